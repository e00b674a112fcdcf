// From a Linear2 accumulator to the result rows, mostly in the combine buffer of another rank: bias
// and with it the routing weight, rounding to BF16, weight rows into token rows through shared
// memory, and each valid token's 128 values stored.
#pragma once

#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm100/epilogue_warp.cuh"
#include "deep_moe/experts/sm100/row_biases.cuh"
#include "deep_moe/experts/sm100/row_factors.cuh"
#include "deep_moe/experts/sm100/shared_memory.cuh"
#include "deep_moe/formats/nvfp4.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/layout/symm_buffer.cuh"
#include "deep_moe/layout/token_places.cuh"
#include "deep_moe/layout/token_source.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/stmatrix.cuh"

namespace deep_moe::sm100 {

template <class Config>
class L2Epilogue {
    using Smem = SharedMemory<Config>;
    using Warp = EpilogueWarp<Config>;
    using Biases = typename Config::Biases;
    static constexpr uint32_t lanes_per_row = Smem::l2_output_row_bytes / sizeof(uint4);
    static constexpr uint32_t rows_per_step = Warp::warpgroup_threads / lanes_per_row;
    static constexpr uint32_t num_steps = Config::store_block_m / rows_per_step;
    static constexpr uint32_t rows_per_warp_step = warp_size / lanes_per_row;
    static_assert(lanes_per_row == 16 && num_steps * rows_per_step == Config::store_block_m);
    // Rows that a warp writes of a block, for each of its lanes.
    static constexpr uint32_t num_warp_rows = Warp::max_tiles * num_steps * rows_per_warp_step;
    static constexpr uint32_t num_lane_rows = ceil_div(num_warp_rows, warp_size);

 public:
    // Where the rows that this warp writes come from; each lane has some. first_weight: routing
    // weight of the lane's token in the first tile, if sums are multiplied by it here.
    struct Sources {
        TokenSource of_lane[num_lane_rows];
        float first_weight;
    };

    __device__ L2Epilogue(const Smem& smem, const TokenPlaces<Config>& places, const Warp& warp)
        : smem_(smem), places_(places), warp_(warp) {}

    // Those of a block. Looked up early, because in a trip to L2 the warp could write a tile.
    // Behind the last valid row, those of the last one.
    __device__ Sources find_sources(const Block& block) const {
        Sources sources{};
        if (!exists(block)) return sources;
        const uint32_t first_row = PoolRing<Config>::first_row(block.pool_block_idx);
#pragma unroll
        for (uint32_t i = 0; i < num_lane_rows; ++i) {
            const uint32_t idx = i * warp_size + warp_.lane_idx;
            const uint32_t token = warp_.first_token(block) +
                                   idx / rows_per_warp_step * rows_per_step +
                                   warp_.quadrant() * rows_per_warp_step + idx % rows_per_warp_step;
            //~ l2_sources
            sources.of_lane[i] = *places_.local().token_src_metadata(
                first_row + min(token, block.num_valid_rows - 1));
        }
        if constexpr (weighs_behind_linear2<Config>) {
            sources.first_weight = load_weight(block, warp_.first_token(block));
        }
        return sources;
    }

    // All epilogue warps. Afterwards the staging tile may still be read by other warps: whoever
    // writes to it next syncs all epilogue warps first.
    __device__ void run(const Block& block, const Accumulator& accumulator,
                        const RowFactors& factors, const RowBiases& biases,
                        const Sources& sources) const {
        const uint32_t num_tiles = exists(block) ? warp_.num_tiles(block) : 0;  //~ l2_tiles
        if (num_tiles == 0) accumulator.release();
        uint64_t rows[num_lane_rows];
#pragma unroll
        for (uint32_t i = 0; i < num_lane_rows; ++i) {
            rows[i] = reinterpret_cast<uint64_t>(places_.result_row(sources.of_lane[i]) +
                                                 block.n_block_idx * Config::block_n);
        }
        float next_weight = sources.first_weight;
        for (uint32_t tile_idx = 0; tile_idx < num_tiles; ++tile_idx) {
            const uint32_t token = warp_.first_token(block) + tile_idx * Config::store_block_m;
            // The next tile's come while this one is computed; behind the last one nobody's.
            const float lane_weight = next_weight;
            if constexpr (weighs_behind_linear2<Config>) {
                //~ l2_next_weight
                next_weight = load_weight(block, token + Config::store_block_m);
            }
            //~ l2_tile_read
            if (tile_idx > 0) warp_.sync_warpgroup();  // the tile before has been read
            stage_tile(block, accumulator, token, lane_weight, factors, biases);
            if (tile_idx + 1 == num_tiles) accumulator.release();
            warp_.sync_warpgroup();  //~ l2_tile_staged
            write_tile(block, token, tile_idx, rows);
        }
    }

 private:
    // The CTA behind an odd last n-block only takes part in the MMAs.
    static __device__ bool exists(const Block& block) {
        return block.n_block_idx < Linear<Config, Phase::linear2>::num_n_blocks;
    }

    // A half-warp writes a row; row of this thread in step i of a tile.
    __device__ uint32_t row_of_step(uint32_t i) const {
        return i * rows_per_step + warp_.quadrant() * 2 + warp_.lane_idx / lanes_per_row;
    }

