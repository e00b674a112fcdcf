// The warp that loads weights and their scales. Weights were written before the kernel started, so
// the warp runs ahead as far as the stages allow. In the even CTA it also claims the cluster's
// pairs of blocks, and tells all roles about them.
#pragma once

#include "deep_moe/experts/block_walk.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/pair_claims.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
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
__device__ void load_weights(const KernelArgs& args, const SharedMemory<Config>& shared_memory,
                             const SymmBuffer<Config>& local, Waiter& waiter) {
    constexpr bool has_scales = Config::Weights::has_scales && !Config::Weights::has_unit_scales;
    Tracer<Config> trace(args, TraceTrack::weight_loader,
                         (Config::num_dispatch_warps + 1) * warp_size);
    trace.mark(TraceStep::await_counts);
    ExpertCounts<Config> counts;
    counts.count_shared(args);
    if (!counts.fetch(args, local, waiter)) return;
    ptx::reconverge(NamedBarrier::weight_loader);
    BlockWalk<Config> walk(counts, blockIdx.x);

    const SharedMemory<Config> smem = shared_memory.uniform();
    const SharedMemory<Config> even = smem.of_even_cta();
    RingPosition<Config::num_stages> ring;
    PairClaims<Config> claims(smem, local);
    PairFollower<Config> pairs(smem);
    for (Block block; pairs.next(walk, block, waiter);) {
        const LinearOf<Config> linear(block.phase);
        trace.mark(linear.load_step(), linear.weight_block_row(block), block.num_valid_rows);
        const TensorMap* weights = &linear.weights(args);
        [[maybe_unused]] const TensorMap* sf = &linear.weight_sf(args);
        const uint32_t num_k_blocks = linear.num_k_blocks();
        const uint32_t num_rows = linear.num_n_blocks() * Config::block_n;
        // Weights stack experts along rows, scales along words of k-blocks. The n-block behind an
        // odd last one brings rows of the next expert or zeros: its results are not stored.
        const uint32_t row_in_expert = block.n_block_idx * Config::block_n;
        const uint32_t first_row = block.expert_idx * num_rows + row_in_expert;  //~ weight_row
        [[maybe_unused]] uint32_t first_sf_row = 0;
        if constexpr (has_scales) {
            first_sf_row = block.expert_idx * num_scale_rows<Config>(num_k_blocks);
        }

        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks; ++k_block_idx) {
            if (ptx::cluster_ctarank() == 0 &&
                !claims.before_k_block(k_block_idx, num_k_blocks, waiter)) {
                return;
            }
            if (!waiter.uniform_mbarrier(WaitSite::weight_stage_empty,
                                         smem.empty_barriers(ring.stage), ring.parity ^ 1)) {
                return;
            }
            if (ptx::elect_sync()) {
                // Weights that are decoded are this CTA's own matter until they are.
                constexpr bool is_decoded = Config::Weights::is_decoded;
                uint32_t full;
                if constexpr (is_decoded) {
                    full = smem.weight_barriers(ring.stage);
                } else {
                    full = even.full_barriers(ring.stage);
                }
                uint32_t num_bytes = smem.weight_tile_loaded_bytes;
                if constexpr (has_scales) num_bytes += Config::Smem::weight_sf_stride;
                ptx::mbarrier_arrive_expect_tx_shared_cluster(full, num_bytes);
                if constexpr (is_decoded) {
                    const uint32_t block_idx = first_row / Config::block_n * num_k_blocks;
                    ptx::cp_async_bulk_tensor_2d_cta_group2_shared_global(
                        smem.weights(ring.stage), weights, full, 0,
                        (block_idx + k_block_idx) *
                            Config::Weights::num_map_rows);  //~ decoded_weight_block
                } else {
                    ptx::cp_async_bulk_tensor_2d_cta_group2_shared_global(
                        smem.weights(ring.stage), weights, full,
                        k_block_idx * k_block_elements<Config>, first_row);  //~ weight_tile
                }
                if constexpr (has_scales) {
                    ptx::cp_async_bulk_tensor_2d_cta_group2_shared_global(
                        smem.weight_sf(ring.stage), sf, full, row_in_expert,
                        first_sf_row + k_block_idx * Config::Weights::scale_words_per_k_block);
                }
            }
            __syncwarp();
            ring.advance();
        }
    }

    trace.mark(TraceStep::end);
    // The even CTA's commits arrive on the barriers of both CTAs: see the last of them here, so
    // that none is on its way when this CTA exits.
    for (uint32_t i = 0; i < Config::num_stages; ++i) {  //~ weights_drained
        if (!waiter.warp_mbarrier(WaitSite::weight_stage_empty, smem.empty_barriers(ring.stage),
                                  ring.parity ^ 1)) {
            return;
        }
        ring.advance();
    }
}

}  // namespace deep_moe::sm100
