// Weights [experts][rows][columns] as E4M3, with a float32 scale for every 128 x 128 of a matrix:
// in the same layout, transposed, or both. The tensor cores want K innermost. That is the same
// layout for products of one direction, forward or backward, and the other for those of the other.
// With Config::compares nothing is stored: results that are there are compared with what they would
// be now.
//
// Grid: a CTA per block of 128 x 128. Its values stay in registers between the search for the
// largest and the quantizing. On their way into the transposed layout they go through shared
// memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/float_scale.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/atomics.cuh"
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
        if constexpr (Config::has_transposed) {
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
        if (threadIdx.x == 0) put_scale(__float_as_uint(scale.scale));
        Block::Bytes bytes;
        Block::quantize(chunks, scale.factor, bytes);
        if constexpr (Config::has_same) put_same(bytes);
        if constexpr (Config::has_transposed) {
            const uint32_t first_column = column_block_ * size;
            Block::put_transposed(
                bytes,
                static_cast<uint8_t*>(args_.transposed) +
                    (uint64_t{expert_} * args_.num_columns + first_column) * args_.num_rows +
                    row_block_ * size,
                args_.num_rows, args_.num_columns - first_column,
                [this](uint8_t* place, uint4 words) { put(place, words); });
        }
        if constexpr (Config::compares) {
            if (differs_) ptx::red_add_relaxed_gpu(args_.num_differences, 1);  //~ difference_seen
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

    // Stores words of a result, or compares what is there.
    template <class Words>
    __device__ __forceinline__ void put(void* place, Words words) {
        Words* const there = static_cast<Words*>(place);
        if constexpr (Config::compares) {
            differs_ |= differ(*there, words);  //~ words_compared
        } else {
            *there = words;
        }
    }
    static __device__ bool differ(uint32_t a, uint32_t b) { return a != b; }
    static __device__ bool differ(uint2 a, uint2 b) { return a.x != b.x || a.y != b.y; }
    static __device__ bool differ(uint4 a, uint4 b) {
        return a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w;
    }

    __device__ __forceinline__ void put_scale(uint32_t scale_bits) {
        const uint64_t num_blocks = uint64_t{num_row_blocks()} * num_column_blocks();
        const uint64_t first = expert_ * num_blocks;
        if constexpr (Config::has_same) {
            const uint32_t block = row_block_ * num_column_blocks() + column_block_;
            put(args_.same_scales + first + block, scale_bits);  //~ block_scale
        }
        if constexpr (Config::has_transposed) {
            const uint32_t block = column_block_ * num_row_blocks() + row_block_;
            put(args_.transposed_scales + first + block, scale_bits);  //~ transposed_scale
        }
    }

    __device__ __forceinline__ void put_same(const Block::Bytes& bytes) {
        uint8_t* const same = static_cast<uint8_t*>(args_.same);
        if (!has_column(first_column())) return;
#pragma unroll
        for (uint32_t i = 0; i < Block::num_chunks; ++i) {
            if (!has_row(row_of(i))) continue;
            put(same + index(row_block_ * size + row_of(i), column_block_ * size + first_column()),
                bytes[i]);
        }
    }

    const QuantizeWeightsArgs& args_;
    uint32_t row_block_;
    uint32_t column_block_;
    uint32_t expert_;
    bool differs_ = false;  // of this thread's words
};

template <class Config>
__device__ __forceinline__ void quantize_weights(const QuantizeWeightsArgs& args) {
    WeightBlock<Config>(args).run();
}

}  // namespace deep_moe
