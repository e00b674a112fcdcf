// From a Linear1 accumulator to Linear2's input: bias, activation, requantization to E4M3 with one
// scale per 32 values, store to the pool, and the arrival bit that lets Linear2 start. The output
// is BF16 if tokens have no scales, and E2M1 with one scale per 16 values if tokens are E2M1.
//
// The block's 128 weight rows are 64 gate/up pairs in runs of 8 gates and 8 ups, so a thread finds
// a value's gate and up in its own registers. A warp makes 16 values per token. As E2M1 these share
// a scale. As E4M3 the 32 values of two neighbouring warps share one. For E2M1 the first run of 16
// pairs has the even ones and the second run the odd ones, so a thread has the two values of a
// byte.
//
// Without a gate the block's 128 rows are 128 values, in two halves. Of each of its quadrant's 32
// rows a warp has 16 of the first half in the first 16, and then 16 of the second half. So a half
// is stored as a whole block is with a gate.
//
// Rows of a stored tile behind the last valid token are zero or leftovers of the accumulator. They
// lie in the block's own padding, which nothing that matters reads.
#pragma once

#include "deep_moe/activations/apply_activation.cuh"
#include "deep_moe/experts/sm100/epilogue_warp.cuh"
#include "deep_moe/experts/sm100/kernel_args.cuh"
#include "deep_moe/experts/sm100/row_biases.cuh"
#include "deep_moe/experts/sm100/row_factors.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/formats/nvfp4.cuh"
#include "deep_moe/formats/quantize.cuh"
#include "deep_moe/formats/sm100_scale_layout.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/ptx/atomics.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/stmatrix.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"

namespace deep_moe::sm100 {

// What one thread makes of 8 tokens: two values of each of its two tokens.
struct ActivatedAtom {
    // [value lane/4 + 8*i of the warp's 16, or of E2M1 2*(lane/4) + i][token 2*(lane%4) + t]
    float values[2][2];
    // Per token, if there are scales: bits of the largest magnitude among the warp's 16 values.
    uint32_t amax[2];
};

__device__ __forceinline__ void find_maxima(ActivatedAtom& atom) {
#pragma unroll
    for (uint32_t t = 0; t < 2; ++t) {
        uint32_t amax = max(magnitude_bits(atom.values[0][t]), magnitude_bits(atom.values[1][t]));
#pragma unroll
        for (uint32_t lane_mask = 4; lane_mask < warp_size; lane_mask *= 2) {
            amax = max(amax, __shfl_xor_sync(full_warp, amax, lane_mask));
        }
        atom.amax[t] = amax;
    }
}

// Of each of the thread's two tokens: factor, of what sums are multiplied by, and routing weight.
struct TokenPair {
    float2 factors{1.0f, 1.0f};
    float2 topk_weights{1.0f, 1.0f};
};

// The same of one token; each lane has one of a tile's.
struct LaneToken {
    float factor = 1.0f;
    float topk_weight = 1.0f;
};

// half: of the block's values, without a gate.
template <class Config>
__device__ __forceinline__ ActivatedAtom activated_atom(const Accumulator& accumulator,
                                                        uint32_t token, const TokenPair& tokens,
                                                        const RowFactors& factors,
                                                        const RowBiases& biases, uint32_t half) {
    using Biases = typename Config::Biases;
    ActivatedAtom atom;
    if constexpr (Config::Activation::has_gate) {
        float rows[2][4];
        accumulator.load(token, rows);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const float (&bias)[2] = biases.values[i];
            const float (&factor)[2] = factors.values[i];
            //~ fp4_token_factor
            atom.values[i][0] = apply_activation<Config>(
                Biases::linear1(rows[i][0], tokens.factors.x * factor[0], bias[0]),
                Biases::linear1(rows[i][2], tokens.factors.x * factor[1], bias[1]),
                Biases::linear1_weight(tokens.topk_weights.x));
            atom.values[i][1] = apply_activation<Config>(
                Biases::linear1(rows[i][1], tokens.factors.y * factor[0], bias[0]),
                Biases::linear1(rows[i][3], tokens.factors.y * factor[1], bias[1]),
                Biases::linear1_weight(tokens.topk_weights.y));
        }
    } else {
        float rows[1][4];
        accumulator.load_half(token, half, rows);
        // Chosen so, and not by an index, they stay in registers.
        const bool is_second = half != 0;
        const auto of_half = [&](const float (&values)[2][2], uint32_t u) {
            return is_second ? values[1][u] : values[0][u];
        };
        const float bias[2] = {of_half(biases.values, 0), of_half(biases.values, 1)};
        const float factor[2] = {of_half(factors.values, 0), of_half(factors.values, 1)};
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            const float of_token = t == 0 ? tokens.factors.x : tokens.factors.y;
            const float2 activated = apply_activation_to_two<Config>(
                Biases::linear1(rows[0][t], of_token * factor[0], bias[0]),
                Biases::linear1(rows[0][2 + t], of_token * factor[1], bias[1]),
                Biases::linear1_weight(t == 0 ? tokens.topk_weights.x : tokens.topk_weights.y));
            atom.values[0][t] = activated.x;
            atom.values[1][t] = activated.y;
        }
    }
    if constexpr (Config::Weights::has_scales) find_maxima(atom);
    return atom;
}

