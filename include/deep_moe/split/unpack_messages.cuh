// Dispatch, receiving, with Config::stages_by_expert: each message goes to its row.
#pragma once

#include <cuda/std/cstdint>

#include "deep_moe/math.cuh"
#include "deep_moe/ptx/warp.cuh"
#include "deep_moe/split/arrivals.cuh"
#include "deep_moe/split/low_latency_buffer.cuh"
#include "deep_moe/split/message.cuh"
#include "deep_moe/split/receive_counts.cuh"
#include "deep_moe/split/received_row.cuh"
#include "deep_moe/split/spread_row.cuh"
#include "deep_moe/split/token_format.cuh"
#include "deep_moe/sync/wait.cuh"

namespace deep_moe {

// All warps of the grid, when all ranks have come to the call.
template <class Config>
class MessageUnpacking {
    using Format = TokenFormat<Config>;
    // A token of E4M3 with hidden 7168 is read in one go.
    static constexpr uint32_t most_loads_at_once = 16;

 public:
    __device__ MessageUnpacking(const LowLatencyArgs& args, const LowLatencyRanks<Config>& ranks,
                                const ReceivedTokens<Config>& received, uint32_t half)
        : args_(args), ranks_(ranks), local_(ranks.local()), received_(received), half_(half) {}

    // The same number of warps takes the messages of each expert and source rank, when they have
    // come: nobody waits for those of others.
    __device__ void run(Waiter& waiter) const {
        constexpr uint32_t num_warps = Config::num_ctas * (Config::num_threads / warp_size);
        constexpr uint32_t num_pairs = Config::num_experts_per_rank * Config::num_ranks;
        constexpr uint32_t warps_per_pair = max(1u, num_warps / num_pairs);
        // The warps of a pair are in different CTAs, so that few messages do not all pass through a
        // few SMs.
        for (uint32_t i = ptx::warp_idx() * Config::num_ctas + blockIdx.x;
             i < num_pairs * warps_per_pair; i += num_warps) {
            const uint32_t local_expert_idx = i / warps_per_pair % Config::num_experts_per_rank;
            const uint32_t rank_idx = i / warps_per_pair / Config::num_experts_per_rank;
            const uint32_t num_rows = received_.num_rows(local_expert_idx, rank_idx);
            if (i % warps_per_pair >= num_rows) continue;
            bool have_come = true;
            have_come = await_pair(local_expert_idx, rank_idx, num_rows,
                                   waiter);  //~ messages_of_pair_awaited
            if (!have_come) return;
            for (uint32_t slot_idx = i % warps_per_pair; slot_idx < num_rows;
                 slot_idx += warps_per_pair) {
                unpack(local_expert_idx, rank_idx, slot_idx);
            }
        }
    }

 private:
    // A whole warp: lane 0 waits, and what it acquired holds for all lanes.
    __device__ bool await_pair(uint32_t local_expert_idx, uint32_t rank_idx, uint32_t num_rows,
                               Waiter& waiter) const {
        bool have_come = true;
        if (ptx::lane_idx() == 0) {
            have_come = await_arrivals_of(
                WaitSite::split_tokens, local_.message_arrivals(half_, local_expert_idx, rank_idx),
                rank_idx, num_rows, waiter);
        }
        return waiter.warp_agrees(have_come);
    }

    // A whole warp.
    __device__ void unpack(uint32_t local_expert_idx, uint32_t rank_idx, uint32_t slot_idx) const {
        const Message<Config, const uint8_t> message(
            local_.message(half_, local_expert_idx, rank_idx, slot_idx));
        const uint32_t row = local_expert_idx * rows_per_expert<Config> +
                             received_.first_row(local_expert_idx, rank_idx) +
                             slot_idx;  //~ message_row
        const LoadedScales<Config> scales(message.scales());
        if (ptx::lane_idx() == 0) {
            const MessageControl control = *message.control();
            const uint32_t number = Config::relays_tokens ? control.origin : control.token_idx;
            tell_source(args_, ranks_, half_, row, rank_idx, control.token_idx, control.slot_idx,
                        number);
        }
        spread_row<Format::num_chunks, most_loads_at_once>(static_cast<uint4*>(args_.recv_x),
                                                           message.values(), only_lane_0, row);
        if constexpr (Format::is_quantized) {
            const auto scale_word = [&](uint32_t, uint32_t column) {
                return scale_word_of_row<Config>(args_, row, column);
            };
            scales.spread(scale_word, only_lane_0, row);
        }
    }

    static constexpr uint32_t only_lane_0 = 1;  // whose row the whole warp writes

    const LowLatencyArgs& args_;
    const LowLatencyRanks<Config>& ranks_;
    const LowLatencyBuffer<Config> local_;
    const ReceivedTokens<Config>& received_;
    uint32_t half_;
};

}  // namespace deep_moe
