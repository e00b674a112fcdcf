// Typed view of one CTA's shared memory: offsets and strides come from Config::Smem, where Python
// renders the one declaration of the layout, an accessor has the name of its segment, and every
// mbarrier is documented here. Both CTAs of a pair use the same offsets, which tcgen05 relies on.
//
// All accessors return 32-bit shared-window addresses.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/elements.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"
#include "deep_moe/ptx/warp.cuh"

namespace deep_moe::sm100 {

// Of a k-block along K: elements of tensor maps, which know no values of less than a byte.
template <class Config>
inline constexpr uint32_t k_block_elements = Config::block_k / Config::Weights::values_per_element;

// Rows of words that an expert has in the tensor of a layer's scales: those of its k-blocks, unless
// there are none or all are 1, and, if there are some, the factors of its weight rows.
template <class Config>
__device__ __forceinline__ uint32_t num_scale_rows(uint32_t num_k_blocks) {
    using Weights = typename Config::Weights;
    const bool has_words = Weights::has_scales && !Weights::has_unit_scales;
    uint32_t num_words = 0;
    if constexpr (Weights::has_scales) num_words = Weights::scale_words_per_k_block;
    return (has_words ? num_k_blocks * num_words : 0) + (Weights::has_factors ? 1 : 0);
}

// Pairs of blocks that a cluster's weight loader may be ahead of its epilogues.
template <class Config>
inline constexpr uint32_t num_pair_slots = Config::Smem::claimed_pairs_dim0;

template <class Config>
class SharedMemory {
    using Smem = typename Config::Smem;

 public:
    static constexpr uint32_t num_epilogue_warpgroups = Config::num_epilogue_warps / 4;
    static constexpr uint32_t activation_tile_bytes = Smem::activations_stride;
    // What a load counts on its barrier.
    static constexpr uint32_t weight_tile_loaded_bytes =
        Config::Weights::loaded_bytes(Smem::weights_stride);
    static constexpr uint32_t num_store_slots = 2;
    // Gate and up merged, or without a gate half of a block's values, in the format of the tokens,
    // whose k-blocks take 128 bytes.
    static constexpr uint32_t l1_output_row_bytes = Config::block_n / 2 * 128 / Config::block_k;
    static constexpr uint32_t l1_output_tile_bytes = Config::store_block_m * l1_output_row_bytes;
    static constexpr uint32_t l2_output_row_bytes = Config::block_n * 2;  // bf16
    static constexpr uint32_t l2_output_tile_bytes = Config::store_block_m * l2_output_row_bytes;
    static_assert(num_store_slots * num_epilogue_warpgroups * l1_output_tile_bytes <=
                          Smem::cd_staging_dim0 &&
                      num_epilogue_warpgroups * l2_output_tile_bytes <= Smem::cd_staging_dim0,
                  "the tiles of both epilogues fit into cd_staging");

    static_assert(all_are<uint32_t, typename Smem::tmem_ptr_element>);
    static_assert(all_are<uint64_t, typename Smem::full_barriers_element>);

    // `base`: first byte of dynamic shared memory.
    __device__ explicit SharedMemory(uint32_t base) : base_(base) {}

    // The same, in a uniform register. A whole converged warp.
    __device__ SharedMemory uniform() const { return SharedMemory(ptx::uniform(base_)); }

    // That of the even CTA of the pair, which owns the barriers that both CTAs signal.
    __device__ SharedMemory of_even_cta() const {
        return SharedMemory(ptx::mapa_shared_cluster(base_, 0));
    }

    // ---- Tiles ---------------------------------------------------------------------------------