// The atom in E4M3, in stmatrix order: value lane/4 of both tokens, then value lane/4 + 8.
__device__ __forceinline__ uint32_t quantize_atom(const ActivatedAtom& atom, float factor0,
                                                  float factor1) {
    const uint32_t low =
        ptx::cvt_rn_satfinite_e4m3x2_f32(atom.values[0][1] * factor1, atom.values[0][0] * factor0);
    const uint32_t high =
        ptx::cvt_rn_satfinite_e4m3x2_f32(atom.values[1][1] * factor1, atom.values[1][0] * factor0);
    return low | high << 16;
}

// The 32-byte, the 64-byte and the 128-byte swizzle of tensor copies, on absolute shared-memory
// addresses.
__device__ __forceinline__ uint32_t swizzle_32b(uint32_t address) {
    return address ^ ((address >> 3) & 0x10);  //~ fp4_swizzle
}
__device__ __forceinline__ uint32_t swizzle_64b(uint32_t address) {
    return address ^ ((address >> 3) & 0x30);  //~ swizzle
}
__device__ __forceinline__ uint32_t swizzle_128b(uint32_t address) {
    return address ^ ((address >> 3) & 0x70);  //~ bf16_swizzle
}

template <class Config>
class L1Epilogue {
    using Smem = SharedMemory<Config>;
    using Warp = EpilogueWarp<Config>;
    static constexpr bool has_scales = Config::Weights::has_scales;
    static constexpr bool is_fp4 = Config::Weights::values_per_element == 2;
    static constexpr bool has_token_factors = has_scales && Config::Weights::has_factors;
    // Of a block's values, as many as half of its rows are stored together.
    static constexpr uint32_t num_parts = Config::Activation::has_gate ? 1 : 2;
    static constexpr uint32_t values_per_part = Config::block_n / 2;
    static_assert(Smem::l1_output_tile_bytes % (8 * Smem::l1_output_row_bytes) == 0,
                  "a tile is whole patterns of the swizzle");

 public:
    __device__ L1Epilogue(const KernelArgs& args, const Smem& smem, const SymmBuffer<Config>& local,
                          const Warp& warp)
        : args_(args), smem_(smem), local_(local), warp_(warp) {}

    // Whether a block has no values, as that of a CTA behind an odd last n-block. No block waits
    // for it, so it must not read its tokens' data, which may be released before it is done.
    static __device__ bool is_idle(const Block& block) {
        constexpr uint32_t num_n_blocks = Linear<Config, Phase::linear1>::num_n_blocks;
        return num_n_blocks % Config::cluster_size != 0 && block.phase == Phase::linear1 &&
               block.n_block_idx == num_n_blocks;
    }

    // Of the warp's first tile. An idle block may have none any more.
    __device__ LaneToken load_first_token(const Block& block) const {
        return is_idle(block) ? LaneToken{} : load_token(block, warp_.first_token(block));
    }

