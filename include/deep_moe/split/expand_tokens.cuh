// Dispatch, receiving: each staged token is read once and written to a row of every local expert
// that it is for.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/receive_counts.cuh"
#include "deep_moe/split/received_row.cuh"
#include "deep_moe/split/spread_row.cuh"
#include "deep_moe/split/token_format.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// All warps of the grid, when all tokens are here.
template <class Config>
class TokenExpansion {
    using Format = TokenFormat<Config>;
    // A token of E4M3 with hidden 7168 is read in one go.
    static constexpr uint32_t most_loads_at_once = 16;

 public:
    __device__ TokenExpansion(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                              const ReceivedTokens<Config>& received, uint32_t half)
        : args_(args), ranks_(ranks), local_(ranks.local()), received_(received), half_(half) {}

    __device__ void run(const Waiter&) const {
        constexpr uint32_t num_warps = Config::num_threads / warp_size;
        const uint32_t num_tokens = received_.num_tokens();
        // Neighbouring tokens go to different CTAs, so that few tokens do not all pass through a
        // few SMs; the first ones to the last CTAs, which have not sent any then.
        const uint32_t cta_idx = Config::num_ctas - 1 - blockIdx.x;
        for (uint32_t i = ptx::warp_idx() * Config::num_ctas + cta_idx; i < num_tokens;
             i += num_warps * Config::num_ctas) {
            const uint32_t rank_idx = received_.rank_of(i);
            expand(rank_idx, i - received_.first_token(rank_idx));
        }
    }

 private:
    // A whole warp; lanes stand for the token's slots first, then for its chunks.
    __device__ void expand(uint32_t rank_idx, uint32_t slot_idx) const {
        const uint32_t* const header = local_.staged_headers(half_, rank_idx, slot_idx);
        uint32_t row_of_expert = RowOfExpert::none;
        if (ptx::lane_idx() < Config::num_topk) {
            row_of_expert = header[LowLatencyBuffer<Config>::num_header_words + ptx::lane_idx()];
        }
        // While it comes.
        const LoadedScales<Config> scales(staged_scales(rank_idx, slot_idx));
        LoadedRow<Format::num_chunks, most_loads_at_once> values(
            reinterpret_cast<const uint4*>(local_.staged_values(half_, rank_idx, slot_idx)));
        const uint32_t slots = __ballot_sync(full_warp, row_of_expert != RowOfExpert::none);
        uint32_t row = 0;  // of all experts' rows
        if (row_of_expert != RowOfExpert::none) {
            const uint32_t local_expert_idx = RowOfExpert::local_expert_idx(row_of_expert);
            row = local_expert_idx * rows_per_expert<Config> +
                  received_.first_row(local_expert_idx, rank_idx) +
                  RowOfExpert::row(row_of_expert);  //~ row_placed
            tell_source(args_, ranks_, half_, row, rank_idx, header[0], ptx::lane_idx(),
                        header[LowLatencyBuffer<Config>::num_header_words - 1]);
        }
        values.spread(static_cast<uint4*>(args_.recv_x), slots, row);
        if constexpr (Format::is_quantized) {
            const auto scale_word = [&](uint32_t slot_row, uint32_t column) {
                return scale_word_of_row<Config>(args_, slot_row, column);
            };
            scales.spread(scale_word, slots, row);
        }
    }

    __device__ const uint32_t* staged_scales(uint32_t rank_idx, uint32_t slot_idx) const {
        if constexpr (Format::is_quantized) return local_.staged_scales(half_, rank_idx, slot_idx);
        return nullptr;
    }

    const LowLatencyArgs& args_;
    const LowLatencyRanks<Config>& ranks_;
    const LowLatencyBuffer<Config> local_;
    const ReceivedTokens<Config>& received_;
    uint32_t half_;
};

}  // namespace deep_moe
