// Dispatch, sending: writes a CTA's tokens, in the format in which they travel, into its own
// buffer, where the ranks of their experts fetch them.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/loaded_chunk.cuh"
#include "deep_moe/split/parts.cuh"
#include "deep_moe/split/spread_row.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/token_block.cuh"
#include "deep_moe/split/token_format.cuh"

namespace deep_moe {

// A CTA's tokens go in parts of at least so many: as a warp shares one in two or three
// microseconds, and a link takes 20 for what ranks fetch of 8.
using TokenParts = Parts<8>;

// A token's values in a rank's buffer.
template <class Config>
__device__ uint4* shared_token(const ThroughputBuffer<Config>& buffer, uint32_t token_idx) {
    constexpr uint32_t row_bytes = TokenFormat<Config>::row_bytes;
    return reinterpret_cast<uint4*>(buffer.tokens(uint64_t{token_idx} * row_bytes));
}

// A whole warp: a token of BF16, quantized.
template <class Config>
__device__ void quantize_token(const ThroughputArgs& args, const ThroughputBuffer<Config>& local,
                               uint32_t token_idx) {
    using Format = TokenFormat<Config>;
    constexpr uint32_t num_chunks = align_up(Format::num_chunks, warp_size);
    constexpr uint32_t chunks_at_once = equal_loads(num_chunks / warp_size, 7);
    uint4* const values = shared_token(local, token_idx);
#pragma unroll 1
    for (uint32_t first = 0; first < num_chunks; first += chunks_at_once * warp_size) {
        LoadedChunk<Config> loaded[chunks_at_once];
#pragma unroll
        for (uint32_t i = 0; i < chunks_at_once; ++i) {
            loaded[i] =
                LoadedChunk<Config>(args.x, token_idx, first + i * warp_size + ptx::lane_idx());
        }
#pragma unroll
        for (uint32_t i = 0; i < chunks_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size + ptx::lane_idx();
            const typename Format::Chunk chunk = Format::make_chunk(loaded[i].values);
            if (chunk_idx >= Format::num_chunks) continue;
            values[chunk_idx] = chunk.values;
            if (chunk_idx % Format::chunks_per_scale_word == 0) {
                local.token_scales(token_idx)[chunk_idx / Format::chunks_per_scale_word] =
                    chunk.scale_word;
            }
        }
    }
}

// A whole warp: a token that travels as it is.
template <class Config>
__device__ void copy_token(const ThroughputArgs& args, const ThroughputBuffer<Config>& local,
                           uint32_t token_idx) {
    using Format = TokenFormat<Config>;
    const auto* const from =
        static_cast<const uint4*>(args.x) + uint64_t{token_idx} * Format::num_chunks;
    spread_row<Format::num_chunks>(shared_token(local, token_idx), from, 1u, 0u);
    if constexpr (Format::is_quantized) {
        const uint32_t* const scales = args.x_sf + uint64_t{token_idx} * Format::num_scale_words;
        for (uint32_t i = ptx::lane_idx(); i < Format::num_scale_words; i += warp_size) {
            local.token_scales(token_idx)[i] = scales[i];
        }
    }
}

// A whole warp: one of the CTA's tokens, with what its slots need.
template <class Config>
__device__ void share_token(const ThroughputArgs& args, const ThroughputBuffer<Config>& local,
                            uint32_t token_idx) {
    if constexpr (TokenFormat<Config>::is_quantized && !Config::is_quantized_input) {
        quantize_token(args, local, token_idx);
    } else {
        copy_token(args, local, token_idx);
    }
    if (ptx::lane_idx() < Config::num_topk) {
        const uint32_t slot_idx = token_idx * Config::num_topk + ptx::lane_idx();
        if constexpr (Config::has_weights) {
            *local.slot_weights(slot_idx) = args.topk_weights[slot_idx];
        }
        if constexpr (Config::knows_rows) {
            *local.slot_words(slot_idx) = static_cast<uint32_t>(args.slot_rows[slot_idx]);
        }
    }
}

}  // namespace deep_moe
