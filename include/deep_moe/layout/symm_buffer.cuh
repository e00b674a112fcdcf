// Typed view of one rank's symmetric buffer. Offsets, dimensions and element types come from
// `Config::Symm`, where Python renders the one declaration of the layout; an accessor has the name
// of its segment. Shapes stand at the end of each line.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/layout/token_source.cuh"

namespace deep_moe {

template <class Config>
class SymmBuffer {
    using Symm = typename Config::Symm;
    static_assert(sizeof(TokenSource) == Symm::token_src_metadata_stride);

 public:
    __device__ explicit SymmBuffer(uint64_t base) : base_(base) {}

    // The same, but opaque to the compiler. So the compiler computes an address where it is used,
    // and not in front of a loop, where each address takes two registers all the time.
    __device__ __forceinline__ SymmBuffer anew() const {
        uint64_t base = base_;
        asm volatile("" : "+l"(base));
        return SymmBuffer(base);
    }

    // Control part; zero between calls but for the barrier words.
    __device__ uint32_t* grid_gather_counter() const {
        return at<typename Symm::grid_gather_counter_element>(Symm::grid_gather_counter_offset);
    }
    __device__ uint32_t* rank_barrier_counter() const {
        return at<typename Symm::rank_barrier_counter_element>(Symm::rank_barrier_counter_offset);
    }
    __device__ int32_t* rank_barrier_signals(uint32_t phase) const {
        return at<typename Symm::rank_barrier_signals_element>(Symm::rank_barrier_signals_offset) +
               phase;  // [2]
    }
    // After a failed call, until the host zeroes the control part, in this rank's own send count of
    // expert 0 and sum of its first expert. No number of CTAs gets there.
    static constexpr uint64_t rank_gave_up = uint64_t{1} << 63;
    // High word: CTAs of this rank that reported; low word: tokens of this rank for the expert.
    __device__ uint64_t* expert_send_count(uint32_t expert_idx) const {
        return at<typename Symm::expert_send_count_element>(Symm::expert_send_count_offset) +
               expert_idx;  // [experts]
    }
    // As the source rank's send count, complete.
    __device__ uint64_t* expert_recv_count(uint32_t rank_idx, uint32_t local_expert_idx) const {
        return at<typename Symm::expert_recv_count_element>(Symm::expert_recv_count_offset) +
               rank_idx * Symm::expert_recv_count_dim1 + local_expert_idx;  // [ranks][E_local]
    }
    // High word: CTAs of all ranks that reported; low word: tokens of all ranks.
    __device__ uint64_t* expert_recv_sum(uint32_t local_expert_idx) const {
        return at<typename Symm::expert_recv_sum_element>(Symm::expert_recv_sum_offset) +
               local_expert_idx;  // [E_local]
    }
    // Tokens of the block already in the L1 pool. On SM90 also, once Linear1 is done with them,
    // whether Linear2 has to look at their scales: has_own_scales.
    static constexpr uint32_t has_own_scales = 0x80000000;
    __device__ uint32_t* l1_arrival_count(uint32_t pool_block_idx) const {
        return at<typename Symm::l1_arrival_count_element>(Symm::l1_arrival_count_offset) +
               pool_block_idx;  // [pool_blocks]
    }
    // One bit per finished L1 n-block.
    __device__ uint64_t* l2_arrival_mask(uint32_t pool_block_idx, uint32_t word_idx = 0) const {
        return at<typename Symm::l2_arrival_mask_element>(Symm::l2_arrival_mask_offset) +
               pool_block_idx * Symm::l2_arrival_mask_dim1 + word_idx;  // [pool_blocks][words]
    }
    // SM90: blocks of the list that CTAs have claimed, beyond each one's first.
    __device__ uint32_t* num_claimed_blocks() const {
        return at<typename Symm::num_claimed_blocks_element>(Symm::num_claimed_blocks_offset);
    }
    // Where the pool is a ring: Linear2 blocks that need the rows of the pool block no more.
    __device__ uint32_t* release_count(uint32_t pool_block_idx) const {
        return at<typename Symm::release_count_element>(Symm::release_count_offset) +
               pool_block_idx;  // [pool_blocks]
    }
    // Where lists may have several pages (dispatch/list_pages.cuh): pages on a rank that this
    // rank's lists have taken beyond their first.
    __device__ uint32_t* num_taken_pages(uint32_t rank_idx) const {
        return at<typename Symm::num_taken_pages_element>(Symm::num_taken_pages_offset) +
               rank_idx;  // [ranks]
    }
    // Of this rank's list for an expert, for its own CTAs: the page behind further_idx others and
    // the first. 0: nobody has taken it yet.
    __device__ uint32_t* taken_pages(uint32_t expert_idx, uint32_t further_idx) const {
        return at<typename Symm::taken_pages_element>(Symm::taken_pages_offset) +
               expert_idx * Symm::taken_pages_dim1 + further_idx;  // [experts][further pages]
    }

