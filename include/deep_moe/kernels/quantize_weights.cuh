// Weights [experts][rows][columns] as E4M3, with a float32 scale for every 128 x 128 of a matrix:
// in the same layout, transposed, or both. The tensor cores want K innermost. That is the same
// layout for products of one direction, forward or backward, and the other for those of the other.
//
// Grid: a CTA per block of 128 x 128. Its values stay in registers between the search for the
// largest and the quantizing. On their way into the transposed layout they go through shared
// memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/float_scale.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/training/args.cuh"
#include "deep_moe/training/value_block.cuh"

namespace deep_moe {

template <class Config>
class WeightBlock {
    using Block = ValueBlock;
    static constexpr uint32_t size = Block::size;
    static_assert(Config::num_threads == Block::num_threads);

 public:
    __device__ explicit WeightBlock(const QuantizeWeightsArgs& args) : args_(args) {
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
        Block::Chunks chunks;
        load(chunks);
        const FloatScale<false> scale(Block::largest(chunks));
        if (threadIdx.x == 0) store_scale(scale.scale);
        Block::Bytes bytes;
        Block::quantize(chunks, scale.factor, bytes);
        if constexpr (Config::stores_same) store_same(bytes);
        if constexpr (Config::stores_transposed) {
            const uint32_t first_column = column_block_ * size;
            Block::store_transposed(
                bytes,
                static_cast<uint8_t*>(args_.transposed) +
                    (uint64_t{expert_} * args_.num_columns + first_column) * args_.num_rows +
                    row_block_ * size,
                args_.num_rows, args_.num_columns - first_column);
        }
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
    // Of chunk i, and of all chunks, in the block.
    static __device__ uint32_t row_of(uint32_t i) { return Block::row_of(i); }
    static __device__ uint32_t first_column() { return Block::first_column(); }

    __device__ __forceinline__ void load(Block::Chunks& chunks) const {
        const uint16_t* const weights = static_cast<const uint16_t*>(args_.weights);
#pragma unroll
        for (uint32_t i = 0; i < Block::num_chunks; ++i) {
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

    __device__ __forceinline__ void store_same(const Block::Bytes& bytes) const {
        uint8_t* const same = static_cast<uint8_t*>(args_.same);
        if (!has_column(first_column())) return;
#pragma unroll
        for (uint32_t i = 0; i < Block::num_chunks; ++i) {
            if (!has_row(row_of(i))) continue;
            *reinterpret_cast<uint2*>(same + index(row_block_ * size + row_of(i),
                                                   column_block_ * size + first_column())) =
                bytes[i];
        }
    }

    const QuantizeWeightsArgs& args_;
    uint32_t row_block_;
    uint32_t column_block_;
    uint32_t expert_;
};

template <class Config>
__device__ __forceinline__ void quantize_weights(const QuantizeWeightsArgs& args) {
    WeightBlock<Config>(args).run();
}

}  // namespace deep_moe
