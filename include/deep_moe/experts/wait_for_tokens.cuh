// Waits for a block's tokens. An activation loader calls this before the block's first copy, and so
// does every other reader of what dispatch brought with the tokens.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// Dispatch has written all tokens of the block, with their scales, routing weights and metadata.
template <class Config>
__device__ bool wait_for_dispatch(const SymmBuffer<Config>& local, const BlockRows& block,
                                  Waiter& waiter) {
    const uint32_t* count = local.l1_arrival_count(block.pool_block_idx);
    // Another CTA's epilogue may have set the flag already.
    //~ tokens_awaited
    return waiter.warp_until(WaitSite::l1_block_arrival, block.num_valid_rows, [&] {
        //~ tokens_acquired
        return ptx::ld_acquire_gpu(count) & ~SymmBuffer<Config>::has_own_scales;
    });
}

// Linear1 needs all tokens of the block from dispatch, Linear2 all of Linear1's n-blocks from the
// epilogues of other CTAs. What was acquired here is read by the async proxy: hence the fence.
template <class Config>
__device__ bool wait_for_tokens(const SymmBuffer<Config>& local, const BlockRows& block,
                                Waiter& waiter) {
    bool arrived = true;
    if (block.phase == Phase::linear1) {
        arrived = wait_for_dispatch(local, block, waiter);
    } else {
        constexpr uint32_t num_n_blocks = Linear<Config, Phase::linear1>::num_n_blocks;
        constexpr uint32_t num_words = ceil_div(num_n_blocks, 64u);
        static_assert(num_words <= Config::Symm::l2_arrival_mask_dim1);
#pragma unroll
        for (uint32_t word_idx = 0; word_idx < num_words; ++word_idx) {
            constexpr uint32_t num_bits_in_last = num_n_blocks - (num_words - 1) * 64;
            const uint32_t num_bits = word_idx + 1 == num_words ? num_bits_in_last : 64;
            const uint64_t* word = local.l2_arrival_mask(block.pool_block_idx, word_idx);
            //~ l1_output_acquired
            arrived = arrived &&
                      waiter.warp_until(WaitSite::l2_block_arrival, ~uint64_t{0} >> (64 - num_bits),
                                        [&] { return ptx::ld_acquire_gpu(word); });
        }
    }
    ptx::fence_proxy_async_global();  //~ tokens_fence
    return arrived;
}

}  // namespace deep_moe
