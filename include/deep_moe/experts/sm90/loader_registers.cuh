// For kernels whose loaders have few registers.
#pragma once

namespace deep_moe::sm90 {

// Whether the weight loader computes addresses anew in place of keeping them. If accumulators leave
// the loaders at most 56 registers, tiles are wide. Math then takes so long over a tile that the
// loader has time for more instructions. Its state of the list of blocks must not spill to local
// memory, because all other roles would wait for that.
template <class Config>
inline constexpr bool has_few_loader_registers = Config::num_loader_registers <= 56;

}  // namespace deep_moe::sm90
