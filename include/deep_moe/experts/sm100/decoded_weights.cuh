// What weights of 4 bits that are decoded to BF16 beside BF16 tokens have in common on SM100. They
// are the A operand of the MMAs, which takes it from tensor memory: there a thread stores what it
// has decoded in registers, and no swizzle, no bank and no fence of another proxy comes in between.
//
// A block is 128 rows x 64 k as the host laid it out (deep_moe/targets/sm100/decoded.py): first the
// codes, [chunk of 32 along k][row][16 bytes], then what multiplies groups of them, [row][group].
// So the 32 threads of a warp, which have a row each, read consecutive bytes.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/dispatch/plain_pull_policy.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe::sm100 {

constexpr uint32_t num_decode_warps = 8;  // two warpgroups, which take k-blocks in turn
constexpr uint32_t chunks_per_k_block = 2;
constexpr uint32_t decoded_row_columns = 32;  // 64 BF16

// Blocks of decoded weights that a CTA has in tensor memory. A stage's MMAs are over before it is
// loaded again, so that more slots than stages would be of no use.
template <class Config>
inline constexpr uint32_t num_decoded_slots = 1;
template <class Config>
    requires Config::Weights::is_decoded
inline constexpr uint32_t num_decoded_slots<Config> =
    min(Config::Tmem::decoded_weights_dim0, Config::num_stages);

// Column of a slot.
template <class Config>
__device__ __forceinline__ uint32_t decoded_slot(uint32_t tmem, uint32_t slot) {
    static_assert(Config::Tmem::decoded_weights_stride == decoded_row_columns);
    return tmem + Config::Tmem::decoded_weights_column + slot * decoded_row_columns;
}

// Pairs of BF16, neighbours along k in the lower half first, of a chunk.
using ChunkPairs = uint32_t[decoded_row_columns / chunks_per_k_block];

// Of values of 4 bits, 8 of them in a word. `multiplier` says of a word's number in the k-block,
// which the compiler has to know, what multiplies its values, twice.
template <class ToBf16>
class WordDecoder {
 public:
    __device__ __forceinline__ void decode_chunk(const uint4& chunk, ChunkPairs& pairs,
                                                 const auto& multiplier) const {
        const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            typename ToBf16::Fragment made;
            values_.decode(words[i], multiplier(i), made);
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) pairs[4 * i + j] = made[j];
        }
    }

 private:
    ToBf16 values_;
};

// The policy of such weights. Decoder: what makes BF16 of a row's chunks.
//   multiplier_bytes, load_multipliers: what a row has in a block, and how it is loaded.
//   decode: chunk `i` of a k-block, which the compiler has to know.
template <class OfDecoder>
struct Bf16DecodedWeights {
    using Decoder = OfDecoder;

    // Of products, tokens, and Linear1's output.
    static constexpr bool has_scales = false;
    // Of rows, behind the products.
    static constexpr bool has_factors = true;
    static constexpr bool has_unit_scales = false;
    static constexpr bool is_decoded = true;
    static constexpr uint32_t values_per_element = 1;

    static constexpr uint32_t rows = 128;
    static constexpr uint32_t value_bytes = chunks_per_k_block * rows * sizeof(uint4);
    static constexpr uint32_t block_bytes = value_bytes + rows * Decoder::multiplier_bytes;
    // A block is so many rows of 256 bytes of the weights' tensor map.
    static constexpr uint32_t num_map_rows = block_bytes / 256;

    // What a load counts on its barrier for so many bytes of shared memory.
    static constexpr uint32_t loaded_bytes(uint32_t smem_bytes) { return smem_bytes; }

    template <class Config>
    using PullPolicy = PlainPullPolicy<Config>;
};

}  // namespace deep_moe::sm100
