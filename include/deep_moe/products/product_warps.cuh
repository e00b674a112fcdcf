// The math warps: each of two warpgroups multiplies 64 rows of a tile with all of its columns, as
// two times 128 columns.
//
// The tensor core's sums are those of one k-block. Ordinary registers add them up, times the
// product of the row's scale of the k-block and that of the weights' 128 x 128 block: so FP8
// products lose none of the bits that the tensor core drops below the largest one over the whole K.
// While a warpgroup adds, the tensor core has the other one's products: neither waits for the
// other.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/operand_descriptor.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/products/args.cuh"
#include "deep_moe/products/operand_stages.cuh"
#include "deep_moe/ptx/bulk_copy.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/ptx/wgmma.cuh"

namespace deep_moe {

template <class Config>
class ProductWarps {
    using Stages = OperandStages<Config>;
    using Header = typename Stages::Header;
    static constexpr uint32_t rows_per_warpgroup = 64;
    static constexpr uint32_t rows_per_warp = 16;
    static constexpr uint32_t num_parts = 2;
    static constexpr uint32_t columns_per_part = Config::block_n / num_parts;
    static constexpr uint32_t num_accumulators = columns_per_part / 2;
    static constexpr uint32_t mma_bytes = 32;
    static_assert(Config::block_m == Config::num_math_warps / 4 * rows_per_warpgroup,
                  "each warpgroup has 64 rows of a tile");
    static_assert(columns_per_part == 128, "a part's columns share the weights' scale");
    static_assert(Config::y_bytes == sizeof(uint16_t) ||
                      (Config::y_bytes == sizeof(float) && Config::adds),
                  "y is BF16, or float32 that is added to");

    using Products = float[num_accumulators];
    using Sums = Products[num_parts];

    // What a thread's products of a k-block are multiplied by: those of its row, and of the row 8
    // below.
    struct Factors {
        float own;
        float below;
    };

 public:
    __device__ ProductWarps(const GroupedProductArgs& args, const Stages& stages)
        : args_(args),
          stages_(stages),
          warpgroup_idx_(ptx::uniform(ptx::warp_idx() / 4)),
          row_in_tile_(ptx::warp_idx() * rows_per_warp + ptx::lane_idx() / 4) {}

    // All threads of the math warps.
    __device__ void run() {
        for (;; slots_.advance()) {
            stages_.await_loaded(ring_);  //~ product_tile_awaited
            const Header tile = stages_.header(slots_.stage);
            const uint32_t num_rows = ptx::uniform(tile.num_rows);
            const uint32_t num_k_blocks = ptx::uniform(tile.num_k_blocks);
            if (num_rows == 0) break;
            if (num_rows <= warpgroup_idx_ * rows_per_warpgroup) {
                pass(num_k_blocks);
                continue;
            }
            Sums sums;
            add_up(sums, num_k_blocks);
            // Read again, because keeping it would take registers from the main loop.
            store(stages_.header(slots_.stage), sums);
        }
        ptx::cp_async_bulk_wait_group<0>();
    }

 private:
    // Adds up the whole K of a tile, whose first stage is loaded.
    __device__ __forceinline__ void add_up(Sums& sums, uint32_t num_left) {
#pragma unroll
        for (uint32_t i = 0; i < num_accumulators; ++i) sums[0][i] = sums[1][i] = 0.0f;
        uint32_t stage = ptx::uniform(ring_.stage);
        ring_.advance();
#pragma unroll 1
        for (;;) {
            Products products;
            multiply(products, stage, 0);
            // Loaded here and needed at the end, so no thread waits for the load.
            const bool next_is_loaded = stages_.is_loaded(ring_);
            // Behind a wait ptxas takes the address for divergent.
            const uint32_t next_stage = ptx::uniform(ring_.stage);
            const Factors first = load_factors(stage, 0);
            const Factors second = load_factors(stage, 1);
            ptx::wgmma_wait_group<0>();  //~ product_first_complete
            promote(sums[0], products, first);
            multiply(products, stage, 1);
            ptx::wgmma_wait_group<0>();  //~ product_complete
            // Orders all lanes' loads of factors before the arrival of one. wgmma.wait_group only
            // waits for the lanes.
            __syncwarp();
            stages_.release(stage, ptx::lane_idx());
            promote(sums[1], products, second);
            if (--num_left == 0) return;
            if (!next_is_loaded) stages_.await_loaded(ring_);  //~ product_stage_awaited
            ring_.advance();
            stage = next_stage;
        }
    }

