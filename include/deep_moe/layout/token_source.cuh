// Where a pool token came from, and so where its result goes.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

struct TokenSource {
    uint32_t rank_idx;
    uint32_t token_idx;  // on that rank
    uint32_t topk_idx;   // slot of the token that named the expert
};
static_assert(sizeof(TokenSource) == 12);  // the layout's u32[3]

}  // namespace deep_moe
