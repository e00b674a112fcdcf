"""CTAs claim blocks of the list: each is taken once, in order, by whoever is free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.test_block_walk import pairs_in_order

MAX_BLOCKS = 512
NUM_SMS = 5
SLOW_CTA = 3

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/experts/block_claims.cuh>
#include <deep_moe/experts/block_walk.cuh>
#include <deep_moe/ptx/timer.cuh>

using namespace deep_moe;

// y: per CTA the number of its blocks, then what tells each from all others.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* words = static_cast<uint32_t*>(args.y) + blockIdx.x * (1 + MAX_BLOCKS);
    const SymmBuffer<Config> local = RankBuffers<Config>(args).local();
    Waiter waiter(args);
    ExpertCounts<Config> counts;
    if (!counts.fetch(args, local, waiter)) return;
    BlockWalk<Config> walk(counts, blockIdx.x);
    BlockClaims<Config> claims(local);
    uint32_t num_blocks = 0;
    for (Block block; walk.find(block); ++num_blocks) {
        claims.claim();
        if (threadIdx.x == 0) {
            words[1 + num_blocks] = ((static_cast<uint32_t>(block.phase) * 256 + block.expert_idx)
                                     * 256 + block.m_block_idx) * 256 + block.n_block_idx;
        }
        if (blockIdx.x == SLOW_CTA) {
            for (uint32_t i = 0; i < 1000; ++i) ptx::globaltimer();
        }
        walk.go_to(claims.take());
    }
    if (threadIdx.x == 0) words[0] = num_blocks;
}
""".replace("MAX_BLOCKS", str(MAX_BLOCKS)).replace("SLOW_CTA", str(SLOW_CTA))


def full_list(config: Any, counts: list[int]) -> list[int]:
    """Every block in the order of the list."""
    return [
        ((phase * 256 + block.expert) * 256 + block.m_block) * 256 + n_block
        for phase, ((block, n_block),) in pairs_in_order(config, counts)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_every_block_is_taken_once_in_order_by_a_cta_that_is_free(
    make_config: Any, make_ranks: Any, seed: int
) -> None:
    counts = [200, 0, 97, 63]
    config = make_config(
        200,
        arch="sm_90a",
        num_sms=NUM_SMS,
        overrides={"block_m": 8, "num_turn_m_blocks": 1, "num_lead_m_blocks": 13},
    )
    ranks = make_ranks(config, output_bytes=4 * NUM_SMS * (1 + MAX_BLOCKS))
    ranks.seed = seed
    reports = np.uint64(NUM_SMS) << np.uint64(32)
    ranks.segment(0, "expert_recv_sum")[:] = np.array(counts, np.uint64) + reports

    ranks.run(KERNEL)

    words = ranks.output(0, np.uint32, NUM_SMS, 1 + MAX_BLOCKS)
    taken = [row[1 : 1 + row[0]].tolist() for row in words]
    blocks = full_list(config, counts)
    assert sorted(block for own in taken for block in own) == sorted(blocks)
    place = {block: idx for idx, block in enumerate(blocks)}
    for cta, own in enumerate(taken):
        assert place[own[0]] == cta
        assert [place[block] for block in own] == sorted(place[block] for block in own)
    assert len(taken[SLOW_CTA]) < len(blocks) / NUM_SMS / 2


def test_without_tokens_nobody_claims(make_config: Any, make_ranks: Any) -> None:
    config = make_config(arch="sm_90a", num_sms=NUM_SMS)
    ranks = make_ranks(config, output_bytes=4 * NUM_SMS * (1 + MAX_BLOCKS))
    ranks.segment(0, "expert_recv_sum")[:] = np.uint64(NUM_SMS) << np.uint64(32)
    ranks.run(KERNEL)
    assert ranks.output(0, np.uint32, NUM_SMS, 1 + MAX_BLOCKS)[:, 0].tolist() == [0] * NUM_SMS
    assert ranks.segment(0, "num_claimed_blocks").tolist() == [0]
