// Prepares a call's inputs in one launch. BF16 tokens become E4M3 with scales, or stay BF16 if the
// buffer has BF16 (Config::quantizes is false). The router's output takes the types of the
// symmetric buffer.
//
// Neither part knows where a token ends: rows are contiguous and whole scale words, on both sides.
// A warp takes num_chunks_per_lane * 32 neighbouring chunks of 8 values; a lane loads a chunk with
// 16 bytes, and four lanes share a scale. All loads of a lane are under way before anything is
// stored: the compiler must take it that a store could change what a later load reads. Where one
// scale is for a whole token, a CTA has a token (Config::num_token_chunks).
//
// Meanwhile the router's experts may become places of experts (expert_map), padded tokens may lose
// theirs (token_mask), and the slots of each place may be counted (expert_load).
//
// Where Config::num_router_experts says that there are logits in place of a router's output, CTAs
// behind those that have chunks choose the experts (dispatch/token_router.cuh).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/dispatch/token_router.cuh"
#include "deep_moe/formats/bf16_chunk.cuh"
#include "deep_moe/formats/float_scale.cuh"
#include "deep_moe/formats/nvfp4.cuh"
#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

inline constexpr uint32_t lanes_per_scale = 32 / values_per_chunk;
inline constexpr uint32_t lanes_per_float_scale = 128 / values_per_chunk;

struct PrepareInputsArgs {
    const void* x;             // bf16 [num_chunks * 8]
    const void* topk_idx;      // i64 or i32 [num_slots]
    const void* topk_weights;  // f32 or bf16 [num_slots]
    void* input_x;             // e4m3, bf16 or e2m1 [num_chunks * 8], maybe in longer rows
    // ue8m0 [num_chunks / 4], four make a word; or in longer rows; or f32 [num_chunks / 16], or a
    // token; or for each token f32 and e4m3 [hidden / 16]; or null
    void* input_x_sf;
    void* input_topk_idx;       // i64 [num_slots]
    void* input_topk_weights;   // f32 [num_slots]
    const float* token_scale;   // of all tokens, if Config::has_token_scale
    const uint8_t* token_mask;  // [num_slots / num_topk], 0 or 1
    const void* expert_map;     // i32 or i64 [num_mapped_experts][num_expert_copies]
    int32_t* expert_load;       // [num_experts]
    uint32_t num_chunks;
    uint32_t num_slots;
    uint32_t num_topk;
    uint32_t num_mapped_experts;
    uint32_t num_experts;          // of expert_load
    const void* router_logits;     // bf16 or f32 [num_tokens][num_router_experts], or null
    const float* correction_bias;  // [num_router_experts], if Config::has_correction_bias
    double router_scale;           // of the weights
    uint32_t num_chunk_ctas;       // CTAs before those that choose experts
};

// The id of an expert that expert_map does not know: no call takes it for an expert's place.
inline constexpr int64_t unknown_expert = INT64_MAX;

// What one lane quantizes.
template <class Config>
class TokenChunks {
    static constexpr uint32_t num_chunks = Config::num_chunks_per_lane;

