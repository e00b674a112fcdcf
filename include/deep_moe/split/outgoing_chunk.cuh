// Dispatch, sending: a lane's part of a token, from the caller's tensors to how it travels.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/conditional.cuh"
#include "deep_moe/split/loaded_chunk.cuh"
#include "deep_moe/split/low_latency_args.cuh"
#include "deep_moe/split/token_format.cuh"

namespace deep_moe {

// Of BF16 values, which are quantized.
template <class Config>
struct QuantizedChunk {
    LoadedChunk<Config> loaded;

    QuantizedChunk() = default;
    __device__ QuantizedChunk(const LowLatencyArgs& args, uint32_t token_idx, uint32_t chunk_idx)
        : loaded(args.x, token_idx, chunk_idx) {}

    // All 32 lanes.
    __device__ typename TokenFormat<Config>::Chunk as_it_travels() const {
        return TokenFormat<Config>::make_chunk(loaded.values);
    }
};

// Of a token that has been quantized on another rank; zeros if there is no such chunk.
template <class Config>
struct RelayedChunk {
    using Format = TokenFormat<Config>;
    typename Format::Chunk chunk;

    RelayedChunk() = default;
    __device__ RelayedChunk(const LowLatencyArgs& args, uint32_t token_idx, uint32_t chunk_idx)
        : chunk{} {
        if (chunk_idx >= Format::num_chunks) return;
        chunk.values =
            static_cast<const uint4*>(args.x)[uint64_t{token_idx} * Format::num_chunks + chunk_idx];
        if constexpr (Format::is_quantized) {
            constexpr uint32_t chunks_per_word = Format::chunks_per_scale_word;
            chunk.scale_word = args.x_sf[uint64_t{token_idx} * Format::num_scale_words +
                                         chunk_idx / chunks_per_word];
        }
    }

    __device__ const typename Format::Chunk& as_it_travels() const { return chunk; }
};

template <class Config>
using OutgoingChunk =
    conditional_t<Config::relays_tokens, RelayedChunk<Config>, QuantizedChunk<Config>>;

}  // namespace deep_moe
