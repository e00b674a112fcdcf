// The warp that loads tokens: wait for the block's tokens, then for each k-block wait for a free
// stage and start a tensor copy; for Linear2, see to the scales (rescaler.cuh).
#pragma once

#include "deep_moe/kernel_args.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/ring_position.cuh"
#include "deep_moe/roles/wait_for_tokens.cuh"
#include "deep_moe/scheduler.cuh"
#include "deep_moe/sm90/rescaler.cuh"
#include "deep_moe/sm90/shared_memory.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace.cuh"

namespace deep_moe::sm90 {

template <class Config>
__device__ void load_activations(const KernelArgs& args, const SharedMemory<Config>& smem,
                                 const SymmBuffer<Config>& local, Waiter& waiter) {
    Tracer<Config> trace(args, TraceTrack::activation_loader,
                         Config::num_dispatch_warps * warp_size);
    trace.mark(TraceStep::await_counts);
    trace.first_anchor();
    Scheduler<Config> scheduler(local, blockIdx.x);
    if (!scheduler.fetch_expert_counts(waiter)) return;

    RingPosition<Config::num_stages> ring;
    for (Block block; scheduler.next(block);) {
        const bool is_linear1 = block.phase == Phase::linear1;
        trace.mark(is_linear1 ? TraceStep::await_l1_tokens : TraceStep::await_l2_tokens,
                   block.pool_block_idx, block.num_valid_rows);
        if (!wait_for_tokens(local, block, waiter)) return;
        trace.mark(is_linear1 ? TraceStep::load_l1 : TraceStep::load_l2);

        const TensorMap* tokens = is_linear1 ? &args.l1_activations : &args.l2_activations;
        const uint32_t num_k_blocks =
            is_linear1 ? Config::num_l1_k_blocks : Config::num_l2_k_blocks;
        const uint32_t first_row = block.pool_block_idx * Config::block_m;
        Rescaler<Config> rescaler(local.l2_token_sf(0, first_row), block.num_valid_rows);

        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks; ++k_block_idx) {
            if (!is_linear1) rescaler.load();
            if (!waiter.warp_mbarrier(WaitSite::activation_stage_empty,
                                      smem.empty_barrier(ring.stage), ring.parity ^ 1)) {
                return;
            }
            if (is_linear1) {
                store_change_of_scale(smem, ring.stage, false);
            } else {
                rescaler.store(smem, ring.stage, k_block_idx == 0);
            }
            __syncwarp();
            if (ptx::elect_sync()) {
                const uint32_t full = smem.full_barrier(ring.stage);
                ptx::mbarrier_arrive_expect_tx(full, smem.activation_tile_bytes);
                ptx::cp_async_bulk_tensor_2d_shared_global(smem.activations(ring.stage), tokens,
                                                           full, k_block_idx * Config::block_k,
                                                           first_row);
            }
            __syncwarp();
            ring.advance();
        }
    }

    trace.mark(TraceStep::end);
    // The stage behind the last block brings nothing but the news of it.
    if (!waiter.warp_mbarrier(WaitSite::activation_stage_empty, smem.empty_barrier(ring.stage),
                              ring.parity ^ 1)) {
        return;
    }
    if (ptx::elect_sync()) ptx::mbarrier_arrive(smem.full_barrier(ring.stage));
    __syncwarp();
}

}  // namespace deep_moe::sm90
