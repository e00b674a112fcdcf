// The math warps: each of two warpgroups multiplies 64 rows of a tile with all of its columns.
//
// The tensor core's sums are those of one k-block. Ordinary registers add them up, times the row's
// scale of the k-block and that of the weights' 128 x 128 block: so FP8 products lose none of the
// bits that the tensor core drops below the largest one over the whole K. While a warpgroup adds,
// the tensor core has the other one's products.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/sm90/operand_descriptor.cuh"
#include "deep_moe/math.cuh"
#include "deep_moe/products/args.cuh"
#include "deep_moe/products/operand_stages.cuh"
#include "deep_moe/products/product_tiles.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/ptx/wgmma.cuh"

namespace deep_moe {

template <class Config>
class ProductWarps {
    static constexpr uint32_t rows_per_warpgroup = 64;
    static constexpr uint32_t num_accumulators = Config::block_n / 2;
    static constexpr uint32_t mma_bytes = 32;
    static_assert(Config::block_m == Config::num_math_warps / 4 * rows_per_warpgroup,
                  "each warpgroup has 64 rows of a tile");
    static_assert(Config::block_n == 128, "a tile's columns share the weights' scale");
    using Stages = OperandStages<Config>;

 public:
    __device__ ProductWarps(const GroupedProductArgs& args, const Stages& stages)
        : args_(args),
          stages_(stages),
          warpgroup_idx_(ptx::uniform(ptx::warp_idx() / 4)),
          row_in_tile_(ptx::warp_idx() * 16 + ptx::lane_idx() / 4) {}

    // All threads of the math warps.
    __device__ void run() {
        ProductTiles<Config> tiles(args_);
        ProductTile tile;
        while (tiles.next(tile)) {
            float sums[num_accumulators];
            add_up(tile, sums);
            store(tile, sums);
        }
    }

 private:
    // What a thread's products of a k-block are multiplied by: those of its row, and of the row 8
    // below.
    struct Scales {
        float own;
        float below;
    };

    __device__ __forceinline__ void add_up(const ProductTile& tile,
                                           float (&sums)[num_accumulators]) {
#pragma unroll
        for (uint32_t i = 0; i < num_accumulators; ++i) sums[i] = 0.0f;
        const uint32_t row = tile.first_row + row_in_tile_;
        const bool has_own = row < tile.end_row;
        const bool has_below = row + 8 < tile.end_row;
        const float* const own_sf =
            args_.x_sf + tile.expert * args_.x_sf_expert_stride + row * args_.x_sf_row_stride;
        const float* const below_sf = own_sf + 8 * args_.x_sf_row_stride;
        const uint64_t block_row =
            uint64_t{tile.expert} * ceil_div(args_.num_columns, Config::block_n) + tile.n_block;
        const float* const weight_sf = args_.weight_sf + block_row * args_.num_k_blocks;
        const auto load_scales = [&](uint32_t k_block) -> Scales {
            const float of_weights = weight_sf[k_block];  //~ weight_scale_of_block
            const int64_t idx = k_block * args_.x_sf_k_stride;
            return {has_own ? own_sf[idx] * of_weights : 0.0f,
                    has_below ? below_sf[idx] * of_weights : 0.0f};
        };
        Scales scales = load_scales(0);
#pragma unroll 1
        for (uint32_t k_block = 0; k_block < args_.num_k_blocks; ++k_block) {
            float products[num_accumulators];
            stages_.await_loaded(ring_);
            const uint32_t stage = ptx::uniform(ring_.stage);
            multiply(products, stage);
            ring_.advance();
            // The next ones come while the tensor core works.
            const Scales current = scales;
            if (k_block + 1 < args_.num_k_blocks) scales = load_scales(k_block + 1);
            ptx::wgmma_wait_group<0>();  //~ product_complete
            ptx::wgmma_keep_order(products);
            if (ptx::lane_idx() == 0) stages_.release(stage);
#pragma unroll
            for (uint32_t i = 0; i < num_accumulators; ++i) {
                //~ product_promoted
                sums[i] = fmaf(products[i], i / 2 % 2 == 0 ? current.own : current.below, sums[i]);
            }
        }
    }

    // Starts the products of the warpgroup's rows with a k-block, as one group.
    __device__ __forceinline__ void multiply(float (&products)[num_accumulators], uint32_t stage) {
        const uint32_t rows = sm90::operand_descriptor_low<Config>(
            stages_.x(stage) + warpgroup_idx_ * rows_per_warpgroup * Config::block_k);
        const uint32_t columns = sm90::operand_descriptor_low<Config>(stages_.weight(stage));
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

    // The sums as BF16. A thread has 2 neighbouring columns of every 8. Four threads exchange those
    // of 32 columns, so that each stores 8 neighbours with one instruction.
    __device__ __forceinline__ void store(const ProductTile& tile,
                                          const float (&sums)[num_accumulators]) const {
        const uint32_t part = ptx::lane_idx() % 4;
        const uint32_t row = tile.first_row + row_in_tile_;
#pragma unroll
        for (uint32_t first = 0; first < Config::block_n; first += 32) {
            const uint32_t column = tile.n_block * Config::block_n + first + part * 8;
#pragma unroll
            for (uint32_t h = 0; h < 2; ++h) {
                uint32_t pairs[4];
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) {
                    const uint32_t i = first / 2 + 4 * j + 2 * h;
                    pairs[j] = ptx::cvt_rn_bf16x2_f32(sums[i + 1], sums[i]);
                }
                const uint4 chunk = transposed(pairs, part);
                const uint32_t own_row = row + 8 * h;
                if (own_row < tile.end_row && column < args_.num_columns) {  //~ product_stored
                    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(args_.y) +
                                              uint64_t{own_row} * args_.num_columns + column) =
                        chunk;
                }
            }
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
};

}  // namespace deep_moe
