// Combine: y[token] = sum of the contributions of its routed slots, in slot order, then of the
// shared experts, in FP32, rounded to BF16 once. The routing weights are in the contributions
// already. A call that accumulates begins with what y holds.
//
// One warp of those that did the epilogues takes a token. A token is cut into chunks that fit into
// registers (as FP32 sums) and shared memory. Contributions arrive chunk by chunk, slot by slot, by
// bulk copies into two buffers in turn: one travels while the other is added. A third buffer holds
// the chunk on its way out. Where tokens are few, each chunk has its own warp.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/routing.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/layout/rank_buffers.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/active_ranks.cuh"
#include "deep_moe/sync/handover.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe {

template <class Config>
struct CombineChunks {
    static constexpr uint32_t bytes_per_access = 16;  // per lane: one uint4 of 8 BF16
    static constexpr uint32_t elements_per_access = bytes_per_access / sizeof(uint16_t);
    static constexpr uint32_t row_bytes = Config::output_hidden * sizeof(uint16_t);  // of y
    static constexpr uint32_t chunk_bytes =
        align_up(ceil_div(row_bytes, Config::num_combine_chunks), bytes_per_access);
    static constexpr uint32_t num_chunks = ceil_div(row_bytes, chunk_bytes);
    static constexpr uint32_t num_accesses = ceil_div(chunk_bytes, bytes_per_access* warp_size);
    static constexpr uint32_t num_buffers = 3;
    // Warps of a CTA that combine: those that have done its epilogues.
    static constexpr uint32_t num_warps = Config::num_epilogue_warps;

    static_assert(num_buffers * num_warps * chunk_bytes <= Config::Smem::barriers_offset,
                  "three chunks per warp fit in front of the barriers");
    static_assert(num_accesses * elements_per_access <= 128,
                  "a chunk's sums fit into 128 registers per lane");
    // What is added for a token, in order: y's own row, if the call accumulates; a row for each
    // routed slot; one for each shared expert.
    static constexpr uint32_t first_slot = Config::accumulate ? 1 : 0;
    static constexpr uint32_t first_shared = first_slot + Config::num_topk;
    static constexpr uint32_t num_addends = first_shared + Config::num_shared_experts;
    static_assert(num_addends <= warp_size, "one lane per addend");

    static __device__ uint32_t num_bytes(uint32_t chunk_idx) {
        if constexpr (row_bytes % chunk_bytes == 0) return chunk_bytes;
        return min(chunk_bytes, row_bytes - chunk_idx * chunk_bytes);  // the last may be shorter
    }
};

// The loads of one token's chunks in order: for each chunk, all addends that there are.
struct CombineCursor {
    uint32_t chunk_idx;
    uint32_t addends_left;  // of this chunk, one bit each

    __device__ void advance(uint32_t all_addends) {
        addends_left &= addends_left - 1;
        if (addends_left == 0) {
            addends_left = all_addends;
            ++chunk_idx;
        }
    }
};

// One per warp. `warp_idx` counts from the first of them.
template <class Config>
class Combine {
    using Chunks = CombineChunks<Config>;

 public:
    __device__ Combine(const KernelArgs& args, uint32_t shared_memory, uint32_t warp_idx)
        : local_(RankBuffers<Config>(args).local()),
          y_(static_cast<uint8_t*>(args.y)),
          buffers_(shared_memory + warp_idx * Chunks::chunk_bytes),
          // Two per warp, one arrival plus the chunk's bytes per load; first phase 0.
          barriers_(shared_memory + Config::Smem::combine_barriers_offset +
                    warp_idx * 2 * Config::Smem::combine_barriers_stride) {}

