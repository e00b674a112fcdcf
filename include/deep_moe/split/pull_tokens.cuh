// Dispatch, receiving: a rank fetches every token with a slot for a local expert once, and writes
// it to the rows of all such slots. Padding rows behind an expert's own become zero.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/convert.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/claims.cuh"
#include "deep_moe/split/parts.cuh"
#include "deep_moe/split/pulled_rows.cuh"
#include "deep_moe/split/share_tokens.cuh"
#include "deep_moe/split/spread_row.cuh"
#include "deep_moe/split/step.cuh"
#include "deep_moe/split/throughput_buffer.cuh"
#include "deep_moe/split/token_block.cuh"
#include "deep_moe/split/token_format.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// 8 values of BF16, each times a number in FP32 and rounded once.
__device__ __forceinline__ uint4 multiply_chunk(uint4 chunk, float factor) {
    const auto multiply = [&](uint32_t pair) {
        const float low = __uint_as_float(pair << 16);
        const float high = __uint_as_float(pair & 0xffff0000u);
        return ptx::cvt_rn_bf16x2_f32(__fmul_rn(factor, high), __fmul_rn(factor, low));
    };
    return {multiply(chunk.x), multiply(chunk.y), multiply(chunk.z), multiply(chunk.w)};
}

// Any warps of all CTAs. A CTA takes the same part of every rank's tokens, so that every pair of
// ranks is busy all the time, and every num_ctas-th padding row. Its warps claim both, with padding
// spread evenly among tokens. So the work of the links and of this GPU's memory goes on side by
// side to the end. A token is waited for before it is fetched.
//
// `Rows`: CountedRows or KnownRows.
template <class Config, class Rows>
class TokenPull {
    using Format = TokenFormat<Config>;
    static constexpr uint32_t alignment = Config::expert_alignment;
    // Rows that may be padding, of all experts and of a CTA: behind each expert's last one there
    // are fewer than `alignment`.
    static constexpr uint32_t num_gaps = Config::num_experts_per_rank * (alignment - 1);
    static constexpr uint32_t gaps_per_cta = ceil_div(num_gaps, Config::num_ctas);
    // Over a link a load takes two microseconds and more: a token of E4M3 with hidden 7168 is here
    // after one. To multiply them takes registers, too.
    static constexpr uint32_t most_loads_at_once = Rows::are_known ? 8 : 16;

 public:
    __device__ TokenPull(const ThroughputArgs& args, const ThroughputRanks<Config>& ranks,
                         const Rows& rows, const Claims& claims)
        : args_(args), ranks_(ranks), rows_(rows), claims_(claims) {}

    __device__ void run(const Step<Config>& step, Waiter& waiter) const {
        const auto parts_of = [&](uint32_t source) { return TokenParts(block_of(source).size()); };
        PartWait<Config, Step<Config>, decltype(parts_of)> wait(step, parts_of, waiter);
        const uint32_t num_tokens = longest_block() * Config::num_ranks;
        const uint32_t num_items = num_tokens + gaps_per_cta;
        const auto tokens_before = [&](uint32_t item) {
            return static_cast<uint32_t>(uint64_t{item} * num_tokens / num_items);
        };
        for (uint32_t item = claims_.next(); item < num_items; item = claims_.next()) {
            const uint32_t i = tokens_before(item);
            if (tokens_before(item + 1) != i) {
                if (!wait.reach(i / Config::num_ranks)) return;  //~ part_awaited
                pull_item(i);
            } else {
                clear_gap(item - i);
            }
        }
        wait.reach_end();
    }

 private:
    __device__ void pull_item(uint32_t i) const {
        // CTAs begin with different ranks, and ranks do, too.
        const uint32_t source = (blockIdx.x + ranks_.rank_idx() + i) % Config::num_ranks;
        const TokenBlock<Config> block = block_of(source);
        const uint32_t token_idx = block.begin + i / Config::num_ranks;
        if (token_idx >= block.end) return;
        if constexpr (Config::masks_ranks && Rows::are_known) {
            if (!ranks_.active().contains(source)) return clear_token(source, token_idx);
        }
        pull(source, token_idx);
    }

    // The tokens of a rank that this CTA takes.
    __device__ TokenBlock<Config> block_of(uint32_t source) const {
        return TokenBlock<Config>(rows_.num_tokens(source));
    }

    __device__ void clear_gap(uint32_t i) const {
        if constexpr (alignment > 1) {
            const uint32_t gap = i * Config::num_ctas + blockIdx.x;
            if (gap >= num_gaps) return;
            const uint32_t end = rows_.end_of(gap / (alignment - 1));
            const uint32_t row = end + gap % (alignment - 1);
            if (row < align_up(end, alignment)) clear_row(row);  //~ padding_cleared
        }
    }