 public:
    // Starts the loads.
    __device__ TokenChunks(const PrepareInputsArgs& args, uint32_t warp_in_grid, uint32_t lane_idx)
        : args_(args), first_(warp_in_grid * num_chunks * warp_size + lane_idx) {
        const auto* x = static_cast<const uint4*>(args.x);
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            chunks_[i] = is_valid(i) ? x[chunk_idx(i)] : uint4{};  //~ chunks_read
        }
    }

    // All 32 lanes.
    __device__ void store() const {
        if constexpr (Config::has_float_scales) {
            quantize_to_float_scales();
        } else if constexpr (Config::quantizes) {
            quantize();
        } else {
            auto* values = static_cast<uint4*>(args_.input_x);
#pragma unroll
            for (uint32_t i = 0; i < num_chunks; ++i) {
                if (!is_valid(i)) continue;
                values[place(chunk_idx(i), Config::num_buffer_row_chunks)] = chunks_[i];
            }
        }
    }

 private:
    // All 32 lanes.
    __device__ void quantize() const {
        auto* values = static_cast<uint2*>(args_.input_x);
        auto* scale_bytes = static_cast<uint8_t*>(args_.input_x_sf);
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            const uint4 chunk = chunks_[i];
            const uint32_t amax_bits = group_maximum<lanes_per_scale>(chunk_amax_bits(chunk));
            const uint32_t scale_byte = e4m3_scale_byte(amax_bits);
            const float factor = e4m3_factor(amax_bits, scale_byte);
            if (!is_valid(i)) continue;  //~ chunk_exists
            values[place(chunk_idx(i), Config::num_buffer_row_chunks)] =
                quantize_chunk(chunk, factor);
            if (chunk_idx(i) % lanes_per_scale == 0) {
                const uint32_t chunk_of_scale =
                    place(chunk_idx(i), Config::num_buffer_row_scales * lanes_per_scale);
                scale_bytes[chunk_of_scale / lanes_per_scale] = static_cast<uint8_t>(scale_byte);
            }
        }
    }

    // All 32 lanes. Rows are whole groups.
    __device__ void quantize_to_float_scales() const {
        auto* values = static_cast<uint2*>(args_.input_x);
        auto* scales = static_cast<float*>(args_.input_x_sf);
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            const uint4 chunk = chunks_[i];
            //~ float_group
            const FloatScale<false> group(
                group_maximum<lanes_per_float_scale>(chunk_amax_bits(chunk)));
            if (!is_valid(i)) continue;
            values[chunk_idx(i)] = quantize_chunk(chunk, group.factor);
            if (chunk_idx(i) % lanes_per_float_scale == 0) {
                scales[chunk_idx(i) / lanes_per_float_scale] = group.scale;
            }
        }
    }

    // Where a chunk belongs, in rows of this many chunks. Rows of the buffer may be longer than
    // those of x.
    static __device__ uint32_t place(uint32_t chunk_idx, uint32_t row_chunks) {
        constexpr uint32_t length = Config::num_row_chunks;
        if constexpr (length == 0) {
            return chunk_idx;
        } else {
            return chunk_idx / length * row_chunks + chunk_idx % length;  //~ padded_row
        }
    }
    __device__ uint32_t chunk_idx(uint32_t i) const { return first_ + i * warp_size; }
    __device__ bool is_valid(uint32_t i) const { return chunk_idx(i) < args_.num_chunks; }

    const PrepareInputsArgs& args_;
    uint32_t first_;
    uint4 chunks_[num_chunks];
};

// What one thread quantizes where one scale is for a whole token, which its CTA has.
template <class Config>
class WholeTokenChunks {
    static constexpr uint32_t num_chunks = Config::num_chunks_per_lane;
    static constexpr uint32_t num_warps = Config::num_threads / warp_size;

 public:
    // Starts the loads.
    __device__ explicit WholeTokenChunks(const PrepareInputsArgs& args) : args_(args) {
        const auto* x = static_cast<const uint4*>(args.x) + first();
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            chunks_[i] = is_valid(i) ? x[chunk_idx(i)] : uint4{};  //~ token_chunks_read
        }
    }

    // All threads of the CTA.
    __device__ void store() const {
        __shared__ uint32_t maxima[num_warps];
        uint32_t amax_bits = 0;
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            amax_bits = max(amax_bits, chunk_amax_bits(chunks_[i]));
        }
        amax_bits = ptx::redux_sync_max(amax_bits);
        if (ptx::lane_idx() == 0) maxima[threadIdx.x / warp_size] = amax_bits;
        __syncthreads();  //~ token_maxima_there
