// Combine, receiving: out[token] = sum of weight * row over the token's used slots, in slot order.
// Products and sums are in FP32, each rounded; the end is rounded once, to BF16 or FP16 as the
// rows.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/fp16_chunk.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// Adds weight * row to the sums of 8 values.
template <bool is_fp16>
__device__ __forceinline__ void add_weighted(float (&sums)[8], uint4 row, float weight) {
    const uint32_t pairs[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        float low;
        float high;
        if constexpr (is_fp16) {
            const HalfPair values(pairs[i]);
            low = values.low;
            high = values.high;
        } else {
            // BF16 is the upper half of an FP32.
            low = __uint_as_float(pairs[i] << 16);
            high = __uint_as_float(pairs[i] & 0xffff0000u);
        }
        sums[2 * i] = __fadd_rn(sums[2 * i], __fmul_rn(weight, low));
        sums[2 * i + 1] = __fadd_rn(sums[2 * i + 1], __fmul_rn(weight, high));
    }
}

template <bool is_fp16>
__device__ __forceinline__ uint32_t rounded_pair(float high, float low) {
    return is_fp16 ? ptx::cvt_rn_f16x2_f32(high, low) : ptx::cvt_rn_bf16x2_f32(high, low);
}

// Where a slot's row is, and how much of it counts.
struct SlotRow {
    uint64_t address;  // 0: the slot is not used
    float weight;
};

// A whole warp: 32 neighbouring chunks of a token.
template <class Config>
class SlotSum {
    static constexpr uint32_t num_chunks = Config::hidden * sizeof(uint16_t) / sizeof(uint4);

 public:
    static constexpr uint32_t num_pieces = ceil_div(num_chunks, warp_size);  // of a token

    // out: bf16 or fp16 [tokens, hidden]. slot: of the token's that the lane stands for.
    static __device__ void add(void* out, uint32_t token_idx, uint32_t piece_idx,
                               const SlotRow& slot) {
        constexpr uint32_t loads_at_once = min(8u, Config::num_topk);
        const uint32_t chunk_idx = piece_idx * warp_size + ptx::lane_idx();
        const bool is_valid = chunk_idx < num_chunks;
        const uint32_t used = __ballot_sync(full_warp, slot.address != 0);
        float sums[8] = {};
#pragma unroll 1
        for (uint32_t first = 0; first < Config::num_topk; first += loads_at_once) {
            uint4 rows[loads_at_once];
#pragma unroll
            for (uint32_t j = 0; j < loads_at_once; ++j) {
                if ((used >> (first + j) & 1) == 0) continue;
                const uint64_t slot_row = __shfl_sync(full_warp, slot.address, first + j);
                if (is_valid) rows[j] = reinterpret_cast<const uint4*>(slot_row)[chunk_idx];
            }
#pragma unroll
            for (uint32_t j = 0; j < loads_at_once; ++j) {
                if ((used >> (first + j) & 1) == 0) continue;
                const float slot_weight = __shfl_sync(full_warp, slot.weight, first + j);
                if (is_valid) add_weighted<Config::is_fp16>(sums, rows[j], slot_weight);
            }
        }
        if (is_valid) {
            constexpr bool is_fp16 = Config::is_fp16;
            static_cast<uint4*>(out)[uint64_t{token_idx} * num_chunks + chunk_idx] = {
                rounded_pair<is_fp16>(sums[1], sums[0]), rounded_pair<is_fp16>(sums[3], sums[2]),
                rounded_pair<is_fp16>(sums[5], sums[4]), rounded_pair<is_fp16>(sums[7], sums[6])};
        }
    }
};

// All warps of the grid. `find_row(token_idx)`, for a whole warp: the SlotRow of the slot that the
// lane stands for; unused behind the last slot.
template <class Config, class FindRow>
class SlotReduction {
    static constexpr uint32_t num_warps = Config::num_threads / warp_size;
    static constexpr uint32_t num_pieces = SlotSum<Config>::num_pieces;

 public:
    // out: bf16 or fp16 [num_tokens, hidden].
    __device__ SlotReduction(void* out, uint32_t num_tokens, const FindRow& find_row)
        : out_(out), num_items_(num_tokens * num_pieces), find_row_(find_row) {}

    // Finds the first row, during the wait for others if it can be known by then.
    __device__ void begin() {
        if (first_item() < num_items_) next_slot_ = find_row_(first_item() / num_pieces);
    }

    // Behind `begin`, when all rows are here, or complete where they are.
    __device__ void run() {
        for (uint32_t i = first_item(); i < num_items_; i += num_warps * Config::num_ctas) {
            const SlotRow slot = next_slot_;
            // The next one is looked up while the rows of this one are on their way.
            const uint32_t next = i + num_warps * Config::num_ctas;
            if (next < num_items_) next_slot_ = find_row_(next / num_pieces);
            SlotSum<Config>::add(out_, i / num_pieces, i % num_pieces, slot);
        }
    }

 private:
    static __device__ uint32_t first_item() {
        return ptx::warp_idx() * Config::num_ctas + blockIdx.x;
    }

    void* out_;
    uint32_t num_items_;
    const FindRow& find_row_;
    SlotRow next_slot_ = {0, 0.0f};
};

}  // namespace deep_moe
