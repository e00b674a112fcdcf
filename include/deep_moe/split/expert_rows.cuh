// How many rows the local experts have, one after the other, and whose a row is.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/cta.cuh"

namespace deep_moe {

// The first counts of the local experts' rows, in lanes of the first warp; on their way when this
// is made.
template <class Config>
class FirstCounts {
 public:
    static constexpr uint32_t number = ceil_div(uint32_t{Config::num_experts_per_rank}, warp_size);
    static constexpr uint32_t at_once = min(8u, number);

    __device__ explicit FirstCounts(const int32_t* recv_count) {
        if (ptx::warp_idx() == 0) load(recv_count, 0);
    }
    // Of the counts from first * warp_size on.
    __device__ void load(const int32_t* recv_count, uint32_t first) {
#pragma unroll
        for (uint32_t j = 0; j < at_once; ++j) {
            const uint32_t i = (first + j) * warp_size + ptx::lane_idx();
            counts_[j] =
                i < Config::num_experts_per_rank ? static_cast<uint32_t>(recv_count[i]) : 0;
        }
    }
    __device__ uint32_t get(uint32_t j) const { return counts_[j]; }

 private:
    uint32_t counts_[at_once];
};

// Rows of all local experts before each of them, and all; in shared memory, u32[E_local + 1].
template <class Config>
class ExpertRows {
 public:
    __device__ explicit ExpertRows(uint32_t shared_memory)
        : words_(shared_memory + Config::Smem::expert_rows_offset) {}

    // All threads of a CTA; a barrier stands behind it.
    __device__ void sum_up(const int32_t* recv_count, FirstCounts<Config> counts) const {
        if (ptx::warp_idx() == 0) {
            constexpr uint32_t at_once = FirstCounts<Config>::at_once;
            uint32_t num_before = 0;
            if (ptx::lane_idx() == 0) ptx::st_shared_u32(words_, 0);
#pragma unroll 1
            for (uint32_t first = 0; first < FirstCounts<Config>::number; first += at_once) {
                if (first != 0) counts.load(recv_count, first);
#pragma unroll
                for (uint32_t j = 0; j < at_once; ++j) {
                    const uint32_t i = (first + j) * warp_size + ptx::lane_idx();
                    const uint32_t end = num_before + ptx::inclusive_sum(counts.get(j));
                    if (i < Config::num_experts_per_rank) {
                        ptx::st_shared_u32(words_ + (i + 1) * sizeof(uint32_t), end);
                    }
                    num_before = __shfl_sync(full_warp, end, warp_size - 1);
                }
            }
        }
        cta_sync<Config>();  //~ expert_rows_shared
    }

    __device__ uint32_t first(uint32_t local_expert_idx) const {
        return ptx::ld_shared_u32(words_ + local_expert_idx * sizeof(uint32_t));
    }
    __device__ uint32_t num_rows() const { return first(Config::num_experts_per_rank); }

    // A whole warp: whose row it is.
    __device__ uint32_t expert_of(uint32_t row_idx) const {
        uint32_t num_before = 0;
        for (uint32_t base = 0; base < Config::num_experts_per_rank; base += warp_size) {
            const uint32_t i = base + ptx::lane_idx();
            const bool is_before = i < Config::num_experts_per_rank && first(i + 1) <= row_idx;
            const uint32_t found = __ballot_sync(full_warp, is_before);
            num_before += __popc(found);
            if (found != full_warp) break;
        }
        return num_before;
    }

 private:
    uint32_t words_;
};

}  // namespace deep_moe
