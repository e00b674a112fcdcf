// Dispatch, receiving: how many tokens each rank has for each local expert, and where they go.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// In shared memory. An expert's rows lie by source rank, and by the source's order below that. What
// is said of the tokens of all ranks is there where a token comes once for all of its experts.
template <class Config>
class ReceivedTokens {
 public:
    __device__ explicit ReceivedTokens(uint32_t shared_memory)
        : first_rows_(shared_memory + Config::Smem::first_rows_offset),
          rank_tokens_(shared_memory + rank_tokens_offset()) {}

    // The first row that an expert has from a rank.
    __device__ uint32_t first_row(uint32_t local_expert_idx, uint32_t rank_idx) const {
        return ptx::ld_shared_u32(row_word(local_expert_idx, rank_idx));
    }
    // With Config::stages_by_expert: how many it has from there.
    __device__ uint32_t num_rows(uint32_t local_expert_idx, uint32_t rank_idx) const {
        return first_row(local_expert_idx, rank_idx + 1) - first_row(local_expert_idx, rank_idx);
    }
    __device__ uint32_t num_tokens() const {
        return ptx::ld_shared_u32(token_word(Config::num_ranks));
    }
    // Of a rank, behind `acquire`; none where a token comes to each of its experts.
    __device__ uint32_t tokens_of(uint32_t rank_idx) const {
        return Config::stages_by_expert ? 0 : ptx::ld_shared_u32(count_word(rank_idx));
    }
    // Of the tokens of all ranks, one rank after the other.
    __device__ uint32_t first_token(uint32_t rank_idx) const {
        return ptx::ld_shared_u32(token_word(rank_idx));
    }
    // A whole warp: whose token it is.
    __device__ uint32_t rank_of(uint32_t token_idx) const {
        uint32_t num_before = 0;
#pragma unroll
        for (uint32_t base = 0; base < Config::num_ranks; base += warp_size) {
            const uint32_t rank_idx = base + ptx::lane_idx();
            num_before += __popc(__ballot_sync(
                full_warp, rank_idx < Config::num_ranks && first_token(rank_idx + 1) <= token_idx));
        }
        return num_before;
    }

    // All threads of a CTA: waits for the counts of all ranks; a barrier stands behind it.
    __device__ bool acquire(const LowLatencyBuffer<Config>& local,
                            const ActiveRanks<Config>& active, uint32_t half,
                            Waiter& waiter) const {
        constexpr uint32_t num_words = LowLatencyBuffer<Config>::num_count_words;
        for (uint32_t i = threadIdx.x; i < Config::num_ranks * num_words;
             i += Config::num_threads) {
            const uint32_t rank_idx = i / num_words;
            const uint32_t word_idx = i % num_words;
            const uint32_t count = acquire_count(local, active, half, rank_idx, word_idx, waiter);
            ptx::st_shared_u32(word_idx < Config::num_experts_per_rank
                                   ? row_word(word_idx, rank_idx)
                                   : count_word(rank_idx),
                               count);
        }
        return cta_agrees<Config>(waiter);  //~ counts_shared
    }

    // All threads of a CTA, behind `acquire`: from counts to what stands before. The others may
    // read it behind a barrier, such as that of `await_arrivals`. One CTA tells the caller.
    __device__ void sum_up(const LowLatencyArgs& args, bool tells_caller) const {
        constexpr uint32_t num_words = LowLatencyBuffer<Config>::num_count_words;
        for (uint32_t i = threadIdx.x; i < num_words; i += Config::num_threads) {
            if (i < Config::num_experts_per_rank) {
                sum_up_expert(args, i, tells_caller);
            } else {
                sum_up_tokens();
            }
        }
    }

 private:
    static __device__ uint32_t acquire_count(const LowLatencyBuffer<Config>& local,
                                             const ActiveRanks<Config>& active, uint32_t half,
                                             uint32_t rank_idx, uint32_t word_idx, Waiter& waiter) {
        if (!active.contains(rank_idx)) return 0;
        uint32_t word = 0;
        const auto has_come = [&] {
            word = ptx::ld_relaxed_sys(local.recv_counts(half, rank_idx, word_idx));
            return word != 0;  //~ count_awaited
        };
        const auto late_rank = [&] {
            RankSet set;
            set.insert(rank_idx);
            return set;
        };
        waiter.until(WaitSite::split_counts, 1, has_come, late_rank);
        return EncodedCount::decode(word);
    }

    __device__ void sum_up_expert(const LowLatencyArgs& args, uint32_t local_expert_idx,
                                  bool tells_caller) const {
        uint32_t num_rows = 0;
        for (uint32_t rank_idx = 0; rank_idx < Config::num_ranks; ++rank_idx) {
            const uint32_t count = first_row(local_expert_idx, rank_idx);
            ptx::st_shared_u32(row_word(local_expert_idx, rank_idx), num_rows);
            if (tells_caller) {
                args.layout_range[local_expert_idx * Config::num_ranks + rank_idx] =
                    static_cast<int64_t>(uint64_t{num_rows} << 32 | count);  //~ range_packed
            }
            num_rows += count;
        }
        if constexpr (Config::stages_by_expert) {
            ptx::st_shared_u32(row_word(local_expert_idx, Config::num_ranks), num_rows);
        }
        if (!tells_caller) return;
        args.recv_count[local_expert_idx] = static_cast<int32_t>(num_rows);
        if (args.expert_totals != nullptr) {
            args.expert_totals[local_expert_idx] += static_cast<int32_t>(num_rows);
        }
    }

    __device__ void sum_up_tokens() const {
        uint32_t num_tokens = 0;
        for (uint32_t rank_idx = 0; rank_idx < Config::num_ranks; ++rank_idx) {
            ptx::st_shared_u32(token_word(rank_idx), num_tokens);
            num_tokens += tokens_of(rank_idx);
        }
        ptx::st_shared_u32(token_word(Config::num_ranks), num_tokens);
    }

    __device__ uint32_t row_word(uint32_t local_expert_idx, uint32_t rank_idx) const {
        constexpr uint32_t num_words = Config::Smem::first_rows_dim1;
        return first_rows_ + (local_expert_idx * num_words + rank_idx) * sizeof(uint32_t);
    }
    __device__ uint32_t count_word(uint32_t rank_idx) const {
        return rank_tokens_ + rank_idx * sizeof(uint32_t);
    }
    __device__ uint32_t token_word(uint32_t rank_idx) const {
        return count_word(Config::num_ranks + 1 + rank_idx);
    }

    static constexpr uint32_t rank_tokens_offset() {
        if constexpr (Config::stages_by_expert) {
            return 0;  // there are none
        } else {
            static_assert(Config::Smem::rank_tokens_dim1 == Config::num_ranks + 1);
            return Config::Smem::rank_tokens_offset;
        }
    }

    // u32[E_local][ranks], with Config::stages_by_expert [ranks + 1]: first the counts, then what
    // is before them.
    uint32_t first_rows_;
    // u32[2][ranks + 1]: tokens of each rank, and of the ranks before. Both, for threads that wait
    // for tokens read the first while one still sums up.
    uint32_t rank_tokens_;
};

}  // namespace deep_moe
