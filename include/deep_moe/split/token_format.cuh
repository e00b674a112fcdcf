// How a token travels: as E4M3 with a scale per group of values, or as it is. A lane makes a chunk
// of 16 bytes; scales travel as words, each an FP32 number of one group or four UE8M0 bytes of 32
// values each. What is not quantized is BF16, or FP16 with Config::is_fp16.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/formats/bf16_chunk.cuh"
#include "deep_moe/formats/float_scale.cuh"
#include "deep_moe/formats/fp16_chunk.cuh"
#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe {

template <class Config>
struct TokenFormat {
    static constexpr bool has_float_scales = Config::values_per_word == Config::values_per_scale;
    static_assert(Config::values_per_scale == 0 || has_float_scales ||
                      (Config::values_per_scale == 32 && Config::values_per_word == 128),
                  "a word of scales has an FP32 number or four bytes");
    static_assert(Config::hidden % 128 == 0);
    static_assert(Config::values_per_scale == 0 || Config::hidden % Config::values_per_word == 0);
    static_assert(!Config::packs_scales || (Config::rounds_scales && Config::hidden % 512 == 0),
                  "only the exponents of powers of two are packed, four in a word");
    static constexpr bool is_quantized = Config::values_per_scale != 0;
    static constexpr uint32_t chunk_bytes = 16;
    static constexpr uint32_t row_bytes = Config::hidden * (is_quantized ? 1 : 2);
    static constexpr uint32_t num_chunks = row_bytes / chunk_bytes;
    static constexpr uint32_t num_loads = is_quantized ? 2 : 1;  // of 16 bytes of input, per chunk
    static constexpr uint32_t values_per_word = is_quantized ? Config::values_per_word : 128;
    static constexpr uint32_t num_scale_words = is_quantized ? Config::hidden / values_per_word : 0;
    static constexpr uint32_t scales_per_received_word = Config::packs_scales ? 4 : 1;
    static constexpr uint32_t num_received_words = num_scale_words / scales_per_received_word;
    static constexpr uint32_t chunks_per_scale_word = values_per_word / chunk_bytes;
    static_assert(chunks_per_scale_word >= 1 && chunks_per_scale_word <= warp_size,
                  "lanes of a warp share a group");

    // A lane's part of a token.
    struct Chunk {
        uint4 values;
        uint32_t scale_word;  // the same in all lanes whose chunks it belongs to
    };

    static __device__ uint32_t amax_bits_of(uint4 loaded) {
        return Config::is_fp16 ? fp16_chunk_amax_bits(loaded) : chunk_amax_bits(loaded);
    }
    static __device__ uint2 quantized(uint4 loaded, float factor) {
        return Config::is_fp16 ? quantize_fp16_chunk(loaded, factor)
                               : quantize_chunk(loaded, factor);
    }

    // All 32 lanes, with neighbouring chunks, the first a multiple of 32. `loaded`: the values, as
    // they come; zeros where there is no chunk.
    static __device__ Chunk make_chunk(const uint4 (&loaded)[num_loads]) {
        if constexpr (!is_quantized) {
            return {loaded[0], 0};
        } else {
            constexpr uint32_t lanes_per_scale = Config::values_per_scale / chunk_bytes;
            const uint32_t amax_bits = group_maximum<lanes_per_scale>(
                max(amax_bits_of(loaded[0]), amax_bits_of(loaded[1])));
            float factor;
            uint32_t scale_word;
            if constexpr (has_float_scales) {
                const FloatScale<Config::rounds_scales> scale(amax_bits);
                factor = scale.factor;
                scale_word = __float_as_uint(scale.scale);
            } else {
                const uint32_t scale_byte = e4m3_scale_byte(amax_bits);
                factor = e4m3_factor(amax_bits, scale_byte);
                scale_word = scale_byte
                             << ptx::lane_idx() / lanes_per_scale % 4 * 8;  //~ byte_place
                scale_word |= __shfl_xor_sync(full_warp, scale_word, lanes_per_scale);
                scale_word |= __shfl_xor_sync(full_warp, scale_word, 2 * lanes_per_scale);
            }
            const uint2 low = quantized(loaded[0], factor);
            const uint2 high = quantized(loaded[1], factor);
            return {{low.x, low.y, high.x, high.y}, scale_word};
        }
    }

    // A word of a token's scales as the experts get it: one that travelled, or the exponents of
    // four of them: that of an FP32 power of two is its UE8M0 byte.
    static __device__ uint32_t received_word(const uint32_t* travelled, uint32_t column) {
        if constexpr (!Config::packs_scales) {
            return travelled[column];
        } else {
            uint32_t word = 0;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                word |= travelled[4 * column + i] >> 23 << 8 * i;  //~ exponent_packed
            }
            return word;
        }
    }
};

}  // namespace deep_moe
