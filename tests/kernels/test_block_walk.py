"""The list of blocks that every role walks, against a model that writes the list down in full."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from deep_moe.jit.status import missing_ranks
from deep_moe.targets import MegaMoEConfig

MAX_BLOCKS = 4096

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/layout/rank_buffers.cuh>
#include <deep_moe/experts/block_walk.cuh>

using namespace deep_moe;

constexpr uint32_t max_blocks = MAX_BLOCKS;

// y: per CTA the number of its blocks, then their fields.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* words = static_cast<uint32_t*>(args.y) + blockIdx.x * (1 + 7 * max_blocks);
    Waiter waiter(args);
    ExpertCounts<Config> counts;
    if (!counts.fetch(args, RankBuffers<Config>(args).local(), waiter)) return;
    BlockWalk<Config> walk(counts, blockIdx.x);
    uint32_t num_blocks = 0;
    uint32_t pair_idx = blockIdx.x / Config::cluster_size;
    for (Block block; walk.find(block); ++num_blocks) {
        walk.go_to(pair_idx += Config::num_sms / Config::cluster_size);
        if (threadIdx.x != 0) continue;
        uint32_t* fields = words + 1 + 7 * num_blocks;
        fields[0] = static_cast<uint32_t>(block.phase);
        fields[1] = block.expert_idx;
        fields[2] = block.m_block_idx;
        fields[3] = block.n_block_idx;
        fields[4] = block.pool_block_idx;
        fields[5] = block.num_valid_rows;
        fields[6] = block.shares_weights;
    }
    if (threadIdx.x == 0) words[0] = num_blocks;
}
""".replace("MAX_BLOCKS", str(MAX_BLOCKS))


@dataclass(frozen=True)
class Block:
    phase: int
    expert: int
    m_block: int
    n_block: int
    pool_block: int
    num_valid_rows: int
    shares_weights: int = 0


def publish(ranks: Any, counts: list[int]) -> None:
    """The counts as all CTAs of all ranks would have left them."""
    config = ranks.config
    reports = np.uint64(config.num_sms * config.num_ranks) << np.uint64(32)
    ranks.segment(0, "expert_recv_sum")[:] = np.array(counts, np.uint64) + reports


def walked_blocks(ranks: Any, cta: int) -> list[Block]:
    words = ranks.output(0, np.uint32, ranks.config.num_sms, 1 + 7 * MAX_BLOCKS)[cta]
    return [Block(*fields) for fields in words[1 : 1 + 7 * words[0]].reshape(-1, 7).tolist()]


@dataclass(frozen=True)
class MBlock:
    expert: int
    m_block: int
    pool_block: int
    num_pool_blocks: int
    num_valid_rows: int


