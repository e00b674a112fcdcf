// From Linear1's accumulators to Linear2's input: row and token factors, biases, activation,
// requantization to E4M3 with one scale for the block's 128 values of each token, and store to the
// pool. l1_publisher.cuh tells Linear2. Where tokens have no scales it is rounded to BF16 instead.
//
// A thread's rows are gate and up of two neighbouring values, in its own registers. A token's 128
// values are spread over all math warps: their maximum is found in shared memory.
//
// Without a gate each row is a value: a block has 128 values of a token for each warpgroup, and two
// scales. The second warpgroup of an odd last block has none.
//
// Linear2 reads its k in the order of its weights (weights/mxfp4/sm90_e5m2_decode.cuh): byte 32*j +
// 16*h + 4*q + b of 128 holds value 32*q + 8*j + 4*h + b. The rows of Linear1's weights are ordered
// so that a warp has 16 consecutive bytes of a token.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/activations/apply_activation.cuh"
#include "deep_moe/experts/sm90/block_header.cuh"
#include "deep_moe/experts/sm90/l1_publisher.cuh"
#include "deep_moe/experts/sm90/main_loop.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/experts/sm90/rescaler.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/formats/sm90_linear2_scale.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// Prepares the maxima of the block of that turn. All math warps; a barrier must follow.
template <class Config>
__device__ __forceinline__ void clear_maxima(const SharedMemory<Config>& smem,
                                             const MathThread<Config>& thread, uint32_t turn) {
    if constexpr (Config::Activation::has_gate) {
        if (thread.thread_idx < Config::block_m) {
            ptx::st_shared_u32(smem.amax_exchange(turn, thread.thread_idx), 0);
        }
    } else {
        for (uint32_t i = thread.thread_idx; i < 2 * Config::block_m; i += thread.num_threads) {
            ptx::st_shared_u32(smem.amax_exchange(turn, i), 0);
        }
    }
}

// For m-blocks of num_rows rows.
template <class Config, uint32_t num_rows>
class L1Epilogue {
    using Smem = SharedMemory<Config>;
    using Thread = MathThread<Config>;
    using Biases = typename Config::Biases;
    static constexpr bool has_scales = Config::Weights::has_token_scales;
    static constexpr bool has_gate = Config::Activation::has_gate;
    static constexpr uint32_t num_values = has_gate ? 2 : 4;  // of a token, in a thread
    static constexpr uint32_t values_per_k_block = 128;

 public:
    __device__ L1Epilogue(const Smem& smem, const SymmBuffer<Config>& local, const Thread& thread,
                          uint32_t slot, uint32_t turn)
        : smem_(smem), local_(local), thread_(thread), slot_(slot), turn_(turn) {}

    // All math warps. False if one of them has given up: then nothing was stored.
    __device__ __forceinline__ bool run(const BlockHeader& block, const RowValues& factors,
                                        const RowValues& biases, Accumulators<num_rows>& values,
                                        Waiter& waiter) const {
        activate(factors, biases, values);
        if constexpr (has_scales) {
            find_maxima(values);
            if (!thread_.vote(waiter)) return false;  //~ maxima_there
            choose_scales(block);
            thread_.sync();  //~ scales_chosen
            store_tokens(block, values);
        } else {
            if (!thread_.vote(waiter)) return false;
            store_bf16_tokens(block, values);
        }
        return true;
    }

 private:
    // Overwrites accumulators by values: register 2*j + p of half b is value b of token
    // 8*j + first_token() + p; without a gate register 4*j + 2*h + p value (b, h).
    __device__ __forceinline__ void activate(const RowValues& factors, const RowValues& biases,
                                             Accumulators<num_rows>& values) const {
        if constexpr (has_gate) {
            merge_gate_and_up(factors, biases, values);
        } else {
            activate_rows(factors, biases, values);
        }
    }