    // Leaves a tile to the other warpgroup, which has all of its rows.
    __device__ __forceinline__ void pass(uint32_t num_k_blocks) {
#pragma unroll 1
        for (uint32_t i = 0; i < num_k_blocks; ++i) {
            stages_.await_loaded(ring_);
            __syncwarp();
            stages_.release(ring_.stage, ptx::lane_idx());  //~ product_stage_passed
            ring_.advance();
        }
    }

    // Starts the products of the warpgroup's rows with a part of a k-block's columns, as one group.
    __device__ __forceinline__ void multiply(Products& products, uint32_t stage, uint32_t part) {
        const uint32_t rows = sm90::operand_descriptor_low<Config>(
            stages_.x(stage) + warpgroup_idx_ * rows_per_warpgroup * Config::block_k);
        const uint32_t columns = sm90::operand_descriptor_low<Config>(stages_.weight(stage, part));
        ptx::wgmma_keep_order(products);
        ptx::wgmma_fence();  //~ product_fence
#pragma unroll
        for (uint32_t i = 0; i < Config::block_k / mma_bytes; ++i) {
            ptx::wgmma_m64k32_f32_e4m3_e4m3(
                products, sm90::operand_descriptor(rows + i * (mma_bytes >> 4)),
                sm90::operand_descriptor(columns + i * (mma_bytes >> 4)), i > 0);
        }
        ptx::wgmma_commit_group();
    }

    __device__ __forceinline__ Factors load_factors(uint32_t stage, uint32_t part) const {
        const uint32_t own = stages_.factors(stage, part) + row_in_tile_ * sizeof(float);
        return {ptx::ld_shared_f32(own), ptx::ld_shared_f32(own + 8 * sizeof(float))};
    }

    static __device__ __forceinline__ void promote(Products& sums, Products& products,
                                                   const Factors& factors) {
        ptx::wgmma_keep_order(products);
#pragma unroll
        for (uint32_t i = 0; i < num_accumulators; ++i) {
            //~ product_promoted
            sums[i] = fmaf(products[i], i / 2 % 2 == 0 ? factors.own : factors.below, sums[i]);
        }
    }

    // The sums go through shared memory, from where a copy takes each row while the warp multiplies
    // the next tile.
    __device__ __forceinline__ void store(const Header& tile, const Sums& sums) const {
        if constexpr (Config::y_bytes == sizeof(float)) {
            store_f32(tile, sums);
        } else {
            store_bf16(tile, sums);
        }
    }