    // [block_m / 2][block_k], 128-byte swizzle: this CTA's half of the tokens.
    __device__ uint32_t activations(uint32_t stage) const {
        return base_ + Smem::activations_offset + stage * activation_tile_bytes;
    }
    // [block_n][block_k], as long as the tokens', 128-byte swizzle: this CTA's weight rows. Of
    // weights that are decoded, a block as experts/sm100/decoded_weights.cuh has it.
    __device__ uint32_t weights(uint32_t stage) const {
        return base_ + Smem::weights_offset + stage * Smem::weights_stride;
    }
    // If there are scales:
    // [words of a k-block]: scale words of all tokens of the block, in the order that TMEM wants;
    // the same in both CTAs.
    __device__ uint32_t activation_sf(uint32_t stage) const {
        static_assert(all_are<uint32_t, typename Smem::activation_sf_element>);
        return base_ + Smem::activation_sf_offset + stage * Smem::activation_sf_stride;
    }
    // [words of a k-block]: scale words of this CTA's weight rows, in the order that TMEM wants. Of
    // scales that are all 1 there is one stage for all, written before the roles begin.
    __device__ uint32_t weight_sf(uint32_t stage) const {
        static_assert(all_are<uint32_t, typename Smem::weight_sf_element>);
        return base_ + Smem::weight_sf_offset + stage * Smem::weight_sf_stride;
    }
    // [store_block_m][block_n / 2]: Linear1's output on its way to the pool, in the swizzle of as
    // many bytes as a row has, 64 of e4m3, 128 of bf16 or 32 of e2m1.
    __device__ uint32_t l1_output(uint32_t slot, uint32_t warpgroup_idx) const {
        const uint32_t tile_idx = slot * num_epilogue_warpgroups + warpgroup_idx;
        return base_ + Smem::cd_staging_offset + tile_idx * l1_output_tile_bytes;
    }
    // bf16 [store_block_m][block_n]: Linear2's output. Same bytes as l1_output, never both in use.
    __device__ uint32_t l2_output(uint32_t warpgroup_idx) const {
        return base_ + Smem::cd_staging_offset + warpgroup_idx * l2_output_tile_bytes;
    }
    // u32 [store_block_m]: bits of the largest magnitude that a warp saw of each token.
    __device__ uint32_t amax_exchange(uint32_t epilogue_warp_idx) const {
        static_assert(all_are<uint32_t, typename Smem::amax_exchange_element>);
        return base_ + Smem::amax_exchange_offset + epilogue_warp_idx * Smem::amax_exchange_stride;
    }

    // u32: which pair of the list the cluster takes next, written by the even CTA's weight loader
    // in both CTAs (pair_claims.cuh).
    __device__ uint32_t claimed_pairs(uint32_t slot) const {
        static_assert(all_are<uint32_t, typename Smem::claimed_pairs_element>);
        return base_ + Smem::claimed_pairs_offset + slot * sizeof(uint32_t);
    }

    // Where the TMEM allocation starts, written by the allocating warp.
    __device__ uint32_t tmem_ptr() const { return base_ + Smem::tmem_ptr_offset; }

    // ---- Barriers ------------------------------------------------------------------------------

    // "A stage is loaded in both CTAs." Only the even CTA's are used. Arrive: activation and weight
    // loaders of both CTAs (4), each with the bytes of its own copies; where weights are decoded,
    // in place of the weight loaders one lane of each warp of the warpgroups that have decoded them
    // (8). Waits: the MMA warp, parity of its round. Protects the stage's tiles, and decoded
    // weights in tensor memory, until the MMAs may read them.
    __device__ uint32_t full_barriers(uint32_t stage) const {
        return barrier(Smem::full_barriers_offset, stage);
    }

    // "A block of weights is loaded that will be decoded." Each CTA has its own. Arrives: its
    // weight loader (1), with the block's bytes. Wait: the warpgroup that decodes it, parity of its
    // round.
    __device__ uint32_t weight_barriers(uint32_t stage) const {
        return barrier(Smem::weight_barriers_offset, stage);
    }

    // "A stage may be overwritten." Each CTA has its own. Arrive: the commit behind the stage's
    // MMAs, in both CTAs (1), and, where weights are decoded, one lane of each warp that has read
    // them (4). Wait: both loaders of the CTA, with the parity opposite to their round, so that the
    // first round passes at once, and whoever decodes the weights that take the place of the
    // stage's in tensor memory, parity of the stage's round.
    __device__ uint32_t empty_barriers(uint32_t stage) const {
        return barrier(Smem::empty_barriers_offset, stage);
    }

