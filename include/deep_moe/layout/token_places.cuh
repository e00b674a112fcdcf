// Where tokens are before they are brought into the pool, and where their results go: RankBuffers
// or LocalRows, as Config::Tokens says.
#pragma once

namespace deep_moe {

template <class Config>
using TokenPlaces = typename Config::Tokens::template Places<Config>;

}  // namespace deep_moe
