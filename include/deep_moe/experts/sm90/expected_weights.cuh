// Prefetch of weights that a call will read, before it is known which ranks have tokens for which
// experts.
//
// Counts of all ranks take several microseconds. Some experts are known at once: those that this
// rank owns and its own tokens want. In that time their weights are brought into L2, about as many
// as memory can read.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm90/kernel_args.cuh"
#include "deep_moe/experts/sm90/loader_registers.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm90 {

// Not for wide tiles, because weights do not bound their calls. On one H100 it cost 0.4 % at 2048
// tokens with 112 rows (2026-11-25). With even wider tiles the loaders have too few registers for
// it.
template <class Config>
inline constexpr bool expects_weights =
    !Config::Tokens::are_here && Config::block_m <= 96 && !has_few_loader_registers<Config>;

// The warp that loads weights, before it waits for counts. CTAs share each expert's Linear1, and
// experts come in the order of the walk; one warp's width of the rank's slots is looked at.
template <class Config>
__device__ __forceinline__ void prefetch_expected_weights(const KernelArgs& args,
                                                          const SymmBuffer<Config>& local) {
    using First = Linear<Config, Phase::linear1>;
    constexpr uint32_t block_bytes = Config::Weights::block_bytes;
    constexpr uint32_t num_blocks = First::num_k_blocks * First::num_n_blocks;
    constexpr uint32_t num_own_blocks = ceil_div(num_blocks, Config::num_sms);  // of an expert
    // 16 MB of all CTAs: an H100 reads 20 in the time from the first token counted to all counts.
    // Twice as many were no faster.
    constexpr uint32_t most_own_blocks = (uint32_t{16} << 20) / Config::num_sms / block_bytes;
    constexpr uint32_t none = ~0u;

    const uint32_t lane_idx = ptx::lane_idx();
    uint32_t expert_idx = none;
    if (lane_idx < args.num_tokens * Config::num_topk) {
        const auto idx = static_cast<uint64_t>(*local.input_topk_idx(lane_idx)) -
                         args.rank_idx * Config::num_experts_per_rank;
        //~ expected_expert
        if (idx < Config::num_experts_per_rank) expert_idx = static_cast<uint32_t>(idx);
    }
    const auto* const blocks = static_cast<const uint8_t*>(First::weight_blocks(args));
    for (uint32_t num_left = most_own_blocks; num_left > 0;) {
        const uint32_t next_idx = ptx::redux_sync_min(expert_idx);
        if (next_idx == none) break;
        if (expert_idx == next_idx) expert_idx = none;
        const uint32_t block_idx = lane_idx * Config::num_sms + blockIdx.x;
        if (lane_idx < num_left && block_idx < num_blocks) {  //~ expected_blocks
            ptx::cp_async_bulk_prefetch_l2(
                blocks + (uint64_t{next_idx} * num_blocks + block_idx) * block_bytes, block_bytes);
        }
        num_left -= min(num_left, num_own_blocks);
    }
}

}  // namespace deep_moe::sm90
