// Dispatch: what count_tokens.cuh does, where the rank has so few tokens that one CTA does it
// sooner than all of them, which draw places from each other and meet in a gather.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/count_tokens.cuh"
#include "deep_moe/dispatch/dispatch_barriers.cuh"
#include "deep_moe/dispatch/list_pages.cuh"
#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/grid_gather.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// A thread keeps its slots in registers.
constexpr uint32_t few_slots_per_thread = 2;

// Whether the first CTA sends all that the rank has. Then no list has a second page.
template <class Config>
__device__ bool has_few_slots(uint32_t num_tokens) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    constexpr uint32_t max_slots =
        min(few_slots_per_thread * num_threads, ListPages<Config>::num_slots);
    return num_tokens * Config::num_topk <= max_slots;
}

// All dispatch threads of that CTA. `expert_counts`: u32[num_experts] in shared memory; afterwards,
// behind a barrier of the CTA, the rank's tokens for each expert. A slot's addition to them draws
// its place in the list. Who gives up, and why: as in count_tokens.
template <class Config>
__device__ void count_few_tokens(const RankBuffers<Config>& buffers,
                                 const typename CallRanks<Config>::Mask& mask, uint32_t num_tokens,
                                 uint32_t thread_idx, uint32_t expert_counts,
                                 DispatchBarriers<Config>& barriers, Waiter& waiter) {
    constexpr uint32_t num_threads = Config::num_dispatch_warps * warp_size;
    const SymmBuffer<Config> local = buffers.local();
    auto* const counts = static_cast<uint32_t*>(__cvta_shared_to_generic(expert_counts));
    const uint32_t num_slots = num_tokens * Config::num_topk;
    // Loaded while the counts are zeroed.
    int64_t expert_indices[few_slots_per_thread];
#pragma unroll
    for (uint32_t i = 0; i < few_slots_per_thread; ++i) {
        const uint32_t slot = i * num_threads + thread_idx;
        expert_indices[i] = slot < num_slots ? *local.input_topk_idx(slot) : -1;
    }
    const bool may_send = !has_given_up(local.grid_gather_counter());
    for (uint32_t i = thread_idx; i < Config::num_experts; i += num_threads) counts[i] = 0;
    const CallRanks<Config> ranks(mask);
    if constexpr (Config::masks_ranks) {
        refuse_masked_itself<Config>(ranks, buffers.rank_idx(), waiter);
    }
    if (!barriers.cta(may_send)) return;  //~ few_zeroed
#pragma unroll
    for (uint32_t i = 0; i < few_slots_per_thread; ++i) {
        if (!is_routed<Config>(expert_indices[i])) continue;  //~ few_routed
        const auto expert_idx = static_cast<uint32_t>(expert_indices[i]);
        if constexpr (Config::masks_ranks) {
            if (!owned_by_active<Config>(expert_idx, ranks)) continue;  //~ few_for_active
        }
        //~ few_counted
        const uint32_t list_idx =
            ptx::atom_add_shared(expert_counts + expert_idx * sizeof(uint32_t), 1);
        const SymmBuffer<Config> owner = buffers.of(expert_idx / Config::num_experts_per_rank);
        const uint32_t page_idx = ListPages<Config>::first_of(
            expert_idx % Config::num_experts_per_rank, buffers.rank_idx());
        *owner.src_token_topk_idx(page_idx, list_idx) = i * num_threads + thread_idx;  //~ few_slot
    }
}

// What the CTA then tells of an expert, as if all CTAs of the rank had reported.
template <class Config>
__device__ uint64_t few_send_count(uint32_t expert_counts, uint32_t expert_idx) {
    const auto* const counts =
        static_cast<const uint32_t*>(__cvta_shared_to_generic(expert_counts));
    return uint64_t{Config::num_sms} << 32 | counts[expert_idx];  //~ few_told
}

}  // namespace deep_moe
