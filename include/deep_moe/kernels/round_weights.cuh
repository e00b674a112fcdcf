// Weights [..., K, N], rounded as MXFP8 holds them, in BF16. A scale covers 32 neighbours along K,
// which lie in 32 rows.
//
// Grid: a thread per group and pair of columns.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/training/args.cuh"
#include "deep_moe/training/mxfp8_rounding.cuh"

namespace deep_moe {

// The E4M3 of a value and back.
__device__ __forceinline__ float mxfp8_rounded(float value, uint32_t amax_bits) {
    const uint32_t scale_byte = e4m3_scale_byte(amax_bits);
    const float scaled = value * e4m3_factor(amax_bits, scale_byte);
    const uint32_t packed = ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, scaled);
    const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(static_cast<uint16_t>(packed));
    return ptx::cvt_f32_f16(static_cast<uint16_t>(halves)) * ue8m0_value(scale_byte);
}

template <class Config>
__device__ __forceinline__ void round_weights(const RoundWeightsArgs& args) {
    constexpr uint32_t group_size = 32;
    const uint64_t idx = uint64_t{blockIdx.x} * Config::num_threads + threadIdx.x;
    const uint64_t group = idx / args.num_pairs;
    if (group >= args.num_groups) return;
    const uint64_t first = group * group_size * args.num_pairs + idx % args.num_pairs;
    const auto* const weights = static_cast<const uint32_t*>(args.weights) + first;
    auto* const rounded = static_cast<uint32_t*>(args.rounded) + first;
    uint32_t pairs[group_size];
    uint32_t low_amax = 0;
    uint32_t high_amax = 0;
#pragma unroll
    for (uint32_t i = 0; i < group_size; ++i) pairs[i] = weights[uint64_t{i} * args.num_pairs];
#pragma unroll
    for (uint32_t i = 0; i < group_size; ++i) {
        low_amax = max(low_amax, pairs[i] << 16 & 0x7fff0000u);
        high_amax = max(high_amax, pairs[i] & 0x7fff0000u);  //~ weight_amax
    }
#pragma unroll
    for (uint32_t i = 0; i < group_size; ++i) {
        const float low = mxfp8_rounded(__uint_as_float(pairs[i] << 16), low_amax);
        const float high = mxfp8_rounded(__uint_as_float(pairs[i] & 0xffff0000u), high_amax);
        rounded[uint64_t{i} * args.num_pairs] = ptx::cvt_rn_bf16x2_f32(high, low);
    }
}

}  // namespace deep_moe