    // All epilogue warps. first_token: of this block.
    __device__ void run(const Block& block, const Accumulator& accumulator,
                        const RowFactors& factors, const RowBiases& biases,
                        const LaneToken& first_token) const {
        if (is_idle(block)) {
            accumulator.release();
            return;
        }
        const uint32_t num_tiles = warp_.num_tiles(block);
        if (num_tiles == 0) accumulator.release();
        LaneToken next = first_token;
#pragma unroll 1  // each part is long
        for (uint32_t part_idx = 0; part_idx < num_parts; ++part_idx) {
            for (uint32_t tile_idx = 0; tile_idx < num_tiles; ++tile_idx) {
                const uint32_t token = warp_.first_token(block) + tile_idx * Config::store_block_m;
                // The next tile's come while this one is computed. Behind the last tile, that is
                // the first one's: what is read for nothing is this warp's own.
                const LaneToken lane_token = next;
                const uint32_t next_idx = tile_idx + 1 < num_tiles ? tile_idx + 1 : 0;
                next =
                    load_token(block, warp_.first_token(block) + next_idx * Config::store_block_m);
                ActivatedAtom atoms[Warp::atoms_per_tile];
                //~ l1_computed
                compute_tile(block, accumulator, token, lane_token, factors, biases, part_idx,
                             atoms);
                if (part_idx + 1 == num_parts && tile_idx + 1 == num_tiles) {
                    accumulator.release();  //~ l1_released
                }
                const uint32_t slot = (part_idx * num_tiles + tile_idx) % Smem::num_store_slots;
                //~ part_stored
                store_tile(block, token, slot, num_parts * block.n_block_idx + part_idx, atoms);
            }
        }
        publish(block);
    }

 private:
    __device__ bool issues_stores() const { return warp_.quadrant() == 0 && ptx::elect_sync(); }

    // Of tokens from this row of the pool on.
    __device__ const void* token_factors(uint32_t row) const {
        if constexpr (Config::Weights::has_unit_scales) {
            return local_.l1_token_sf(0, row);
        } else {
            return local_.l1_token_factors(row);
        }
    }

    // Of the tile that begins with this token, the lane's token: one trip to L2 for all of them.
    // Lanes behind the last valid row have the last one's.
    __device__ LaneToken load_token(const Block& block, uint32_t token) const {
        static_assert(Config::store_block_m <= warp_size, "a tile has a token for each lane");
        LaneToken lane_token;
        if (block.num_valid_rows == 0) return lane_token;
        const uint32_t row = PoolRing<Config>::first_row(block.pool_block_idx) +
                             min(token + warp_.lane_idx, block.num_valid_rows - 1);
        if constexpr (has_token_factors) {
            lane_token.factor = *static_cast<const float*>(token_factors(row));
        }
        if constexpr (!weighs_behind_linear2<Config>) {
            lane_token.topk_weight = *local_.l1_topk_weights(row);
        }
        return lane_token;
    }

    // The thread's two tokens of the atom that begins `offset` tokens into the tile. Whole warp.
    __device__ __forceinline__ TokenPair tokens_of_atom(const LaneToken& lane_token,
                                                        uint32_t offset) const {
        const uint32_t lane = offset + 2 * (warp_.lane_idx % 4);
        const auto pair_of = [&](float value) {
            return float2{__shfl_sync(full_warp, value, lane),
                          __shfl_sync(full_warp, value, lane + 1)};
        };
        TokenPair tokens;
        if constexpr (has_token_factors) tokens.factors = pair_of(lane_token.factor);
        if constexpr (!weighs_behind_linear2<Config>) {
            tokens.topk_weights = pair_of(lane_token.topk_weight);
        }
        return tokens;
    }

    // Values of one tile, and their maxima into the exchange buffer.
    __device__ void compute_tile(const Block& block, const Accumulator& accumulator, uint32_t token,
                                 const LaneToken& lane_token, const RowFactors& factors,
                                 const RowBiases& biases, uint32_t part_idx,
                                 ActivatedAtom (&atoms)[Warp::atoms_per_tile]) const {
#pragma unroll
        for (uint32_t i = 0; i < Warp::atoms_per_tile; ++i) {
            const uint32_t offset = i * tokens_per_atom;
            if (token + offset < block.num_valid_rows) {
                atoms[i] = activated_atom<Config>(accumulator, token + offset,
                                                  tokens_of_atom(lane_token, offset), factors,
                                                  biases, part_idx);
            } else {
                atoms[i] = {};
            }
            if constexpr (has_scales && !is_fp4) {
                const uint32_t exchange = smem_.amax_exchange(warp_.warp_idx);
                if (warp_.lane_idx < 4) {
                    ptx::st_shared_v2(exchange + (offset + 2 * warp_.lane_idx) * sizeof(uint32_t),
                                      {atoms[i].amax[0], atoms[i].amax[1]});
                }
            }
        }
    }

