// The descriptors that tcgen05 instructions read: where an operand lies in shared memory, and what
// the MMA does. Bits and codes are those of the PTX ISA's tables for tcgen05; fields that are not
// named here are 0.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/tcgen05.cuh"

namespace deep_moe::sm100 {

// One MMA consumes 32 bytes of K: 32 elements of one byte (E2M1 was unpacked by the load, for
// MXFP4), 16 of BF16, or 64 of packed E2M1. So the next K step starts 32 bytes further inside the
// same 128-byte row.
constexpr uint32_t mma_k_bytes = 32;
// A k-block is one 128-byte row of the swizzle, and one 32-bit word of scales, or four of packed
// E2M1.
constexpr uint32_t mmas_per_k_block = 128 / mma_k_bytes;
// One copy of scales to TMEM moves the words of 128 rows into 4 columns.
constexpr uint32_t scale_rows_per_copy = 128;
constexpr uint32_t scale_columns_per_copy = 4;

// Descriptor addresses count 16-byte units and hold bits 4..17 of the shared-memory address.
__device__ __forceinline__ uint16_t descriptor_address(uint32_t smem_address) {
    return static_cast<uint16_t>((smem_address & 0x3ffff) >> 4);
}

// The upper word for groups of 8 rows, each `group_bytes` behind the one before it. Of SM100, bit
// 46 of a descriptor is 1.
constexpr uint64_t matrix_descriptor(uint32_t swizzle_code, uint32_t group_bytes) {
    return uint64_t{swizzle_code << 29 | 1u << 14 | group_bytes >> 4} << 32;
}

// Rows of 128 bytes along K in the 128-byte swizzle; each group of 8 rows takes 1024 bytes.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t smem_address) {
    constexpr uint32_t swizzle_128b = 2;
    return matrix_descriptor(swizzle_128b, 1024) | descriptor_address(smem_address);
}

// The same layout, moved by `count` times `stride` bytes, a multiple of 16: within the 128 bytes of
// an operand's row, or to another stage. Shared memory ends before a sum could leave the address's
// 14 bits. So the high word does not change, and is known at compile time.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t count, uint32_t stride) {
    return descriptor >> 32 << 32 | (static_cast<uint32_t>(descriptor) + count * (stride >> 4));
}

// 128 scale words in the order r -> (r%32)*4 + r/32: 32 rows of 16 bytes without a swizzle, so that
// 8 rows take 128 bytes.
__device__ __forceinline__ uint64_t scale_descriptor(uint32_t smem_address) {
    constexpr uint32_t no_swizzle = 0;
    return matrix_descriptor(no_swizzle, 128) | descriptor_address(smem_address);
}

// What the instruction descriptors of all kinds begin with: D[256 weight rows][num_tokens], both
// operands K-major and in formats of these codes.
__device__ __forceinline__ uint32_t mma_of(uint32_t a_format, uint32_t b_format,
                                           uint32_t num_tokens) {
    return 256 >> 4 << 24 | num_tokens >> 3 << 17 | b_format << 10 | a_format << 7;
}

// D in FP32 = weights x E4M3 tokens, UE8M0 scales. `scale_idx` picks the byte of each scale word,
// which is the K step inside the k-block.
template <class Weights>
__device__ __forceinline__ uint32_t instruction_descriptor(uint32_t num_tokens,
                                                           uint32_t scale_idx) {
    constexpr uint32_t ue8m0_scales = 1u << 23;
    return mma_of(Weights::mma_format, ptx::f8f6f4_e4m3, num_tokens) | ue8m0_scales |
           scale_idx << 29 | scale_idx << 4;
}

// D in FP32 = packed E2M1 weights x packed E2M1 tokens, E4M3 scales (code 0): of 16 values, so that
// an MMA takes all four bytes of a scale word.
__device__ __forceinline__ uint32_t fp4_instruction_descriptor(uint32_t num_tokens) {
    return mma_of(ptx::mxf4nvf4_e2m1, ptx::mxf4nvf4_e2m1, num_tokens);
}

// D in FP32 = weights x tokens of one format without scales.
__device__ __forceinline__ uint32_t plain_instruction_descriptor(uint32_t format,
                                                                 uint32_t num_tokens) {
    constexpr uint32_t fp32_sums = 1u << 4;
    return mma_of(format, format, num_tokens) | fp32_sums;
}

}  // namespace deep_moe::sm100
