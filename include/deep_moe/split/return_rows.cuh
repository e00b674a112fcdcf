// Combine of the throughput path. With Config::sends_rows the experts' rows go to the tokens'
// ranks, a place for each slot there: links carry 9 % more if data is sent than if it is fetched.
// Otherwise they, and always a number for each of them, stay with their rank, in its buffer, and
// the tokens' ranks fetch them from there.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/parts.cuh"
#include "deep_moe/split/reduce_slots.cuh"
#include "deep_moe/split/slot_lanes.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/token_block.cuh"

namespace deep_moe {

// A token goes in pieces of 32 chunks, and so do its rows: a CTA takes neighbouring pieces of each
// rank's tokens, in parts of at least so many.
using PieceParts = Parts<32>;
template <class Config>
using PieceBlock = TokenBlock<Config, SlotSum<Config>::num_pieces>;

// The experts' rows to other ranks: of each rank's pieces those that the CTA of this number adds
// there. This rank's own are added from where they are; padding stays behind.
template <class Config>
class RowSharing {
    static constexpr uint32_t num_chunks = Config::hidden * sizeof(uint16_t) / sizeof(uint4);
    static constexpr uint32_t num_pieces = SlotSum<Config>::num_pieces;
    static constexpr uint32_t num_others = max(1u, Config::num_ranks - 1);
    static constexpr uint32_t lanes = slot_lanes<Config>();  // that look at a token's slots
    static constexpr uint32_t pieces_at_once = warp_size / lanes;

 public:
    __device__ RowSharing(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks)
        : args_(args), ranks_(ranks) {}

    // How a rank's pieces that this CTA takes are cut.
    __device__ PieceParts parts_of(uint32_t rank_idx) const {
        return PieceParts(block_of(rank_idx).size());
    }
    // The most that a rank has.
    __device__ uint32_t num_parts() const {
        return most([&](uint32_t rank_idx) { return parts_of(rank_idx).count(); });
    }
    // Units to tell a rank with a part. What stays here is told with the first one.
    __device__ uint32_t units(uint32_t rank_idx, uint32_t part) const {
        if (rank_idx == args_.rank_idx) return part == 0 ? units_per_round : 0;
        return parts_of(rank_idx).units(part);
    }

    // `num_warps` whole warps, of which this is the warp'th: a part of the pieces of all ranks.
    __device__ void share(uint32_t part, uint32_t warp, uint32_t num_warps) const {
        if constexpr (Config::num_ranks == 1) return;
        const uint32_t length = most([&](uint32_t rank_idx) {
            const PieceParts parts = parts_of(rank_idx);
            return parts.end(part) - parts.begin(part);
        });
        for (uint32_t i = warp * pieces_at_once; i < length * num_others;
             i += num_warps * pieces_at_once) {
            copy_pieces(part, i, length * num_others);
        }
    }

 private:
    // A whole warp. first: of the pieces of all other ranks, one of each after the other.
    __device__ void copy_pieces(uint32_t part, uint32_t first, uint32_t end) const {
        // Lanes stand for slots first.
        const uint32_t i = first + ptx::lane_idx() / lanes;
        const uint32_t source = (args_.rank_idx + 1 + i % num_others) % Config::num_ranks;
        const PieceBlock<Config> block = block_of(source);
        const PieceParts parts(block.size());
        const uint32_t piece = block.begin + parts.begin(part) + i / num_others;
        const uint32_t slot_idx = ptx::lane_idx() % lanes;
        const uint32_t token_idx = piece / num_pieces;
        uint32_t row = RankRow::none;
        if (i < end && piece < block.begin + parts.end(part) && slot_idx < Config::num_topk) {
            const uint64_t token = uint64_t{source} * Config::max_tokens_per_rank + token_idx;
            const int32_t* const rows = args_.rows_here + token * Config::num_topk;
            row = static_cast<uint32_t>(rows[slot_idx]);  //~ row_shared
        }
        const uint32_t first_chunk = piece % num_pieces * warp_size;
        const uint64_t slot_row = reinterpret_cast<uint64_t>(
            ranks_.of(source).rows(token_idx * Config::num_topk + slot_idx));  //~ row_sent_to_slot
        // Then for chunks.
        constexpr uint32_t loads_at_once = 8;
        for (uint32_t left = __ballot_sync(full_warp, row != RankRow::none); left != 0;) {
            uint4 chunks[loads_at_once];
            uint32_t others = left;
#pragma unroll
            for (uint32_t j = 0; j < loads_at_once; ++j) {
                if (others == 0) break;
                const uint32_t lane = __ffs(others) - 1;
                const uint64_t from = __shfl_sync(full_warp, row, lane);
                const uint32_t chunk_idx = chunk_of(first_chunk, lane);
                if (chunk_idx < num_chunks) {
                    chunks[j] = static_cast<const uint4*>(args_.y)[from * num_chunks + chunk_idx];
                }
                others &= others - 1;
            }
#pragma unroll
            for (uint32_t j = 0; j < loads_at_once; ++j) {
                if (left == 0) break;
                const uint32_t lane = __ffs(left) - 1;
                const uint64_t to = __shfl_sync(full_warp, slot_row, lane);
                const uint32_t chunk_idx = chunk_of(first_chunk, lane);
                if (chunk_idx < num_chunks) reinterpret_cast<uint4*>(to)[chunk_idx] = chunks[j];
                left &= left - 1;
            }
        }
    }