    __device__ __forceinline__ void merge_gate_and_up(const RowValues& factors,
                                                      const RowValues& biases,
                                                      Accumulators<num_rows>& values) const {
        for_each_8_rows<num_rows>([&](uint32_t j) {
            const float2 factor = token_factors(j);
            float2 weight{};
            if constexpr (!Biases::exist) weight = load_pair(smem_.topk_weights(slot_), j);
#pragma unroll
            for (uint32_t b = 0; b < 2; ++b) {
                float (&v)[num_rows / 2] = values[b];
                const float (&row)[2] = factors.values[b];
                const float (&bias)[2] = biases.values[b];
                v[2 * j] = apply_activation<Config>(
                    Biases::linear1(v[4 * j], row[0] * factor.x, bias[0]),
                    Biases::linear1(v[4 * j + 2], row[1] * factor.x, bias[1]),
                    Biases::linear1_weight(weight.x));
                v[2 * j + 1] = apply_activation<Config>(
                    Biases::linear1(v[4 * j + 1], row[0] * factor.y, bias[0]),
                    Biases::linear1(v[4 * j + 3], row[1] * factor.y, bias[1]),
                    Biases::linear1_weight(weight.y));
            }
        });
    }

    __device__ __forceinline__ void activate_rows(const RowValues& factors, const RowValues& biases,
                                                  Accumulators<num_rows>& values) const {
        for_each_8_rows<num_rows>([&](uint32_t j) {
            const float2 factor = token_factors(j);
            float2 weight{};
            if constexpr (!Biases::exist) weight = load_pair(smem_.topk_weights(slot_), j);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t b = i / 2;
                const bool is_second = i % 2 != 0;  // of the two tokens
                float& low = values[b][4 * j + is_second];
                float& high = values[b][4 * j + 2 + is_second];
                const float of_token = is_second ? factor.y : factor.x;  //~ factor_of_token
                const float (&row)[2] = factors.values[b];
                const float (&bias)[2] = biases.values[b];
                const float2 activated = apply_activation_to_two<Config>(
                    Biases::linear1(low, row[0] * of_token, bias[0]),
                    Biases::linear1(high, row[1] * of_token, bias[1]),
                    Biases::linear1_weight(is_second ? weight.y : weight.x));
                low = activated.x;
                high = activated.y;
            }
        });
    }

    // Writes the largest magnitude of each token into shared memory. A lane begins with those of
    // its two values of num_rows / 4 tokens. In each step two lanes split the tokens: one keeps the
    // first half, the other the second. So the 8 lanes of a token's rows need not all compute all
    // maxima. Both keep what cannot be halved.
    __device__ __forceinline__ void find_maxima(const Accumulators<num_rows>& values) const {
        constexpr uint32_t num_tokens = num_rows / 4;
        uint32_t maxima[num_tokens];
#pragma unroll
        for (uint32_t i = 0; i < num_tokens; ++i) {
            const uint32_t first = num_values * (i / 2) + i % 2;
            maxima[i] = max(magnitude_bits(values[0][first]), magnitude_bits(values[1][first]));
            if constexpr (!has_gate) {
                //~ further_maxima
                maxima[i] = max(maxima[i], max(magnitude_bits(values[0][first + 2]),
                                               magnitude_bits(values[1][first + 2])));
            }
        }
        merge_maxima<num_tokens, warp_size / 2>(maxima, 0);
    }

    // maxima[0 .. num_tokens - 1] are those of tokens first, first + 1, ... of this lane's.
    template <uint32_t num_tokens, uint32_t lane_mask, uint32_t capacity>
    __device__ __forceinline__ void merge_maxima(uint32_t (&maxima)[capacity],
                                                 uint32_t first) const {
        constexpr uint32_t lane_of_next_row = 4;
        if constexpr (lane_mask < lane_of_next_row) {
#pragma unroll
            for (uint32_t k = 0; k < num_tokens; ++k) {
                const uint32_t i = first + k;
                ptx::red_max_shared(smem_.amax_exchange(turn_, first_maximum() + i / 2 * 8 +
                                                                   thread_.first_token() + i % 2),
                                    maxima[k]);
            }
        } else if constexpr (num_tokens % 2 == 0) {
            constexpr uint32_t num_kept = num_tokens / 2;
            const bool keeps_second = (thread_.lane_idx() & lane_mask) != 0;
#pragma unroll
            for (uint32_t i = 0; i < num_kept; ++i) {
                const uint32_t kept = keeps_second ? maxima[i + num_kept] : maxima[i];
                const uint32_t given = keeps_second ? maxima[i] : maxima[i + num_kept];
                maxima[i] = max(kept, __shfl_xor_sync(full_warp, given, lane_mask));
            }
            merge_maxima<num_kept, lane_mask / 2>(maxima, first + (keeps_second ? num_kept : 0));
        } else {
#pragma unroll
            for (uint32_t i = 0; i < num_tokens; ++i) {
                maxima[i] = max(maxima[i], __shfl_xor_sync(full_warp, maxima[i], lane_mask));
            }
            merge_maxima<num_tokens, lane_mask / 2>(maxima, first);
        }
    }

    // Writes each token's scale to the pool, and replaces its maximum by the factor of its values.
    // The publication covers the flag, too.
    __device__ void choose_scales(const BlockHeader& block) const {
        if constexpr (has_gate) {
            if (thread_.thread_idx < block.num_valid_rows) choose_scale(block, thread_.thread_idx);
        } else {
            if (!has_values(block)) return;
            for (uint32_t row = thread_.warpgroup_thread_idx(); row < block.num_valid_rows;
                 row += Thread::warpgroup_threads) {
                choose_scale(block, row);
            }
        }
    }

    __device__ __forceinline__ void choose_scale(const BlockHeader& block, uint32_t row) const {
        const uint32_t maximum = smem_.amax_exchange(turn_, first_maximum() + row);
        const uint32_t amax = ptx::ld_shared_u32(maximum);
        float weight = 0.0f;
        if constexpr (!Biases::exist) {
            weight = ptx::ld_shared_f32(smem_.topk_weights(slot_) + row * sizeof(float));
        }
        const uint32_t token_byte = token_scale_byte(Biases::linear1_weight(weight));
        const uint32_t byte = linear2_scale_byte(amax, token_byte);
        if (has_token_factors<Config> && byte != token_byte) {
            ptx::red_or_relaxed_gpu(local_.l1_arrival_count(block.pool_block_idx),
                                    SymmBuffer<Config>::has_own_scales);  //~ own_scale_told
        }
        ptx::st_shared_u32(maximum, __float_as_uint(e4m3_factor(amax, byte)));
        *local_.l2_token_sf(k_block_idx(block),
                            PoolRing<Config>::first_row(block.pool_block_idx) + row) = byte << 23;
    }

    // Two neighbouring lanes (of rows 2*i and 2*i + 1) hold four consecutive bytes of two tokens:
    // each puts together those of one and stores them. The eight lanes of a token have 16 bytes,
    // without a gate for each h.
    __device__ __forceinline__ void store_tokens(const BlockHeader& block,
                                                 const Accumulators<num_rows>& values) const {
        if (!has_values(block)) return;
        const uint32_t is_odd = thread_.row() % 2;
        const uint32_t selectors = is_odd ? 0x3276 : 0x5410;
        constexpr uint32_t lane_of_next_row = 4;
        const uint32_t first = thread_.first_token() + is_odd;
        uint8_t* const token =
            local_.l2_tokens(PoolRing<Config>::first_row(block.pool_block_idx) + first) +
            k_block_idx(block) * values_per_k_block + byte_idx();
        for_each_8_rows<num_rows>([&](uint32_t j) {
            const float2 factor = load_pair(smem_.amax_exchange(turn_, first_maximum()), j);
#pragma unroll
            for (uint32_t h = 0; h < num_values / 2; ++h) {
                const uint32_t i = num_values * j + 2 * h;
                const uint32_t mine = ptx::cvt_rn_satfinite_e4m3x2_f32(values[1][i] * factor.x,
                                                                       values[0][i] * factor.x) |
                                      static_cast<uint32_t>(ptx::cvt_rn_satfinite_e4m3x2_f32(
                                          values[1][i + 1] * factor.y, values[0][i + 1] * factor.y))
                                          << 16;
                const uint32_t other = __shfl_xor_sync(full_warp, mine, lane_of_next_row);
                if (8 * j + first < block.num_valid_rows) {
                    uint8_t* const place = token + 8 * j * Config::intermediate_hidden + 16 * h;
                    *reinterpret_cast<uint32_t*>(place) = ptx::prmt(mine, other, selectors);
                }
            }
        });
    }

    // The 8 lanes of a token have 16 neighbouring values, two each; without a gate for each h.
    __device__ __forceinline__ void store_bf16_tokens(const BlockHeader& block,
                                                      const Accumulators<num_rows>& values) const {
        if (!has_values(block)) return;
        const uint32_t first = thread_.first_token();
        const uint32_t value_idx = k_block_idx(block) * values_per_k_block + first_of_warp() +
                                   2 * thread_.row();  //~ bf16_place
        uint8_t* const token =
            local_.l2_tokens(PoolRing<Config>::first_row(block.pool_block_idx) + first) +
            value_idx * sizeof(uint16_t);
        for_each_8_rows<num_rows>([&](uint32_t j) {
#pragma unroll
            for (uint32_t p = 0; p < 2; ++p) {
                if (8 * j + first + p >= block.num_valid_rows) continue;
                uint8_t* const place = token + (8 * j + p) * Config::Symm::l2_tokens_stride;
#pragma unroll
                for (uint32_t h = 0; h < num_values / 2; ++h) {
                    const uint32_t i = num_values * j + 2 * h + p;
                    *reinterpret_cast<uint32_t*>(place + 16 * h * sizeof(uint16_t)) =
                        ptx::cvt_rn_bf16x2_f32(values[1][i], values[0][i]);
                }
            }
        });
    }

    // What token sums are multiplied by: two neighbouring tokens' scales.
    __device__ float2 token_factors(uint32_t j) const {
        if constexpr (has_token_factors<Config>) {
            return load_pair(smem_.l1_token_factors(slot_), j);
        } else {
            return {1.0f, 1.0f};
        }
    }

    // Where, in the order of k, the four values stand that this lane and its neighbour have: each
    // warp has 16 bytes of the 128, without a gate 32.
    __device__ uint32_t byte_idx() const { return first_of_warp() + thread_.row() / 2 * 4; }

    // Of a token's 128 values, the first one of this warp's.
    __device__ uint32_t first_of_warp() const {
        return has_gate ? (4 * thread_.warpgroup_idx() + thread_.warp_idx()) * 16
                        : thread_.warp_idx() * 32;
    }

    // Which 128 of a token's values this warpgroup has some of, and whether there are so many.
    __device__ uint32_t k_block_idx(const BlockHeader& block) const {
        //~ values_k_block
        return has_gate ? block.n_block_idx : 2 * block.n_block_idx + thread_.warpgroup_idx();
    }
    __device__ bool has_values(const BlockHeader& block) const {
        constexpr uint32_t num_k_blocks = Config::intermediate_hidden / values_per_k_block;
        return has_gate || num_k_blocks % 2 == 0 || k_block_idx(block) < num_k_blocks;
    }

    // Of those that the warpgroup exchanges: without a gate it has some of its own.
    __device__ uint32_t first_maximum() const {
        return has_gate ? 0 : thread_.warpgroup_idx() * Config::block_m;  //~ own_maxima
    }

    // Two floats of `vector`: of tokens 8*j + first_token() and the next.
    __device__ float2 load_pair(uint32_t vector, uint32_t j) const {
        return ptx::ld_shared_f32x2(vector + (8 * j + thread_.first_token()) * sizeof(float));
    }

    const Smem& smem_;
    const SymmBuffer<Config>& local_;
    const Thread& thread_;
    uint32_t slot_;
    uint32_t turn_;  // which maxima this block uses
};

}  // namespace deep_moe::sm90
