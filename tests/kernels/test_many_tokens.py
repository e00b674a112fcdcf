"""More tokens for one expert than 16 bits count: counts, lists, places in the pool, blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .test_block_walk import KERNEL as WALK_KERNEL
from .test_block_walk import MAX_BLOCKS, publish, walked_blocks
from .test_min_peeling import in_turn

# Of the second of two experts, from two ranks.
COUNTS = (66_001, 4_003)
NUM_TOKENS = sum(COUNTS)

COUNT_KERNEL = r"""
#include <deep_moe/dispatch/count_tokens.cuh>

using namespace deep_moe;

extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    __shared__ uint32_t counts[Config::num_experts];
    const RankBuffers<Config> buffers(args);
    Waiter waiter(args);
    DispatchBarriers<Config> barriers(buffers, threadIdx.x, waiter);
    const CallRanks<Config>::Mask mask(args.masked_ranks);
    count_tokens<Config>(buffers, mask, args.num_tokens, blockIdx.x, threadIdx.x,
                         ptx::shared_address(counts), barriers, waiter);
}
"""

PULL_KERNEL = r"""
#include <deep_moe/dispatch/pull_tokens.cuh>

using namespace deep_moe;

// y: places in the order of the pool, upwards, and for each what stands there.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    if (blockIdx.x != 0) return;
    auto* const words = static_cast<uint32_t*>(args.y);
    const SymmBuffer<Config> local = RankBuffers<Config>(args).local();
    Waiter waiter(args);
    ExpertCounts<Config> counts;
    if (!counts.acquire(args, local, waiter)) return;
    PoolWalk<Config> walk(RankBuffers<Config>(args), counts);
    for (uint32_t i = 0; i < args.num_tokens; ++i) {
        PulledToken token;
        if (!walk.find(words[i], token) || threadIdx.x != 0) continue;
        uint32_t* const fields = words + args.num_tokens + 6 * i;
        fields[0] = token.pool_block_idx;
        fields[1] = token.row_idx;
        fields[2] = token.pool_token_idx;
        fields[3] = token.source.rank_idx;
        fields[4] = token.source.token_idx;
        fields[5] = token.source.topk_idx;
    }
}
"""

HEADER_KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/experts/sm90/block_header.cuh>
#include <deep_moe/ptx/ld_st.cuh>

using namespace deep_moe;

// y: the fields of headers, before and after their way through shared memory.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    __shared__ uint4 slot;
    if (blockIdx.x != 0) return;
    auto* const words = static_cast<uint32_t*>(args.y);
    for (uint32_t i = 0; i < args.num_tokens; ++i) {
        uint32_t* const in = words + 12 * i;
        const sm90::BlockHeader header{
            {static_cast<Phase>(in[0] & 1), in[1], in[2], in[3], in[0] >> 1 != 0}, in[4], in[5]};
        if (threadIdx.x == 0) sm90::store_header(ptx::shared_address(&slot), header);
        __syncwarp();
        const sm90::BlockHeader loaded = sm90::load_header<Config>(ptx::shared_address(&slot));
        if (threadIdx.x == 0) {
            in[6] = static_cast<uint32_t>(loaded.phase) | uint32_t{loaded.is_reused} << 1;
            in[7] = loaded.pool_block_idx;
            in[8] = loaded.num_rows;
            in[9] = loaded.num_valid_rows;
            in[10] = loaded.weight_block_row_idx;
            in[11] = loaded.n_block_idx;
        }
        __syncwarp();
    }
}
"""


def two_ranks(make_config: Any, *, num_tokens: int) -> Any:
    return make_config(
        num_tokens,
        arch="sm_90a",
        num_ranks=2,
        num_experts=4,
        num_topk=1,
        hidden=128,
        overrides={"block_m": 128},
    )


def test_they_are_counted_and_listed(make_config: Any, make_ranks: Any) -> None:
    """All of a rank's tokens go to one expert of the other; either CTA has more than 65,535."""
    num_tokens = 2 * COUNTS[0]
    config = two_ranks(make_config, num_tokens=num_tokens)
    ranks = make_ranks(config, output_bytes=16)
    ranks.segment(0, "input_topk_idx")[:] = 3
    ranks.run(
        COUNT_KERNEL,
        num_threads=32 * config.num_dispatch_warps,
        num_tokens=[num_tokens, 0],
        only=[0],
    )
    assert ranks.segment(0, "expert_send_count").tolist() == [
        (config.num_sms << 32) + count for count in (0, 0, 0, num_tokens)
    ]
    listed = ranks.segment(1, "src_token_topk_idx")[2]  # of its second expert, from rank 0
    assert np.array_equal(np.sort(listed), np.arange(num_tokens))


