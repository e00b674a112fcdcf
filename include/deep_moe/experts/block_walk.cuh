// Which block comes next. The list of all blocks follows from the experts' token counts alone, so
// that whoever walks it knows what stands where without asking anybody. In which order they stand
// there depends on the pool: expert_walk.cuh, or, where rows are used again, chunk_walk.cuh.
//
// A cluster takes a pair, its CTA of rank r the pair's r-th block: neighbouring n-blocks of an
// m-block, or, where num_cluster_m_blocks is 2, the same n-block of two neighbouring m-blocks, and
// n-blocks only of an odd last one. Which pairs: on SM100 every (number of clusters)-th, on SM90
// whichever it claims next (experts/sm90/block_claims.cuh). A block waits only for blocks in pairs
// in front of it, or for tokens that wait only for such, and pairs are taken in order, so the walk
// cannot deadlock.
//
// An m-block counts as half as many pairs as it has n-blocks, rounded up. With an odd number of
// n-blocks there are blocks with n_block_idx == number of n-blocks: a CTA takes part in their loads
// and MMAs, whose results nobody stores.
#pragma once

#include "deep_moe/conditional.cuh"
#include "deep_moe/experts/chunk_walk.cuh"
#include "deep_moe/experts/expert_walk.cuh"
#include "deep_moe/layout/pool_ring.cuh"

namespace deep_moe {

template <class Config>
using BlockWalk = conditional_t<PoolRing<Config>::wraps, ChunkWalk<Config>, ExpertWalk<Config>>;

}  // namespace deep_moe
