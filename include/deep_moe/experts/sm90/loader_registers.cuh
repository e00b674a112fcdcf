// Where loaders have few registers.
#pragma once

namespace deep_moe::sm90 {

// Whether the weight loader works addresses out anew instead of keeping them. Tiles whose
// accumulators leave the loaders no more than 56 registers are wide: math takes so long over one
// that the loader has time for more instructions. What it knows of the list of blocks shall not lie
// in local memory, which all other roles would wait for.
template <class Config>
inline constexpr bool has_few_loader_registers = Config::num_loader_registers <= 56;

}  // namespace deep_moe::sm90