def m_blocks_in_order(config: MegaMoEConfig, counts: list[int]) -> list[MBlock]:
    """Those of all experts, in the order of the pool: of each expert as few as can be, as equal as
    the steps allow, the larger ones first."""
    m_blocks = []
    pool_block = 0
    step = config.block_m_step
    for expert, count in enumerate(counts):
        num_tiles = -(-count // config.block_m)
        num_steps = max(-(-count // step), num_tiles * config.min_block_m // step)
        for i in range(num_tiles):
            size = num_steps // num_tiles + (i < num_steps % num_tiles)
            valid = min(count, size * step)
            m_blocks.append(MBlock(expert, i, pool_block, size, valid))
            pool_block += size
            count -= valid
    return m_blocks


# Phase, and the m-block and n-block of each CTA of a cluster.
Pair = tuple[int, tuple[tuple[MBlock, int], ...]]


def pairs_of_phase(config: MegaMoEConfig, phase: int, m_blocks: list[MBlock]) -> list[Pair]:
    """By expert, by unit, by n-block. A cluster has two m-blocks together, where the pool has room
    for four at least."""
    cluster_size = config.cluster_size
    room = config.num_ring_blocks * config.block_m_step // config.block_m
    takes_two = config.num_cluster_m_blocks == 2 and (room >= 4 or not config.pool_wraps)
    num_n_blocks = (config.num_l1_n_blocks, config.num_l2_n_blocks)[phase]
    num_pairs = -(-num_n_blocks // cluster_size)
    pairs: list[Pair] = []
    for _, of_expert in itertools.groupby(m_blocks, key=lambda m_block: m_block.expert):
        rest = list(of_expert)
        while rest:
            unit, rest = rest[: config.num_unit_m_blocks], rest[config.num_unit_m_blocks :]
            twos = list(zip(unit[::2], unit[1::2], strict=False)) if takes_two else []
            alone = unit[2 * len(twos) :]
            pairs += [
                (phase, tuple((m_block, n) for m_block in two))
                for n in range(2 * num_pairs)
                for two in twos
            ]
            pairs += [
                (phase, tuple((one, cluster_size * i + rank) for rank in range(cluster_size)))
                for i in range(num_pairs)
                for one in alone
            ]
    return pairs


def pairs_in_order(config: MegaMoEConfig, counts: list[int]) -> list[Pair]:
    """The list: Linear1 of the first m-blocks, then by turns Linear2 and Linear1 of some, each
    going on where it was left, in pairs."""
    m_blocks = m_blocks_in_order(config, counts)
    left = [pairs_of_phase(config, phase, m_blocks) for phase in (0, 1)]
    per_m_block = [
        -(-num_n_blocks // config.cluster_size)
        for num_n_blocks in (config.num_l1_n_blocks, config.num_l2_n_blocks)
    ]
    order: list[Pair] = []

    def take(phase: int, num_m_blocks: int) -> None:
        end = num_m_blocks * per_m_block[phase]
        order.extend(left[phase][:end])
        left[phase] = left[phase][end:]

    take(0, config.num_lead_m_blocks)
    while left[1]:
        take(1, config.num_turn_m_blocks)
        take(0, config.num_turn_m_blocks)
    return order


def blocks_of_cta(config: MegaMoEConfig, pairs: list[Pair], cta: int) -> list[Block]:
    cluster, cta_rank = divmod(cta, config.cluster_size)
    return [
        Block(
            phase,
            *(blocks[cta_rank][0].expert, blocks[cta_rank][0].m_block, blocks[cta_rank][1]),
            *(blocks[cta_rank][0].pool_block, blocks[cta_rank][0].num_valid_rows),
            len({m_block for m_block, _ in blocks}) > 1,
        )
        for phase, blocks in pairs[cluster :: config.num_sms // config.cluster_size]
    ]


def check_order(config: MegaMoEConfig, pairs: list[Pair]) -> None:
    """Whatever a block waits for stands in front of it: Linear2 behind all of its m-block's
    Linear1, and Linear1 behind all Linear2 of whatever has had one of its rows before."""
    begun: dict[tuple[int, MBlock], int] = {}  # the place of the first in the list
    done: dict[tuple[int, MBlock], int] = {}  # and of the last
    last_use: dict[int, int] = {}  # the latter of Linear2, by pool block
    for place, (phase, blocks) in enumerate(pairs):
        for m_block, _ in blocks:
            begun.setdefault((phase, m_block), place)
            done[phase, m_block] = place
            if phase == 1:
                for i in range(m_block.num_pool_blocks):
                    last_use[m_block.pool_block + i] = place
    for (phase, m_block), place in begun.items():
        if phase == 1:
            assert done[0, m_block] < place
        elif config.pool_wraps:
            end = m_block.pool_block + m_block.num_pool_blocks - config.num_ring_blocks
            assert all(last_use[pool_block] < place for pool_block in range(end))


@pytest.mark.parametrize(
    ("num_experts", "hidden", "intermediate", "block_m", "turns", "num_sms"),
    [
        pytest.param(4, 256, 128, 16, (2, 2, 1), 4, id="one behind the other"),
        pytest.param(4, 256, 128, 16, (2, 3, 2), 4, id="units of two"),
        pytest.param(4, 384, 128, 16, (1, 4, 1), 2, id="odd number of n-blocks"),
        pytest.param(4, 384, 128, 16, (1, 4, 3), 2, id="odd number of n-blocks, units of three"),
        pytest.param(33, 128, 128, 32, (11, 14, 2), 6, id="33 experts on 32 lanes"),
        pytest.param(33, 128, 128, 32, (4, 11, 8), 6, id="a last turn that is not full"),
        pytest.param(130, 128, 128, 16, (130, 500, 2), 10, id="130 experts, one turn"),
        pytest.param(130, 128, 128, 16, (1, 1, 1), 10, id="130 experts, one by one"),
    ],
)
def test_every_cta_walks_its_share_of_the_list(
    make_config: Any,
    make_ranks: Any,
    num_experts: int,
    hidden: int,
    intermediate: int,
    block_m: int,
    turns: tuple[int, int, int],
    num_sms: int,
) -> None:
    generator = np.random.default_rng(num_experts)
    counts = generator.integers(0, 3 * block_m, num_experts) * generator.integers(0, 2, num_experts)
    counts[-1] = block_m + 1
    config = make_config(
        64,
        num_sms=num_sms,
        num_experts=num_experts,
        hidden=hidden,
        intermediate_hidden=intermediate,
        overrides={
            "block_m": block_m,
            "num_turn_m_blocks": turns[0],
            "num_lead_m_blocks": turns[1],
            "num_unit_m_blocks": turns[2],
        },
    )
    check_walk(config, make_ranks, counts.tolist())


def check_walk(config: MegaMoEConfig, make_ranks: Any, counts: list[int]) -> None:
    ranks = make_ranks(config, output_bytes=4 * config.num_sms * (1 + 7 * MAX_BLOCKS))
    publish(ranks, counts)

    ranks.run(KERNEL)

    pairs = pairs_in_order(config, counts)
    check_order(config, pairs)
    for cta in range(config.num_sms):
        assert walked_blocks(ranks, cta) == blocks_of_cta(config, pairs, cta)


RING_COUNTS = {
    "of all sizes": [70, 0, 1, 190, 16, 0, 0, 333, 129, 2, 64, 65],
    "one expert": [0, 0, 0, 0, 0, 1111, 0, 0, 0, 0, 0, 0],
    "small": [17] * 12,
    "as many as fit": [30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 20],
}


SHORT_LEAD = {"num_turn_m_blocks": 1, "num_lead_m_blocks": 2}


@pytest.mark.parametrize("counts", RING_COUNTS.values(), ids=RING_COUNTS)
@pytest.mark.parametrize(
    ("arch", "tile", "num_pool_tokens"),
    [
        ("sm_100a", {"block_m": 16}, 384),
        ("sm_100a", {"block_m": 192}, 384),
        ("sm_100a", {"block_m": 32}, 1152),
        ("sm_90a", {"block_m": 24}, 384),
        ("sm_90a", {"block_m": 128, "block_m_step": 32}, 384),
        ("sm_90a", {"block_m": 64, "block_m_step": 8}, 768),
        ("sm_90a", {"block_m": 24, "cluster_size": 2}, 384),
        ("sm_90a", {"block_m": 8}, 384),
        ("sm_90a", {"block_m": 16, "num_unit_m_blocks": 5}, 384),
        ("sm_90a", {"block_m": 8, "cluster_size": 2}, 384),
        ("sm_90a", {"block_m": 64, "block_m_step": 8, "num_unit_m_blocks": 3}, 768),
        ("sm_90a", {"block_m": 16, "cluster_size": 2, **SHORT_LEAD}, 384),
        ("sm_90a", {"block_m": 16, "cluster_size": 2, "num_turn_m_blocks": 5}, 384),
        # Of four m-blocks, the fewest of which a cluster takes two together, and of two.
        ("sm_90a", {"block_m": 96, "cluster_size": 2}, 384),
        ("sm_90a", {"block_m": 128, "block_m_step": 32, "cluster_size": 2}, 384),
        # With room for all of them.
        ("sm_90a", {"block_m": 24, "cluster_size": 2, "num_turn_m_blocks": 4}, None),
    ],
)
def test_rows_are_used_again_behind_who_had_them(
    make_config: Any,
    make_ranks: Any,
    arch: str,
    tile: dict[str, int],
    num_pool_tokens: int | None,
    counts: list[int],
) -> None:
    config = make_config(
        1111,
        arch=arch,
        num_sms=6,
        num_experts=len(counts),
        hidden=384,
        intermediate_hidden=128,
        num_pool_tokens=num_pool_tokens,
        overrides=tile,
    )
    assert config.pool_wraps == (num_pool_tokens is not None)
    check_walk(config, make_ranks, counts)


def test_no_tokens_give_no_blocks(make_config: Any, make_ranks: Any) -> None:
    ranks = make_ranks(make_config(num_sms=2), output_bytes=8 * (1 + 7 * MAX_BLOCKS))
    publish(ranks, [0, 0, 0, 0])
    ranks.run(KERNEL)
    assert [walked_blocks(ranks, cta) for cta in range(2)] == [[], []]


def test_more_tokens_than_the_pool_holds_are_refused(make_config: Any, make_ranks: Any) -> None:
    config = make_config(overrides={"block_m": 16})
    ranks = make_ranks(config, output_bytes=8 * (1 + 7 * MAX_BLOCKS))
    # One block too many, though the tokens alone would fit.
    counts = [config.num_pool_tokens - 3 * 16 + 1, 1, 1, 1]
    publish(ranks, counts)
    ranks.run(KERNEL)
    status = ranks.statuses[0]
    assert (status.code, status.expected, status.seen) == (
        2,
        config.num_pool_tokens,
        config.num_pool_tokens + 16,
    )
    assert walked_blocks(ranks, 0) == []


def test_the_largest_number_of_tokens_fits(make_config: Any, make_ranks: Any) -> None:
    config = make_config(overrides={"block_m": 16})
    ranks = make_ranks(config, output_bytes=8 * (1 + 7 * MAX_BLOCKS))
    publish(ranks, [config.num_pool_tokens - 3 * 16, 1, 1, 1])
    ranks.run(KERNEL)
    assert ranks.statuses[0].code == 0
    assert walked_blocks(ranks, 0) != []


@pytest.mark.parametrize("missing", [[3, 66], [64], [69], [0, 63]])
def test_ranks_that_did_not_report_are_named(
    make_config: Any, make_ranks: Any, missing: list[int]
) -> None:
    config = make_config(num_ranks=70, num_experts=140)
    ranks = make_ranks(config, output_bytes=8 * (1 + 7 * MAX_BLOCKS))
    num_reports = (70 - len(missing)) * config.num_sms
    ranks.segment(0, "expert_recv_count")[:] = np.uint64(config.num_sms) << np.uint64(32)
    ranks.segment(0, "expert_recv_count")[missing] = 0
    ranks.segment(0, "expert_recv_sum")[:] = np.uint64(num_reports) << np.uint64(32)

    ranks.run(KERNEL, only=[0], timeout_ns=3_000_000)

    status = ranks.statuses[0]
    assert (status.code, status.site) == (1, 1)
    assert (status.expected, status.seen) == (70 * config.num_sms, num_reports)
    assert status.peer_rank == missing[0]
    assert missing_ranks(status) == missing
    assert status.waited_ns >= 3_000_000
