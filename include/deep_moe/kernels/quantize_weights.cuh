// Weights [experts][rows][columns] as E4M3, with a float32 scale for every 128 x 128 of a matrix:
// in the same layout, transposed, or both. The tensor cores want K innermost. That is the same
// layout for products of one direction, forward or backward, and the other for those of the other.
//
// Grid: a CTA per block of 128 x 128. Its values stay in registers between the search for the
// largest and the quantizing. On their way into the transposed layout they go through shared
// memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/bf16_chunk.cuh"
#include "deep_moe/formats/float_scale.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/training/args.cuh"

namespace deep_moe {

// words[i] byte j <-> words[j] byte i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
    const uint32_t low01 = ptx::prmt(words[0], words[1], 0x5140);
    const uint32_t low23 = ptx::prmt(words[2], words[3], 0x5140);
    const uint32_t high01 = ptx::prmt(words[0], words[1], 0x7362);
    const uint32_t high23 = ptx::prmt(words[2], words[3], 0x7362);
    words[0] = ptx::prmt(low01, low23, 0x5410);
    words[1] = ptx::prmt(low01, low23, 0x7632);
    words[2] = ptx::prmt(high01, high23, 0x5410);
    words[3] = ptx::prmt(high01, high23, 0x7632);
}

// One thread's part of a block: 8 neighbouring columns of 4 neighbouring rows, and of the 4 rows
// that lie 64 behind.
template <class Config>
class WeightBlock {
    static constexpr uint32_t size = 128;
    static constexpr uint32_t chunks_per_row = size / values_per_chunk;
    static constexpr uint32_t num_chunks = size * chunks_per_row / Config::num_threads;
    static constexpr uint32_t num_warps = Config::num_threads / warp_size;
    static constexpr uint32_t words_per_column = size / 4;
    static_assert(Config::num_threads == 256);

 public:
    __device__ explicit WeightBlock(const QuantizeWeightsArgs& args)
        : args_(args),
          chunk_(threadIdx.x % chunks_per_row),
          first_row_(threadIdx.x / chunks_per_row * 4) {
        // Neighbouring CTAs write neighbours.
        const uint32_t idx = blockIdx.x;
        if constexpr (Config::stores_transposed) {
            row_block_ = idx % num_row_blocks();
            column_block_ = idx / num_row_blocks() % num_column_blocks();
        } else {
            column_block_ = idx % num_column_blocks();
            row_block_ = idx / num_column_blocks() % num_row_blocks();
        }
        expert_ = idx / (num_row_blocks() * num_column_blocks());
    }

