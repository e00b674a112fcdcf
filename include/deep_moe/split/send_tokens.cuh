// Dispatch, sending: each token is quantized once and goes once to every rank that owns one of its
// experts, into the staging of this rank there.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/active_ranks.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/loaded_chunk.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/routed_slot.cuh"
#include "deep_moe/split/token_counts.cuh"
#include "deep_moe/split/token_format.cuh"

namespace deep_moe {

// Where the CTA's token goes. In shared memory: how many places, then each as
// rank_idx << 16 | slot in the staging.
template <class Config>
class Destinations {
 public:
    __device__ explicit Destinations(uint32_t shared_memory)
        : words_(shared_memory + Config::Smem::destinations_offset) {}

    __device__ uint32_t count() const { return ptx::ld_shared_u32(words_); }
    __device__ uint32_t rank_idx(uint32_t i) const { return get(i) >> 16; }
    __device__ uint32_t slot_idx(uint32_t i) const { return get(i) & 0xffff; }

    // A whole warp: finds them for a token, and writes its header to each. `counts`: of all tokens
    // before it.
    __device__ void find(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                         const ActiveRanks<Config>& active, const TokenCounts<Config>& counts,
                         uint32_t half, uint32_t token_idx) const {
        const RoutedSlot slot =
            route_slot<Config, warp_size>(args.topk_idx, active, token_idx, true);
        uint32_t row = RowOfExpert::none;
        if (slot.is_first_of_expert()) {
            row = RowOfExpert::pack(slot.expert_idx % Config::num_experts_per_rank,
                                    counts.of_expert(slot.expert_idx));  //~ row_of_expert
        }
        const uint32_t firsts = __ballot_sync(full_warp, slot.is_first_of_rank());
        if (ptx::lane_idx() == 0) ptx::st_shared_u32(words_, __popc(firsts));
        uint32_t i = 0;
        for (uint32_t left = firsts; left != 0; left &= left - 1) {
            const uint32_t rank_idx = __shfl_sync(full_warp, slot.rank_idx, __ffs(left) - 1);
            const uint32_t slot_idx = counts.of_rank(rank_idx);  //~ slot_of_rank
            uint32_t* const header =
                ranks.of(rank_idx).staged_headers(half, ranks.rank_idx(), slot_idx);
            if (ptx::lane_idx() == 0) {
                header[0] = token_idx;
                ptx::st_shared_u32(words_ + ++i * sizeof(uint32_t), rank_idx << 16 | slot_idx);
            }
            if (slot.slot_idx < Config::num_topk) {
                header[1 + slot.slot_idx] =
                    slot.rank_idx == rank_idx ? row : RowOfExpert::none;  //~ header_written
            }
        }
    }

 private:
    __device__ uint32_t get(uint32_t i) const {
        return ptx::ld_shared_u32(words_ + (1 + i) * sizeof(uint32_t));
    }

    uint32_t words_;
};

// All threads of a CTA: one token. `loaded`: this thread's first chunk of it.
template <class Config>
__device__ void send_token(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                           const Destinations<Config>& destinations, uint32_t half,
                           uint32_t token_idx, LoadedChunk<Config> loaded) {
    using Format = TokenFormat<Config>;
    const uint32_t num_destinations = destinations.count();
#pragma unroll 1
    for (uint32_t chunk_idx = threadIdx.x;
         chunk_idx < align_up(Format::num_chunks, Config::num_threads);
         chunk_idx += Config::num_threads) {
        const typename Format::Chunk chunk = Format::make_chunk(loaded.values);
        if constexpr (Format::num_chunks > Config::num_threads) {
            loaded = LoadedChunk<Config>(args.x, token_idx, chunk_idx + Config::num_threads);
        }
        if (chunk_idx >= Format::num_chunks) continue;
        for (uint32_t i = 0; i < num_destinations; ++i) {
            const LowLatencyBuffer<Config> buffer = ranks.of(destinations.rank_idx(i));
            const uint32_t slot_idx = destinations.slot_idx(i);
            reinterpret_cast<uint4*>(
                buffer.staged_values(half, ranks.rank_idx(), slot_idx))[chunk_idx] = chunk.values;
            if constexpr (Format::is_quantized) {
                constexpr uint32_t chunks_per_word = Format::chunks_per_scale_word;
                if (chunk_idx % chunks_per_word == 0) {
                    buffer.staged_scales(half, ranks.rank_idx(),
                                         slot_idx)[chunk_idx / chunks_per_word] = chunk.scale_word;
                }
            }
        }
    }
}

// All threads of the grid.
template <class Config>
__device__ void send_tokens(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                            const ActiveRanks<Config>& active, const TokenCounts<Config>& counts,
                            uint32_t shared_memory, uint32_t half) {
    const Destinations<Config> destinations(shared_memory);
    counts.clear();
    uint32_t num_counted = 0;
    for (uint32_t token_idx = blockIdx.x; token_idx < args.num_tokens;
         token_idx += Config::num_ctas) {
        const LoadedChunk<Config> loaded(args.x, token_idx,
                                         threadIdx.x);  // while tokens are counted
        counts.add(args.topk_idx, active, num_counted, token_idx);
        num_counted = token_idx;
        if (ptx::warp_idx() == 0) {
            destinations.find(args, ranks, active, counts, half, token_idx);
        }
        cta_sync<Config>();  //~ destinations_found
        send_token(args, ranks, destinations, half, token_idx, loaded);
        // The next token's search, behind the barrier of its count, overwrites the destinations.
    }
}

}  // namespace deep_moe
