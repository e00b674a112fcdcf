// A block: the unit of work of the two linear layers. It is the n-th columns of an m-block; an
// m-block is a run of tokens of one expert.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

enum class Phase : uint32_t { linear1, linear2 };

// The tokens of a block.
struct BlockRows {
    Phase phase;
    uint32_t pool_block_idx;  // the m-block's first; its counters are those of the m-block
    uint32_t num_rows;        // of the m-block, up to block_m
    uint32_t num_valid_rows;  // tokens in it, at least 1
    bool is_reused;           // other tokens of this call wait for its rows (pool_ring.cuh)
};

struct Block : BlockRows {
    uint32_t expert_idx;  // local, as weights have them: shared ones stand behind the routed ones
    uint32_t m_block_idx;
    uint32_t n_block_idx;
    bool shares_weights;  // the cluster's CTAs have the same n-block, of m-blocks of one expert
};

}  // namespace deep_moe