    __device__ __forceinline__ void run() {
        uint4 chunks[num_chunks];
        load(chunks);
        const FloatScale<false> scale(largest(chunks));
        if (threadIdx.x == 0) store_scale(scale.scale);
        uint2 bytes[num_chunks];
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            bytes[i] = quantize_chunk(chunks[i], scale.factor);
        }
        if constexpr (Config::stores_same) store_same(bytes);
        if constexpr (Config::stores_transposed) store_transposed(bytes);
    }

 private:
    __device__ uint32_t num_row_blocks() const { return ceil_div(args_.num_rows, size); }
    __device__ uint32_t num_column_blocks() const { return ceil_div(args_.num_columns, size); }
    // In [experts][num_rows][num_columns].
    __device__ uint64_t index(uint32_t row, uint32_t column) const {
        return (uint64_t{expert_} * args_.num_rows + row) * args_.num_columns + column;
    }
    __device__ bool has_column(uint32_t column) const {
        return column_block_ * size + column < args_.num_columns;  //~ column_exists
    }
    __device__ bool has_row(uint32_t row) const {
        return row_block_ * size + row < args_.num_rows;  //~ row_exists
    }
    // Of chunk i, in the block.
    __device__ uint32_t row_of(uint32_t i) const { return first_row_ + i / 4 * 64 + i % 4; }
    // Of all chunks, in the block.
    __device__ uint32_t first_column() const { return chunk_ * values_per_chunk; }

    __device__ __forceinline__ void load(uint4 (&chunks)[num_chunks]) const {
        const uint16_t* const weights = static_cast<const uint16_t*>(args_.weights);
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            chunks[i] = uint4{};
            if (!has_column(first_column()) || !has_row(row_of(i))) continue;
            chunks[i] = *reinterpret_cast<const uint4*>(
                weights +
                index(row_block_ * size + row_of(i), column_block_ * size + first_column()));
        }
    }

    __device__ __forceinline__ void store_scale(float scale) const {
        const uint64_t num_blocks = uint64_t{num_row_blocks()} * num_column_blocks();
        const uint64_t first = expert_ * num_blocks;
        if constexpr (Config::stores_same) {
            const uint32_t block = row_block_ * num_column_blocks() + column_block_;
            args_.same_scales[first + block] = scale;  //~ block_scale
        }
        if constexpr (Config::stores_transposed) {
            const uint32_t block = column_block_ * num_row_blocks() + row_block_;
            args_.transposed_scales[first + block] = scale;  //~ transposed_scale
        }
    }

    // Bits of the block's largest magnitude.
    __device__ __forceinline__ uint32_t largest(const uint4 (&chunks)[num_chunks]) const {
        __shared__ uint32_t of_warps[num_warps];
        uint32_t amax_bits = 0;
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            amax_bits = max(amax_bits, chunk_amax_bits(chunks[i]));
        }
        amax_bits = group_maximum<warp_size>(amax_bits);
        const uint32_t warp_idx = ptx::warp_idx();
        if (ptx::lane_idx() == 0) of_warps[warp_idx] = amax_bits;
        __syncthreads();  //~ maxima_stored
        amax_bits = 0;
#pragma unroll
        for (uint32_t i = 0; i < num_warps; ++i) amax_bits = max(amax_bits, of_warps[i]);
        return amax_bits;
    }

    __device__ __forceinline__ void store_same(const uint2 (&bytes)[num_chunks]) const {
        uint8_t* const same = static_cast<uint8_t*>(args_.same);
        if (!has_column(first_column())) return;
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            if (!has_row(row_of(i))) continue;
            *reinterpret_cast<uint2*>(same + index(row_block_ * size + row_of(i),
                                                   column_block_ * size + first_column())) =
                bytes[i];
        }
    }

    __device__ __forceinline__ void store_transposed(const uint2 (&bytes)[num_chunks]) const {
        // A word more, so that neighbouring columns have other banks.
        __shared__ uint32_t words[size][words_per_column + 1];
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; i += 4) {
            uint32_t low[4];
            uint32_t high[4];
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                low[j] = bytes[i + j].x;
                high[j] = bytes[i + j].y;
            }
            transpose_bytes(low);
            transpose_bytes(high);
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                words[first_column() + j][row_of(i) / 4] = low[j];
                words[first_column() + j + 4][row_of(i) / 4] = high[j];
            }
        }
        __syncthreads();  //~ block_transposed
        uint8_t* const transposed = static_cast<uint8_t*>(args_.transposed);
        const uint32_t first_word = threadIdx.x % 8 * 4;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t column = threadIdx.x / 8 + 32 * i;
            if (!has_column(column)) continue;
            const uint32_t* const own = words[column] + first_word;
            const uint64_t first =
                (uint64_t{expert_} * args_.num_columns + column_block_ * size + column) *
                    args_.num_rows +
                row_block_ * size + first_word * 4;
            *reinterpret_cast<uint4*>(transposed + first) = {own[0], own[1], own[2], own[3]};
        }
    }

    const QuantizeWeightsArgs& args_;
    uint32_t row_block_;
    uint32_t column_block_;
    uint32_t expert_;
    uint32_t chunk_;
    uint32_t first_row_;
};

template <class Config>
__device__ __forceinline__ void quantize_weights(const QuantizeWeightsArgs& args) {
    WeightBlock<Config>(args).run();
}

}  // namespace deep_moe