#pragma unroll
        for (uint32_t warp = 0; warp < num_warps; ++warp) amax_bits = max(amax_bits, maxima[warp]);
        if constexpr (Config::packs_e2m1) {
            store_fp4(amax_bits);
        } else {
            store_e4m3(amax_bits);
        }
    }

 private:
    __device__ void store_e4m3(uint32_t amax_bits) const {
        FloatScale<false> token(amax_bits);
        if constexpr (Config::has_token_scale) {
            const bool is_finite = amax_bits < 0x7f800000u;
            token.scale = is_finite ? *args_.token_scale : 1.0f;
            token.factor = is_finite ? __frcp_rn(token.scale) : __uint_as_float(0x7fffffffu);
        }
        auto* values = static_cast<uint2*>(args_.input_x) + first();
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            if (is_valid(i)) values[chunk_idx(i)] = quantize_chunk(chunks_[i], token.factor);
        }
        if (threadIdx.x == 0) static_cast<float*>(args_.input_x_sf)[blockIdx.x] = token.scale;
    }

    // Two lanes side by side have the 16 values of a group.
    __device__ void store_fp4(uint32_t amax_bits) const {
        const bool is_finite = amax_bits < 0x7f800000u;
        float scale;
        if constexpr (Config::has_token_scale) {
            scale = *args_.token_scale;
        } else {
            //~ fp4_token_scale
            scale = fmaxf(__uint_as_float(amax_bits), min_fp4_token_amax) * (1.0f / fp4_largest);
        }
        const float inverse = is_finite ? __frcp_rn(scale) : 0.0f;
        auto* values = static_cast<uint32_t*>(args_.input_x) +
                       uint64_t{blockIdx.x} * Config::num_buffer_row_chunks;
        auto* row = static_cast<uint8_t*>(args_.input_x_sf) +
                    uint64_t{blockIdx.x} * Config::num_buffer_row_scales;
        uint8_t* scale_bytes = row + sizeof(float);
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            const uint32_t group_bits = group_maximum<fp4_group_size / values_per_chunk>(
                chunk_amax_bits(chunks_[i]));  //~ fp4_group
            const Fp4Groups group(group_bits, group_bits, inverse);
            if (!is_valid(i)) continue;
            values[chunk_idx(i)] = quantize_chunk_to_fp4(chunks_[i], group.factors[0]);
            if (chunk_idx(i) % 2 == 0) {
                scale_bytes[chunk_idx(i) / 2] = static_cast<uint8_t>(group.scale_bytes);
            }
        }
        if (threadIdx.x == 0) {
            *reinterpret_cast<uint32_t*>(row) = is_finite ? __float_as_uint(scale) : 0x7fffffffu;
        }
    }

    static __device__ uint64_t first() { return uint64_t{blockIdx.x} * Config::num_token_chunks; }
    static __device__ uint32_t chunk_idx(uint32_t i) {
        return threadIdx.x + i * Config::num_threads;
    }
    static __device__ bool is_valid(uint32_t i) { return chunk_idx(i) < Config::num_token_chunks; }

    const PrepareInputsArgs& args_;
    uint4 chunks_[num_chunks];
};

template <class Config>
__device__ __forceinline__ float load_topk_weight(const PrepareInputsArgs& args,
                                                  uint32_t slot_idx) {
    if constexpr (Config::has_bf16_topk_weights) {
        const uint32_t bits = static_cast<const uint16_t*>(args.topk_weights)[slot_idx];
        return __uint_as_float(bits << 16);
    } else {
        return static_cast<const float*>(args.topk_weights)[slot_idx];
    }
}

template <class Config>
__device__ __forceinline__ int64_t load_place(const PrepareInputsArgs& args, int64_t idx) {
    if constexpr (Config::has_int64_expert_map) {
        return static_cast<const int64_t*>(args.expert_map)[idx];
    } else {
        return static_cast<const int32_t*>(args.expert_map)[idx];
    }
}

// Where one of the copies of an expert lies. Tokens take them in turn.
template <class Config>
__device__ __forceinline__ int64_t place_of_expert(const PrepareInputsArgs& args, int64_t expert,
                                                   uint32_t token_idx) {
    if (expert < 0) return expert;
    if (expert >= args.num_mapped_experts) return unknown_expert;
    const int64_t first = expert * Config::num_expert_copies;
    uint32_t num_copies = 0;
    while (num_copies < Config::num_expert_copies &&
           load_place<Config>(args, first + num_copies) >= 0) {
        ++num_copies;
    }
    if (num_copies == 0) return unknown_expert;
    return load_place<Config>(args, first + token_idx % num_copies);
}