    // output_idx: which part of all the layer's output.
    __device__ void store_tile(const Block& block, uint32_t token, uint32_t slot,
                               uint32_t output_idx,
                               const ActivatedAtom (&atoms)[Warp::atoms_per_tile]) const {
        const uint32_t staging = smem_.l1_output(slot, warp_.warpgroup_idx());

        // The store that used this slot two tiles ago must have read it. Behind the barrier all
        // maxima of the tile are there, too.
        //~ l1_slot_free
        if (issues_stores()) ptx::cp_async_bulk_wait_group_read<Smem::num_store_slots - 1>();
        __syncwarp();
        warp_.sync_warpgroup();  //~ l1_maxima_there
        if constexpr (is_fp4) {
            quantize_tile_to_fp4(block, token, staging, output_idx, atoms);
        } else if constexpr (has_scales) {
            quantize_tile(block, token, staging, output_idx, atoms);
        } else {
            round_tile(staging, atoms);
        }
        // All of the tile must be written before it is stored, and all maxima read before the next
        // tile's are written.
        ptx::fence_proxy_async_shared_cta();  //~ l1_tile_fence
        warp_.sync_warpgroup();               //~ l1_tile_written
        if (issues_stores()) {
            ptx::cp_async_bulk_tensor_2d_global_shared(
                &args_.l1_output, staging,
                output_idx * (values_per_part / Config::Weights::values_per_element),
                PoolRing<Config>::first_row(block.pool_block_idx) + token);
            ptx::cp_async_bulk_commit_group();
        }
        __syncwarp();
    }

    // Into the staging tile in E4M3, and the scales to the pool.
    __device__ void quantize_tile(const Block& block, uint32_t token, uint32_t staging,
                                  uint32_t output_idx,
                                  const ActivatedAtom (&atoms)[Warp::atoms_per_tile]) const {
        const uint32_t neighbour = smem_.amax_exchange(warp_.warp_idx ^ 1);  //~ l1_neighbour
#pragma unroll
        for (uint32_t i = 0; i < Warp::atoms_per_tile; ++i) {
            const uint32_t offset = i * tokens_per_atom;
            const uint2 others = ptx::ld_shared_v2(neighbour + (offset + 2 * (warp_.lane_idx % 4)) *
                                                                   sizeof(uint32_t));
            const uint32_t amax[2] = {max(atoms[i].amax[0], others.x),
                                      max(atoms[i].amax[1], others.y)};
            const uint32_t scale_bytes[2] = {e4m3_scale_byte(amax[0]), e4m3_scale_byte(amax[1])};
            const uint32_t row = offset + warp_.lane_idx % tokens_per_atom;
            ptx::stmatrix_m16n8_x1_trans_b8(
                swizzle_64b(staging + row * Smem::l1_output_row_bytes + warp_.quadrant() * 16),
                quantize_atom(atoms[i], e4m3_factor(amax[0], scale_bytes[0]),
                              e4m3_factor(amax[1], scale_bytes[1])));
            store_scales(block, token + offset, output_idx, scale_bytes);
        }
    }

    // Into the staging tile in E2M1: a warp's 16 values of a token are 8 bytes, of which a thread
    // has one for each of its two tokens. It gives the one to its neighbour along K, who has the
    // other half of the same 16 bits, and so has two bytes of one token.
    __device__ void quantize_tile_to_fp4(const Block& block, uint32_t token, uint32_t staging,
                                         uint32_t output_idx,
                                         const ActivatedAtom (&atoms)[Warp::atoms_per_tile]) const {
        const uint32_t place = warp_.lane_idx / 4;  // of the thread's byte among 8
        const bool is_odd = place % 2 != 0;
#pragma unroll
        for (uint32_t i = 0; i < Warp::atoms_per_tile; ++i) {
            const uint32_t offset = i * tokens_per_atom;
            const float (&values)[2][2] = atoms[i].values;
            const Fp4Groups groups(atoms[i].amax[0], atoms[i].amax[1],
                                   1.0f / fp4_linear2_scale);  //~ fp4_l1_groups
            uint32_t bytes[2];
#pragma unroll
            for (uint32_t t = 0; t < 2; ++t) {
                bytes[t] = ptx::cvt_rn_satfinite_e2m1x2_f32(values[1][t] * groups.factors[t],
                                                            values[0][t] * groups.factors[t]);
            }
            const uint32_t others =
                __shfl_xor_sync(full_warp, is_odd ? bytes[0] : bytes[1], 4);  //~ fp4_neighbour
            const uint32_t both = is_odd ? others | bytes[1] << 8 : bytes[0] | others << 8;
            const uint32_t row = offset + 2 * (warp_.lane_idx % 4) + place % 2;
            ptx::st_shared_u16(swizzle_32b(staging + row * Smem::l1_output_row_bytes +
                                           warp_.quadrant() * 8 + place / 2 * 2),
                               static_cast<uint16_t>(both));
            store_fp4_scales(block, token + offset, output_idx, groups.scale_bytes);
        }
    }