    // "An accumulator is complete." Each CTA has its own. Arrives: the commit behind the block's
    // last MMA, in both CTAs (1). Wait: all epilogue warps of the CTA, parity of their round.
    __device__ uint32_t tmem_full_barriers(uint32_t stage) const {
        return barrier(Smem::tmem_full_barriers_offset, stage);
    }

    // "An accumulator has been read." Only the even CTA's are used. Arrive: one lane of every
    // epilogue warp of both CTAs. Waits: the MMA warp, with the parity opposite to its round.
    __device__ uint32_t tmem_empty_barriers(uint32_t stage) const {
        return barrier(Smem::tmem_empty_barriers_offset, stage);
    }

    // "It is known which pair of blocks comes next." Each CTA has its own. Arrives: the weight
    // loader of the even CTA (1), with the bytes that it stores. Wait: all roles of the CTA, parity
    // of their round over the slots.
    __device__ uint32_t pair_barriers(uint32_t slot) const {
        return barrier(Smem::pair_barriers_offset, slot);
    }

    // "All roles know the pair in a slot." Only the even CTA's are used. Arrive: of both CTAs the
    // loaders, one epilogue warp for all, and warps that decode; and the MMA warp. These arrivals
    // only say that the slot was read. Waits: the weight loader of the even CTA, with the parity
    // opposite to its round.
    __device__ uint32_t pair_read_barriers(uint32_t slot) const {
        return barrier(Smem::pair_read_barriers_offset, slot);
    }

    // One thread; others, in both CTAs, may use the barriers after a cluster barrier.
    __device__ void init_barriers() const {
        // "A token lies in the pull buffer." One per dispatch warp, private to it: one lane arrives
        // (1) with the token's bytes, the warp waits; first phase 0 (dispatch/pull_tokens.cuh).
        init(Smem::pull_barriers_offset, Config::num_dispatch_warps, 1);
        constexpr uint32_t num_decoders = Config::Weights::is_decoded ? 4 : 0;  // of a CTA
        constexpr uint32_t num_weight_arrivals = Config::Weights::is_decoded ? 2 * num_decoders : 2;
        init(Smem::full_barriers_offset, Config::num_stages,
             2 + num_weight_arrivals);  //~ full_init
        init(Smem::empty_barriers_offset, Config::num_stages, 1 + num_decoders);
        if constexpr (Config::Weights::is_decoded) {
            init(Smem::weight_barriers_offset, Config::num_stages, 1);
        }
        init(Smem::tmem_full_barriers_offset, Config::num_tmem_stages, 1);
        init(Smem::tmem_empty_barriers_offset, Config::num_tmem_stages,
             2 * Config::num_epilogue_warps);  //~ tmem_empty_init
        init(Smem::pair_barriers_offset, num_pair_slots<Config>, 1);
        init(Smem::pair_read_barriers_offset, num_pair_slots<Config>,
             2 * (3 + Config::num_decode_warps) + 1);  //~ pair_read_init
        for (uint32_t i = 0; i < num_pair_slots<Config>; ++i) {
            ptx::st_shared_u32(claimed_pairs(i), 0);
        }
        // "A contribution has arrived." Two per epilogue warp, private to it: one lane arrives (1)
        // with the chunk's bytes, the warp waits; first phase 0 (combine/combine.cuh).
        init(Smem::combine_barriers_offset, 2 * Config::num_epilogue_warps, 1);
        ptx::fence_mbarrier_init_release_cluster();  //~ init_fence
    }

 private:
    __device__ uint32_t barrier(uint32_t offset, uint32_t idx) const {
        return base_ + offset + idx * sizeof(uint64_t);
    }
    __device__ void init(uint32_t offset, uint32_t num_barriers, uint32_t num_arrivals) const {
        for (uint32_t i = 0; i < num_barriers; ++i) {
            ptx::mbarrier_init(barrier(offset, i), num_arrivals);
        }
    }

    uint32_t base_;
};

}  // namespace deep_moe::sm100
