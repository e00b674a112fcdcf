// The warp that loads weights. They were written before the kernel started, so the warp runs ahead
// as far as the stages allow. It also claims the CTA's blocks, tells the other roles about them,
// and publishes what Linear1's epilogues have stored, unless another warp does (l1_publisher.cuh).
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block_claims.cuh"
#include "deep_moe/experts/block_walk.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm90/block_header.cuh"
#include "deep_moe/experts/sm90/cluster_claims.cuh"
#include "deep_moe/experts/sm90/expected_weights.cuh"
#include "deep_moe/experts/sm90/fill_stages.cuh"
#include "deep_moe/experts/sm90/kernel_args.cuh"
#include "deep_moe/experts/sm90/l1_publisher.cuh"
#include "deep_moe/experts/sm90/loader_registers.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm90 {

// One lane, when the first stage of the block is free: then no warp reads the slot any more.
template <class Config>
__device__ void tell_roles(const SharedMemory<Config>& smem, uint32_t slot,
                           const BlockHeader& header) {
    if constexpr (!has_few_loader_registers<Config>) {
        store_header(smem.block_headers(slot), header);  //~ header_stored
    }
    ptx::mbarrier_arrive(smem.header_barriers(slot));  //~ header_told
}

// What comes before that where loaders have few registers: the header may be stored before the
// stage is free, because there is a slot more than blocks in the stages (num_block_slots in
// heuristics/sm90.py). So nothing of it is kept meanwhile. Whole warp.
template <class Config>
__device__ void leave_header(const SharedMemory<Config>& smem, uint32_t slot,
                             const BlockHeader& header) {
    if (ptx::lane_idx() == 0) store_header(smem.block_headers(slot), header);  //~ header_left
    __syncwarp();
}

// Where a warp of its own publishes: until that one is done with the block before in the slot.
// Whole warp; false after an abort.
template <class Config>
__device__ __forceinline__ bool await_slot(const SharedMemory<Config>& smem,
                                           const RingPosition<Config::num_block_slots>& slot,
                                           Waiter& waiter) {
    //~ slot_awaited
    return waiter.warp_mbarrier(WaitSite::block_seen, smem.seen_barriers(slot.stage),
                                slot.parity ^ 1);
}

// Who says which block is next. By reference, as long as the loader runs.
template <class Config>
__device__ auto claims_of([[maybe_unused]] const SharedMemory<Config>& smem,
                          const SymmBuffer<Config>& local) {
    if constexpr (Config::cluster_size == 1) {
        return BlockClaims<Config>(local);
    } else {
        return ClusterClaims<Config>(smem, local);
    }
}

// Copies a k-block of weights into this CTA's stage, whose barrier counts block_bytes. One thread.
// If both CTAs of the cluster have the same weights, each copies one half of them to both. The
// other CTA's half may arrive before this CTA has announced its bytes.
template <class Config>
__device__ __forceinline__ void copy_weights(uint32_t dst, const uint8_t* src, uint32_t barrier,
                                             [[maybe_unused]] bool shares_weights,
                                             bool is_read_once) {
    constexpr uint32_t block_bytes = Config::Weights::block_bytes;
    if constexpr (Config::num_cluster_m_blocks > 1) {
        constexpr uint32_t half_bytes = block_bytes / 2;
        constexpr uint16_t both_ctas = 0b11;
        if (shares_weights) {
            const uint32_t offset = ptx::cluster_ctarank() * half_bytes;  //~ own_half
            if (is_read_once) {
                ptx::cp_async_bulk_shared_global_multicast_evict_first(
                    dst + offset, src + offset, half_bytes, barrier, both_ctas);
            } else {
                ptx::cp_async_bulk_shared_global_multicast(dst + offset, src + offset, half_bytes,
                                                           barrier, both_ctas);
            }
            return;
        }
    }
    if (is_read_once) {
        ptx::cp_async_bulk_shared_global_evict_first(dst, src, block_bytes, barrier);
    } else {
        ptx::cp_async_bulk_shared_global(dst, src, block_bytes, barrier);
    }
}

