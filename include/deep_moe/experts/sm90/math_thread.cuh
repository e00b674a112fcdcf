// The math warps, and where a thread's accumulators lie in a block.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/named_barrier.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/named_barriers.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe::sm90 {

// They do SM90's epilogues, too, and the fields of Config that SM90 and SM100 share are named so.
template <class Config>
inline constexpr uint32_t num_math_warps = Config::num_epilogue_warps;
template <class Config>
inline constexpr uint32_t num_math_registers = Config::num_epilogue_registers;

// Register 4*j + 2*h + p of row half b is weight row slot 64*b + 16*warp + 8*h + row() of the
// warpgroup, and token 8*j + first_token() + p.
template <class Config>
struct MathThread {
    static constexpr uint32_t num_threads = num_math_warps<Config> * warp_size;
    static constexpr uint32_t warpgroup_threads = 4 * warp_size;
    static_assert(num_math_warps<Config> == 8, "two math warpgroups share the 256 weight rows");

    uint32_t thread_idx;  // counted from the first math thread

    // This thread. Made anew by each epilogue from a register read that the compiler cannot move:
    // else it would compute the epilogues' addresses once, in front of the block loop, and keep
    // them in registers that the main loop needs.
    static __device__ __forceinline__ MathThread here() {
        return {ptx::tid_x() - (Config::num_threads - num_threads)};
    }

    __device__ uint32_t warpgroup_idx() const { return thread_idx / warpgroup_threads; }
    __device__ uint32_t warpgroup_thread_idx() const { return thread_idx % warpgroup_threads; }
    __device__ uint32_t warp_idx() const { return thread_idx % warpgroup_threads / warp_size; }
    __device__ uint32_t lane_idx() const { return thread_idx % warp_size; }
    __device__ uint32_t row() const { return lane_idx() / 4; }
    __device__ uint32_t first_token() const { return 2 * (lane_idx() % 4); }
    // Index of this thread's run of consecutive rows within the warpgroup.
    __device__ uint32_t row_run() const { return 8 * warp_idx() + row(); }

    __device__ void sync() const { ptx::bar_sync(NamedBarrier::epilogue, num_threads); }
    // The same, and tells whether any math warp has given up. For the shuffle see load_header.
    __device__ bool vote(Waiter& waiter) const {
        const bool all = ptx::bar_red_and(NamedBarrier::epilogue, num_threads, !waiter.aborted());
        return waiter.follow(__shfl_sync(full_warp, all, 0));
    }
};

// Calls body(j) for every 8 of an m-block's rows.
template <uint32_t num_rows, class Body>
__device__ __forceinline__ void for_each_8_rows(const Body& body) {
#pragma unroll
    for (uint32_t j = 0; j < num_rows / 8; ++j) body(j);
}

// This thread's 4 of what there is for each of the 256 rows of a block, [row half][h].
struct RowValues {
    float values[2][2];
};

// `vector`: f32 [256] in shared memory.
template <class Config>
__device__ __forceinline__ RowValues load_row_values(uint32_t vector,
                                                     const MathThread<Config>& thread) {
    const uint32_t first = thread.warpgroup_idx() * 128 + thread.warp_idx() * 16 + thread.row();
    const auto value = [&](uint32_t row) {
        return ptx::ld_shared_f32(vector + (first + row) * sizeof(float));
    };
    return {{{value(0), value(8)}, {value(64), value(72)}}};
}

}  // namespace deep_moe::sm90
