// The stages that a CTA's operands go through, in shared memory, and the warps that fill them.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/products/args.cuh"
#include "deep_moe/products/product_tiles.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/tensor_copy.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/sync/ring_position.cuh"

namespace deep_moe {

// Without a limit: nothing outside of the cluster takes part but the copies, which end or fault.
__device__ __forceinline__ void await_phase(uint32_t barrier, uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
    }
}

// A stage is a k-block of the tile's columns (weights), then of its rows, each in rows of 128 bytes
// with the 128-byte swizzle. Behind all stages lie, for each, the factors of its products: for 128
// columns and each row the product of both scales. Then come each math warp's results of 16 rows,
// the headers of tiles, and the barriers:
//   full   "A stage is loaded." The loader arrives (1) with the stage's bytes, and the warp that
//          has stored its factors (1). The math warps wait; first phase 0.
//   empty  "A stage may be loaded." Each math warp of the cluster arrives when its products have
//          read the stage and it has read the factors; loaders of both CTAs wait, because a copy of
//          shared weights goes to both. The first round is granted.
template <class Config>
class OperandStages {
 public:
    // A row of results is all columns of a tile in BF16, or half of them in float32. From one row
    // to the next there are some bytes more, so that rows that are written at once have other
    // banks: two in BF16, four in float32.
    static constexpr uint32_t result_bytes = Config::block_n * sizeof(uint16_t);
    static constexpr uint32_t result_stride = result_bytes + (Config::y_bytes == 4 ? 32 : 64);

 private:
    static constexpr uint32_t columns_per_part = 128;  // which share the weights' scales
    static constexpr uint32_t num_parts = Config::block_n / columns_per_part;
    static constexpr uint32_t part_bytes = columns_per_part * Config::block_k;
    static constexpr uint32_t weight_bytes = num_parts * part_bytes;
    static constexpr uint32_t x_bytes = Config::block_m * Config::block_k;
    static constexpr uint32_t stage_bytes = weight_bytes + x_bytes;
    static constexpr uint32_t part_factor_bytes = Config::block_m * sizeof(float);
    static constexpr uint32_t stage_factor_bytes = num_parts * part_factor_bytes;
    static constexpr uint32_t num_slots = Config::num_stages + 1;
    static constexpr uint32_t header_bytes = 16;
    static constexpr uint32_t factors_offset = Config::num_stages * stage_bytes;
    static constexpr uint32_t results_offset =
        factors_offset + Config::num_stages * stage_factor_bytes;
    static constexpr uint32_t warp_result_bytes = 16 * (result_bytes + 64);
    static constexpr uint32_t headers_offset =
        results_offset + Config::num_math_warps * warp_result_bytes;
    static constexpr uint32_t barriers_offset = headers_offset + num_slots * header_bytes;
    static constexpr uint32_t num_full_arrivals = 2;
    static_assert(Config::block_k == 128, "a k-block is one row of the swizzle");
    static_assert(Config::block_m == 4 * warp_size, "a lane has the scales of 4 rows");
    static_assert(num_parts == 2, "each CTA of a cluster brings the columns of one part to both");
    static_assert(barriers_offset + Config::num_stages * 16 == Config::smem_bytes,
                  "smem_bytes is the stages, their factors and barriers, results and headers");

 public:
    using Ring = RingPosition<Config::num_stages>;
    // One slot more than stages: a header is stored when the tile's first stage is free. Then the
    // math warps have multiplied the tile num_stages before it, but perhaps not stored its results.
    using Slots = RingPosition<num_slots>;

    // What the math warps know of a tile; num_rows is 0 behind the last one.
    struct Header {
        uint32_t first_row;  // of y
        uint32_t num_rows;
        uint32_t first_column;
        uint32_t num_k_blocks;
    };

    __device__ explicit OperandStages(uint32_t shared_memory) : begin_(shared_memory) {}

    // One thread, before any other method.
    __device__ void init_barriers() const {
        for (uint32_t stage = 0; stage < Config::num_stages; ++stage) {
            ptx::mbarrier_init(full(stage), num_full_arrivals);  //~ product_full_init
            ptx::mbarrier_init(
                empty(stage),
                Config::cluster_size * Config::num_math_warps);  //~ product_empty_init
        }
        ptx::fence_mbarrier_init_release_cluster();
    }

