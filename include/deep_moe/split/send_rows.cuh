// Combine, sending: each row that a local expert made goes to the rank that the token came from,
// into the place of its slot.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/active_ranks.cuh"
#include "deep_moe/split/cta.cuh"
#include "deep_moe/split/expand_tokens.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"

namespace deep_moe {

// Rows of all local experts before each of them, and all; in shared memory, u32[E_local + 1].
template <class Config>
class ExpertRows {
 public:
    __device__ explicit ExpertRows(uint32_t shared_memory)
        : words_(shared_memory + Config::Smem::expert_rows_offset) {}

    // All threads of a CTA; a barrier stands behind it.
    __device__ void sum_up(const int32_t* recv_count) const {
        if (ptx::warp_idx() == 0) {
            uint32_t num_before = 0;
            if (ptx::lane_idx() == 0) ptx::st_shared_u32(words_, 0);
            for (uint32_t base = 0; base < Config::num_experts_per_rank; base += warp_size) {
                const uint32_t i = base + ptx::lane_idx();
                const uint32_t count =
                    i < Config::num_experts_per_rank ? static_cast<uint32_t>(recv_count[i]) : 0;
                const uint32_t end = num_before + ptx::inclusive_sum(count);
                if (i < Config::num_experts_per_rank) {
                    ptx::st_shared_u32(words_ + (i + 1) * sizeof(uint32_t), end);
                }
                num_before = __shfl_sync(full_warp, end, warp_size - 1);
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

// A whole warp: the rank that sent a row of an expert.
template <class Config>
__device__ uint32_t source_rank(const int64_t* ranges, uint32_t row) {
    uint32_t num_ended = 0;  // ranks whose rows end in front of it
    for (uint32_t base = 0; base < Config::num_ranks; base += warp_size) {
        const uint32_t rank_idx = base + ptx::lane_idx();
        const uint64_t range =
            rank_idx < Config::num_ranks ? static_cast<uint64_t>(ranges[rank_idx]) : ~uint64_t{0};
        const uint32_t begin = range >> 32;
        const uint32_t end = begin + static_cast<uint32_t>(range);
        num_ended += __popc(__ballot_sync(full_warp, rank_idx < Config::num_ranks && end <= row));
    }
    return num_ended;
}

// A row of BF16, by a whole warp.
template <class Config>
__device__ void copy_row(void* to, const void* from) {
    constexpr uint32_t num_chunks = Config::hidden * sizeof(uint16_t) / sizeof(uint4);
    constexpr uint32_t loads_at_once = min(8u, ceil_div(num_chunks, warp_size));
#pragma unroll 1
    for (uint32_t first = ptx::lane_idx(); first < num_chunks; first += loads_at_once * warp_size) {
        uint4 chunks[loads_at_once];
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size;
            if (chunk_idx < num_chunks) chunks[i] = static_cast<const uint4*>(from)[chunk_idx];
        }
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size;
            if (chunk_idx < num_chunks) static_cast<uint4*>(to)[chunk_idx] = chunks[i];
        }
    }
    __syncwarp();
}

// All warps of the grid.
template <class Config>
__device__ void send_rows(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                          const ActiveRanks<Config>& active, uint32_t shared_memory,
                          uint32_t half) {
    constexpr uint32_t num_warps = Config::num_threads / warp_size;
    const ExpertRows<Config> rows(shared_memory);
    rows.sum_up(args.recv_count);
    const uint32_t num_rows = rows.num_rows();
    for (uint32_t i = ptx::warp_idx() * Config::num_ctas + blockIdx.x; i < num_rows;
         i += num_warps * Config::num_ctas) {
        const uint32_t local_expert_idx = rows.expert_of(i);
        const uint32_t row = i - rows.first(local_expert_idx);
        const uint32_t rank_idx =
            source_rank<Config>(args.layout_range + local_expert_idx * Config::num_ranks, row);
        if (!active.contains(rank_idx)) continue;
        const uint64_t row_idx = uint64_t{local_expert_idx} * rows_per_expert<Config> + row;
        const auto source = static_cast<uint32_t>(args.src_info[row_idx]);
        copy_row<Config>(
            ranks.of(rank_idx).combine(half, source % Config::num_topk, source / Config::num_topk),
            static_cast<const uint16_t*>(args.y) + row_idx * Config::hidden);  //~ row_sent
    }
}

}  // namespace deep_moe
