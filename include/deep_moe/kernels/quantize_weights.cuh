// Weights [experts][K][N], or with `is_by_columns` [experts][N][K], as E4M3 [experts][N][K], which
// is how the tensor cores take them, with a float32 scale for every 128 x 128 of a matrix.
//
// Grid: a CTA per block of 128 x 128. Its values stay in registers between the search for the
// largest and the quantizing. On their way to [N][K] they go through shared memory.
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

// One thread's part of a block: with is_by_columns 8 neighbours along K of every 16th column,
// otherwise 8 neighbours along N of 4 neighbouring k, and of the 4 that lie 64 behind.
template <class Config>
class WeightBlock {
    static constexpr uint32_t size = 128;
    static constexpr uint32_t chunks_per_row = size / values_per_chunk;
    static constexpr uint32_t num_chunks = size * chunks_per_row / Config::num_threads;
    static constexpr uint32_t num_warps = Config::num_threads / warp_size;
    static constexpr uint32_t words_per_row = size / 4;
    static_assert(Config::num_threads == 256);

 public:
    __device__ explicit WeightBlock(const QuantizeWeightsArgs& args)
        : args_(args),
          k_block_(blockIdx.x % num_k_blocks()),
          n_block_(blockIdx.x / num_k_blocks() % num_n_blocks()),
          expert_(blockIdx.x / num_k_blocks() / num_n_blocks()),
          chunk_(threadIdx.x % chunks_per_row),
          row_(threadIdx.x / chunks_per_row) {}

    __device__ __forceinline__ void run() {
        uint4 chunks[num_chunks];
        load(chunks);
        const FloatScale<false> scale(largest(chunks));
        if (threadIdx.x == 0) {
            const uint64_t block = uint64_t{expert_} * num_n_blocks() + n_block_;
            args_.scales[block * num_k_blocks() + k_block_] = scale.scale;  //~ block_scale
        }
        if constexpr (Config::is_by_columns) {
            store_columns(chunks, scale.factor);
        } else {
            store_transposed(chunks, scale.factor);
        }
    }

 private:
    __device__ uint32_t num_k_blocks() const { return args_.num_values / size; }
    __device__ uint32_t num_n_blocks() const { return ceil_div(args_.num_columns, size); }
    // Bytes of the result, values of the source with is_by_columns.
    __device__ uint64_t in_columns(uint32_t column, uint32_t k) const {
        return (uint64_t{expert_} * args_.num_columns + n_block_ * size + column) *
                   args_.num_values +
               k_block_ * size + k;
    }
    __device__ bool has_column(uint32_t column) const {
        return n_block_ * size + column < args_.num_columns;  //~ column_exists
    }
    // By rows, of chunk i.
    __device__ uint32_t k_of(uint32_t i) const { return row_ * 4 + i / 4 * 64 + i % 4; }

    __device__ __forceinline__ void load(uint4 (&chunks)[num_chunks]) const {
        const uint16_t* const weights = static_cast<const uint16_t*>(args_.weights);
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            chunks[i] = uint4{};
            if constexpr (Config::is_by_columns) {
                const uint32_t column = row_ + 16 * i;
                if (!has_column(column)) continue;
                chunks[i] = *reinterpret_cast<const uint4*>(
                    weights + in_columns(column, chunk_ * values_per_chunk));
            } else {
                const uint32_t column = chunk_ * values_per_chunk;
                if (!has_column(column)) continue;
                const uint64_t k = uint64_t{expert_} * args_.num_values + k_block_ * size + k_of(i);
                chunks[i] = *reinterpret_cast<const uint4*>(weights + k * args_.num_columns +
                                                            n_block_ * size + column);
            }
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

    __device__ __forceinline__ void store_columns(const uint4 (&chunks)[num_chunks],
                                                  float factor) const {
        uint8_t* const quantized = static_cast<uint8_t*>(args_.quantized);
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) {
            const uint32_t column = row_ + 16 * i;
            if (!has_column(column)) continue;
            *reinterpret_cast<uint2*>(quantized + in_columns(column, chunk_ * values_per_chunk)) =
                quantize_chunk(chunks[i], factor);
        }
    }

    __device__ __forceinline__ void store_transposed(const uint4 (&chunks)[num_chunks],
                                                     float factor) const {
        // A word more, so that neighbouring columns have other banks.
        __shared__ uint32_t words[size][words_per_row + 1];
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; i += 4) {
            uint32_t low[4];
            uint32_t high[4];
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                const uint2 bytes = quantize_chunk(chunks[i + j], factor);
                low[j] = bytes.x;
                high[j] = bytes.y;
            }
            transpose_bytes(low);
            transpose_bytes(high);
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t column = chunk_ * values_per_chunk + j;
                words[column][k_of(i) / 4] = low[j];
                words[column + 4][k_of(i) / 4] = high[j];
            }
        }
        __syncthreads();  //~ block_transposed
        uint8_t* const quantized = static_cast<uint8_t*>(args_.quantized);
        const uint32_t first_word = threadIdx.x % 8 * 4;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t column = threadIdx.x / 8 + 32 * i;
            if (!has_column(column)) continue;
            const uint32_t* const own = words[column] + first_word;
            *reinterpret_cast<uint4*>(quantized + in_columns(column, first_word * 4)) = {
                own[0], own[1], own[2], own[3]};
        }
    }

    const QuantizeWeightsArgs& args_;
    uint32_t k_block_;
    uint32_t n_block_;
    uint32_t expert_;
    uint32_t chunk_;
    uint32_t row_;
};

template <class Config>
__device__ __forceinline__ void quantize_weights(const QuantizeWeightsArgs& args) {
    WeightBlock<Config>(args).run();
}

}  // namespace deep_moe