    // 16-byte chunk of a staged row. Chunks are permuted by row, so that neither the transposed
    // stores (8 rows, one chunk) nor the loads (one row, 8 chunks) meet on a bank.
    __device__ uint32_t chunk_address(uint32_t row, uint32_t chunk_idx) const {
        return smem_.l2_output(warp_.warpgroup_idx()) + row * Smem::l2_output_row_bytes +
               (chunk_idx ^ (row % 8)) * sizeof(uint4);
    }

    // lane_weight: routing weight of the lane's token of the tile.
    __device__ void stage_tile(const Block& block, const Accumulator& accumulator, uint32_t token,
                               float lane_weight, const RowFactors& factors,
                               const RowBiases& biases) const {
#pragma unroll
        for (uint32_t i = 0; i < Warp::atoms_per_tile; ++i) {
            const uint32_t offset = i * tokens_per_atom;
            if (token + offset >= block.num_valid_rows) break;
            float2 weights{1.0f, 1.0f};
            if constexpr (weighs_behind_linear2<Config>) {
                weights = weights_of_atom(lane_weight, offset);  //~ sm100_l2_weights
            }
            float rows[2][4];
            accumulator.load(token + offset, rows);
#pragma unroll
            for (uint32_t r = 0; r < 4; ++r) {
                const float bias = biases.values[r / 2][r % 2];
                const float factor = scaled(factors.values[r / 2][r % 2]);
                float (&pair)[4] = rows[r / 2];
                const uint32_t first = r % 2 * 2;
                pair[first] = weighed(pair[first], factor, bias, weights.x);
                pair[first + 1] = weighed(pair[first + 1], factor, bias, weights.y);
            }
            // Register pair j holds weight rows 8*j .. 8*j+7 of the warp's 32: one chunk.
            ptx::stmatrix_m8n8_x4_trans_b16(
                chunk_address(offset + warp_.lane_idx % 8,
                              warp_.quadrant() * 4 + warp_.lane_idx / 8),
                ptx::cvt_rn_bf16x2_f32(rows[0][1], rows[0][0]),
                ptx::cvt_rn_bf16x2_f32(rows[0][3], rows[0][2]),
                ptx::cvt_rn_bf16x2_f32(rows[1][1], rows[1][0]),
                ptx::cvt_rn_bf16x2_f32(rows[1][3], rows[1][2]));
        }
    }

    // A weight row's factor times what Linear2's input was divided by.
    static __device__ __forceinline__ float scaled(float factor) {
        return Config::Weights::values_per_element == 2 ? factor * fp4_linear2_scale : factor;
    }

    // A sum of products as it is stored.
    static __device__ __forceinline__ float weighed(float sum, float factor, float bias,
                                                    float topk_weight) {
        const float result = Biases::linear2(sum, factor, bias, topk_weight);
        constexpr bool is_weighed = Biases::exist || !weighs_behind_linear2<Config>;
        return is_weighed ? result : result * topk_weight;  //~ fp4_l2_weight
    }

    // Of the tile that begins with this token, the lane's token's: one trip to L2 for all of them.
    // Behind the last valid row, that of the last one.
    __device__ float load_weight(const Block& block, uint32_t token) const {
        static_assert(Config::store_block_m <= warp_size, "a tile has a token for each lane");
        const uint32_t row = PoolRing<Config>::first_row(block.pool_block_idx) +
                             min(token + warp_.lane_idx, block.num_valid_rows - 1);
        return *places_.local().l1_topk_weights(row);
    }

    // Of the thread's two tokens of the atom that begins `offset` tokens into the tile. Whole warp.
    __device__ float2 weights_of_atom(float lane_weight, uint32_t offset) const {
        const uint32_t lane = offset + 2 * (warp_.lane_idx % 4);
        return {__shfl_sync(full_warp, lane_weight, lane),
                __shfl_sync(full_warp, lane_weight, lane + 1)};
    }

    // This thread's 16 bytes of each row. rows: of the whole block, as `find_sources` has them.
    __device__ void write_tile(const Block& block, uint32_t token, uint32_t tile_idx,
                               const uint64_t (&rows)[num_lane_rows]) const {
#pragma unroll
        for (uint32_t i = 0; i < num_steps; ++i) {
            const uint32_t idx =
                (tile_idx * num_steps + i) * rows_per_warp_step + warp_.lane_idx / lanes_per_row;
            uint64_t row = rows[0];
#pragma unroll
            for (uint32_t k = 1; k < num_lane_rows; ++k) {
                row = idx / warp_size == k ? rows[k] : row;
            }
            row = __shfl_sync(full_warp, row, idx % warp_size);
            if (token + row_of_step(i) < block.num_valid_rows) {  //~ l2_valid_row
                reinterpret_cast<uint4*>(row)[warp_.lane_idx % lanes_per_row] = ptx::ld_shared_v4(
                    chunk_address(row_of_step(i), warp_.lane_idx % lanes_per_row));
            }
        }
    }

    const Smem& smem_;
    const TokenPlaces<Config>& places_;
    const Warp& warp_;
};

}  // namespace deep_moe::sm100
