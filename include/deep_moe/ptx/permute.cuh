// Byte permutation. Any thread may call it.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::ptx {

// Byte i of the result is the byte of `low` (0..3) or `high` (4..7) that nibble i of `selectors`
// names; bit 3 of a nibble replicates that byte's sign bit instead. Upper 16 bits of `selectors`
// are ignored.
__device__ __forceinline__ uint32_t prmt(uint32_t low, uint32_t high, uint32_t selectors) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

}  // namespace deep_moe::ptx
