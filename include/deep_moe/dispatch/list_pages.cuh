// The pages of the lists that ranks write for each other. A list holds which tokens a source rank
// has for a local expert of the owner.
//
// A list's first page has a fixed place, and few lists have more: where routing is far from even.
// Of further pages each source rank has its own on each owner, as many as all its lists there may
// need together. A CTA draws consecutive places in a list (count_tokens.cuh). The one that draws
// the first place of a page takes the next free one, and says which it is
//   to the owner, who reads it when the counts are published, as it does the list itself;
//   to its own rank's CTAs, of which those with other places in the page wait for it.
// A CTA waits only when it has taken all that it has to take, and all CTAs are resident: so nobody
// waits for ever.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/expert_batches.cuh"
#include "deep_moe/dispatch/min_peeling.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

template <class Config>
struct ListPages {
    using Symm = typename Config::Symm;
    static constexpr uint32_t num_slots = Symm::src_token_topk_idx_dim1;  // of a page
    // Beyond the first of each list, of one source rank: 0 if each list fits into its first page.
    static constexpr uint32_t num_further =
        (Symm::src_token_topk_idx_dim0 - Config::num_experts) / Config::num_ranks;

    // Of a list with so many slots, beyond the first page.
    static __device__ constexpr uint32_t num_further_of(uint32_t num_list_slots) {
        return (max(num_list_slots, 1u) - 1) / num_slots;
    }
    static __device__ uint32_t first_of(uint32_t local_expert_idx, uint32_t source_rank_idx) {
        return local_expert_idx * Config::num_ranks + source_rank_idx;
    }
    static __device__ uint32_t further_of(uint32_t source_rank_idx) {
        return Config::num_experts + source_rank_idx * num_further;
    }
};

// Where a slot of a list stands.
struct ListPlace {
    uint32_t page_idx;
    uint32_t slot_idx;  // in the page
};

// One dispatch thread, for the places of a batch's experts that its CTA has drawn: num_places of
// each expert, behind the low word of first_places[i]. Takes the pages that begin there.
template <class Config>
__device__ void take_pages(const RankBuffers<Config>& buffers, const ExpertBatch<Config>& batch,
                           const uint64_t (&first_places)[ExpertBatch<Config>::size],
                           const uint32_t* num_places) {
    using Pages = ListPages<Config>;
    const SymmBuffer<Config> local = buffers.local();
    uint32_t further = 0;  // bit i: places behind the first page
    batch.for_each([&](uint32_t expert_idx, uint32_t i) {
        const uint32_t end = static_cast<uint32_t>(first_places[i]) + num_places[expert_idx];
        further |= end > Pages::num_slots ? 1u << i : 0;
    });
    if (further == 0) return;
    // What a failed call has left are no places, and its rank tells others nothing.
    //~ failed_takes_none
    if (ptx::ld_relaxed_gpu(local.expert_send_count(0)) & SymmBuffer<Config>::rank_gave_up) return;
#pragma unroll 1
    for (; further != 0; further &= further - 1) {
        const uint32_t idx = __ffs(further) - 1;
        uint32_t expert_idx = 0;
        uint32_t begin = 0;
        batch.for_each([&](uint32_t of_batch, uint32_t i) {
            if (i != idx) return;
            expert_idx = of_batch;
            begin = static_cast<uint32_t>(first_places[i]);
        });
        const uint32_t end = Pages::num_further_of(begin + num_places[expert_idx]);
        begin = Pages::num_further_of(begin);
        if (begin == end) continue;
        const uint32_t owner_rank_idx = expert_idx / Config::num_experts_per_rank;
        const SymmBuffer<Config> owner = buffers.of(owner_rank_idx);
        //~ pages_drawn
        uint32_t page_idx =
            Pages::further_of(buffers.rank_idx()) +
            ptx::atom_add_relaxed_gpu(local.num_taken_pages(owner_rank_idx), end - begin);
#pragma unroll 1
        for (uint32_t i = begin; i < end; ++i, ++page_idx) {
            //~ page_listed
            *owner.src_list_pages(expert_idx % Config::num_experts_per_rank, buffers.rank_idx(),
                                  i) = page_idx;
            ptx::st_relaxed_gpu(local.taken_pages(expert_idx, i), page_idx);  //~ page_told
        }
    }
}

// A thread of the source rank, when its CTA has taken pages: where the list_idx-th slot of its list
// for an expert goes. False after an abort.
template <class Config>
__device__ bool find_own_place(const RankBuffers<Config>& buffers, uint32_t expert_idx,
                               uint32_t list_idx, Waiter& waiter, ListPlace& place) {
    using Pages = ListPages<Config>;
    place = {Pages::first_of(expert_idx % Config::num_experts_per_rank, buffers.rank_idx()),
             list_idx};
    if constexpr (Pages::num_further != 0) {
        if (list_idx >= Pages::num_slots) {
            const uint32_t page = list_idx / Pages::num_slots;
            const uint32_t* taken = buffers.local().taken_pages(expert_idx, page - 1);
            place.slot_idx = list_idx - page * Pages::num_slots;  //~ slot_in_page
            return waiter.until(WaitSite::list_page, 1, [&] {
                place.page_idx = ptx::ld_relaxed_gpu(taken);
                return place.page_idx != 0;  //~ page_awaited
            });
        }
    }
    return true;
}

// On the owner, after ExpertCounts::acquire: a slot of a local expert's list. Addresses are
// computed anew here. Kept over the loop that pulls tokens, they spill on sm_103a.
template <class Config>
__device__ const uint32_t* listed_slot(const SymmBuffer<Config>& local, uint32_t local_expert_idx,
                                       const RankToken& source) {
    using Pages = ListPages<Config>;
    ListPlace place{Pages::first_of(local_expert_idx, source.rank_idx), source.list_idx};
    if constexpr (Pages::num_further != 0) {
        if (source.list_idx >= Pages::num_slots) {
            const uint32_t page = source.list_idx / Pages::num_slots;
            //~ page_found
            place = {*local.anew().src_list_pages(local_expert_idx, source.rank_idx, page - 1),
                     source.list_idx - page * Pages::num_slots};
        }
    }
    return local.anew().src_token_topk_idx(place.page_idx, place.slot_idx);
}

// When all CTAs of the source rank have written their lists: clears the page numbers of a list with
// so many slots, for the next call. Threads may do this for experts of one owner at the same time.
template <class Config>
__device__ void forget_pages(const SymmBuffer<Config>& local, uint32_t expert_idx,
                             uint32_t num_list_slots) {
    using Pages = ListPages<Config>;
    if constexpr (Pages::num_further != 0) {
        if (num_list_slots <= Pages::num_slots) return;
        const uint32_t num_further = Pages::num_further_of(num_list_slots);
#pragma unroll 1
        for (uint32_t i = 0; i < num_further; ++i) {
            *local.taken_pages(expert_idx, i) = 0;  //~ taken_zeroed
        }
        //~ num_taken_zeroed
        ptx::st_relaxed_gpu(local.num_taken_pages(expert_idx / Config::num_experts_per_rank), 0);
    }
}

}  // namespace deep_moe
