// How wgmma is told where an operand lies in shared memory.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe::sm90 {

// wgmma descriptor of an operand with 128 bytes of K per row in the 128-byte swizzle: address in
// units of 16 bytes, 1024 bytes from one group of 8 rows to the next, swizzle code 1. Only the
// lower half depends on the address, of which it takes no bits that name a CTA of a cluster.
template <class Config>
__device__ __forceinline__ uint32_t operand_descriptor_low(uint32_t smem_address) {
    constexpr uint32_t leading = 1 << 16;  // without meaning for a swizzled operand
    if constexpr (Config::cluster_size > 1) smem_address &= 0x3ffff;
    return leading + (smem_address >> 4);
}
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t low) {
    constexpr uint32_t swizzle_128b = 1u << 30;
    constexpr uint32_t stride = 1024 >> 4;  //~ operand_stride
    return uint64_t{swizzle_128b | stride} << 32 | low;
}

}  // namespace deep_moe::sm90
