// Combine: how a rank learns that the rows of its tokens are here.
//
// The dispatch has left how many rows each rank's experts have of this rank's tokens. Arrivals are
// counted in parts of rows, so CTAs without any tell nothing, and nobody waits for a rank that has
// none. Rows that are fetched were complete before this kernel: one CTA tells that in place of all.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/split/arrivals.cuh"
#include "deep_moe/split/copy_row.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/sent_messages.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// A call's arrivals are counted on from combine to combine. Each but the first begins with one
// arrival of each rank that has come to it, and so has added the rows of those before.
//
// In shared memory: u32[num_ranks], parts that come from each rank in a combine.
template <class Config>
class RowArrivals {
 public:
    __device__ RowArrivals(const LowLatencyRanks<Config>& ranks, uint32_t shared_memory)
        : ranks_(ranks), words_(shared_memory + Config::Smem::expected_parts_offset) {}

    // All threads of the CTA, in front of a barrier.
    __device__ void expect(const uint32_t* sent_rows) const {
        for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
            const uint32_t num_parts = sent_rows[i] * RowPart<Config>::per_row;  //~ parts_expected
            ptx::st_shared_u32(word(i), num_parts);
        }
    }

    // All threads of the grid: this rank has come so far, and all is done that its earlier kernels
    // did. One CTA tells the others.
    __device__ void come(const ActiveRanks<Config>& active, uint32_t half) const {
        if (blockIdx.x != 0) return;
        for (uint32_t i = threadIdx.x; i < Config::num_ranks; i += Config::num_threads) {
            if (!active.contains(i)) continue;
            SentMessages<Config>::tell(ranks_.of(i).combine_arrivals(half, ranks_.rank_idx()),
                                       1);  //~ rank_came
        }
    }

    // All threads of a CTA: until all ranks have come to this combine, which repeats one.
    __device__ bool await_ranks(const LowLatencyArgs& args, const ActiveRanks<Config>& active,
                                uint32_t half, const WaitCost& cost, Waiter& waiter) const {
        const auto num_expected = [&](uint32_t rank_idx) { return num_before(args, rank_idx); };
        return await(active, half, num_expected, cost, waiter);
    }
    // The same until its rows are here, too.
    __device__ bool await_rows(const LowLatencyArgs& args, const ActiveRanks<Config>& active,
                               uint32_t half, const WaitCost& cost, Waiter& waiter) const {
        const auto num_expected = [&](uint32_t rank_idx) {
            return num_before(args, rank_idx) + (Config::fetches_rows ? 1 : parts_of(rank_idx));
        };
        return await(active, half, num_expected, cost, waiter);
    }

 private:
    template <class Expected>
    __device__ bool await(const ActiveRanks<Config>& active, uint32_t half,
                          const Expected& num_expected, const WaitCost& cost,
                          Waiter& waiter) const {
        const LowLatencyBuffer<Config> local = ranks_.local();
        const auto arrivals = [&](uint32_t rank_idx) {
            return local.combine_arrivals(half, rank_idx);
        };
        return await_arrivals<Config>(WaitSite::split_contributions, active, arrivals, num_expected,
                                      cost, waiter, 0);
    }

    // A rank's arrivals up to its coming to this combine. No rows have been fetched before.
    __device__ uint32_t num_before(const LowLatencyArgs& args, uint32_t rank_idx) const {
        if constexpr (!Config::repeats) return 0;
        return args.num_earlier_combines * (parts_of(rank_idx) + 1);  //~ ranks_awaited
    }

    __device__ uint32_t parts_of(uint32_t rank_idx) const {
        return ptx::ld_shared_u32(word(rank_idx));
    }
    __device__ uint32_t word(uint32_t idx) const { return words_ + idx * sizeof(uint32_t); }

    const LowLatencyRanks<Config>& ranks_;
    uint32_t words_;
};

}  // namespace deep_moe
