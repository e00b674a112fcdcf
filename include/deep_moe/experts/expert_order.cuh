// The order of a rank's experts in the list of blocks and in the pool, and so the order in which
// dispatch pulls tokens.
//
// Routed experts stand by their index. A shared expert has all tokens of its own rank, which would
// be several experts' work in one place. Where weights come from memory, other blocks must come in
// between. So a shared expert is cut into parts, and one part of each shared expert stands in front
// of every num_experts_per_part routed experts. A part is an entry of the list like an expert: a
// run of tokens, cut into m-blocks, with rows in the pool. All parts but the last non-empty one
// have the same number of m-blocks, and these are full. Parts behind it are empty.
//
// The tokens of shared experts are known without other ranks. So are the pool rows of the entries
// in front of the first routed expert. Dispatch pulls these while counts are on their way.
//
// Among weights, shared experts stand behind the rank's routed ones.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/conditional.cuh"
#include "deep_moe/layout/kernel_args.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe {

// Where there are no shared experts: an entry is an expert.
template <class Config>
class RoutedExpertOrder {
 public:
    static constexpr bool has_shared = false;
    static constexpr uint32_t num_entries = Config::num_experts_per_rank;

    static constexpr uint32_t num_entries_with(uint32_t num_experts) { return num_experts; }
    static __device__ bool is_shared(uint32_t) { return false; }
    static __device__ uint32_t routed_expert(uint32_t entry) { return entry; }
    static __device__ uint32_t entry_of(uint32_t expert_idx) { return expert_idx; }
    static __device__ uint32_t weight_expert(uint32_t entry) { return entry; }
    __device__ uint32_t num_own_tokens() const { return args_->num_tokens; }
    __device__ uint32_t num_shared_tokens() const { return 0; }
    __device__ uint32_t num_part_tokens(uint32_t) const { return 0; }
};

template <class Config>
class SharedExpertOrder {
    static constexpr uint32_t num_routed = Config::num_experts_per_rank;
    static constexpr uint32_t num_shared = Config::num_shared_experts;
    // Entries from one part of the first shared expert to its next.
    static constexpr uint32_t group_size = Config::num_experts_per_part + num_shared;
    // Of each shared expert.
    static constexpr uint32_t num_parts = ceil_div(num_routed, Config::num_experts_per_part);

 public:
    static constexpr bool has_shared = true;
    static constexpr uint32_t num_entries = num_routed + num_parts * num_shared;

    // Of so many routed experts, the first of which has parts in front of it, with all parts that
    // stand among them.
    static constexpr uint32_t num_entries_with(uint32_t num_experts) {
        return num_experts + ceil_div(num_experts, Config::num_experts_per_part) * num_shared;
    }

    static __device__ bool is_shared(uint32_t entry) { return entry % group_size < num_shared; }
    // Of a routed expert's entry: its local index; and the other way round.
    static __device__ uint32_t routed_expert(uint32_t entry) {
        return entry - (entry / group_size + 1) * num_shared;
    }
    static __device__ uint32_t entry_of(uint32_t expert_idx) {
        return expert_idx + (expert_idx / Config::num_experts_per_part + 1) * num_shared;
    }
    // Of a part: which shared expert's it is.
    static __device__ uint32_t shared_expert(uint32_t entry) { return entry % group_size; }
    // Of any entry: whose weights it takes.
    static __device__ uint32_t weight_expert(uint32_t entry) {
        //~ shared_weights
        return is_shared(entry) ? num_routed + shared_expert(entry) : routed_expert(entry);
    }

    // Before anything that is asked of a call.
    __device__ void set_call(const KernelArgs& args) { args_ = &args; }
    // Where the tokens of shared experts come from.
    __device__ uint32_t own_rank_idx() const { return args_->rank_idx; }
    // Of this rank: what each shared expert has. Of all together:
    __device__ uint32_t num_own_tokens() const { return args_->num_tokens; }
    __device__ uint32_t num_shared_tokens() const { return num_shared * num_own_tokens(); }
    // Of a part: its first token, among the rank's own, and how many it has.
    __device__ uint32_t first_token(uint32_t entry) const {
        return min(entry / group_size * tokens_per_part(), num_own_tokens());  //~ part_begin
    }
    __device__ uint32_t num_part_tokens(uint32_t entry) const {
        return min(num_own_tokens() - first_token(entry), tokens_per_part());
    }
    // In front of the first routed expert.
    __device__ uint32_t num_first_tokens() const {
        return num_shared * min(num_own_tokens(), tokens_per_part());  //~ first_tokens
    }
    // Whether a shared expert's tokens are a single m-block.
    __device__ bool is_one_m_block() const { return num_own_tokens() <= Config::block_m; }

 private:
    __device__ uint32_t tokens_per_part() const {
        constexpr uint32_t unit = Config::block_m * Config::num_part_m_blocks;
        return align_up(ceil_div(num_own_tokens(), num_parts), unit);
    }

    // The kernel's __grid_constant__ parameter, so that its fields take no registers.
    const KernelArgs* args_;
};

template <class Config>
using ExpertOrder = conditional_t<Config::num_shared_experts == 0, RoutedExpertOrder<Config>,
                                  SharedExpertOrder<Config>>;

}  // namespace deep_moe
