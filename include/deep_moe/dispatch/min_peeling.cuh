// Which source rank a token of an expert is pulled from.
//
// Each rank has a list of tokens for the expert; the pool order interleaves the lists. In turn, one
// token from each rank that has any left, for as many rounds as the shortest of those lists has
// tokens; then that rank drops out, and so on. Tokens that neighbouring warps pull at the same time
// thus come from different ranks, however unequal the lists are.
//
//   lists 3, 1, 2 -> ranks 0 1 2 | 0 2 | 0      (peels of 1, 1 and 1 rounds)
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

struct RankToken {
    uint32_t rank_idx;
    uint32_t list_idx;  // position in that rank's list for the expert
};

// `num_tokens[i]` of lane l: length of the list of rank 32 * i + l, 0 past the last rank.
// `token_idx` is below the sum of all lists. A whole warp; the result is uniform.
template <uint32_t num_ranks>
__device__ __forceinline__ RankToken
find_source_rank(const uint32_t (&num_tokens)[ceil_div(num_ranks, warp_size)], uint32_t token_idx) {
    constexpr uint32_t num_ranks_per_lane = ceil_div(num_ranks, warp_size);
    constexpr uint32_t no_list = 0xffffffff;
    uint32_t num_rounds_peeled = 0;
    while (true) {
        // The ranks with tokens left, and the shortest of what is left.
        uint32_t active[num_ranks_per_lane];
        uint32_t num_active = 0;
        uint32_t shortest = no_list;
#pragma unroll
        for (uint32_t i = 0; i < num_ranks_per_lane; ++i) {
            const bool is_active = num_tokens[i] > num_rounds_peeled;
            active[i] = __ballot_sync(full_warp, is_active);
            num_active += __popc(active[i]);
            if (is_active) shortest = min(shortest, num_tokens[i] - num_rounds_peeled);
        }
        const uint32_t num_rounds = ptx::redux_sync_min(shortest);

        if (token_idx < num_rounds * num_active) {
            uint32_t nth = token_idx % num_active;
            const uint32_t list_idx = num_rounds_peeled + token_idx / num_active;
#pragma unroll
            for (uint32_t i = 0; i < num_ranks_per_lane; ++i) {
                const uint32_t num_active_here = __popc(active[i]);
                if (nth < num_active_here) {
                    return {i * warp_size + ptx::fns(active[i], nth), list_idx};
                }
                nth -= num_active_here;
            }
        }
        token_idx -= num_rounds * num_active;
        num_rounds_peeled += num_rounds;
    }
}

}  // namespace deep_moe