    // `warp_in_grid`: of all warps that combine. `ranks`: those that take part in the call.
    __device__ bool run(uint32_t warp_in_grid, uint32_t num_tokens, const CallRanks<Config>& ranks,
                        Waiter& waiter) {
        constexpr uint32_t num_warps = Config::num_sms * Chunks::num_warps;
        constexpr uint32_t num_chunks = Chunks::num_chunks;
        const uint32_t num_parts = num_tokens <= num_warps / num_chunks ? num_chunks : 1;
        // Contributions were written with ordinary stores, by other ranks too. y was written before
        // this kernel.
        ptx::fence_proxy_async();  //~ combine_fence
        bool arrived = true;
        for (uint32_t part_idx = warp_in_grid; arrived && part_idx < num_tokens * num_parts;
             part_idx += num_warps) {
            const uint32_t first_chunk_idx = part_idx % num_parts;
            arrived = add_up(part_idx / num_parts, first_chunk_idx,
                             first_chunk_idx + num_chunks / num_parts, ranks, waiter);
        }
        // The buffer must outlive the last copy from it.
        if (ptx::lane_idx() == 0) ptx::cp_async_bulk_wait_group<0>();  //~ combine_drained
        __syncwarp();
        return arrived;
    }

 private:
    // Of the chunks from first_chunk_idx up to end_chunk_idx, exclusive.
    __device__ bool add_up(uint32_t token_idx, uint32_t first_chunk_idx, uint32_t end_chunk_idx,
                           const CallRanks<Config>& ranks, Waiter& waiter) {
        const uint32_t addends = addends_of(token_idx, ranks);
        // Nothing but y's own row: it keeps its bits, which 0 + -0.0 would not.
        if (Config::accumulate && addends == 1) return true;  //~ kept_row
        CombineCursor load{first_chunk_idx, addends};
        if (addends != 0) issue_load(token_idx, load, addends, num_loads_);
        for (uint32_t chunk_idx = first_chunk_idx; chunk_idx < end_chunk_idx; ++chunk_idx) {
            float sums[Chunks::num_accesses][Chunks::elements_per_access] = {};
            const uint32_t num_addends = __popc(addends);
            for (uint32_t i = 0; i < num_addends; ++i) {
                if (load.chunk_idx < end_chunk_idx) {
                    issue_load(token_idx, load, addends, num_loads_ + 1);
                }
                const uint32_t stage = num_loads_ % 2;
                const uint32_t parity = num_loads_ / 2 % 2;  //~ combine_parity
                ++num_loads_;
                if (!waiter.warp_mbarrier(WaitSite::combine_arrival, barrier(stage), parity)) {
                    return false;
                }
                add(buffer(stage), chunk_idx, sums);
                // Each lane's reads come before the bulk copy that will overwrite the buffer.
                ptx::fence_proxy_async_shared_cta();  //~ added_fence
                __syncwarp();                         //~ added_by_all
            }
            store(token_idx, chunk_idx, sums);
        }
        return true;
    }

    __device__ uint32_t addends_of(uint32_t token_idx, const CallRanks<Config>& ranks) const {
        const uint32_t addend = ptx::lane_idx();
        const uint32_t slot = addend - Chunks::first_slot;
        //~ added_slots
        const bool routed =
            slot < Config::num_topk &&
            is_routed<Config>(*local_.input_topk_idx(token_idx * Config::num_topk + slot), ranks);
        if constexpr (Chunks::num_addends == Config::num_topk) {
            return __ballot_sync(full_warp, routed);
        }
        const bool own = Config::accumulate && addend == 0;  //~ added_y
        //~ shared_slots
        const bool shared = Chunks::first_shared <= addend && addend < Chunks::num_addends;
        return __ballot_sync(full_warp, own || routed || shared);
    }

    // What one addend brings to a token: BF16 [output_hidden].
    __device__ const uint8_t* row(uint32_t addend, uint32_t token_idx) const {
        if (Config::accumulate && addend == 0) return y_row(token_idx);
        const uint32_t slot = addend - Chunks::first_slot;  //~ combined_slot
        return reinterpret_cast<const uint8_t*>(local_.combine(slot, token_idx));
    }

    __device__ uint8_t* y_row(uint32_t token_idx) const {
        return y_ + uint64_t{token_idx} * Chunks::row_bytes;
    }

    // Starts the load at the cursor, which is the `load_idx`-th of this warp, and advances it.
    __device__ void issue_load(uint32_t token_idx, CombineCursor& load, uint32_t addends,
                               uint32_t load_idx) const {
        if (ptx::lane_idx() == 0) {
            const uint32_t addend = __ffs(load.addends_left) - 1;
            const uint32_t num_bytes = Chunks::num_bytes(load.chunk_idx);
            const auto* src = row(addend, token_idx) + load.chunk_idx * Chunks::chunk_bytes;
            ptx::mbarrier_arrive_expect_tx(barrier(load_idx % 2), num_bytes);
            ptx::cp_async_bulk_shared_global(buffer(load_idx % 2), src, num_bytes,
                                             barrier(load_idx % 2));
        }
        load.advance(addends);
    }

