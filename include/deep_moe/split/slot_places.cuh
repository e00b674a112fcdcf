// Dispatch, sending: how many slots of this rank name each expert, and each slot's place among
// them.
//
// Every CTA counts for itself the slots of all tokens before its own, so no CTA waits for another
// one. That takes less time than to ask them. Places do not depend on which CTA comes first.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/throughput_warps.cuh"
#include "deep_moe/split/token_block.cuh"
#include "deep_moe/sync/named_barriers.cuh"

namespace deep_moe {

// In shared memory: u32[num_experts].
template <class Config>
class SlotPlaces {
 public:
    // Many of the CTA's: the last CTA's counts are what all ranks wait for.
    static constexpr uint32_t num_warps = fetching_warps<Config>;

    __device__ SlotPlaces(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                          uint32_t shared_memory)
        : args_(args),
          ranks_(ranks),
          local_(ranks.local()),
          block_(args.num_tokens),
          words_(shared_memory + Config::Smem::slot_counts_offset) {}

    // The CTA's first `num_warps` warps: places of the slots of its tokens. The last CTA, which has
    // counted all then, tells all ranks.
    __device__ void find() const {
        clear();
        meet();  //~ slot_counts_cleared
        count_earlier();
        meet();  //~ earlier_counted
        if (ptx::warp_idx() != 0) return;
        place();
        if (blockIdx.x == Config::num_ctas - 1) publish();
    }

    // One thread of the rank, when all its CTAs have read it: all of them know this dispatch's
    // counts.
    static __device__ void count_on(const ThroughputBuffer<Config>& local) {
        ptx::red_add_relaxed_gpu(local.num_counts(), 1);  //~ counts_counted
    }

 private:
    static constexpr uint32_t num_threads = num_warps * warp_size;

    static __device__ void meet() { ptx::bar_sync(NamedBarrier::slot_counts, num_threads); }

    __device__ void clear() const {
        for (uint32_t i = threadIdx.x; i < Config::num_experts; i += num_threads) {
            ptx::st_shared_u32(word(i), 0);
        }
    }

    __device__ void count_earlier() const {
        constexpr uint32_t loads_at_once = 16;
        const uint32_t end = block_.begin * Config::num_topk;
#pragma unroll 1
        for (uint32_t first = threadIdx.x; first < end; first += loads_at_once * num_threads) {
            // Without branches, so that no load waits for one before it.
            int64_t experts[loads_at_once];
#pragma unroll
            for (uint32_t i = 0; i < loads_at_once; ++i) {
                const uint32_t slot_idx = min(first + i * num_threads, end - 1);
                experts[i] = load_topk_idx<Config>(args_.topk_idx, slot_idx);
            }
#pragma unroll
            for (uint32_t i = 0; i < loads_at_once; ++i) {
                if (first + i * num_threads >= end || !is_used(experts[i])) continue;
                const auto expert_idx = static_cast<uint32_t>(experts[i]);
                ptx::red_add_shared(word(expert_idx), 1);  //~ earlier_added
            }
        }
    }

    // A whole warp. Behind it the words count the CTA's slots too.
    __device__ void place() const {
        const uint32_t end = block_.end * Config::num_topk;
        uint32_t slot_idx = block_.begin * Config::num_topk + ptx::lane_idx();
        uint32_t expert_idx = expert_of(slot_idx, end);
        while (__any_sync(full_warp, slot_idx < end)) {
            const uint32_t next_expert = expert_of(slot_idx + warp_size, end);
            const uint32_t alike = __match_any_sync(full_warp, expert_idx);
            uint32_t word_here = PlaceAtExpert::none;
            if (expert_idx != PlaceAtExpert::none) {
                const uint32_t num_in_warp = __popc(alike & ((1u << ptx::lane_idx()) - 1));
                const uint32_t place =
                    ptx::ld_shared_u32(word(expert_idx)) + num_in_warp;  //~ place_found
                word_here = PlaceAtExpert::pack(expert_idx, place);
            }
            __syncwarp();
            if (expert_idx != PlaceAtExpert::none && alike >> ptx::lane_idx() == 1) {
                ptx::st_shared_u32(word(expert_idx), PlaceAtExpert::place(word_here) + 1);
            }
            __syncwarp();
            if (slot_idx < end) *local_.slot_words(slot_idx) = word_here;
            slot_idx += warp_size;
            expert_idx = next_expert;
        }
    }

    // A whole warp. The counts have an arrival of their own, in front of those of the tokens.
    __device__ void publish() const {
        for (uint32_t i = ptx::lane_idx(); i < Config::num_ranks; i += warp_size) {
            if (!ranks_.active().contains(i)) continue;  //~ masked_gets_no_tokens
            *ranks_.of(i).num_tokens(ranks_.rank_idx()) = args_.num_tokens;  //~ tokens_told
        }
        for (uint32_t i = ptx::lane_idx(); i < Config::num_experts; i += warp_size) {
            const uint32_t count = ptx::ld_shared_u32(word(i));
            for (uint32_t rank_idx = 0; rank_idx < Config::num_ranks; ++rank_idx) {
                if (!ranks_.active().contains(rank_idx)) continue;  //~ masked_gets_no_totals
                *ranks_.of(rank_idx).expert_totals(ranks_.rank_idx(), i) =
                    count;  //~ total_published
            }
        }
        __syncwarp();  // all lanes' stores in front of each release
        for (uint32_t i = ptx::lane_idx(); i < Config::num_ranks; i += warp_size) {
            if (!ranks_.active().contains(i)) continue;  //~ masked_gets_no_arrival
            ptx::red_add_release_sys(ranks_.of(i).count_arrivals(ranks_.rank_idx()),
                                     1);  //~ totals_released
        }
    }

    __device__ uint32_t expert_of(uint32_t slot_idx, uint32_t end) const {
        if (slot_idx >= end) return PlaceAtExpert::none;
        const int64_t expert_idx = load_topk_idx<Config>(args_.topk_idx, slot_idx);
        if (!is_used(expert_idx)) return PlaceAtExpert::none;
        return static_cast<uint32_t>(expert_idx);
    }

    __device__ bool is_used(int64_t expert_idx) const {
        return is_routed<Config>(expert_idx, ranks_.active());
    }

    __device__ uint32_t word(uint32_t expert_idx) const {
        return words_ + expert_idx * sizeof(uint32_t);
    }

    const ThroughputArgs& args_;
    const ThroughputRanks<Config>& ranks_;
    const ThroughputBuffer<Config> local_;
    const TokenBlock<Config> block_;
    uint32_t words_;  // u32[E]: slots before, that name the expert
};

}  // namespace deep_moe
