// The warp that loads tokens and their scales: wait for the block's tokens, then for each k-block
// wait for a free stage and start two tensor copies.
#pragma once

#include "deep_moe/experts/block_walk.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/mma.cuh"
#include "deep_moe/experts/sm100/pair_claims.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/experts/wait_for_tokens.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/named_barriers.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm100 {

template <class Config>
__device__ void load_activations(const KernelArgs& args, const SharedMemory<Config>& shared_memory,
                                 const SymmBuffer<Config>& local, Waiter& waiter) {
    constexpr bool has_scales = Config::Weights::has_scales;
    Tracer<Config> trace(args, TraceTrack::activation_loader,
                         Config::num_dispatch_warps * warp_size);
    trace.mark(TraceStep::await_counts);
    trace.first_anchor();
    ExpertCounts<Config> counts;
    counts.count_shared(args);
    if (!counts.fetch(args, local, waiter)) return;
    ptx::reconverge(NamedBarrier::activation_loader);
    BlockWalk<Config> walk(counts, blockIdx.x);

    const SharedMemory<Config> smem = shared_memory.uniform();
    const SharedMemory<Config> even = smem.of_even_cta();
    RingPosition<Config::num_stages> ring;
    PairFollower<Config> pairs(smem);
    for (Block block; pairs.next(walk, block, waiter);) {
        const LinearOf<Config> linear(block.phase);
        trace.mark(linear.await_tokens_step(), block.pool_block_idx, block.num_valid_rows);
        if (!wait_for_tokens(local, block, waiter)) return;
        ptx::reconverge(NamedBarrier::activation_loader);
        trace.mark(linear.load_step());

        [[maybe_unused]] const TensorMap* sf = &linear.activation_sf(args);
        const uint32_t num_k_blocks = linear.num_k_blocks();
        // The two CTAs each take half of the tokens of the MMA, whose number depends on the block.
        //~ half_tile
        const uint32_t num_rows = num_mma_tokens(block) / 2;
        const uint32_t first_row =
            PoolRing<Config>::first_row(block.pool_block_idx) + ptx::cluster_ctarank() * num_rows;
        // The smallest copy with these rows, for what an SM has in flight bounds how fast its
        // weights come. The last rows may go unused.
        constexpr uint32_t box_rows = Config::block_m / 2 / num_token_boxes;
        const uint32_t num_boxes = ceil_div(num_rows, box_rows);
        //~ token_box
        const TensorMap* tokens = &linear.activations(args)[num_boxes - 1];
        // Both CTAs need the scales of all tokens.
        [[maybe_unused]] uint32_t first_sf = 0;
        [[maybe_unused]] const bool loads_scales =
            !Config::Weights::has_unit_scales || block.phase == Phase::linear2;
        uint32_t num_bytes = num_boxes * (smem.activation_tile_bytes / num_token_boxes);
        if constexpr (has_scales) {
            first_sf =
                PoolRing<Config>::place_of(block.pool_block_idx) * Config::Smem::activation_sf_dim2;
            if (loads_scales) num_bytes += Config::Smem::activation_sf_stride;
        }

        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks; ++k_block_idx) {
            //~ token_stage_free
            if (!waiter.uniform_mbarrier(WaitSite::activation_stage_empty,
                                         smem.empty_barriers(ring.stage), ring.parity ^ 1)) {
                return;
            }
            if (ptx::elect_sync()) {
                const uint32_t full = even.full_barriers(ring.stage);
                ptx::mbarrier_arrive_expect_tx_shared_cluster(full, num_bytes);  //~ token_bytes
                ptx::cp_async_bulk_tensor_2d_cta_group2_shared_global(
                    smem.activations(ring.stage), tokens, full,
                    k_block_idx * k_block_elements<Config>, first_row);
                if constexpr (has_scales) {
                    if (loads_scales) {
                        ptx::cp_async_bulk_tensor_2d_cta_group2_shared_global(
                            smem.activation_sf(ring.stage), sf, full, first_sf,
                            k_block_idx * Config::Weights::scale_words_per_k_block);
                    }
                }
            }
            __syncwarp();
            ring.advance();
        }
    }
    trace.mark(TraceStep::end);
}

}  // namespace deep_moe::sm100
