// Typed view of one CTA's shared memory: offsets and strides come from Config::Smem, where Python
// renders the one declaration of the layout, an accessor has the name of its segment, and every
// mbarrier is documented here.
//
// All accessors return 32-bit shared-window addresses.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/linear.cuh"
#include "deep_moe/experts/sm90/math_thread.cuh"
#include "deep_moe/layout/elements.cuh"
#include "deep_moe/ptx/cluster.cuh"
#include "deep_moe/ptx/fence.cuh"
#include "deep_moe/ptx/ld_st.cuh"
#include "deep_moe/ptx/mbarrier.cuh"

namespace deep_moe::sm90 {

template <class Config>
class SharedMemory {
    using Smem = typename Config::Smem;

 public:
    static_assert(Smem::weight_blocks_stride == Config::Weights::block_bytes);
    static_assert(Smem::block_headers_stride == sizeof(uint4), "a header is one vector");
    static_assert(all_are<float, typename Smem::topk_weights_element>);
    static_assert(all_are<uint64_t, typename Smem::destinations_element,
                          typename Smem::full_barriers_element>);

    // `base`: first byte of dynamic shared memory.
    __device__ explicit SharedMemory(uint32_t base) : base_(base) {}

    // ---- Tiles ---------------------------------------------------------------------------------

    // [block_m][block_k] of the tokens' format, 128-byte swizzle.
    __device__ uint32_t activations(uint32_t stage) const {
        return base_ + Smem::activations_offset + stage * Smem::activations_stride;
    }
    // 256 rows x block_k of weights as the host laid them out (Config::Weights).
    __device__ uint32_t weight_blocks(uint32_t stage) const {
        return base_ + Smem::weight_blocks_offset + stage * Smem::weight_blocks_stride;
    }
    // f32 [2][2]: the weights' scales in this k-block, of each warpgroup's rows of h = 0 and of h =
    // 1 (math_thread.cuh), for formats without row factors.
    __device__ uint32_t weight_scales(uint32_t stage) const {
        static_assert(all_are<float, typename Smem::weight_scales_element>);
        return base_ + Smem::weight_scales_offset + stage * Smem::weight_scales_stride;
    }
    // f32 [block_m]: the scales of this k-block's tokens, where the main loop multiplies by them.
    // There are no factors of tokens then, and nothing is rescaled.
    __device__ uint32_t token_scales(uint32_t stage) const {
        static_assert(all_are<float, typename Smem::token_scales_element>);
        return base_ + Smem::token_scales_offset + stage * Smem::token_scales_stride;
    }
    // For tokens with scales, as all that speaks of factors of tokens and of maxima.
    // bf16 [4][block_m / 8][2]: what the accumulators of token 8*j + 2*q + p are multiplied by, at
    // [q][j][p], before the k-block of this stage is added (Linear2).
    __device__ uint32_t rescale_factors(uint32_t stage) const {
        static_assert(all_are<uint16_t, typename Smem::rescale_factors_element>);  // bf16
        return base_ + Smem::rescale_factors_offset + stage * Smem::rescale_factors_stride;
    }
    // u32: whether these factors are to be applied; they are written only then. A block's first
    // k-block has no factors: there it says whether any later one may have (rescaler.cuh).
    __device__ uint32_t changes_of_scale(uint32_t stage) const {
        static_assert(all_are<uint32_t, typename Smem::changes_of_scale_element>);
        return base_ + Smem::changes_of_scale_offset + stage * Smem::changes_of_scale_stride;
    }
    // u32 [2][block_m], without a gate [2][2 * block_m], for each warpgroup: bits of each token's
    // largest magnitude, later the float that its values are multiplied by. Blocks take turns.
    __device__ uint32_t amax_exchange(uint32_t turn, uint32_t row) const {
        static_assert(all_are<uint32_t, typename Smem::amax_exchange_element>);
        return base_ + Smem::amax_exchange_offset +
               (turn * Smem::amax_exchange_dim1 + row) * sizeof(uint32_t);
    }

