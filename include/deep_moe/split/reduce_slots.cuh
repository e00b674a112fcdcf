// Combine, receiving: out[token] = sum of weight * row over the token's used slots, in slot order.
// Products and sums are in FP32, each rounded; the end is rounded to BF16 once.
//
// A warp takes 32 neighbouring chunks of 8 values of a token.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/active_ranks.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/routed_slot.cuh"

namespace deep_moe {

// Adds weight * row to the sums of 8 values.
__device__ __forceinline__ void add_weighted(float (&sums)[8], uint4 row, float weight) {
    const uint32_t pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        // BF16 is the upper half of an FP32.
        const float low = __uint_as_float(pairs[i] << 16);
        const float high = __uint_as_float(pairs[i] & 0xffff0000u);
        sums[2 * i] = __fadd_rn(sums[2 * i], __fmul_rn(weight, low));
        sums[2 * i + 1] = __fadd_rn(sums[2 * i + 1], __fmul_rn(weight, high));
    }
}

// Where the row of a used slot is: in the own buffer, or, where it stays with its expert, there.
template <class Config>
__device__ uint64_t row_address(const LowLatencyRanks<Config>& ranks,
                                const LowLatencyBuffer<Config>& local, uint32_t half,
                                uint32_t token_idx, const RoutedSlot& slot) {
    const uint32_t row_slot = slot.first_slot_of_expert;  //~ row_of_slot
    if constexpr (Config::fetches_rows) {
        const uint32_t row_idx = *local.row_of_slot(half, token_idx * Config::num_topk + row_slot);
        const uint32_t rank_idx = slot.rank_idx;
        const uint16_t* const row = ranks.of(rank_idx).shared_rows(row_idx);  //~ row_fetched
        return reinterpret_cast<uint64_t>(row);
    } else {
        return reinterpret_cast<uint64_t>(local.combine(half, row_slot, token_idx));
    }
}

// All warps of the grid, when all rows are here, or complete where they are.
template <class Config>
__device__ void reduce_slots(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                             const ActiveRanks<Config>& active, uint32_t half) {
    constexpr uint32_t num_warps = Config::num_threads / warp_size;
    constexpr uint32_t num_chunks = Config::hidden * sizeof(uint16_t) / sizeof(uint4);
    constexpr uint32_t num_parts = ceil_div(num_chunks, warp_size);
    constexpr uint32_t loads_at_once = min(8u, Config::num_topk);
    const LowLatencyBuffer<Config> local = ranks.local();
    for (uint32_t i = ptx::warp_idx() * Config::num_ctas + blockIdx.x;
         i < args.num_tokens * num_parts; i += num_warps * Config::num_ctas) {
        const uint32_t token_idx = i / num_parts;
        const uint32_t chunk_idx = i % num_parts * warp_size + ptx::lane_idx();
        const bool is_valid = chunk_idx < num_chunks;
        const RoutedSlot slot =
            route_slot<Config, warp_size>(args.topk_idx, active, token_idx, true);
        const uint32_t used = __ballot_sync(full_warp, slot.is_used());
        float weight = 0.0f;
        if (slot.is_used()) {
            weight = args.topk_weights[token_idx * Config::num_topk + slot.slot_idx];
        }
        uint64_t row = 0;  // its address
        if (slot.is_used()) row = row_address(ranks, local, half, token_idx, slot);
        float sums[8] = {};
#pragma unroll 1
        for (uint32_t first = 0; first < Config::num_topk; first += loads_at_once) {
            uint4 rows[loads_at_once];
#pragma unroll
            for (uint32_t j = 0; j < loads_at_once; ++j) {
                if ((used >> (first + j) & 1) == 0) continue;
                const uint64_t slot_row = __shfl_sync(full_warp, row, first + j);
                if (is_valid) rows[j] = reinterpret_cast<const uint4*>(slot_row)[chunk_idx];
            }
#pragma unroll
            for (uint32_t j = 0; j < loads_at_once; ++j) {
                if ((used >> (first + j) & 1) == 0) continue;
                const float slot_weight = __shfl_sync(full_warp, weight, first + j);
                if (is_valid) add_weighted(sums, rows[j], slot_weight);
            }
        }
        if (is_valid) {
            static_cast<uint4*>(args.out)[uint64_t{token_idx} * num_chunks + chunk_idx] = {
                ptx::cvt_rn_bf16x2_f32(sums[1], sums[0]), ptx::cvt_rn_bf16x2_f32(sums[3], sums[2]),
                ptx::cvt_rn_bf16x2_f32(sums[5], sums[4]), ptx::cvt_rn_bf16x2_f32(sums[7], sums[6])};
        }
    }
}

}  // namespace deep_moe