    // Written before it is read in every call, so never cleaned.
    // As taken_pages of the source rank, for this rank to read.
    __device__ uint32_t* src_list_pages(uint32_t local_expert_idx, uint32_t rank_idx,
                                        uint32_t further_idx) const {
        const uint32_t row = local_expert_idx * Symm::src_list_pages_dim1 + rank_idx;
        return at<typename Symm::src_list_pages_element>(Symm::src_list_pages_offset) +
               row * Symm::src_list_pages_dim2 + further_idx;  // [E_local][ranks][further pages]
    }
    // token_idx * num_topk + topk_idx on the source rank.
    __device__ uint32_t* src_token_topk_idx(uint32_t page_idx, uint32_t slot_idx) const {
        return at<typename Symm::src_token_topk_idx_element>(Symm::src_token_topk_idx_offset) +
               uint64_t{page_idx} * Symm::src_token_topk_idx_dim1 + slot_idx;  // [pages][slots]
    }
    __device__ TokenSource* token_src_metadata(uint32_t pool_token_idx) const {
        return at<TokenSource>(Symm::token_src_metadata_offset) + pool_token_idx;  // [pool_tokens]
    }

    // Data part: the caller's inputs. Of tokens without scales there are no scale words.
    static constexpr uint32_t token_bytes = Symm::l1_tokens_dim1;
    __device__ uint8_t* input_x(uint32_t token_idx) const {
        return at<typename Symm::input_x_element>(Symm::input_x_offset) +
               uint64_t{token_idx} * Symm::input_x_dim1;  // [T][H] of e4m3 or bf16
    }
    __device__ auto* input_x_sf(uint32_t token_idx) const {
        return at<typename Symm::input_x_sf_element>(Symm::input_x_sf_offset) +
               uint64_t{token_idx} * Symm::input_x_sf_dim1;  // [T][H/128] of u32 or f32
    }
    __device__ int64_t* input_topk_idx(uint32_t token_topk_idx) const {
        return at<typename Symm::input_topk_idx_element>(Symm::input_topk_idx_offset) +
               token_topk_idx;  // [T * topk]
    }
    __device__ float* input_topk_weights(uint32_t token_topk_idx) const {
        return at<typename Symm::input_topk_weights_element>(Symm::input_topk_weights_offset) +
               token_topk_idx;  // [T * topk]
    }

    // Data part: pools of tokens for local experts.
    __device__ uint8_t* l1_tokens(uint32_t pool_token_idx) const {
        return at<typename Symm::l1_tokens_element>(Symm::l1_tokens_offset) +
               uint64_t{pool_token_idx} * Symm::l1_tokens_dim1;  // [pool_tokens][H]
    }
    __device__ uint32_t* l1_token_sf(uint32_t k_block_idx, uint32_t sf_pool_token_idx) const {
        return at<typename Symm::l1_token_sf_element>(Symm::l1_token_sf_offset) +
               uint64_t{k_block_idx} * Symm::l1_token_sf_dim1 +
               sf_pool_token_idx;  // [H/128][padded_sf_pool]
    }
    // Of tokens with a float for all of their values.
    __device__ float* l1_token_factors(uint32_t pool_token_idx) const {
        return at<typename Symm::l1_token_factors_element>(Symm::l1_token_factors_offset) +
               pool_token_idx;  // [pool_tokens]
    }
    __device__ float* l1_topk_weights(uint32_t pool_token_idx) const {
        return at<typename Symm::l1_topk_weights_element>(Symm::l1_topk_weights_offset) +
               pool_token_idx;  // [pool_tokens]
    }
    __device__ uint8_t* l2_tokens(uint32_t pool_token_idx) const {
        return at<typename Symm::l2_tokens_element>(Symm::l2_tokens_offset) +
               uint64_t{pool_token_idx} * Symm::l2_tokens_dim1;  // [pool_tokens][I]
    }
    __device__ uint32_t* l2_token_sf(uint32_t k_block_idx, uint32_t sf_pool_token_idx) const {
        return at<typename Symm::l2_token_sf_element>(Symm::l2_token_sf_offset) +
               uint64_t{k_block_idx} * Symm::l2_token_sf_dim1 +
               sf_pool_token_idx;  // [I/128][padded_sf_pool]
    }

    // Data part: contributions to this rank's tokens, one row per slot, shared experts' behind the
    // routed ones.
    __device__ uint16_t* combine(uint32_t topk_idx, uint32_t token_idx) const {
        const uint64_t row = uint64_t{topk_idx} * Symm::combine_dim1 + token_idx;
        return at<typename Symm::combine_element>(Symm::combine_offset) +
               row * Symm::combine_dim2;  // [topk + shared][T][H] bf16
    }

 private:
    template <class T>
    __device__ T* at(uint64_t offset) const {
        return reinterpret_cast<T*>(base_ + offset);
    }

    uint64_t base_;
};

}  // namespace deep_moe