    // ---- What the math warps need of a block beside its tiles ---------------------------------
    //
    // A ring of slots, so that no epilogue waits for memory. The loaders write a block's slot
    // before or with one of its stages, whose barrier releases it. They may write it anew
    // num_block_slots blocks later: by then math has given back a stage of the block behind it, and
    // so is through with its epilogue.
    static constexpr uint32_t num_block_slots = Config::num_block_slots;
    static_assert((num_block_slots - 1) * LinearOf<Config>::min_k_blocks > Config::num_stages);

    // Weight loader, before the first stage: what the block is (block_header.cuh).
    __device__ uint32_t block_headers(uint32_t slot) const {
        return base_ + Smem::block_headers_offset + slot * Smem::block_headers_stride;
    }
    // Weight loader, with the first stage: f32 [256], factors of the weight rows, in slot order,
    // for formats that have some.
    __device__ uint32_t row_factors(uint32_t slot) const {
        static_assert(all_are<float, typename Smem::row_factors_element>);
        return base_ + Smem::row_factors_offset + slot * Smem::row_factors_stride;
    }
    // Weight loader, with the first stage: f32 [256], biases of the weight rows, in slot order, if
    // there are some.
    __device__ uint32_t biases(uint32_t slot) const {
        static_assert(all_are<float, typename Smem::biases_element>);
        return base_ + Smem::biases_offset + slot * Smem::biases_stride;
    }
    // Activation loader, with the first stage of Linear1: f32 [block_m], the tokens' scales.
    __device__ uint32_t l1_token_factors(uint32_t slot) const {
        static_assert(all_are<float, typename Smem::l1_token_factors_element>);
        return base_ + Smem::l1_token_factors_offset + slot * Smem::l1_token_factors_stride;
    }
    // Activation loader, with the first stage of Linear1: f32 [block_m], their routing weights.
    // With biases instead by the last stage of Linear2, and by ordinary stores only.
    __device__ uint32_t topk_weights(uint32_t slot) const {
        return base_ + Smem::topk_weights_offset + slot * Smem::topk_weights_stride;
    }
    // Activation loader, by the last stage of Linear2: f32 [block_m], the tokens' scales in the
    // last k-block. Apart from Linear1's, which copies write: no fence has to stand between them.
    __device__ uint32_t l2_token_factors(uint32_t slot) const {
        static_assert(all_are<float, typename Smem::l2_token_factors_element>);
        return base_ + Smem::l2_token_factors_offset + slot * Smem::l2_token_factors_stride;
    }
    // Activation loader, by the last stage of Linear2: u64 [block_m], where each token's result
    // goes, 0 behind the last valid one.
    __device__ uint32_t destinations(uint32_t slot) const {
        return base_ + Smem::destinations_offset + slot * Smem::destinations_stride;
    }

    // Of a cluster's second CTA, written by the first one's weight loader: u32, which pair of the
    // list the cluster has behind the block in the slot (block_claims.cuh).
    __device__ uint32_t claimed_blocks(uint32_t slot) const {
        static_assert(all_are<uint32_t, typename Smem::claimed_blocks_element>);
        return base_ + Smem::claimed_blocks_offset + slot * sizeof(uint32_t);
    }

    // ---- Barriers ------------------------------------------------------------------------------

    // "A stage is loaded." Arrive: activation loader and weight loader (2), each with the bytes of
    // its copies; their arrivals also release the block's slot and what is said of rescaling.
    // Behind the last block both arrive once more without a copy. Wait: all math threads, parity of
    // their round.
    __device__ uint32_t full_barriers(uint32_t stage) const {
        return barrier(Smem::full_barriers_offset, stage);
    }

    // "A stage may be overwritten." Arrive: one lane of every math warp, of all CTAs of the cluster
    // because a copy of weights may go to all of them, when the products that read the stage are
    // complete. Wait: both loaders, with the parity opposite to their round, so that the first
    // round passes at once.
    __device__ uint32_t empty_barriers(uint32_t stage) const {
        return barrier(Smem::empty_barriers_offset, stage);
    }
    // A math warp's arrival; any of its lanes may call this. To another CTA it hands over nothing
    // but that the stage was read.
    __device__ __forceinline__ void release_stage(uint32_t stage, uint32_t lane_idx) const {
        if constexpr (Config::cluster_size == 1) {
            //~ lane_releases
            if (lane_idx == 0) ptx::mbarrier_arrive(empty_barriers(stage));
        } else if (lane_idx < Config::cluster_size) {
            ptx::mbarrier_arrive_shared_cluster(
                ptx::mapa_shared_cluster(empty_barriers(stage), lane_idx));  //~ cluster_released
        }
    }