// The expert of a slot as the call takes it. expert: as the router names it.
template <class Config>
__device__ __forceinline__ int64_t expert_of_slot(const PrepareInputsArgs& args, uint32_t slot_idx,
                                                  int64_t expert) {
    if constexpr (Config::has_token_mask || Config::num_expert_copies != 0) {
        const uint32_t token_idx = slot_idx / args.num_topk;
        if constexpr (Config::num_expert_copies != 0) {
            expert = place_of_expert<Config>(args, expert, token_idx);
        }
        if constexpr (Config::has_token_mask) {
            //~ token_masked
            if ((args.token_mask[token_idx] != 0) == Config::masks_padding) expert = -1;
        }
    }
    if constexpr (Config::has_expert_load) {
        if (expert >= 0 && expert < args.num_experts) {
            ptx::red_add_relaxed_gpu(args.expert_load + expert, 1);
        }
    }
    return expert;
}

// The router's output, one slot per thread and round.
template <class Config>
__device__ __forceinline__ void convert_routing(const PrepareInputsArgs& args, uint32_t first,
                                                uint32_t stride) {
    for (uint32_t slot_idx = first; slot_idx < args.num_slots; slot_idx += stride) {
        const int64_t topk_idx =
            expert_of_slot<Config>(args, slot_idx, load_topk_idx<Config>(args.topk_idx, slot_idx));
        const float topk_weight = load_topk_weight<Config>(args, slot_idx);
        static_cast<int64_t*>(args.input_topk_idx)[slot_idx] = topk_idx;
        static_cast<float*>(args.input_topk_weights)[slot_idx] = topk_weight;
    }
}

// Experts of tokens, a token per warp and round.
template <class Config>
__device__ __forceinline__ void route_tokens(const PrepareInputsArgs& args, uint32_t first,
                                             uint32_t stride) {
    constexpr uint32_t logit_bytes = Config::has_bf16_logits ? 2 : 4;
    const uint32_t num_tokens = args.num_slots / args.num_topk;
    for (uint32_t token_idx = first; token_idx < num_tokens; token_idx += stride) {
        const auto* logits = static_cast<const uint8_t*>(args.router_logits) +
                             uint64_t{token_idx} * (Config::num_router_experts * logit_bytes);
        TokenRouter<Config> router(logits, args.correction_bias);
        int64_t expert;
        float weight;
        router.choose(args.num_topk, args.router_scale, expert, weight);
        if (ptx::lane_idx() >= args.num_topk) continue;
        const uint32_t slot_idx = token_idx * args.num_topk + ptx::lane_idx();
        static_cast<int64_t*>(args.input_topk_idx)[slot_idx] =
            expert_of_slot<Config>(args, slot_idx, expert);
        static_cast<float*>(args.input_topk_weights)[slot_idx] = weight;
    }
}

// Grid: enough warps for all chunks, or a CTA for each token; behind them, those that choose.
template <class Config>
__device__ __forceinline__ void prepare_inputs(const PrepareInputsArgs& args) {
    static_assert(Config::num_threads % warp_size == 0, "num_threads must be whole warps");
    const uint32_t thread_in_grid = blockIdx.x * Config::num_threads + threadIdx.x;
    if constexpr (Config::num_router_experts != 0) {
        constexpr uint32_t num_warps = Config::num_threads / warp_size;
        if (blockIdx.x >= args.num_chunk_ctas) {
            const uint32_t cta_idx = blockIdx.x - args.num_chunk_ctas;
            route_tokens<Config>(args, cta_idx * num_warps + ptx::warp_idx(),
                                 (gridDim.x - args.num_chunk_ctas) * num_warps);
            return;
        }
    }
    const auto convert = [&](const auto& chunks) {
        if constexpr (Config::num_router_experts == 0) {
            convert_routing<Config>(args, thread_in_grid, gridDim.x * Config::num_threads);
        }
        chunks.store();
    };
    if constexpr (Config::num_token_chunks != 0) {
        convert(WholeTokenChunks<Config>(args));
    } else {
        convert(TokenChunks<Config>(args, thread_in_grid / warp_size, ptx::lane_idx()));
    }
}

}  // namespace deep_moe
