// One UE8M0 byte as the scale of each of four groups of 32 values.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

inline constexpr uint32_t same_four_bytes = 0x01010101;

}  // namespace deep_moe
