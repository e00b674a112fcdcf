// Dispatch, sending: how many slots of this rank name each expert, and each slot's place among
// them. A CTA counts those of its own tokens and adds what the CTAs before it have counted.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/token_block.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// In shared memory: u32[num_experts], twice.
template <class Config>
class SlotPlaces {
 public:
    __device__ SlotPlaces(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                          uint32_t shared_memory)
        : args_(args),
          ranks_(ranks),
          local_(ranks.local()),
          block_(args.num_tokens),
          words_(shared_memory + Config::Smem::slot_counts_offset),
          earlier_words_(shared_memory + Config::Smem::earlier_counts_offset) {}

    // All threads of the CTA; a barrier stands behind it.
    __device__ void clear() const {
        for (uint32_t i = threadIdx.x; i < Config::num_experts; i += Config::num_threads) {
            ptx::st_shared_u32(word(i), 0);
            ptx::st_shared_u32(earlier_word(i), 0);
        }
        cta_sync<Config>();  //~ slot_counts_cleared
    }

    // A whole warp per CTA: places among the slots of this CTA's tokens, and, for the CTAs behind
    // it, how many there are.
    __device__ void count() const {
        const uint32_t end = block_.end * Config::num_topk;
        uint32_t slot_idx = block_.begin * Config::num_topk + ptx::lane_idx();
        uint32_t expert_idx = expert_of(slot_idx, end);
        while (__any_sync(full_warp, slot_idx < end)) {
            const uint32_t next_expert = expert_of(slot_idx + warp_size, end);
            const uint32_t alike = __match_any_sync(full_warp, expert_idx);
            uint32_t word_here = ExpertPlace::none;
            if (expert_idx != ExpertPlace::none) {
                const uint32_t num_in_warp = __popc(alike & ((1u << ptx::lane_idx()) - 1));
                const uint32_t place =
                    ptx::ld_shared_u32(word(expert_idx)) + num_in_warp;  //~ place_in_block
                word_here = ExpertPlace::pack(expert_idx, place);
            }
            __syncwarp();
            if (expert_idx != ExpertPlace::none && alike >> ptx::lane_idx() == 1) {
                ptx::st_shared_u32(word(expert_idx), ExpertPlace::place(word_here) + 1);
            }
            __syncwarp();
            if (slot_idx < end) *local_.slot_words(slot_idx) = word_here;
            slot_idx += warp_size;
            expert_idx = next_expert;
        }
        for (uint32_t i = ptx::lane_idx(); i < Config::num_experts; i += warp_size) {
            *block_count(blockIdx.x, i) = ptx::ld_shared_u32(word(i));
        }
        __syncwarp();  // all lanes' stores in front of the release
        if (ptx::lane_idx() == 0) {
            ptx::red_add_release_gpu(local_.counted_ctas(), 1);  //~ counts_released
        }
    }

    // All threads of the CTA, behind a barrier behind `count`: places among all slots of this rank.
    // The last CTA tells all ranks how many there are.
    __device__ bool add_earlier_ctas(Waiter& waiter) const {
        if (threadIdx.x == 0) await_counts(waiter);
        if (!cta_agrees<Config>(waiter)) return false;  //~ counts_passed_on
        sum_up_earlier();
        cta_sync<Config>();  //~ earlier_shared
        if (blockIdx.x == Config::num_ctas - 1) {
            for (uint32_t i = threadIdx.x; i < Config::num_experts; i += Config::num_threads) {
                publish(i, ptx::ld_shared_u32(earlier_word(i)) + ptx::ld_shared_u32(word(i)));
            }
        }
        for (uint32_t i = block_.begin * Config::num_topk + threadIdx.x;
             i < block_.end * Config::num_topk; i += Config::num_threads) {
            const uint32_t word_here = *local_.slot_words(i);
            if (word_here == ExpertPlace::none) continue;
            *local_.slot_words(i) =
                word_here + ptx::ld_shared_u32(earlier_word(ExpertPlace::expert_idx(word_here)));
        }
        return true;
    }