    // Of all ranks' in this CTA.
    __device__ uint32_t longest_block() const {
        uint32_t longest = 0;
        for (uint32_t i = ptx::lane_idx(); i < Config::num_ranks; i += warp_size) {
            longest = max(longest, block_of(i).size());
        }
        return ptx::redux_sync_max(longest);
    }

    // A whole warp; lanes stand for the token's slots first, then for its chunks.
    __device__ void pull(uint32_t source, uint32_t token_idx) const {
        const ThroughputBuffer<Config> buffer = ranks_.of(source);
        const uint32_t slot_idx = token_idx * Config::num_topk + ptx::lane_idx();
        uint32_t row = not_here;
        if (ptx::lane_idx() < Config::num_topk) {
            row = rows_.row_of(*buffer.slot_words(slot_idx), source);
        }
        const bool is_here = row != not_here;
        if constexpr (!Rows::are_known) {
            if (ptx::lane_idx() < Config::num_topk) {
                const uint32_t first_token = source * Config::max_tokens_per_rank;
                args_.rows_here[uint64_t{first_token} * Config::num_topk + slot_idx] =
                    static_cast<int32_t>(row);  //~ row_here_told
            }
        }
        const uint32_t slots = __ballot_sync(full_warp, is_here);
        if (slots == 0) return;
        if (args_.row_ids != nullptr && is_here) {
            const uint32_t first_slot =  // of the source's
                source * Config::max_tokens_per_rank * Config::num_topk;
            args_.row_ids[row] = int64_t{first_slot} + slot_idx;
        }
        // All loads of a token are under way before the first of them is waited for.
        float weight = 0.0f;
        if constexpr (Config::has_weights) {
            if (is_here) weight = *buffer.slot_weights(slot_idx);
        }
        const LoadedScales<Config> scales(buffer.token_scales(token_idx));
        const uint4* const token = shared_token(buffer, token_idx);
        auto* const rows = static_cast<uint4*>(args_.recv_x);
        if constexpr (Config::has_weights && Rows::are_known) {
            static_assert(!Format::is_quantized, "only rows of BF16 are multiplied");
            const auto multiplied = [&](uint32_t slot) {
                const float factor = __shfl_sync(full_warp, weight, slot);  //~ slot_factor
                return [=](uint4 chunk) { return multiply_chunk(chunk, factor); };
            };
            spread_row<Format::num_chunks, most_loads_at_once>(rows, token, slots, row, multiplied);
        } else {
            spread_row<Format::num_chunks, most_loads_at_once>(rows, token, slots, row);
            if constexpr (Config::has_weights) {
                if (is_here) args_.recv_weights[row] = weight;  //~ weight_told
            }
        }
        if constexpr (Format::is_quantized) {
            const auto scale_word = [&](uint32_t slot_row, uint32_t column) {
                return args_.recv_scales + uint64_t{slot_row} * Format::num_received_words + column;
            };
            scales.spread(scale_word, slots, row);
        }
    }

    // A whole warp: the rows of a token whose rank has been masked since they were counted.
    __device__ void clear_token(uint32_t source, uint32_t token_idx) const {
        uint32_t row = not_here;
        if (ptx::lane_idx() < Config::num_topk) {
            const uint64_t token = uint64_t{source} * Config::max_tokens_per_rank + token_idx;
            row =
                static_cast<uint32_t>(args_.rows_here[token * Config::num_topk + ptx::lane_idx()]);
        }
        for (uint32_t left = __ballot_sync(full_warp, row != not_here); left != 0;
             left &= left - 1) {
            clear_row(__shfl_sync(full_warp, row, __ffs(left) - 1));  //~ masked_row_cleared
        }
    }

    // A whole warp.
    __device__ void clear_row(uint32_t row) const {
        auto* const values = static_cast<uint4*>(args_.recv_x) + uint64_t{row} * Format::num_chunks;
        for (uint32_t i = ptx::lane_idx(); i < Format::num_chunks; i += warp_size) {
            values[i] = uint4{};
        }
        if constexpr (Format::is_quantized) {
            constexpr uint32_t num_words = Format::num_received_words;
            for (uint32_t i = ptx::lane_idx(); i < num_words; i += warp_size) {
                args_.recv_scales[uint64_t{row} * num_words + i] = 0;
            }
        }
        if constexpr (Config::has_weights && !Rows::are_known) {
            if (ptx::lane_idx() == 0) args_.recv_weights[row] = 0.0f;
        }
        if (args_.row_ids != nullptr && ptx::lane_idx() == 0) args_.row_ids[row] = -1;
    }

    const ThroughputArgs& args_;
    const ThroughputRanks<Config>& ranks_;
    const Rows& rows_;
    const Claims claims_;
};

}  // namespace deep_moe