    // "The header of a block is written." Arrive: weight loader (1), when the block's first stage
    // is free. Wait: activation loader, parity of its round over the slots; math learns of it by
    // the first stage. And the warp that publishes, if there is one of its own.
    __device__ uint32_t header_barriers(uint32_t slot) const {
        return barrier(Smem::header_barriers_offset, slot);
    }

    // "The warp that publishes has seen a block's header and its results stored", if there is one
    // of its own. Its lane 0 arrives. Wait: weight loader, before it writes the slot anew, with the
    // parity opposite to its round over the slots, so that the first round passes at once.
    __device__ uint32_t seen_barriers(uint32_t slot) const {
        return barrier(Smem::seen_barriers_offset, slot);
    }

    // "The results of a block are stored." Arrive: one lane of every math warp, behind its warp's
    // stores. Wait: who publishes Linear1's (l1_publisher.cuh), parity of the block's round over
    // the slots.
    __device__ uint32_t stored_barriers(uint32_t slot) const {
        return barrier(Smem::stored_barriers_offset, slot);
    }

    // "It is known which blocks the cluster has next." Of a cluster's second CTA. Arrive: its own
    // weight loader (1), with the bytes that the first CTA's stores. Wait: the same warp, parity of
    // its round over the slots. The first CTA stores in a slot anew num_block_slots blocks later:
    // by then the second has loaded a stage of the block behind it.
    __device__ uint32_t claim_barriers(uint32_t slot) const {
        return barrier(Smem::claim_barriers_offset, slot);
    }

    // One thread; others may use the barriers after a barrier of the cluster.
    __device__ void init_barriers() const {
        // "A token lies in the pull buffer." One per dispatch warp, private to it: one lane arrives
        // (1) with the token's bytes, the warp waits; first phase 0 (dispatch/pull_tokens.cuh).
        init(Smem::pull_barriers_offset, Config::num_dispatch_warps, 1);
        init(Smem::full_barriers_offset, Config::num_stages, 2);  //~ sm90_full_init
        //~ sm90_empty_init
        init(Smem::empty_barriers_offset, Config::num_stages,
             num_math_warps<Config> * Config::cluster_size);
        init(Smem::header_barriers_offset, Config::num_block_slots, 1);
        if constexpr (Config::num_publish_warps > 0) {
            init(Smem::seen_barriers_offset, Config::num_block_slots, 1);  //~ seen_init
        }
        //~ stored_init
        init(Smem::stored_barriers_offset, Config::num_block_slots, num_math_warps<Config>);
        if constexpr (Config::cluster_size > 1) {
            init(Smem::claim_barriers_offset, Config::num_block_slots, 1);
            for (uint32_t i = 0; i < Config::num_block_slots; ++i) {
                ptx::st_shared_u32(claimed_blocks(i), 0);
            }
        }
        // "A contribution has arrived." Two per math warp, private to it: one lane arrives (1) with
        // the chunk's bytes, the warp waits; first phase 0 (combine/combine.cuh).
        init(Smem::combine_barriers_offset, 2 * num_math_warps<Config>, 1);
        ptx::fence_mbarrier_init_release_cluster();  //~ sm90_init_fence
    }

    // After an abort, one thread, when neither CTA of the cluster uses them any more: those on
    // which the other CTA's copies are counted, which may be in the middle of a phase.
    __device__ void end_cluster_barriers() const {
        for (uint32_t i = 0; i < Config::num_stages; ++i) ptx::mbarrier_inval(full_barriers(i));
        for (uint32_t i = 0; i < Config::num_block_slots; ++i) {
            ptx::mbarrier_inval(claim_barriers(i));
        }
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

}  // namespace deep_moe::sm90