    // One thread of the rank, when all its CTAs have read it: all of them are counted.
    static __device__ void count_on(const ThroughputBuffer<Config>& local) {
        ptx::red_add_relaxed_gpu(local.num_counts(), 1);
    }

 private:
    __device__ uint32_t expert_of(uint32_t slot_idx, uint32_t end) const {
        if (slot_idx >= end) return ExpertPlace::none;
        const int64_t expert_idx = load_topk_idx<Config>(args_.topk_idx, slot_idx);
        if (!is_routed<Config>(expert_idx)) return ExpertPlace::none;
        return static_cast<uint32_t>(expert_idx);
    }

    __device__ void await_counts(Waiter& waiter) const {
        const uint32_t num_before =
            ptx::ld_relaxed_gpu(local_.num_counts()) * uint32_t{Config::num_ctas};
        waiter.until(WaitSite::split_block_counts, Config::num_ctas, [&] {
            return ptx::ld_acquire_gpu(local_.counted_ctas()) -
                   num_before;  //~ block_counts_acquired
        });
    }

    // All threads of the CTA. A thread takes a few neighbouring experts, of every so many of the
    // CTAs before: the last CTA, for which all ranks wait, then has most of its loads under way at
    // once.
    __device__ void sum_up_earlier() const {
        constexpr uint32_t experts_at_once = Config::num_experts % 4 == 0 ? 4 : 1;
        constexpr uint32_t num_columns = Config::num_experts / experts_at_once;
        constexpr uint32_t num_groups = max(1u, Config::num_threads / num_columns);
        const uint32_t group = threadIdx.x / num_columns;
        if (group >= num_groups) return;
        for (uint32_t column = threadIdx.x - group * num_columns; column < num_columns;
             column += Config::num_threads) {
            const uint32_t expert_idx = column * experts_at_once;
            uint32_t num_earlier[experts_at_once] = {};
#pragma unroll 16  // loads that wait for nothing
            for (uint32_t cta_idx = group; cta_idx < blockIdx.x; cta_idx += num_groups) {
                const uint32_t* const counts = block_count(cta_idx, expert_idx);
                if constexpr (experts_at_once == 4) {
                    const uint4 four = *reinterpret_cast<const uint4*>(counts);
                    num_earlier[0] += four.x;
                    num_earlier[1] += four.y;
                    num_earlier[2] += four.z;
                    num_earlier[3] += four.w;
                } else {
                    num_earlier[0] += *counts;
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < experts_at_once; ++i) {
                ptx::red_add_shared(earlier_word(expert_idx + i),
                                    num_earlier[i]);  //~ earlier_added
            }
        }
    }

    __device__ void publish(uint32_t expert_idx, uint32_t count) const {
        for (uint32_t rank_idx = 0; rank_idx < Config::num_ranks; ++rank_idx) {
            *ranks_.of(rank_idx).expert_totals(ranks_.rank_idx(), expert_idx) =
                count;  //~ total_published
        }
    }

    __device__ uint32_t* block_count(uint32_t cta_idx, uint32_t expert_idx) const {
        return args_.block_counts + cta_idx * Config::num_experts + expert_idx;
    }
    __device__ uint32_t word(uint32_t expert_idx) const {
        return words_ + expert_idx * sizeof(uint32_t);
    }
    __device__ uint32_t earlier_word(uint32_t expert_idx) const {
        return earlier_words_ + expert_idx * sizeof(uint32_t);
    }

    const ThroughputArgs& args_;
    const ThroughputRanks<Config>& ranks_;
    const ThroughputBuffer<Config> local_;
    const TokenBlock<Config> block_;
    uint32_t words_;          // u32[E]: slots of this CTA's tokens
    uint32_t earlier_words_;  // u32[E]: of the CTAs before
};

}  // namespace deep_moe
