// The warp that loads weights. They are there before the kernel starts, so it runs ahead as far as
// the stages allow. It also claims the CTA's blocks, tells the other roles of them, and
// publishes what Linear1's epilogues have stored, unless math does (l1_publisher.cuh).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/ring_position.cuh"
#include "deep_moe/scheduler.cuh"
#include "deep_moe/sm90/block_claims.cuh"
#include "deep_moe/sm90/block_header.cuh"
#include "deep_moe/sm90/fp4_decode.cuh"
#include "deep_moe/sm90/l1_publisher.cuh"
#include "deep_moe/sm90/shared_memory.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace.cuh"

namespace deep_moe::sm90 {

// One lane, when the first stage of the block is free: then nobody reads what is in the slot.
template <class Config>
__device__ void tell_roles(const SharedMemory<Config>& smem, uint32_t slot,
                           const BlockHeader& header) {
    store_header(smem.block_header(slot), header);
    ptx::mbarrier_arrive(smem.header_barrier(slot));
}

template <class Config>
__device__ void load_weights(const KernelArgs& args, const SharedMemory<Config>& smem,
                             const SymmBuffer<Config>& local, Waiter& waiter) {
    constexpr uint32_t row_factor_bytes = Config::block_n * sizeof(float);
    Tracer<Config> trace(args, TraceTrack::weight_loader,
                         (Config::num_dispatch_warps + 1) * warp_size);
    trace.mark(TraceStep::await_counts);
    Scheduler<Config> scheduler(local, blockIdx.x);
    if (!scheduler.fetch_expert_counts(waiter)) return;

    RingPosition<Config::num_stages> ring;
    RingPosition<Config::num_block_slots> slots;
    BlockClaims<Config> claims(local, blockIdx.x);
    L1Publisher<Config> publisher(smem, local);
    for (Block block; scheduler.find(block); slots.advance()) {
        const bool is_linear1 = block.phase == Phase::linear1;
        const uint32_t num_n_blocks =
            is_linear1 ? Config::num_l1_n_blocks : Config::num_l2_n_blocks;
        const uint32_t num_k_blocks =
            is_linear1 ? Config::num_l1_k_blocks : Config::num_l2_k_blocks;
        const BlockHeader header{block, block.expert_idx * num_n_blocks + block.n_block_idx,
                                 block.n_block_idx};
        trace.mark(is_linear1 ? TraceStep::load_l1 : TraceStep::load_l2,
                   header.weight_block_row_idx, header.num_valid_rows);
        const auto* src = static_cast<const uint8_t*>(is_linear1 ? args.l1_weight_blocks
                                                                 : args.l2_weight_blocks) +
                          uint64_t{header.weight_block_row_idx} * num_k_blocks * weight_block_bytes;
        // With a single m-block, these weights are read once.
        const bool is_read_once = scheduler.num_m_blocks(block.expert_idx) == 1;
        const float* row_factors = (is_linear1 ? args.l1_row_factors : args.l2_row_factors) +
                                   header.weight_block_row_idx * Config::block_n;

        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks; ++k_block_idx) {
            if (k_block_idx == L1Publisher<Config>::k_block_to_publish_at(num_k_blocks) &&
                !publisher.publish(slots, waiter)) {
                return;
            }
            if (!waiter.warp_mbarrier(WaitSite::weight_stage_empty, smem.empty_barrier(ring.stage),
                                      ring.parity ^ 1)) {
                return;
            }
            if (ptx::elect_sync()) {
                const uint32_t full = smem.full_barrier(ring.stage);
                const uint32_t dst = smem.weight_block(ring.stage);
                if (k_block_idx == 0) {
                    tell_roles(smem, slots.stage, header);
                    ptx::mbarrier_arrive_expect_tx(full, weight_block_bytes + row_factor_bytes);
                    ptx::cp_async_bulk_shared_global(smem.row_factors(slots.stage), row_factors,
                                                     row_factor_bytes, full);
                } else {
                    ptx::mbarrier_arrive_expect_tx(full, weight_block_bytes);
                }
                if (is_read_once) {
                    ptx::cp_async_bulk_shared_global_evict_first(dst, src, weight_block_bytes,
                                                                 full);
                } else {
                    ptx::cp_async_bulk_shared_global(dst, src, weight_block_bytes, full);
                }
            }
            __syncwarp();
            constexpr uint32_t num_ahead = BlockClaims<Config>::num_k_blocks_ahead;
            if (k_block_idx + min(num_ahead, num_k_blocks) == num_k_blocks) claims.claim();
            src += weight_block_bytes;
            ring.advance();
        }
        scheduler.advance(claims.take());
    }
    if (!publisher.publish(slots, waiter)) return;

    trace.mark(TraceStep::end);
    if (!waiter.warp_mbarrier(WaitSite::weight_stage_empty, smem.empty_barrier(ring.stage),
                              ring.parity ^ 1)) {
        return;
    }
    if (ptx::elect_sync()) {
        tell_roles(smem, slots.stage, {});
        ptx::mbarrier_arrive(smem.full_barrier(ring.stage));
    }
    __syncwarp();
}

}  // namespace deep_moe::sm90