    // This lane's chunk of the piece that another lane has found.
    static __device__ uint32_t chunk_of(uint32_t first_chunk, uint32_t lane) {
        return __shfl_sync(full_warp, first_chunk, lane) + ptx::lane_idx();
    }

    __device__ PieceBlock<Config> block_of(uint32_t rank_idx) const {
        const bool is_active = ranks_.active().contains(rank_idx);  //~ masked_gets_no_rows
        return PieceBlock<Config>(is_active ? static_cast<uint32_t>(args_.rank_tokens[rank_idx])
                                            : 0);
    }

    // A whole warp: the largest of all other ranks.
    template <class Of>
    __device__ uint32_t most(const Of& of) const {
        uint32_t largest = 0;
        for (uint32_t i = ptx::lane_idx(); i < Config::num_ranks; i += warp_size) {
            if (i != args_.rank_idx) largest = max(largest, of(i));
        }
        return ptx::redux_sync_max(largest);
    }

    const ThroughputArgs& args_;
    const ThroughputRanks<Config>& ranks_;
};

// All threads of the grid. Padding goes along.
template <class Config>
__device__ void share_scalars(const ThroughputArgs& args, const ThroughputBuffer<Config>& local) {
    const auto end = static_cast<uint32_t>(args.expert_end[Config::num_experts_per_rank - 1]);
    for (uint32_t i = blockIdx.x * Config::num_threads + threadIdx.x; i < end;
         i += Config::num_ctas * Config::num_threads) {
        *local.scalars(i) = args.scalars[i];
    }
}

// Of a slot's RankRow: whether its row counts. That of a rank which has been masked since the
// dispatch does not.
template <class Config>
__device__ bool has_row(const ThroughputRanks<Config>& ranks, uint32_t word) {
    return word != RankRow::none &&
           ranks.active().contains(RankRow::rank_idx(word));  //~ masked_row_dropped
}

// What `SlotReduction` asks. A whole warp.
template <class Config>
__device__ SlotRow returned_row(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                                uint32_t token_idx) {
    if (ptx::lane_idx() >= Config::num_topk) return {0, 0.0f};
    const uint32_t slot_idx = token_idx * Config::num_topk + ptx::lane_idx();
    const auto word = static_cast<uint32_t>(args.slot_rows[slot_idx]);
    if (!has_row(ranks, word)) return {0, 0.0f};
    const uint32_t rank_idx = RankRow::rank_idx(word);
    const uint16_t* row;
    if constexpr (!Config::sends_rows) {
        row = ranks.of(rank_idx).rows(RankRow::row_idx(word));  //~ row_returned
    } else if (rank_idx == ranks.rank_idx()) {
        row = static_cast<const uint16_t*>(args.y) +
              uint64_t{RankRow::row_idx(word)} * Config::hidden;  //~ own_row_added
    } else {
        row = ranks.local().rows(slot_idx);
    }
    float weight = 1.0f;
    if constexpr (Config::has_weights) weight = args.topk_weights[slot_idx];
    return {reinterpret_cast<uint64_t>(row), weight};
}

// All threads of the grid, when all ranks' numbers may be fetched.
template <class Config>
__device__ void fetch_scalars(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks) {
    for (uint32_t i = blockIdx.x * Config::num_threads + threadIdx.x;
         i < args.num_tokens * Config::num_topk; i += Config::num_ctas * Config::num_threads) {
        const auto word = static_cast<uint32_t>(args.slot_rows[i]);
        float scalar = 0.0f;
        if (has_row(ranks, word)) {
            scalar = *ranks.of(RankRow::rank_idx(word)).scalars(RankRow::row_idx(word));
        }
        args.slot_scalars[i] = scalar;  //~ scalar_returned
    }
}

}  // namespace deep_moe
