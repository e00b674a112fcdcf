// The list of blocks where the pool is a ring (layout/pool_ring.cuh).
//
// If the call has more pool blocks than the ring has places, the list of expert_walk.cuh would wait
// for rows that come free behind it. So the m-blocks of all experts are cut into chunks of
// num_ring_chunk_m_blocks, whatever expert they are of: first Linear1 of num_ring_lead_chunks
// chunks, then by turns Linear2 of a chunk and Linear1 of the one so many chunks further; inside,
// by m-block, by pair of neighbouring n-blocks. As many chunks fit into the ring at once. So
// whatever has the rows of an m-block before it has its Linear2 in front of the m-block's Linear1.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/experts/block.cuh"
#include "deep_moe/experts/expert_counts.cuh"
#include "deep_moe/experts/expert_walk.cuh"
#include "deep_moe/experts/linear.cuh"
#include "deep_moe/layout/expert_tiles.cuh"
#include "deep_moe/layout/pool_ring.cuh"
#include "deep_moe/math.cuh"

namespace deep_moe {

// Of one warp; all 32 lanes call everything, and all members are the same in all of them.
template <class Config>
class ChunkWalk : public ExpertWalk<Config> {
    using Experts = ExpertWalk<Config>;
    static constexpr uint32_t chunk_m_blocks = Config::num_ring_chunk_m_blocks;
    static constexpr uint32_t lead = Config::num_ring_lead_chunks;
    static_assert(chunk_m_blocks > 0 && lead > 0);
    static_assert(chunk_m_blocks * lead * (Config::block_m / Config::block_m_step) <=
                      PoolRing<Config>::num_blocks,
                  "the chunks that Linear1 is ahead fit into the ring");

 public:
    __device__ ChunkWalk(const ExpertCounts<Config>& counts, uint32_t cta_idx)
        : Experts(counts, cta_idx), num_m_blocks_(counts.num_m_blocks_in_use()) {
        if constexpr (is_mixed) num_reused_ = counts.num_reused_blocks();
        if (num_reused() > 0) this->turn_end_ = 0;
    }

    // As those of ExpertWalk.
    __device__ bool find(Block& block) {
        return num_reused() == 0 ? Experts::find(block) : find_in_chunks(block);
    }
    __device__ bool next(Block& block) {
        const bool found = find(block);
        this->advance(Experts::num_clusters);
        return found;
    }

 private:
    __device__ bool find_in_chunks(Block& block);
    // The m-blocks of the chunk that the walk stands at; none where its phase has no such chunk.
    __device__ uint32_t num_m_blocks_of_chunk() const;
    // The other phase's chunk; false behind the last of Linear2.
    __device__ bool start_next_chunk();

    // The first m-block of the chunk that the walk stands at, counted from the first one of the
    // expert at place_; modulo 2^32, for that expert may begin in the middle of the chunk.
    __device__ uint32_t chunk_offset() const {
        if constexpr (!is_mixed) return first_m_block() - this->place_.pool_block_idx;
        return chunk_offset_;
    }
    // The same, counted from the first m-block of all.
    __device__ uint32_t first_m_block() const {
        return (chunk_idx() - (this->phase_ == Phase::linear1 ? 0 : lead)) * chunk_m_blocks;
    }
    // Of Linear1; Linear2's is `lead` behind it. Turns are of one expert here, so that where they
    // end need not be kept from one block to the next: its register has this instead.
    __device__ uint32_t chunk_idx() const { return this->turn_end_; }
    // Pool blocks whose rows others use after them.
    __device__ uint32_t num_reused() const {
        if constexpr (is_mixed) return num_reused_;
        constexpr uint32_t num_places = PoolRing<Config>::num_blocks;
        return num_m_blocks_ - min(num_m_blocks_, num_places);
    }

    // Where m-blocks have one size, each is one pool block, and what these would say follows from
    // the number of pool blocks in front of the expert: the loaders have few registers.
    static constexpr bool is_mixed = Config::block_m != Config::block_m_step;

    // The walk stands at a chunk of one phase, and next_pair_ counts from its first pair. place_ is
    // the expert of the block that was found last in this phase.
    uint32_t num_m_blocks_;  // of all experts
    // Where sizes are mixed:
    uint32_t num_reused_ = 0;
    uint32_t chunk_offset_ = 0;
    uint32_t other_chunk_offset_ = 0;  // of the other phase, with its place
};

template <class Config>
__device__ bool ChunkWalk<Config>::find_in_chunks(Block& block) {
    const auto num_m_blocks_of = [](const ExpertTiles<Config>& tiles, uint32_t) {
        return tiles.num_m_blocks();
    };
    uint32_t num_pairs = LinearOf<Config>(this->phase_).num_n_block_pairs();
    for (uint32_t end; this->next_pair_ >= (end = num_m_blocks_of_chunk() * num_pairs);) {
        this->next_pair_ -= end;
        if (!start_next_chunk()) return false;
        num_pairs = LinearOf<Config>(this->phase_).num_n_block_pairs();
    }
    const uint32_t offset = chunk_offset() + this->next_pair_ / num_pairs;
    uint32_t m_block_idx = offset;
    this->counts_.pass_experts(this->place_, Experts::num_experts, m_block_idx, num_m_blocks_of);
    if constexpr (is_mixed) chunk_offset_ -= offset - m_block_idx;

    // A turn of this expert alone, at this pair.
    const uint32_t next_pair = this->next_pair_;
    const uint32_t chunk_idx = this->chunk_idx();
    [[maybe_unused]] const uint32_t chunk_offset = this->chunk_offset();
    [[maybe_unused]] const uint32_t end_of_chunk = chunk_offset + num_m_blocks_of_chunk();
    this->turn_end_ = this->place_.expert_idx + 1;
    if constexpr (Config::num_cluster_m_blocks == 1) {
        this->next_pair_ = m_block_idx * num_pairs + next_pair % num_pairs;
        Experts::find(block);
    } else {
        // A cluster has no m-blocks together of which only one is in the chunk.
        const bool begins_before = static_cast<int32_t>(chunk_offset) <= 0;
        const uint32_t first = begins_before ? 0 : chunk_offset;
        this->next_pair_ -= (first - chunk_offset) * num_pairs;
        this->find_in_run(block, first, end_of_chunk);  //~ paired_in_chunk
    }
    this->next_pair_ = next_pair;
    this->turn_end_ = chunk_idx;
    block.is_reused = block.pool_block_idx < num_reused();
    return true;
}

template <class Config>
__device__ uint32_t ChunkWalk<Config>::num_m_blocks_of_chunk() const {
    const uint32_t lag = this->phase_ == Phase::linear1 ? 0 : lead;
    const uint32_t first = first_m_block();
    return chunk_idx() < lag || first >= num_m_blocks_ ? 0
                                                       : min(chunk_m_blocks, num_m_blocks_ - first);
}

template <class Config>
__device__ bool ChunkWalk<Config>::start_next_chunk() {
    if constexpr (is_mixed) {
        const uint32_t offset = chunk_offset_ + num_m_blocks_of_chunk();
        chunk_offset_ = other_chunk_offset_;
        other_chunk_offset_ = offset;
    }
    const ExpertPlace place = this->place_;
    this->place_ = this->other_place_;
    this->other_place_ = place;
    if (this->phase_ == Phase::linear2) {
        this->phase_ = Phase::linear1;
        return true;
    }
    this->phase_ = Phase::linear2;
    const uint32_t chunk_idx = ++this->turn_end_;
    return chunk_idx < lead || (chunk_idx - lead) * chunk_m_blocks < num_m_blocks_;
}

}  // namespace deep_moe