    __device__ void add(uint32_t buffer, uint32_t chunk_idx,
                        float (&sums)[Chunks::num_accesses][Chunks::elements_per_access]) const {
#pragma unroll
        for (uint32_t i = 0; i < Chunks::num_accesses; ++i) {
            const uint32_t offset = (i * warp_size + ptx::lane_idx()) * Chunks::bytes_per_access;
            if (offset >= Chunks::num_bytes(chunk_idx)) break;
            const uint4 packed = ptx::ld_shared_v4(buffer + offset);
            const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                // BF16 is the upper half of an FP32.
                sums[i][2 * j] += __uint_as_float(pairs[j] << 16);  //~ unpacked_low
                sums[i][2 * j + 1] += __uint_as_float(pairs[j] & 0xffff0000);
            }
        }
    }

    __device__ void store(
        uint32_t token_idx, uint32_t chunk_idx,
        const float (&sums)[Chunks::num_accesses][Chunks::elements_per_access]) const {
        const uint32_t out = buffer(2);
        const uint32_t num_bytes = Chunks::num_bytes(chunk_idx);
        // The previous chunk has left the buffer.
        if (ptx::lane_idx() == 0) ptx::cp_async_bulk_wait_group_read<0>();  //~ out_free
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < Chunks::num_accesses; ++i) {
            const uint32_t offset = (i * warp_size + ptx::lane_idx()) * Chunks::bytes_per_access;
            if (offset >= num_bytes) break;
            ptx::st_shared_v4(out + offset,
                              make_uint4(ptx::cvt_rn_bf16x2_f32(sums[i][1], sums[i][0]),
                                         ptx::cvt_rn_bf16x2_f32(sums[i][3], sums[i][2]),
                                         ptx::cvt_rn_bf16x2_f32(sums[i][5], sums[i][4]),
                                         ptx::cvt_rn_bf16x2_f32(sums[i][7], sums[i][6])));
        }
        // Each lane's writes come before the bulk copy that reads them.
        ptx::fence_proxy_async_shared_cta();  //~ out_fence
        __syncwarp();
        if (ptx::lane_idx() == 0) {
            ptx::cp_async_bulk_global_shared(y_row(token_idx) + chunk_idx * Chunks::chunk_bytes,
                                             out, num_bytes);
            ptx::cp_async_bulk_commit_group();
        }
    }

    // Buffers of all warps lie side by side: [buffer][warp][chunk_bytes].
    __device__ uint32_t buffer(uint32_t idx) const {
        return buffers_ + idx * Chunks::num_warps * Chunks::chunk_bytes;
    }
    __device__ uint32_t barrier(uint32_t idx) const {
        return barriers_ + idx * Config::Smem::combine_barriers_stride;
    }

    SymmBuffer<Config> local_;
    uint8_t* y_;
    uint32_t buffers_;
    uint32_t barriers_;
    uint32_t num_loads_ = 0;  // waited for; load n uses stage n % 2 in phase n / 2
};

// All warps that combine, after sync_compute_done. `warp_idx` counts from the first of them.
template <class Config>
__device__ void combine(const KernelArgs& args, uint32_t shared_memory, uint32_t warp_idx,
                        Waiter& waiter) {
    Tracer<Config> trace(args, TraceTrack::combine,
                         Config::num_threads - CombineChunks<Config>::num_warps * warp_size);
    trace.mark(TraceStep::await_combine);
    const CallRanks<Config> ranks(args.masked_ranks);  // loaded while others are awaited
    if (!sync_combine_ready<Config>(waiter)) return;
    trace.mark(TraceStep::combine);
    // Neighbouring tokens go to different CTAs, so that few tokens do not all pass through a few
    // SMs.
    Combine<Config>(args, shared_memory, warp_idx)
        .run(warp_idx * Config::num_sms + blockIdx.x, args.num_tokens, ranks, waiter);
    trace.mark(TraceStep::end);
}

}  // namespace deep_moe