    // Into the staging tile in BF16: a warp's 16 values of a token are two chunks of 16 bytes.
    __device__ void round_tile(uint32_t staging,
                               const ActivatedAtom (&atoms)[Warp::atoms_per_tile]) const {
#pragma unroll
        for (uint32_t i = 0; i < Warp::atoms_per_tile; ++i) {
            const uint32_t row = i * tokens_per_atom + warp_.lane_idx % tokens_per_atom;
            const uint32_t chunk_idx = warp_.quadrant() * 2 + warp_.lane_idx / tokens_per_atom % 2;
            const float (&values)[2][2] = atoms[i].values;
            ptx::stmatrix_m8n8_x2_trans_b16(
                swizzle_128b(staging + row * Smem::l1_output_row_bytes + chunk_idx * sizeof(uint4)),
                ptx::cvt_rn_bf16x2_f32(values[0][1], values[0][0]),
                ptx::cvt_rn_bf16x2_f32(values[1][1], values[1][0]));
        }
    }

    // Scales of 8 tokens: a byte each of the scale word that four neighbouring groups share. Both
    // warps of a group know them, the even one writes.
    __device__ void store_scales(const Block& block, uint32_t token, uint32_t output_idx,
                                 const uint32_t (&scale_bytes)[2]) const {
        if (warp_.warp_idx % 2 != 0 || warp_.lane_idx >= 4) return;
        const uint32_t group_idx = output_idx * 2 + warp_.quadrant() / 2;
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            const uint32_t row = token + 2 * warp_.lane_idx + t;
            if (row >= block.num_valid_rows) continue;
            uint32_t* word = local_.l2_token_sf(
                group_idx / 4, sf_pool_token_idx<Config>(block.pool_block_idx, row));
            reinterpret_cast<uint8_t*>(word)[group_idx % 4] = scale_bytes[t];  //~ l1_scale_byte
        }
    }

    // The same of groups of 16, one of each warp: the four of a part share a scale word.
    __device__ void store_fp4_scales(const Block& block, uint32_t token, uint32_t output_idx,
                                     uint16_t scale_bytes) const {
        if (warp_.lane_idx >= 4) return;
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            const uint32_t row = token + 2 * warp_.lane_idx + t;
            if (row >= block.num_valid_rows) continue;
            uint32_t* word = local_.l2_token_sf(
                output_idx, sf_pool_token_idx<Config>(block.pool_block_idx, row));
            reinterpret_cast<uint8_t*>(word)[warp_.quadrant()] =
                static_cast<uint8_t>(scale_bytes >> 8 * t);  //~ fp4_scale_byte
        }
    }

    // Every warp's scales and tiles must have reached global memory before the bit says so.
    __device__ void publish(const Block& block) const {
        if (issues_stores()) ptx::cp_async_bulk_wait_group<0>();  //~ l1_stored
        __syncwarp();
        warp_.sync_all();  //~ l1_all_stored
        if (warp_.warp_idx == 0 && ptx::elect_sync()) {
            ptx::red_or_release_gpu(
                local_.l2_arrival_mask(block.pool_block_idx, block.n_block_idx / 64),
                uint64_t{1} << (block.n_block_idx % 64));  //~ l1_published
        }
        __syncwarp();
    }

    const KernelArgs& args_;
    const Smem& smem_;
    const SymmBuffer<Config>& local_;
    const Warp& warp_;
};

}  // namespace deep_moe::sm100
