// The warps that decode weights: from a loaded block in shared memory to BF16 in tensor memory. Two
// warpgroups take k-blocks in turn, so that one computes while the other waits. A thread has one of
// the block's 128 rows, that of its lane.
#pragma once

#include "deep_moe/experts/block_walk.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm100/decoded_weights.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/pair_claims.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/tcgen05.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm100 {

// A row's codes and what multiplies them.
template <class Decoder>
struct PackedRow {
    uint4 chunks[chunks_per_k_block];
    uint32_t multipliers;
};

// block: of shared memory.
template <class Weights>
__device__ __forceinline__ PackedRow<typename Weights::Decoder> load_row(uint32_t block,
                                                                         uint32_t row) {
    PackedRow<typename Weights::Decoder> packed;
#pragma unroll
    for (uint32_t i = 0; i < chunks_per_k_block; ++i) {
        packed.chunks[i] =
            ptx::ld_shared_v4(block + (i * Weights::rows + row) * sizeof(uint4));  //~ packed_chunk
    }
    packed.multipliers = Weights::Decoder::load_multipliers(block + Weights::value_bytes, row);
    return packed;
}

template <class Config>
class WeightDecoder {
    using Weights = typename Config::Weights;
    using Decoder = typename Weights::Decoder;
    using Smem = SharedMemory<Config>;

 public:
    __device__ WeightDecoder(const Smem& smem, uint32_t warp_idx, uint32_t tmem)
        : smem_(smem),
          even_(smem.of_even_cta()),
          first_lane_(warp_idx % 4 * warp_size),
          tmem_(tmem + (first_lane_ << 16)) {}

    // Whole warp. False if the call was given up.
    __device__ __forceinline__ bool run(const RingPosition<Config::num_stages>& ring, uint32_t slot,
                                        Waiter& waiter) const {
        if (!waiter.warp_mbarrier(WaitSite::weights_loaded, smem_.weight_barriers(ring.stage),
                                  ring.parity)) {  //~ weights_loaded
            return false;
        }
        const PackedRow<Decoder> packed =
            load_row<Weights>(smem_.weights(ring.stage), first_lane_ + ptx::lane_idx());
        __syncwarp();
        if (ptx::elect_sync()) {
            ptx::mbarrier_arrive_shared_cluster(smem_.empty_barriers(ring.stage));  //~ codes_read
        }
        __syncwarp();

        const uint32_t columns = decoded_slot<Config>(tmem_, slot);
#pragma unroll
        for (uint32_t i = 0; i < chunks_per_k_block; ++i) {
            ChunkPairs pairs;
            decoder_.decode(packed.chunks[i], packed.multipliers, i, pairs);  //~ chunk_decoded
            ptx::tcgen05_st_32x32b_x16(columns + i * (decoded_row_columns / chunks_per_k_block),
                                       pairs);  //~ chunk_stored
        }
        ptx::tcgen05_wait_st();                   //~ decoded_stored
        ptx::tcgen05_fence_before_thread_sync();  //~ decoded_fence
        __syncwarp();
        if (ptx::elect_sync()) {
            ptx::mbarrier_arrive_shared_cluster(even_.full_barriers(ring.stage));  //~ decoded_there
        }
        __syncwarp();
        return true;
    }

 private:
    const Smem smem_;
    const Smem even_;
    uint32_t first_lane_;
    uint32_t tmem_;
    Decoder decoder_;
};

template <class Config>
__device__ void decode_weights(const KernelArgs& args, const SharedMemory<Config>& smem,
                               const SymmBuffer<Config>& local, uint32_t decode_warp_idx,
                               uint32_t tmem, Waiter& waiter) {
    constexpr uint32_t num_slots = num_decoded_slots<Config>;
    ExpertCounts<Config> counts;
    counts.count_shared(args);
    if (!counts.fetch(args, local, waiter)) return;
    BlockWalk<Config> walk(counts, blockIdx.x);

    const WeightDecoder<Config> decoder(smem, decode_warp_idx, tmem);
    bool is_mine = decode_warp_idx < 4;
    RingPosition<Config::num_stages> ring;
    RingPosition<num_slots> slots;
    // The k-block whose place in tensor memory this one takes. The first ones take free places.
    RingPosition<Config::num_stages> read;
    uint32_t num_free = num_slots;
    PairFollower<Config> pairs(smem);
    for (Block block; pairs.next(walk, block, waiter);) {
        const uint32_t num_k_blocks = LinearOf<Config>(block.phase).num_k_blocks();
        for (uint32_t k_block_idx = 0; k_block_idx < num_k_blocks; ++k_block_idx) {
            if (is_mine) {
                //~ decoded_slot_free
                if (num_free == 0 &&
                    !waiter.warp_mbarrier(WaitSite::decoded_weights_read,
                                          smem.empty_barriers(read.stage), read.parity)) {
                    return;
                }
                ptx::tcgen05_fence_after_thread_sync();  //~ decoded_slot_fence
                if (!decoder.run(ring, slots.stage, waiter)) return;
            }
            is_mine = !is_mine;
            if (num_free > 0) {
                --num_free;
            } else {
                read.advance();
            }
            ring.advance();
            slots.advance();
        }
    }
}

}  // namespace deep_moe::sm100