    // A thread has 2 neighbouring columns of every 8. Four threads exchange those of 32 columns, so
    // that each has 8 neighbours.
    __device__ __forceinline__ void store_bf16(const Header& tile, const Sums& sums) const {
        constexpr uint32_t columns_per_run = 32;
        constexpr uint32_t runs_per_part = columns_per_part / columns_per_run;
        const uint32_t results = stages_.results(ptx::warp_idx());
        const uint32_t thread = ptx::lane_idx() % 4;
        const uint32_t own =
            results + ptx::lane_idx() / 4 * Stages::result_stride + thread * sizeof(uint4);
        ptx::cp_async_bulk_wait_group_read<0>();
        __syncwarp();  //~ product_results_free
#pragma unroll
        for (uint32_t run = 0; run < Config::block_n / columns_per_run; ++run) {
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h) {
                uint32_t pairs[4];
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) {
                    const Products& part = sums[run / runs_per_part];
                    const uint32_t i = run % runs_per_part * 16 + 4 * j + 2 * h;
                    pairs[j] = ptx::cvt_rn_bf16x2_f32(part[i + 1], part[i]);
                }
                ptx::st_shared_v4(
                    own + 8 * h * Stages::result_stride + run * columns_per_run * sizeof(uint16_t),
                    transposed(pairs, thread));
            }
        }
        copy_results<Config::block_n>(tile, results, tile.first_column);
    }

    // One part behind the other, in the same memory.
    __device__ __forceinline__ void store_f32(const Header& tile, const Sums& sums) const {
        const uint32_t results = stages_.results(ptx::warp_idx());
        const uint32_t own = results + ptx::lane_idx() / 4 * Stages::result_stride +
                             ptx::lane_idx() % 4 * sizeof(uint2);
#pragma unroll
        for (uint32_t part = 0; part < num_parts; ++part) {
            ptx::cp_async_bulk_wait_group_read<0>();
            __syncwarp();  //~ product_part_free
#pragma unroll
            for (uint32_t i = 0; i < num_accumulators; i += 2) {
                const uint32_t row = i / 2 % 2 * 8;
                ptx::st_shared_v2(
                    own + row * Stages::result_stride + i / 4 * 8 * sizeof(float),
                    {__float_as_uint(sums[part][i]), __float_as_uint(sums[part][i + 1])});
            }
            copy_results<columns_per_part>(tile, results,
                                           tile.first_column + part * columns_per_part);
        }
    }

    // The warp's rows of shared memory to these columns of y, or added to them.
    template <uint32_t max_columns>
    __device__ __forceinline__ void copy_results(const Header& tile, uint32_t results,
                                                 uint32_t first_column) const {
        ptx::fence_proxy_async_shared_cta();  //~ product_results_fenced
        __syncwarp();                         //~ product_results_written
        const uint32_t lane_idx = ptx::lane_idx();
        const uint32_t row_in_tile = ptx::warp_idx() * rows_per_warp + lane_idx;
        if (lane_idx < rows_per_warp && row_in_tile < tile.num_rows &&  //~ product_stored
            first_column < args_.num_columns) {
            const uint64_t first =
                uint64_t{tile.first_row + row_in_tile} * args_.num_columns + first_column;
            const uint32_t num_columns =
                min(max_columns, args_.num_columns - first_column);  //~ product_columns
            uint8_t* const y = static_cast<uint8_t*>(args_.y) + first * Config::y_bytes;
            const uint32_t own = results + lane_idx * Stages::result_stride;
            const uint32_t num_bytes = num_columns * Config::y_bytes;
            if constexpr (!Config::adds) {
                ptx::cp_async_bulk_global_shared(y, own, num_bytes);
            } else if constexpr (Config::y_bytes == sizeof(float)) {
                ptx::cp_reduce_async_bulk_add_f32(y, own, num_bytes);
            } else {
                ptx::cp_reduce_async_bulk_add_bf16(y, own, num_bytes);
            }
            ptx::cp_async_bulk_commit_group();
        }
    }

    // words[j] of four neighbouring lanes: lane `part` gets words[part] of each, in their order.
    static __device__ __forceinline__ uint4 transposed(uint32_t (&words)[4], uint32_t part) {
        swap<1>(words[0], words[1], part);
        swap<1>(words[2], words[3], part);
        swap<2>(words[0], words[2], part);
        swap<2>(words[1], words[3], part);
        return {words[0], words[1], words[2], words[3]};
    }

    // Between lanes that differ in `bit`: the upper word of the lower lane for the lower one of the
    // upper lane.
    template <uint32_t bit>
    static __device__ __forceinline__ void swap(uint32_t& lower, uint32_t& upper, uint32_t part) {
        const bool is_upper_lane = (part & bit) != 0;
        const uint32_t other = __shfl_xor_sync(full_warp, is_upper_lane ? lower : upper, bit);
        if (is_upper_lane) {
            lower = other;
        } else {
            upper = other;
        }
    }

    const GroupedProductArgs& args_;
    const Stages& stages_;
    uint32_t warpgroup_idx_;
    uint32_t row_in_tile_;
    typename Stages::Ring ring_;
    typename Stages::Slots slots_;
};

}  // namespace deep_moe
