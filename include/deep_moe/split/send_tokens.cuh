// Dispatch, sending: each token is quantized once, unless it has been before, and written to all
// places that it goes to.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/conditional.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/expert_destinations.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/outgoing_chunk.cuh"
#include "deep_moe/split/rank_destinations.cuh"
#include "deep_moe/split/routed_slot.cuh"
#include "deep_moe/split/sent_messages.cuh"
#include "deep_moe/split/token_counts.cuh"
#include "deep_moe/split/token_format.cuh"
#include "deep_moe/sync/active_ranks.cuh"

namespace deep_moe {

template <class Config>
using Destinations =
    conditional_t<Config::stages_by_expert, ExpertDestinations<Config>, RankDestinations<Config>>;

// A token that the CTA sends next, as far as it can be known ahead.
template <class Config>
struct NextToken {
    OutgoingChunk<Config> chunk;  // this thread's first one
    int64_t expert_idx;           // in the first warp: of the slot that the lane stands for
    RoutedSlot slot;              // and the slot

    // All threads of a CTA: its values and experts are on their way then. There may be no such
    // token.
    __device__ NextToken(const LowLatencyArgs& args, uint32_t token_idx) {
        if (!Config::sends || token_idx >= args.num_tokens) return;
        if (ptx::warp_idx() == 0) {
            expert_idx = named_expert<Config, warp_size>(args.topk_idx, token_idx, true);
        }
        chunk = OutgoingChunk<Config>(args, token_idx, threadIdx.x);
    }
    // The same: `slot`, which is waited for.
    __device__ void route(const LowLatencyArgs& args, const ActiveRanks<Config>& active,
                          uint32_t token_idx) {
        if (!Config::sends || token_idx >= args.num_tokens || ptx::warp_idx() != 0) return;
        slot = route_slot<Config, warp_size>(active, expert_idx);
    }
};

// All threads of a CTA: one token. `loaded`: this thread's first chunk of it.
template <class Config>
__device__ void send_token(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                           const Destinations<Config>& destinations, uint32_t half,
                           uint32_t token_idx, OutgoingChunk<Config> loaded) {
    using Format = TokenFormat<Config>;
    const uint32_t num_destinations = destinations.count();
#pragma unroll 1
    for (uint32_t chunk_idx = threadIdx.x;
         chunk_idx < align_up(Format::num_chunks, Config::num_threads);
         chunk_idx += Config::num_threads) {
        const typename Format::Chunk chunk = loaded.as_it_travels();
        if constexpr (Format::num_chunks > Config::num_threads) {
            loaded = OutgoingChunk<Config>(args, token_idx, chunk_idx + Config::num_threads);
        }
        if (chunk_idx >= Format::num_chunks) continue;
        for (uint32_t i = 0; i < num_destinations; ++i) {
            const auto place = destinations.get(ranks, half, i);
            place.values()[chunk_idx] = chunk.values;
            if constexpr (Format::is_quantized) {
                constexpr uint32_t chunks_per_word = Format::chunks_per_scale_word;
                if (chunk_idx % chunks_per_word == 0) {
                    place.scales()[chunk_idx / chunks_per_word] = chunk.scale_word;
                }
            }
        }
    }
}

// All threads of the grid, behind a barrier that counts were cleared in front of. first_token: the
// CTA's, blockIdx.x.
template <class Config>
__device__ void send_tokens(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                            const ActiveRanks<Config>& active, const TokenCounts<Config>& counts,
                            const SentMessages<Config>& sent, uint32_t shared_memory, uint32_t half,
                            const NextToken<Config>& first_token) {
    const Destinations<Config> destinations(shared_memory);
    NextToken<Config> token = first_token;
    uint32_t num_counted = 0;
    for (uint32_t token_idx = blockIdx.x; token_idx < args.num_tokens;
         token_idx += Config::num_ctas) {
        if (token_idx != blockIdx.x) {
            token = NextToken<Config>(args, token_idx);  // while tokens are counted
            token.route(args, active, token_idx);
        }
        counts.add(args.topk_idx, active, num_counted, token_idx);
        num_counted = token_idx;
        uint32_t found = 0;
        if (ptx::warp_idx() == 0) found = destinations.find(counts, sent, token.slot);
        cta_sync<Config>();  //~ destinations_found
        if (ptx::warp_idx() == 0) {
            destinations.tell(args, ranks, half, token_idx, token.slot, found);
        }
        send_token(args, ranks, destinations, half, token_idx, token.chunk);
        // The next token's search, behind the barrier of its count, overwrites the destinations.
    }
}

}  // namespace deep_moe
