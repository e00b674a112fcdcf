// Dispatch, receiving: where each expert's rows begin, on every rank. All ranks know all counts. So
// each rank computes how many rows every rank gets, and all fail together if one would get more
// than it has room for.
//
// An expert's rows lie by source rank, and by the source's order below that; experts begin at
// multiples of Config::expert_alignment.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/token_block.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// Of a rank that has told its counts. A masked rank has none.
template <class Config>
__device__ uint32_t tokens_told(const ThroughputBuffer<Config>& local,
                                const CallRanks<Config>& active, uint32_t rank_idx) {
    if (!active.contains(rank_idx)) return 0;  //~ masked_has_no_tokens
    return *local.num_tokens(rank_idx);
}

// In shared memory.
template <class Config>
class ExpertPlaces {
 public:
    __device__ explicit ExpertPlaces(uint32_t shared_memory)
        : begins_(shared_memory + Config::Smem::expert_begins_offset),
          own_rows_(shared_memory + Config::Smem::own_rows_offset),
          first_rows_(shared_memory + Config::Smem::first_rows_offset) {}

    // All threads of a group, when all ranks' counts are here. Fails if a rank's rows do not fit.
    // The first CTA tells the caller of its own rank's experts, and of all ranks' tokens. False if
    // this rank gave up.
    __device__ bool sum_up(const ThroughputArgs& args, const ThroughputBuffer<Config>& local,
                           const CallRanks<Config>& active, uint32_t rank_idx,
                           const FirstWarps& group, Waiter& waiter) const {
        for (uint32_t i = threadIdx.x; i < Config::num_experts; i += group.num_threads) {
            sum_up_expert(local, active, rank_idx, i);
        }
        if (blockIdx.x == 0) {
            for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += group.num_threads) {
                const auto num_tokens = static_cast<int32_t>(tokens_told(local, active, i));
                args.rank_tokens[i] = num_tokens;  //~ rank_tokens_told
            }
        }
        group.sync();  //~ totals_summed
        for (uint32_t i = ptx::warp_idx(); i < Config::num_ranks;
             i += group.num_threads / warp_size) {
            place_experts(args, i, i == rank_idx && blockIdx.x == 0, waiter);
        }
        return group.agrees(waiter);  //~ places_passed_on
    }

    // The row, on its owner, of this rank's first slot that names an expert.
    __device__ uint32_t own_row(uint32_t expert_idx) const {
        return ptx::ld_shared_u32(begins_ + expert_idx * sizeof(uint32_t)) +
               ptx::ld_shared_u32(own_rows_ + expert_idx * sizeof(uint32_t));
    }
    // The row here of a rank's first slot that names a local expert; expert_idx is its global one.
    __device__ uint32_t first_row(uint32_t expert_idx, uint32_t source_rank) const {
        return ptx::ld_shared_u32(begins_ + expert_idx * sizeof(uint32_t)) +
               ptx::ld_shared_u32(first_row_word(expert_idx, source_rank));
    }
    // Behind its last row here.
    __device__ uint32_t end_of(uint32_t expert_idx) const {
        return first_row(expert_idx, Config::num_ranks);
    }

 private:
    // How many slots name it, and how many of those stand before each rank's.
    __device__ void sum_up_expert(const ThroughputBuffer<Config>& local,
                                  const CallRanks<Config>& active, uint32_t rank_idx,
                                  uint32_t expert_idx) const {
        constexpr uint32_t loads_at_once = min(8u, Config::num_ranks);
        const bool is_local = expert_idx / Config::num_experts_per_rank == rank_idx;
        uint32_t num_rows = 0;
#pragma unroll 1
        for (uint32_t first = 0; first < Config::num_ranks; first += loads_at_once) {
            uint32_t counts[loads_at_once];
#pragma unroll
            for (uint32_t i = 0; i < loads_at_once; ++i) {
                const bool is_valid = first + i < Config::num_ranks &&
                                      active.contains(first + i);  //~ masked_total_dropped
                counts[i] = is_valid ? *local.expert_totals(first + i, expert_idx) : 0;
            }
#pragma unroll
            for (uint32_t i = 0; i < loads_at_once; ++i) {
                const uint32_t source = first + i;
                if (source >= Config::num_ranks) break;
                if (is_local) ptx::st_shared_u32(first_row_word(expert_idx, source), num_rows);
                if (source == rank_idx) {
                    ptx::st_shared_u32(own_rows_ + expert_idx * sizeof(uint32_t), num_rows);
                }
                num_rows += counts[i];
            }
        }
        if (is_local) {
            ptx::st_shared_u32(first_row_word(expert_idx, Config::num_ranks), num_rows);
        }
        ptx::st_shared_u32(begins_ + expert_idx * sizeof(uint32_t), num_rows);
    }

    // A whole warp: from counts to where the experts of a rank begin. A lane takes neighbours, so
    // that one sum over the warp is enough.
    __device__ void place_experts(const ThroughputArgs& args, uint32_t rank_idx, bool tells_caller,
                                  Waiter& waiter) const {
        constexpr uint32_t num_local = Config::num_experts_per_rank;
        constexpr uint32_t experts_per_lane = ceil_div(num_local, warp_size);
        const uint32_t words = begins_ + rank_idx * num_local * sizeof(uint32_t);
        const uint32_t first = min(ptx::lane_idx() * experts_per_lane, num_local);
        const uint32_t last = min(first + experts_per_lane, num_local);
        const auto room_for = [](uint32_t count) {
            return align_up(count, uint32_t{Config::expert_alignment});
        };
        uint32_t num_rows = 0;
        for (uint32_t i = first; i < last; ++i) {
            num_rows += room_for(ptx::ld_shared_u32(words + i * sizeof(uint32_t)));
        }
        const uint32_t lane_end = ptx::inclusive_sum(num_rows);
        uint32_t begin = lane_end - num_rows;
        for (uint32_t i = first; i < last; ++i) {
            const uint32_t count = ptx::ld_shared_u32(words + i * sizeof(uint32_t));
            const uint32_t expert_end = begin + room_for(count);
            ptx::st_shared_u32(words + i * sizeof(uint32_t), begin);  //~ expert_placed
            if (tells_caller) {
                args.expert_begin[i] = static_cast<int32_t>(begin);
                args.expert_count[i] = static_cast<int32_t>(count);
                args.expert_end[i] = static_cast<int32_t>(expert_end);
            }
            begin = expert_end;
        }
        const uint32_t end = __shfl_sync(full_warp, lane_end, warp_size - 1);
        if (end > Config::max_recv_rows && ptx::lane_idx() == 0) {  //~ overflow_seen
            RankSet overflowing;
            overflowing.insert(rank_idx);
            waiter.fail(WaitCode::recv_overflow, WaitSite::none, Config::max_recv_rows, end,
                        overflowing);
        }
    }

    __device__ uint32_t first_row_word(uint32_t expert_idx, uint32_t source_rank) const {
        constexpr uint32_t num_words = Config::Smem::first_rows_dim1;
        return first_rows_ + (expert_idx % Config::num_experts_per_rank * num_words + source_rank) *
                                 sizeof(uint32_t);
    }

    uint32_t begins_;    // u32[E]: first counts, then where each begins on its owner
    uint32_t own_rows_;  // u32[E]: rows of the ranks before this one
    // u32[E_local][ranks + 1]: rows of the ranks before each, of local experts; at last, all.
    uint32_t first_rows_;
};

// All threads of a group: for the steps that follow, where the slots of the CTA's tokens went.
template <class Config>
__device__ void tell_slot_rows(const ThroughputArgs& args, const ThroughputBuffer<Config>& local,
                               const ExpertPlaces<Config>& places, const FirstWarps& group) {
    const TokenBlock<Config> block(args.num_tokens);
    for (uint32_t i = block.begin * Config::num_topk + threadIdx.x;
         i < block.end * Config::num_topk; i += group.num_threads) {
        const uint32_t word = *local.slot_words(i);
        uint32_t row = RankRow::none;
        if (word != PlaceAtExpert::none) {
            const uint32_t expert_idx = PlaceAtExpert::expert_idx(word);
            row = RankRow::pack(expert_idx / Config::num_experts_per_rank,
                                places.own_row(expert_idx) + PlaceAtExpert::place(word));
        }
        args.slot_rows[i] = static_cast<int32_t>(row);  //~ slot_row_told
    }
}

}  // namespace deep_moe
