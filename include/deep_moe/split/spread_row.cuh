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

// Loads that a lane has under way at once: of chunks_per_lane, in as many equal parts as `most`
// needs.
__host__ __device__ constexpr uint32_t equal_loads(uint32_t chunks_per_lane, uint32_t most) {
    return ceil_div(chunks_per_lane, ceil_div(chunks_per_lane, most));
}

// A row, of which as much as a lane loads at once is on its way when this is made.
template <uint32_t num_chunks, uint32_t most_loads_at_once = 8>
class LoadedRow {
    static constexpr uint32_t loads_at_once =
        equal_loads(ceil_div(num_chunks, warp_size), most_loads_at_once);

 public:
    // A whole warp.
    __device__ explicit LoadedRow(const uint4* from) : from_(from) { load(ptx::lane_idx()); }

    // slots: bits of the lanes whose `row`, of `out`, is written. `change(slot)(chunk)`: what is
    // written; all lanes ask it for a slot.
    template <class Change = Unchanged>
    __device__ void spread(uint4* out, uint32_t slots, uint32_t row, const Change& change = {}) {
#pragma unroll 1
        for (uint32_t first = ptx::lane_idx(); first < align_up(num_chunks, warp_size);
             first += loads_at_once * warp_size) {
            if (first >= warp_size) load(first);
            for (uint32_t left = slots; left != 0; left &= left - 1) {
                const uint32_t slot = __ffs(left) - 1;
                uint4* const to = out + uint64_t{__shfl_sync(full_warp, row, slot)} * num_chunks;
                const auto changed = change(slot);
#pragma unroll
                for (uint32_t i = 0; i < loads_at_once; ++i) {
                    const uint32_t chunk_idx = first + i * warp_size;
                    if (chunk_idx < num_chunks) to[chunk_idx] = changed(chunks_[i]);
                }
            }
        }
    }

 private:
    __device__ void load(uint32_t first) {
#pragma unroll
        for (uint32_t i = 0; i < loads_at_once; ++i) {
            const uint32_t chunk_idx = first + i * warp_size;
            if (chunk_idx < num_chunks) chunks_[i] = from_[chunk_idx];
        }
    }

    const uint4* from_;
    uint4 chunks_[loads_at_once];
};

// The same, of a row that is read first of all.
template <uint32_t num_chunks, uint32_t most_loads_at_once = 8, class Change = Unchanged>
__device__ void spread_row(uint4* out, const uint4* from, uint32_t slots, uint32_t row,
                           const Change& change = {}) {
    LoadedRow<num_chunks, most_loads_at_once>(from).spread(out, slots, row, change);
}

// A token's scales in the same way, all read when this is made.
template <class Config>
class LoadedScales {
    using Format = TokenFormat<Config>;
    static constexpr uint32_t words_per_lane =
        max(1u, ceil_div(Format::num_received_words, warp_size));

 public:
    __device__ explicit LoadedScales(const uint32_t* from) {
#pragma unroll
        for (uint32_t i = 0; i < words_per_lane; ++i) {
            words_[i] = has_word(i) ? Format::received_word(from, column(i)) : 0;
        }
    }

    // `scale_word(row, column)`: where a word goes.
    template <class ScaleWord>
    __device__ void spread(const ScaleWord& scale_word, uint32_t slots, uint32_t row) const {
        for (uint32_t left = slots; left != 0; left &= left - 1) {
            const uint32_t slot_row = __shfl_sync(full_warp, row, __ffs(left) - 1);
#pragma unroll
            for (uint32_t i = 0; i < words_per_lane; ++i) {
                if (has_word(i)) *scale_word(slot_row, column(i)) = words_[i];
            }
        }
    }

 private:
    static __device__ uint32_t column(uint32_t i) { return i * warp_size + ptx::lane_idx(); }
    static __device__ bool has_word(uint32_t i) {
        if constexpr (Format::is_quantized) return column(i) < Format::num_received_words;
        return false;
    }

    uint32_t words_[words_per_lane];
};

}  // namespace deep_moe
