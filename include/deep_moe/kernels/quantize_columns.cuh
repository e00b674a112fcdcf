// Rows as E4M3 in blocks of 128 rows of an expert (training/token_blocks.cuh), transposed, with a
// float32 scale for 128 x 128: operands of products whose sums go over rows. With Config::gathers
// each row is that of its slot's token. With Config::stores_rows the same values are stored as
// quantized rows, too, with scales of their own (training/quantized_rows.cuh).
//
// Grid: a CTA per block of 128 x 128, of as many blocks of rows as there can be.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/float_scale.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/training/args.cuh"
#include "deep_moe/training/quantized_rows.cuh"
#include "deep_moe/training/token_blocks.cuh"
#include "deep_moe/training/value_block.cuh"

namespace deep_moe {

template <class Config>
__device__ __forceinline__ void quantize_columns(const QuantizeColumnsArgs& args) {
    using Block = ValueBlock;
    static_assert(Config::num_threads == Block::num_threads);
    static_assert(Block::size == rows_per_block);
    // Neighbouring CTAs read neighbours.
    const uint32_t num_column_blocks = args.num_columns / Block::size;
    const uint32_t column_block = blockIdx.x % num_column_blocks;
    const uint32_t block_idx = blockIdx.x / num_column_blocks;
    const RowBlock rows = row_block(args.rows.offs, args.rows.num_experts, block_idx);
    if (!rows.exists) return;
    const uint32_t first_column = column_block * Block::size + Block::first_column();
    Block::Chunks chunks;
#pragma unroll
    for (uint32_t i = 0; i < Block::num_chunks; ++i) {
        chunks[i] = uint4{};
        int32_t row = rows.begin + Block::row_of(i);
        if (static_cast<uint32_t>(row) >= rows.end) continue;  //~ rows_of_block
        if constexpr (Config::gathers) {
            row = args.rows.slot_of_row[row];
            if (row < 0) continue;  //~ padding_of_block
            row /= args.num_topk;   //~ token_of_slot
        }
        chunks[i] =
            *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.values) +
                                            uint64_t(row) * args.num_columns + first_column);
    }
    if constexpr (Config::stores_rows) {
        const uint32_t row_chunks = args.num_columns / values_per_chunk;
#pragma unroll
        for (uint32_t i = 0; i < Block::num_chunks; ++i) {
            const uint32_t row = rows.begin + Block::row_of(i);
            const bool exists = row < rows.end;  //~ rows_of_block_exist
            uint8_t* const quantized = static_cast<uint8_t*>(args.quantized) +
                                       uint64_t{row} * quantized_row_bytes(row_chunks);
            // Behind the last chunk nothing is stored.
            store_quantized(quantized, row_chunks,
                            exists ? first_column / values_per_chunk : row_chunks, chunks[i]);
        }
    }
    const FloatScale<false> scale(Block::largest(chunks));
    const uint64_t first = uint64_t{block_idx} * num_column_blocks + column_block;
    if (threadIdx.x == 0) args.scales[first] = scale.scale;  //~ scale_of_columns
    Block::Bytes bytes;
    Block::quantize(chunks, scale.factor, bytes);
    Block::store_transposed(bytes,
                            static_cast<uint8_t*>(args.columns) + first * Block::size * Block::size,
                            Block::size, Block::size);
}

}  // namespace deep_moe