    __device__ uint32_t weight(uint32_t stage, uint32_t part) const {
        return begin_ + stage * stage_bytes + part * part_bytes;
    }
    __device__ uint32_t x(uint32_t stage) const {
        return begin_ + stage * stage_bytes + weight_bytes;
    }
    // Floats, what products of each row and the part's columns are multiplied by.
    __device__ uint32_t factors(uint32_t stage, uint32_t part) const {
        return begin_ + factors_offset + stage * stage_factor_bytes + part * part_factor_bytes;
    }
    // A math warp's 16 rows of y.
    __device__ uint32_t results(uint32_t warp_idx) const {
        return begin_ + results_offset + warp_idx * warp_result_bytes;
    }
    __device__ Header header(uint32_t slot) const {
        const uint4 words = ptx::ld_shared_v4(header_address(slot));
        return {words.x, words.y, words.z, words.w};
    }

    __device__ bool is_loaded(const Ring& ring) const {
        return ptx::mbarrier_test_wait_parity(full(ring.stage), ring.parity);
    }
    __device__ void await_loaded(const Ring& ring) const {
        await_phase(full(ring.stage), ring.parity);
    }
    // Any lane of a math warp that has come together since it read the stage.
    __device__ void release(uint32_t stage, uint32_t lane_idx) const {
        if constexpr (Config::cluster_size == 1) {
            if (lane_idx == 0) ptx::mbarrier_arrive(empty(stage));
        } else if (lane_idx < Config::cluster_size) {
            //~ product_stage_released
            ptx::mbarrier_arrive_shared_cluster(ptx::mapa_shared_cluster(empty(stage), lane_idx));
        }
    }

    // One thread: all k-blocks of all tiles of the CTA.
    __device__ void load(const GroupedProductArgs& args) const {
        ProductTiles<Config> tiles(args);
        ProductTile tile;
        Ring ring;
        Slots slots;
        for (; tiles.next(tile); slots.advance()) {
            for (uint32_t k_block = 0; k_block < tile.num_k_blocks; ++k_block) {
                await_phase(empty(ring.stage), ring.parity ^ 1);  //~ product_stage_free
                if (k_block == 0) store_header(args, slots.stage, tile);
                ptx::mbarrier_arrive_expect_tx(full(ring.stage), stage_bytes);
                copy_rows(args, tile, k_block, ring.stage);
                copy_weights(args, tile, k_block, ring.stage);
                ring.advance();
            }
        }
        await_phase(empty(ring.stage), ring.parity ^ 1);
        store_header(args, slots.stage, {});
        for (uint32_t i = 0; i < num_full_arrivals; ++i) ptx::mbarrier_arrive(full(ring.stage));
    }