// Between the stages that a CTA fills first, while its tokens are on their way. One thread; 0, but
// not before the loads are there.
//
// Weights of all stages at once would take 8 us of an H100's memory time. Behind them would wait
// what dispatch needs for a token: counts, lists, scales, values, and its own instructions, each
// before it knows the next. Two loads that wait for one another take about as long as memory takes
// for the stage, or longer if other CTAs' stages wait there. So this queue stays short, and the
// stages fill just as soon.
template <class Config>
__device__ __forceinline__ uint32_t give_way(const SymmBuffer<Config>& local,
                                             uint32_t pool_block_idx) {
    constexpr uint32_t no_count = ~0u;
    const uint32_t* const count = local.l1_arrival_count(pool_block_idx);  // any word that L2 has
    const uint32_t seen = ptx::ld_relaxed_gpu(count);
    // An address and a result that depend on what is loaded in form only.
    const uint32_t again = ptx::ld_relaxed_gpu(count + (seen == no_count ? 1 : 0));
    return again == no_count ? 1 : 0;
}

template <class Config>
__device__ void load_weights(const KernelArgs& args, const SharedMemory<Config>& smem,
                             const SymmBuffer<Config>& local, Waiter& waiter) {
    using Weights = typename Config::Weights;
    constexpr uint32_t block_bytes = Weights::block_bytes;
    constexpr uint32_t row_factor_bytes =
        Weights::has_row_factors ? Config::block_n * sizeof(float) : 0;
    constexpr uint32_t scales_per_block = Weights::has_block_scales ? 4 : 0;
    constexpr uint32_t scale_bytes = scales_per_block * sizeof(float);
    constexpr uint32_t bias_bytes = Config::Biases::exist ? Config::block_n * sizeof(float) : 0;
    Tracer<Config> trace(args, TraceTrack::weight_loader,
                         (Config::num_dispatch_warps + 1) * warp_size);
    if constexpr (expects_weights<Config>) prefetch_expected_weights<Config>(args, local);
    trace.mark(TraceStep::await_counts);
    ExpertCounts<Config> counts;
    counts.count_shared(args);
    if (!counts.fetch(args, local, waiter)) return;
    BlockWalk<Config> walk(counts, blockIdx.x);

    RingPosition<Config::num_stages> ring;
    RingPosition<Config::num_block_slots> slots;
    // The first time around the ring. Where registers are few, tiles are wide: so many tokens that
    // the first do not matter.
    bool fills_first = !has_few_loader_registers<Config>;
    auto claims = claims_of(smem, local);
    L1Publisher<Config> publisher(smem, local);
    for (Block block; walk.find(block); slots.advance()) {
        const LinearOf<Config> linear(block.phase);
        const uint32_t num_k_blocks = linear.num_k_blocks();
        const BlockHeader header{block, linear.weight_block_row(block), block.n_block_idx};
        trace.mark(linear.load_step(), header.weight_block_row_idx, header.num_valid_rows);
        if constexpr (!loader_publishes<Config>) {
            if (!await_slot(smem, slots, waiter)) return;
        }
        const uint32_t first_block_idx = header.weight_block_row_idx * num_k_blocks;
        const bool is_read_once = counts.copies_weights_once(block.expert_idx);
        if constexpr (has_few_loader_registers<Config>) leave_header(smem, slots.stage, header);

        // What comes once, with the first stage. One thread, when that stage is free.
        const auto start_block = [&](uint32_t stage) {
            tell_roles(smem, slots.stage, header);
            const uint32_t full = smem.full_barriers(stage);
            const uint32_t first_row = header.weight_block_row_idx * Config::block_n;
            if constexpr (row_factor_bytes + bias_bytes > 0) {
                ptx::mbarrier_expect_tx(full, row_factor_bytes + bias_bytes);  //~ row_bytes
            }
            if constexpr (Weights::has_row_factors) {
                ptx::cp_async_bulk_shared_global(smem.row_factors(slots.stage),
                                                 linear.row_factors(args) + first_row,
                                                 row_factor_bytes, full);
            }
            if constexpr (Config::Biases::exist) {
                ptx::cp_async_bulk_shared_global(smem.biases(slots.stage),
                                                 linear.biases(args) + first_row, bias_bytes,
                                                 full);  //~ biases_copied
            }
        };
        // From k_block_idx up to `end`. One thread; false after an abort.
        const auto load = [&]<bool gives_way>(uint32_t k_block_idx, uint32_t end) {
            const auto weights_at = [&](uint32_t block_idx) {
                return static_cast<const uint8_t*>(linear.weight_blocks(args)) +
                       uint64_t{block_idx} * block_bytes;
            };
            const auto scales_at = [&](uint32_t block_idx) {
                return linear.row_factors(args) + block_idx * scales_per_block;
            };
            const uint8_t* src = weights_at(first_block_idx + k_block_idx);
            const float* scales = scales_at(first_block_idx + k_block_idx);
            const auto start = [&](uint32_t i, uint32_t stage) {
                const uint32_t full = smem.full_barriers(stage);
                // Which takes four registers less than pointers that go along.
                if constexpr (has_few_loader_registers<Config>) {
                    src = weights_at(first_block_idx + i);
                    scales = scales_at(first_block_idx + i);
                }
                ptx::mbarrier_arrive_expect_tx(full, block_bytes + scale_bytes);  //~ weight_bytes
                if constexpr (Weights::has_block_scales) {
                    ptx::cp_async_bulk_shared_global(smem.weight_scales(stage), scales, scale_bytes,
                                                     full);
                }
                copy_weights<Config>(smem.weight_blocks(stage), src, full, block.shares_weights,
                                     is_read_once);
                src += block_bytes;
                scales += scales_per_block;
                if constexpr (gives_way) src += give_way(local, block.pool_block_idx);
            };
            return fill_stages(smem, waiter, WaitSite::weight_stage_empty, ring, k_block_idx, end,
                               start_block, start);
        };
        const uint32_t publish_at = L1Publisher<Config>::k_block_to_publish_at(num_k_blocks);
        const uint32_t claim_at = num_k_blocks - min(num_claim_k_blocks, num_k_blocks);
        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks;) {
            if (k_block_idx == publish_at && !publisher.publish(slots, waiter)) return;
            if (k_block_idx == claim_at) claims.claim();
            uint32_t end = num_k_blocks;
            if (k_block_idx < claim_at) end = claim_at;
            if (loader_publishes<Config> && k_block_idx < publish_at) end = min(end, publish_at);
            bool loaded = true;
            if (fills_first) {
                end = min(end, k_block_idx + Config::num_stages - ring.stage);
                if (ptx::elect_sync()) loaded = load.template operator()<true>(k_block_idx, end);
            } else {
                if (ptx::elect_sync()) loaded = load.template operator()<false>(k_block_idx, end);
            }
            if (!waiter.warp_agrees(loaded)) return;
            ring.advance(end - k_block_idx);
            k_block_idx = end;
            fills_first = fills_first && ring.stage != 0;
        }
        if constexpr (Config::cluster_size == 1) {
            walk.go_to(claims.take());
        } else {
            uint32_t pair_idx;
            if (!claims.take(slots, pair_idx, waiter)) return;
            walk.go_to(pair_idx);
        }
    }
    if (!publisher.publish(slots, waiter)) return;
    if constexpr (!loader_publishes<Config>) {
        if (!await_slot(smem, slots, waiter)) return;
    }

    trace.mark(TraceStep::end);
    if (!waiter.warp_mbarrier(WaitSite::weight_stage_empty, smem.empty_barriers(ring.stage),
                              ring.parity ^ 1)) {
        return;
    }
    if (ptx::elect_sync()) {
        store_header(smem.block_headers(slots.stage), {});
        ptx::mbarrier_arrive(smem.header_barriers(slots.stage));
        ptx::mbarrier_arrive(smem.full_barriers(ring.stage));
    }
    __syncwarp();
}

}  // namespace deep_moe::sm90
