// The warp that loads tokens. It learns the next block from the weight loader and waits for the
// block's tokens. For each k-block it waits for a free stage and starts a tensor copy. For Linear2
// it also handles the scales (rescaler.cuh). It writes what the epilogues need of each token into
// the block's slot.
#pragma once

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm90/block_header.cuh"
#include "deep_moe/experts/sm90/fill_stages.cuh"
#include "deep_moe/experts/sm90/kernel_args.cuh"
#include "deep_moe/experts/sm90/loader_registers.cuh"
#include "deep_moe/experts/sm90/rescaler.cuh"
#include "deep_moe/experts/sm90/shared_memory.cuh"
#include "deep_moe/experts/sm90/tile_copy.cuh"
#include "deep_moe/experts/wait_for_tokens.cuh"
#include "deep_moe/formats/sm90_linear2_scale.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/layout/token_places.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"
#include "deep_moe/trace/tracer.cuh"

namespace deep_moe::sm90 {

// In front of which k-blocks of Linear2 the loader reads where results go.
//
// Math is some stages behind, so there is time for these reads, a microsecond or more for every
// warp_size rows. If the stages do not last so long, the rows are read in parts, each before every
// second of the last k-blocks. Timed on an H200 (2026-11-24): 1 to 2 % less time from 2048 tokens
// on in clusters with FP8 weights; no gain without clusters with decoded weights, and up to 1 %
// more time where the stages last.
template <class Config>
struct DestinationParts {
    static constexpr uint32_t num_parts = ceil_div(Config::block_m, warp_size);
    static constexpr uint32_t distance = 2;  // of k-blocks that have a part
    static constexpr bool reads_in_parts = Config::cluster_size > 1 &&
                                           (num_parts >= Config::num_stages) &&
                                           (Config::num_l2_k_blocks >= num_parts * distance);
    // So many, the last of a block.
    static constexpr uint32_t num_k_blocks = reads_in_parts ? num_parts * distance : 1;
};

// Writes what Linear2's epilogue needs of each token: the row where its result goes, its scale, and
// with biases its routing weight. Called before each of the last k-blocks of Linear2. All lanes; a
// __syncwarp and an arrival must follow.
template <class Config>
__device__ void store_destinations(const TokenPlaces<Config>& places, uint32_t first_row,
                                   uint32_t num_valid_rows, const SharedMemory<Config>& smem,
                                   uint32_t slot, uint32_t num_k_blocks_behind) {
    using Parts = DestinationParts<Config>;
    if (num_k_blocks_behind >= Parts::num_k_blocks) return;  //~ all_read
    uint32_t begin = 0;
    uint32_t end = Config::block_m;
    if constexpr (Parts::reads_in_parts) {
        if (num_k_blocks_behind % Parts::distance != 0) return;
        begin = (Parts::num_parts - 1 - num_k_blocks_behind / Parts::distance) * warp_size;
        end = min(begin + warp_size, Config::block_m);
    }
    using Biases = typename Config::Biases;
    constexpr bool has_scales = has_token_factors<Config>;
    const uint32_t destinations = smem.destinations(slot);
#pragma unroll 1  // unrolled, it costs registers
    for (uint32_t row = begin + ptx::lane_idx(); row < end; row += warp_size) {
        uint64_t destination = 0;
        [[maybe_unused]] uint32_t scale = 0;
        [[maybe_unused]] float topk_weight = 0.0f;
        if (row < num_valid_rows) {  //~ has_destination
            const TokenSource source = *places.local().token_src_metadata(first_row + row);
            destination = reinterpret_cast<uint64_t>(places.result_row(source));
            if constexpr (has_scales || Biases::exist) {
                topk_weight = *places.local().l1_topk_weights(first_row + row);
            }
            if constexpr (has_scales) {
                scale = token_scale_byte(Biases::linear1_weight(topk_weight)) << 23;
            }
        }
        ptx::st_shared_v2(
            destinations + row * sizeof(uint64_t),
            {static_cast<uint32_t>(destination), static_cast<uint32_t>(destination >> 32)});
        if constexpr (has_scales) {
            ptx::st_shared_u32(smem.l2_token_factors(slot) + row * sizeof(uint32_t), scale);
        }
        if constexpr (Biases::exist) {
            //~ weight_behind_linear2
            ptx::st_shared_u32(smem.topk_weights(slot) + row * sizeof(float),
                               __float_as_uint(topk_weight));
        }
    }
}

template <class Config>
__device__ void load_activations(const KernelArgs& args, const SharedMemory<Config>& smem,
                                 const SymmBuffer<Config>& local, Waiter& waiter) {
    constexpr bool has_scales = has_token_factors<Config>;
    constexpr bool promotes_scales = Config::Weights::promotes_token_scales;
    Tracer<Config> trace(args, TraceTrack::activation_loader,
                         Config::num_dispatch_warps * warp_size);
    trace.mark(TraceStep::await_counts);
    trace.first_anchor();

    RingPosition<Config::num_stages> ring;
    RingPosition<Config::num_block_slots> slots;
    for (;; slots.advance()) {
        if (!waiter.warp_mbarrier(WaitSite::block_header, smem.header_barriers(slots.stage),
                                  slots.parity)) {
            return;
        }
        BlockHeader block = load_header<Config>(smem.block_headers(slots.stage));
        if (block.num_rows == 0) break;
        const LinearOf<Config> linear(block.phase);
        const bool is_linear1 = block.phase == Phase::linear1;
        // No block waits for a Linear1 block without results. So it must not read rows, which may
        // be released before it is done. Its tiles are zeros.
        const bool reads_pool = !is_linear1 || !linear.is_idle(block.n_block_idx);
        if (!reads_pool) block.num_valid_rows = 0;  //~ idle_without_rows
        trace.mark(linear.await_tokens_step(), block.pool_block_idx, block.num_valid_rows);
        if (reads_pool && !wait_for_tokens(local, block, waiter)) return;
        trace.mark(linear.load_step());

        const uint32_t num_k_blocks = linear.num_k_blocks();
        const uint32_t first_row = PoolRing<Config>::first_row(block.pool_block_idx);
        const TileCopy<Config> copy(args, block);
        const bool has_own_scales =
            has_scales && !is_linear1 &&
            (ptx::ld_relaxed_gpu(local.l1_arrival_count(block.pool_block_idx)) &
             SymmBuffer<Config>::has_own_scales) != 0;
        Rescaler<Config> rescaler(local, block, first_row);

        // What comes once, with the first stage. One thread, when that stage is free.
        const auto start_block = [&](uint32_t stage) {
            if (!is_linear1 || !reads_pool) return;
            // Scales, and the weights that go into Linear1's output.
            constexpr bool has_weights = !Config::Biases::exist;
            constexpr uint32_t num_vectors = (has_scales ? 1 : 0) + (has_weights ? 1 : 0);
            if constexpr (num_vectors == 0) return;
            const uint32_t full = smem.full_barriers(stage);
            const uint32_t token_vector_bytes = block.num_rows * sizeof(float);
            ptx::mbarrier_expect_tx(full, num_vectors * token_vector_bytes);  //~ factor_bytes
            if constexpr (has_scales) {
                ptx::cp_async_bulk_shared_global(smem.l1_token_factors(slots.stage),
                                                 local.l1_token_sf(0, first_row),
                                                 token_vector_bytes, full);
            }
            if constexpr (has_weights) {
                ptx::cp_async_bulk_shared_global(smem.topk_weights(slots.stage),
                                                 local.l1_topk_weights(first_row),
                                                 token_vector_bytes, full);
            }
        };
        // A k-block, when its stage is free. One thread.
        const auto start = [&](uint32_t k_block_idx, uint32_t stage) {
            const uint32_t full = smem.full_barriers(stage);
            if constexpr (promotes_scales) {
                const uint32_t token_vector_bytes = block.num_rows * sizeof(float);
                ptx::mbarrier_arrive_expect_tx(
                    full, copy.num_bytes + token_vector_bytes);  //~ token_scale_bytes
                const void* scales = is_linear1 ? local.l1_token_sf(k_block_idx, first_row)
                                                : local.l2_token_sf(k_block_idx, first_row);
                // Of a block without results, any numbers that nobody writes to.
                if (!reads_pool) scales = linear.weight_blocks(args);
                //~ token_scales_copied
                ptx::cp_async_bulk_shared_global(smem.token_scales(stage), scales,
                                                 token_vector_bytes, full);
            } else {
                ptx::mbarrier_arrive_expect_tx(full, copy.num_bytes);
            }
            copy.start(smem.activations(stage), k_block_idx, full);
        };
        // The warp has more to do than to load in front of Linear2's last k-blocks, and wherever a
        // stage has scales. Where it has few registers, it has time for more instructions, and a
        // thread's own loop would spill.
        const uint32_t num_together = is_linear1 ? 0 : DestinationParts<Config>::num_k_blocks;
        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks;) {
            const uint32_t num_k_blocks_behind = num_k_blocks - 1 - k_block_idx;
            if (!is_linear1) {
                store_destinations(TokenPlaces<Config>(args), first_row, block.num_valid_rows, smem,
                                   slots.stage, num_k_blocks_behind);
            }
            const bool has_scales_here = has_scales && (k_block_idx == 0 || has_own_scales);
            if (has_few_loader_registers<Config> || has_scales_here) {
                //~ sm90_scale_stage_free
                if (!waiter.warp_mbarrier(WaitSite::activation_stage_empty,
                                          smem.empty_barriers(ring.stage), ring.parity ^ 1)) {
                    return;
                }
                if constexpr (has_scales) {
                    if (k_block_idx == 0) {
                        //~ may_change_scale
                        store_change_of_scale(smem, ring.stage, has_own_scales);
                    } else if (has_own_scales) {
                        rescaler.store(smem, ring.stage, k_block_idx);
                    }
                    if (has_own_scales && num_k_blocks_behind == 0) {
                        rescaler.store_scales(smem, slots.stage, k_block_idx);
                    }
                }
                __syncwarp();  //~ scales_stored
                if (ptx::elect_sync()) {
                    if (k_block_idx == 0) start_block(ring.stage);
                    start(k_block_idx, ring.stage);
                }
                __syncwarp();
                ring.advance();
                ++k_block_idx;
            } else {
                __syncwarp();  //~ destinations_stored
                const uint32_t end = max(k_block_idx + 1, num_k_blocks - num_together);
                bool loaded = true;
                if (ptx::elect_sync()) {
                    loaded = fill_stages(smem, waiter, WaitSite::activation_stage_empty, ring,
                                         k_block_idx, end, start_block, start);
                }
                if (!waiter.warp_agrees(loaded)) return;
                ring.advance(end - k_block_idx);
                k_block_idx = end;
            }
        }
        trace.mark(TraceStep::await_header);
    }

    trace.mark(TraceStep::end);
    // The stage behind the last block brings nothing but the news of it.
    if (!waiter.warp_mbarrier(WaitSite::activation_stage_empty, smem.empty_barriers(ring.stage),
                              ring.parity ^ 1)) {
        return;
    }
    if (ptx::elect_sync()) ptx::mbarrier_arrive(smem.full_barriers(ring.stage));
    __syncwarp();
}

}  // namespace deep_moe::sm90
