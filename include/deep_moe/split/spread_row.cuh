// A token's row is read once and written to every row that it goes to.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/token_format.cuh"

namespace deep_moe {

// What becomes of a token's chunks in the row of a slot: nothing.
struct Unchanged {
    __device__ auto operator()(uint32_t) const {
        return [](uint4 chunk) { return chunk; };
    }
};

// A whole warp. slots: bits of the lanes whose `row`, of `out`, is written. `change(slot)(chunk)`:
// what is written; all lanes ask it for a slot.
template <uint32_t num_chunks, class Change = Unchanged>
__device__ void spread_row(uint4* out, const uint4* from, uint32_t slots, uint32_t row,
                           const Change& change = {}) {
    constexpr uint32_t loads_at_once = min(8u, ceil_div(num_chunks, warp_size));
#pragma unroll 1
    for (uint32_t first = ptx::lane_idx(); first < align_up(num_chunks, warp_size);
         first += loads_at_once * warp_size) {
        uint4 chunks[loads_at_once];
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size;
            if (chunk_idx < num_chunks) chunks[i] = from[chunk_idx];
        }
        for (uint32_t left = slots; left != 0; left &= left - 1) {
            const uint32_t slot = __ffs(left) - 1;
            uint4* const to = out + uint64_t{__shfl_sync(full_warp, row, slot)} * num_chunks;
            const auto changed = change(slot);
#pragma unroll
            for (uint32_t i = 0; i < loads_at_once; ++i) {
                const uint32_t chunk_idx = first + i * warp_size;
                if (chunk_idx < num_chunks) to[chunk_idx] = changed(chunks[i]);
            }
        }
    }
}

// The same of a token's scales. `scale_word(row, column)`: where a word goes.
template <class Config, class ScaleWord>
__device__ void spread_scales(const ScaleWord& scale_word, const uint32_t* from, uint32_t slots,
                              uint32_t row) {
    using Format = TokenFormat<Config>;
#pragma unroll 1
    for (uint32_t i = ptx::lane_idx(); i < align_up(Format::num_received_words, warp_size);
         i += warp_size) {
        const bool is_valid = i < Format::num_received_words;
        const uint32_t word = is_valid ? Format::received_word(from, i) : 0;
        for (uint32_t left = slots; left != 0; left &= left - 1) {
            const uint32_t slot_row = __shfl_sync(full_warp, row, __ffs(left) - 1);
            if (is_valid) *scale_word(slot_row, i) = word;
        }
    }
}

}  // namespace deep_moe
