// The descriptors that tcgen05 instructions read: where an operand lies in shared memory, and what
// the MMA does. CuTe's types hold the bit positions; which fields we set, and why, is said here.
#pragma once

#include <cute/arch/mma_sm100_desc.hpp>

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

// Rows of 128 bytes along K in the 128-byte swizzle; each group of 8 rows takes 1024 bytes.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t smem_address) {
    cute::UMMA::SmemDescriptor descriptor{};
    descriptor.start_address_ = descriptor_address(smem_address);
    descriptor.stride_byte_offset_ = 1024 >> 4;
    descriptor.version_ = 1;
    descriptor.layout_type_ = static_cast<uint8_t>(cute::UMMA::LayoutType::SWIZZLE_128B);
    return descriptor;
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
    cute::UMMA::SmemDescriptor descriptor{};
    descriptor.start_address_ = descriptor_address(smem_address);
    descriptor.stride_byte_offset_ = 128 >> 4;
    descriptor.version_ = 1;
    descriptor.layout_type_ = static_cast<uint8_t>(cute::UMMA::LayoutType::SWIZZLE_NONE);
    return descriptor;
}

// D[256 weight rows][num_tokens] in FP32 = weights x E4M3 tokens, both K-major, UE8M0 scales.
// `scale_idx` picks the byte of each scale word, which is the K step inside the k-block.
template <class Weights>
__device__ __forceinline__ uint32_t instruction_descriptor(uint32_t num_tokens,
                                                           uint32_t scale_idx) {
    cute::UMMA::InstrDescriptorBlockScaled descriptor{};
    descriptor.a_format_ = static_cast<uint16_t>(Weights::mma_format);
    descriptor.b_format_ = static_cast<uint16_t>(cute::UMMA::MXF8F6F4Format::E4M3);
    descriptor.scale_format_ = static_cast<uint16_t>(cute::UMMA::ScaleFormat::UE8M0);
    descriptor.m_dim_ = 256 >> 4;
    descriptor.n_dim_ = num_tokens >> 3;
    descriptor.a_sf_id_ = scale_idx;
    descriptor.b_sf_id_ = scale_idx;
    return descriptor;
}

// D[256 weight rows][num_tokens] in FP32 = packed E2M1 weights x packed E2M1 tokens, both K-major,
// E4M3 scales: of 16 values, so that an MMA takes all four bytes of a scale word.
__device__ __forceinline__ uint32_t fp4_instruction_descriptor(uint32_t num_tokens) {
    cute::UMMA::InstrDescriptorBlockScaled descriptor{};
    descriptor.a_format_ = static_cast<uint16_t>(cute::UMMA::MXF4Format::E2M1);
    descriptor.b_format_ = static_cast<uint16_t>(cute::UMMA::MXF4Format::E2M1);
    descriptor.scale_format_ = static_cast<uint16_t>(cute::UMMA::ScaleFormat::UE4M3);
    descriptor.m_dim_ = 256 >> 4;
    descriptor.n_dim_ = num_tokens >> 3;
    return static_cast<uint32_t>(descriptor);
}

// D[256 weight rows][num_tokens] in FP32 = weights x tokens of one format without scales, both
// K-major.
__device__ __forceinline__ uint32_t plain_instruction_descriptor(uint32_t format,
                                                                 uint32_t num_tokens) {
    cute::UMMA::InstrDescriptor descriptor{};
    descriptor.a_format_ = static_cast<uint16_t>(format);
    descriptor.b_format_ = static_cast<uint16_t>(format);
    descriptor.c_format_ = static_cast<uint16_t>(cute::UMMA::CFormat::F32);
    descriptor.m_dim_ = 256 >> 4;
    descriptor.n_dim_ = num_tokens >> 3;
    return static_cast<uint32_t>(descriptor);
}

}  // namespace deep_moe::sm100
