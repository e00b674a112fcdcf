// A block of 128 x 128 BF16 values that a CTA of 256 threads has in registers: its largest
// magnitude, and its bytes in transposed order, through shared memory.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/bf16_chunk.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/permute.cuh"
#include "deep_moe/ptx/warp.cuh"

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

// A thread has 8 neighbouring columns of 4 neighbouring rows, and of the 4 rows that lie 64 behind.
struct ValueBlock {
    static constexpr uint32_t size = 128;
    static constexpr uint32_t num_threads = 256;
    static constexpr uint32_t chunks_per_row = size / values_per_chunk;
    static constexpr uint32_t num_chunks = size * chunks_per_row / num_threads;

    using Chunks = uint4[num_chunks];
    using Bytes = uint2[num_chunks];

    // Of this thread's chunk i, in the block.
    static __device__ __forceinline__ uint32_t row_of(uint32_t i) {
        return threadIdx.x / chunks_per_row * 4 + i / 4 * 64 + i % 4;
    }
    // Of all of its chunks, in the block.
    static __device__ __forceinline__ uint32_t first_column() {
        return threadIdx.x % chunks_per_row * values_per_chunk;
    }

    // Bits of the block's largest magnitude. All threads.
    static __device__ __forceinline__ uint32_t largest(const Chunks& chunks) {
        constexpr uint32_t num_warps = num_threads / warp_size;
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

    static __device__ __forceinline__ void quantize(const Chunks& chunks, float factor,
                                                    Bytes& bytes) {
#pragma unroll
        for (uint32_t i = 0; i < num_chunks; ++i) bytes[i] = quantize_chunk(chunks[i], factor);
    }

    // The 128 values of each column side by side, of so many columns, `stride` bytes from one to
    // the next: put(place, 16 of them) for all. All threads, once.
    template <class Put>
    static __device__ __forceinline__ void put_transposed(const Bytes& bytes, uint8_t* transposed,
                                                          uint64_t stride, uint32_t num_columns,
                                                          const Put& put) {
        // A word more, so that neighbouring columns have other banks.
        __shared__ uint32_t words[size][size / 4 + 1];
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
        const uint32_t first_word = threadIdx.x % 8 * 4;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t column = threadIdx.x / 8 + 32 * i;
            if (column >= num_columns) continue;  //~ transposed_columns
            const uint32_t* const own = words[column] + first_word;
            put(transposed + column * stride + first_word * 4,
                uint4{own[0], own[1], own[2], own[3]});
        }
    }

    static __device__ __forceinline__ void store_transposed(const Bytes& bytes, uint8_t* transposed,
                                                            uint64_t stride, uint32_t num_columns) {
        put_transposed(bytes, transposed, stride, num_columns, [](uint8_t* place, uint4 words) {
            *reinterpret_cast<uint4*>(place) = words;
        });
    }
};

}  // namespace deep_moe