def test_they_are_found_in_their_lists(make_config: Any, make_ranks: Any) -> None:
    config = two_ranks(make_config, num_tokens=COUNTS[0])
    places = [0, 8_005, 8_006, 65_535, 65_536, 65_537, NUM_TOKENS - 1]
    ranks = make_ranks(config, output_bytes=4 * 7 * len(places))
    reports = np.uint64(config.num_sms) << np.uint64(32)
    ranks.segment(0, "expert_recv_sum")[:] = np.array([0, NUM_TOKENS], np.uint64) + 2 * reports
    ranks.segment(0, "expert_recv_count")[:, 1] = np.array(COUNTS, np.uint64) + reports
    lists = ranks.segment(0, "src_token_topk_idx")[2:]  # of its second expert
    lists[:] = [np.arange(COUNTS[0])[::-1], np.arange(COUNTS[0])]
    ranks.output(0, np.uint32, len(places))[:] = places

    ranks.run(PULL_KERNEL, only=[0], num_tokens=[len(places), 0])

    found = ranks.output(0, np.uint32, 7 * len(places))[len(places) :].reshape(-1, 6).tolist()
    sources = list(in_turn(list(COUNTS)))
    step = config.block_m
    assert found == [
        [place // step, place % step, place, rank, int(lists[rank, position]), 0]
        for place in places
        for rank, position in (sources[place],)
    ]


@pytest.mark.parametrize("block_m", [128, 176])
def test_they_are_walked_block_by_block(make_config: Any, make_ranks: Any, block_m: int) -> None:
    config = make_config(
        NUM_TOKENS,
        arch="sm_90a",
        num_sms=1,
        num_experts=2,
        num_topk=1,
        hidden=128,
        overrides={"block_m": block_m},
    )
    ranks = make_ranks(config, output_bytes=4 * (1 + 7 * MAX_BLOCKS))
    publish(ranks, [3, NUM_TOKENS])

    ranks.run(WALK_KERNEL)

    walked = walked_blocks(ranks, 0)
    for phase in (0, 1):
        blocks = [block for block in walked if (block.phase, block.expert) == (phase, 1)]
        assert [block.m_block for block in blocks] == list(range(-(-NUM_TOKENS // block_m)))
        assert [block.pool_block for block in blocks] == [1 + block.m_block for block in blocks]
        assert sum(block.num_valid_rows for block in blocks) == NUM_TOKENS
        assert {block.num_valid_rows for block in blocks[:-1]} == {block_m}


def test_headers_carry_every_field_whole(make_config: Any, make_ranks: Any) -> None:
    headers = [
        [0, 0xFFFFFFFF, 256, 255, 1, 0],
        [1, 0x00010000, 8, 1, 0xFFFFFFFF, 0x7FFFFFFF],
    ]
    ranks = make_ranks(make_config(arch="sm_90a"), output_bytes=4 * 12 * len(headers))
    ranks.output(0, np.uint32, len(headers), 12)[:, :6] = headers
    ranks.run(HEADER_KERNEL, num_tokens=[len(headers)])
    assert ranks.output(0, np.uint32, len(headers), 12)[:, 6:].tolist() == headers


def test_headers_say_whose_rows_are_used_again(make_config: Any, make_ranks: Any) -> None:
    """Above the phase, in these words."""
    headers = [
        [phase | is_reused << 1, 7, 256, 255, 3, 5] for phase in (0, 1) for is_reused in (0, 1)
    ]
    config = make_config(
        200, arch="sm_90a", num_pool_tokens=384, overrides={"block_m": 8, "num_stages": 2}
    )
    assert config.pool_wraps
    ranks = make_ranks(config, output_bytes=4 * 12 * len(headers))
    ranks.output(0, np.uint32, len(headers), 12)[:, :6] = headers
    ranks.run(HEADER_KERNEL, num_tokens=[len(headers)])
    assert ranks.output(0, np.uint32, len(headers), 12)[:, 6:].tolist() == headers
