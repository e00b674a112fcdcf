// The kernel's arguments. The Python launcher reads these structs from this file
// (jit/cpp_structs.py), and every rendered kernel asserts their sizes and offsets.
#pragma once

#include <cuda/std/cstdint>

namespace deep_moe {

inline constexpr uint32_t max_num_ranks = 72;  // one NVLink domain of a GB200/GB300 rack
inline constexpr uint32_t no_peer_rank = 0xffffffff;

// Opaque image of a CUtensorMap; only its address means something to PTX.
struct alignas(64) TensorMap {
    uint8_t bytes[128];
};

enum class WaitCode : uint32_t {
    ok = 0,
    timeout = 1,
    pool_overflow = 2,
    // 3 is the host's, jit/status.py
    stale_handle = 4,
    recv_overflow = 5,
    too_many_rows = 6,
    rows_outside = 7,
    reporting = 8,  // a failure whose other fields are still on their way
    rows_elsewhere = 9,
    masked_itself = 10,
    masked_before = 11,
};

// In WaitStatus::received: see ExpertCounts::is_uneven.
constexpr uint32_t received_unevenly = 1u << 31;

// What the host reads of a call without waiting for it. One per rank, zero before the first call.
//
// Mostly the reason of a failure. A non-zero `code` is also the signal on which every other wait of
// the rank gives up. The first failure wins. The host may read at any time: the other fields are
// valid when `code` is no longer `reporting`.
struct WaitStatus {
    uint32_t code;  // WaitCode
    uint32_t site;  // WaitSite
    uint32_t cta;
    uint32_t warp;
    uint32_t peer_rank;  // first rank that was waited for; no_peer_rank if the site has no peer
    // Tokens of all local experts, in the newest call that got so far, and `received_unevenly`.
    uint32_t received;
    uint64_t expected;
    uint64_t seen;
    uint64_t waited_ns;
    uint64_t missing_ranks[2];  // bit r of word r / 64: rank r had not arrived
};
static_assert(sizeof(WaitStatus) == 64);

// The arguments of all targets' kernels. Those by which a target reaches tokens and weights follow
// in the struct of the same name in its own namespace, experts/<target>/kernel_args.cuh.
struct KernelArgs {
    uint64_t rank_buffers[max_num_ranks];  // each rank's symmetric buffer, as this rank sees it
    void* y;                               // bf16 [num_tokens, hidden]
    int32_t* cumulative_local_expert_recv_stats;  // [num_experts_per_rank], or null
    WaitStatus* status;
    uint64_t wait_timeout_ns;  // limit of a wait for other ranks, in nanoseconds of %globaltimer
    uint32_t rank_idx;
    uint32_t num_tokens;  // of this rank, in this call
    // Used with Config::trace only, see trace/tracer.cuh. Else null and 0.
    void* trace;
    uint32_t trace_capacity;  // records per track
    // With Config::Biases::exist only, see biases/per_expert.cuh. Else null.
    const float* l1_biases;  // [E_local][num_l1_n_blocks * block_n / 256][256]
    const float* l2_biases;  // [E_local][ceil(hidden / 256)][256]
    // Where the tokens are here when the kernel starts (token_sources/local.cuh). Else null and 0.
    // num_tokens is then the number of rows of local_x, and of y.
    const uint8_t* local_x;       // [num_tokens][hidden]
    const uint32_t* local_x_sf;   // of each row, as LocalTokens' Scales says
    const int32_t* expert_begin;  // [E_local], first row; or null: expert * max_expert_rows
    const int32_t* expert_count;  // [E_local], rows
    uint32_t max_expert_rows;     // of one expert
    // With Config::masks_ranks only, see sync/active_ranks.cuh. Else null.
    const uint32_t* masked_ranks;  // [num_ranks], not zero for masked ranks
};

}  // namespace deep_moe
