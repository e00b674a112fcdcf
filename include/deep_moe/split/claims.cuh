// Work of a CTA, item by item, for whichever of its warps is free. Items take different times, and
// some warps do something else first.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

// In shared memory: u32, the items that have been claimed.
class Claims {
 public:
    __device__ explicit Claims(uint32_t word) : word_(word) {}

    // One thread; a barrier of the CTA has to stand behind it.
    __device__ void clear() const { ptx::st_shared_u32(word_, 0); }

    // A whole warp: an item that nobody else gets.
    __device__ uint32_t next() const {
        uint32_t item = 0;
        if (ptx::lane_idx() == 0) item = ptx::atom_add_shared(word_, 1);  //~ item_claimed
        return __shfl_sync(full_warp, item, 0);
    }

 private:
    uint32_t word_;
};

}  // namespace deep_moe