    // Whole warps: warp `idx` of num_scale_warps has every num_scale_warps-th k-block.
    __device__ void fill_factors(const GroupedProductArgs& args, uint32_t idx) const {
        const uint32_t lane_idx = ptx::lane_idx();
        const uint32_t num_column_blocks = ceil_div(args.num_columns, columns_per_part);
        ProductTiles<Config> tiles(args);
        ProductTile tile;
        Ring ring;
        uint32_t num_others = idx;  // k-blocks until the next one of this warp
        while (tiles.next(tile)) {
            const uint32_t first_block = tile.first_column / columns_per_part;
            const Scales scales = scales_of(args, tile, num_column_blocks);
            for (uint32_t k_block = 0; k_block < tile.num_k_blocks; ++k_block, ring.advance()) {
                if (num_others > 0) {
                    --num_others;
                    continue;
                }
                num_others = Config::num_scale_warps - 1;
                float of_rows[4];
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    of_rows[i] = 0.0f;
                    if (lane_idx * 4 + i < tile.num_rows) {
                        of_rows[i] = scales.rows[(lane_idx * 4 + i) * scales.row_stride +
                                                 k_block * scales.row_k_stride];
                    }
                }
                float of_columns[num_parts];
#pragma unroll
                for (uint32_t part = 0; part < num_parts; ++part) {
                    of_columns[part] = 0.0f;
                    if (first_block + part < num_column_blocks) {
                        //~ weight_scale_of_block
                        of_columns[part] = scales.columns[part * scales.column_stride +
                                                          k_block * scales.column_k_stride];
                    }
                }
                await_phase(empty(ring.stage), ring.parity ^ 1);  //~ product_factors_free
#pragma unroll
                for (uint32_t part = 0; part < num_parts; ++part) {
                    const float scale = of_columns[part];
                    ptx::st_shared_v4(
                        factors(ring.stage, part) + lane_idx * sizeof(uint4),
                        {__float_as_uint(of_rows[0] * scale), __float_as_uint(of_rows[1] * scale),
                         __float_as_uint(of_rows[2] * scale), __float_as_uint(of_rows[3] * scale)});
                }
                __syncwarp();  //~ product_factors_stored
                if (lane_idx == 0) ptx::mbarrier_arrive(full(ring.stage));
            }
        }
    }

 private:
    // Of a tile's first k-block, and how far apart others are.
    struct Scales {
        const float* rows;
        const float* columns;  // of its first 128
        int64_t row_stride;
        int64_t row_k_stride;
        uint32_t column_stride;  // to the next 128
        uint32_t column_k_stride;
    };

    static __device__ __forceinline__ Scales scales_of(const GroupedProductArgs& args,
                                                       const ProductTile& tile,
                                                       uint32_t num_column_blocks) {
        const uint32_t column_block = tile.first_column / columns_per_part;
        if constexpr (Config::sums_rows) {
            const uint32_t num_row_blocks = args.num_rows / Config::block_m;
            const uint64_t k_block = tile.first_k_block;
            //~ scales_of_k_block
            return {args.x_sf + k_block * num_row_blocks + tile.first_row / Config::block_m,
                    args.weight_sf + k_block * num_column_blocks + column_block,
                    0,
                    num_row_blocks,
                    1,
                    num_column_blocks};
        }
        return {args.x_sf + tile.expert * args.x_sf_expert_stride +
                    tile.first_row * args.x_sf_row_stride,
                args.weight_sf +
                    (uint64_t{tile.expert} * num_column_blocks + column_block) * args.num_k_blocks,
                args.x_sf_row_stride,
                args.x_sf_k_stride,
                args.num_k_blocks,
                1};
    }

    // Rows of the box behind the tile's last one are filled with zeros: the map's second coordinate
    // counts towards block_m, which is out of bounds (grouped_product.py).
    __device__ __forceinline__ void copy_rows(const GroupedProductArgs& args,
                                              const ProductTile& tile, uint32_t k_block,
                                              uint32_t stage) const {
        if constexpr (Config::sums_rows) {
            ptx::cp_async_bulk_tensor_3d_shared_global(
                x(stage), &args.x, full(stage), 0, tile.first_row, tile.first_k_block + k_block);
        } else {
            ptx::cp_async_bulk_tensor_3d_shared_global(
                x(stage), &args.x, full(stage), k_block * Config::block_k,
                Config::block_m - tile.num_rows, tile.first_row + tile.num_rows);  //~ end_of_rows
        }
    }

    __device__ __forceinline__ void copy_weights(const GroupedProductArgs& args,
                                                 const ProductTile& tile, uint32_t k_block,
                                                 uint32_t stage) const {
        const uint32_t k = Config::sums_rows ? 0 : k_block * Config::block_k;
        //~ weight_of_expert
        const uint32_t matrix = Config::sums_rows ? tile.first_k_block + k_block : tile.expert;
        if constexpr (Config::cluster_size > 1) {
            if (tile.shares_weights) {
                constexpr uint16_t both_ctas = 0b11;
                const uint32_t part = ptx::cluster_ctarank();  //~ own_half_of_weights
                ptx::cp_async_bulk_tensor_3d_shared_global_multicast(
                    weight(stage, part), &args.weight, full(stage), k,
                    tile.first_column + part * columns_per_part, matrix, both_ctas);
                return;
            }
        }
#pragma unroll
        for (uint32_t part = 0; part < num_parts; ++part) {
            ptx::cp_async_bulk_tensor_3d_shared_global(
                weight(stage, part), &args.weight, full(stage), k,
                tile.first_column + part * columns_per_part, matrix);
        }
    }

    __device__ void store_header(const GroupedProductArgs& args, uint32_t slot,
                                 const ProductTile& tile) const {
        uint32_t first_row = tile.first_row;
        if constexpr (Config::sums_rows) first_row += tile.expert * args.num_rows;  //~ y_of_expert
        ptx::st_shared_v4(header_address(slot),
                          {first_row, tile.num_rows, tile.first_column, tile.num_k_blocks});
    }

    __device__ uint32_t header_address(uint32_t slot) const {
        return begin_ + headers_offset + slot * header_bytes;
    }
    __device__ uint32_t full(uint32_t stage) const { return begin_ + barriers_offset + stage * 8; }
    __device__ uint32_t empty(uint32_t stage) const { return full(stage) + Config::num_stages * 8; }

    uint32_t begin_;
};

}  // namespace deep_moe
