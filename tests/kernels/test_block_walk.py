"""The list of blocks that every role walks, against a model that writes the list down in full."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from deep_moe.heuristics import MegaMoEConfig
from deep_moe.jit.status import missing_ranks

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
    for (Block block; walk.next(block); ++num_blocks) {
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


def experts_in_order(config: MegaMoEConfig) -> list[tuple[int, int]]:
    """Phase (0: Linear1) and expert: Linear1 of a wave, then by turns Linear2 of some experts and
    Linear1 of those that enter the wave in their place, as long as there are any."""
    num_experts, wave = config.num_experts_per_rank, config.num_experts_per_wave
    order = [(0, expert) for expert in range(wave)]
    for first in range(0, num_experts, config.num_experts_per_turn):
        turn = range(first, min(first + config.num_experts_per_turn, num_experts))
        order += [(1, expert) for expert in turn]
        order += [(0, expert + wave) for expert in turn if expert + wave < num_experts]
    return order


def blocks_of_cta(config: MegaMoEConfig, counts: list[int], cta: int) -> list[Block]:
    """Every second n-block of each cluster's share of the full list."""
    block_m = config.block_m
    num_m_blocks = [-(-count // block_m) for count in counts]
    first_pool_block = np.cumsum([0, *num_m_blocks]).tolist()
    pairs = [
        Block(
            phase,
            expert,
            m_block,
            2 * pair,
            first_pool_block[expert] + m_block,
            min(block_m, counts[expert] - m_block * block_m),
        )
        for phase, expert in experts_in_order(config)
        for m_block in range(num_m_blocks[expert])
        for pair in range(-(-(config.num_l1_n_blocks, config.num_l2_n_blocks)[phase] // 2))
    ]
    mine = pairs[cta // 2 :: config.num_sms // 2]
    return [Block(**{**vars(block), "n_block": block.n_block + cta % 2}) for block in mine]


def publish(ranks: Any, counts: list[int]) -> None:
    """The counts as all CTAs of all ranks would have left them."""
    config = ranks.config
    reports = np.uint64(config.num_sms * config.num_ranks) << np.uint64(32)
    ranks.segment(0, "expert_recv_sum")[:] = np.array(counts, np.uint64) + reports


def walked_blocks(ranks: Any, cta: int) -> list[Block]:
    words = ranks.output(0, np.uint32, ranks.config.num_sms, 1 + 7 * MAX_BLOCKS)[cta]
    return [Block(*fields) for fields in words[1 : 1 + 7 * words[0]].reshape(-1, 7).tolist()]


@pytest.mark.parametrize(
    ("num_experts", "hidden", "intermediate", "block_m", "wave", "turn", "num_sms"),
    [
        pytest.param(4, 256, 128, 16, 2, 2, 4, id="two waves"),
        pytest.param(4, 256, 128, 16, 2, 1, 4, id="turns of half a wave"),
        pytest.param(4, 384, 128, 16, 4, 1, 2, id="odd number of n-blocks"),
        pytest.param(33, 128, 128, 32, 11, 11, 6, id="33 experts on 32 lanes"),
        pytest.param(33, 128, 128, 32, 11, 4, 6, id="turns that do not divide the wave"),
        pytest.param(130, 128, 128, 16, 130, 130, 10, id="130 experts, one wave"),
        pytest.param(130, 128, 128, 16, 1, 1, 10, id="130 experts, a wave each"),
    ],
)
def test_every_cta_walks_its_share_of_the_list(
    make_config: Any,
    make_ranks: Any,
    num_experts: int,
    hidden: int,
    intermediate: int,
    block_m: int,
    wave: int,
    turn: int,
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
            "num_experts_per_wave": wave,
            "num_experts_per_turn": turn,
        },
    )
    ranks = make_ranks(config, output_bytes=4 * num_sms * (1 + 7 * MAX_BLOCKS))
    publish(ranks, counts.tolist())

    ranks.run(KERNEL)

    for cta in range(num_sms):
        assert walked_blocks(ranks, cta) == blocks_of_cta(config, counts.tolist(), cta)


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


def pairs_of_run(config: MegaMoEConfig, phase: int, m_blocks: list[MBlock]) -> list[Pair]:
    """Of neighbouring m-blocks, all that a cluster may have together."""
    cluster_size = config.cluster_size
    num_n_blocks = (config.num_l1_n_blocks, config.num_l2_n_blocks)[phase]
    num_pairs = -(-num_n_blocks // cluster_size)
    pairs: list[Pair] = []
    for _, of_expert in itertools.groupby(m_blocks, key=lambda m_block: m_block.expert):
        rest = list(of_expert)
        while rest:
            if config.num_cluster_m_blocks == 2 and len(rest) >= 2:
                two, rest = rest[:2], rest[2:]
                pairs += [(phase, ((two[0], n), (two[1], n))) for n in range(2 * num_pairs)]
            else:
                one, *rest = rest
                pairs += [
                    (phase, tuple((one, cluster_size * i + rank) for rank in range(cluster_size)))
                    for i in range(num_pairs)
                ]
    return pairs


def pairs_by_chunks(config: MegaMoEConfig, m_blocks: list[MBlock]) -> list[Pair]:
    """Linear1 of the first chunks, then by turns Linear2 of a chunk and Linear1 of one further
    on."""
    size, lead = config.num_ring_chunk_m_blocks, config.num_ring_lead_chunks
    chunks = [m_blocks[i : i + size] for i in range(0, len(m_blocks), size)]
    order = [(0, chunk) for chunk in chunks[:lead]]
    for idx, chunk in enumerate(chunks):
        order += [(1, chunk)]
        order += [(0, chunk) for chunk in chunks[idx + lead : idx + lead + 1]]
    return [pair for phase, chunk in order for pair in pairs_of_run(config, phase, chunk)]


RING_COUNTS = {
    "of all sizes": [70, 0, 1, 190, 16, 0, 0, 333, 129, 2, 64, 65],
    "one expert": [0, 0, 0, 0, 0, 1111, 0, 0, 0, 0, 0, 0],
    "small": [17] * 12,
    "as many as fit": [30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 20],
}


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
        ("sm_90a", {"block_m": 16, "cluster_size": 2, "num_ring_chunk_m_blocks": 3}, 384),
        ("sm_90a", {"block_m": 128, "block_m_step": 32, "cluster_size": 2}, 384),
    ],
)
def test_a_ring_is_walked_by_chunks(
    make_config: Any,
    make_ranks: Any,
    arch: str,
    tile: dict[str, int],
    num_pool_tokens: int,
    counts: list[int],
) -> None:
    """And Linear2 of whatever has had a row stands in front of Linear1 of who has it next."""
    config = make_config(
        1111,
        arch=arch,
        num_sms=6,
        num_experts=len(counts),
        hidden=384,
        intermediate_hidden=128,
        num_pool_tokens=num_pool_tokens,
        overrides={**tile, "num_experts_per_wave": 12, "num_experts_per_turn": 12},
    )
    assert config.pool_wraps
    ranks = make_ranks(config, output_bytes=4 * config.num_sms * (1 + 7 * MAX_BLOCKS))
    publish(ranks, counts)

    ranks.run(KERNEL)

    m_blocks = m_blocks_in_order(config, counts)
    num_places = config.num_ring_blocks
    if sum(m_block.num_pool_blocks for m_block in m_blocks) <= num_places:
        pairs = [pair for phase in (0, 1) for pair in pairs_of_run(config, phase, m_blocks)]
    else:
        pairs = pairs_by_chunks(config, m_blocks)
    for cta in range(config.num_sms):
        cluster, cta_rank = divmod(cta, config.cluster_size)
        mine = [
            (phase, *blocks[cta_rank], len({m_block for m_block, _ in blocks}) > 1)
            for phase, blocks in pairs[cluster :: config.num_sms // config.cluster_size]
        ]
        assert walked_blocks(ranks, cta) == [
            Block(
                phase,
                m_block.expert,
                m_block.m_block,
                n_block,
                m_block.pool_block,
                m_block.num_valid_rows,
                shares_weights,
            )
            for phase, m_block, n_block, shares_weights in mine
        ]

    done = {}  # the place of its last Linear2 block in the list, by pool block
    begun = {}  # of the first Linear1 block, by m-block
    for place, (phase, blocks) in enumerate(pairs):
        for m_block, _ in blocks:
            if phase == 0:
                begun.setdefault(m_block, place)
            else:
                for i in range(m_block.num_pool_blocks):
                    done[m_block.pool_block + i] = place
    for m_block, place in begun.items():
        end = m_block.pool_block + m_block.num_pool_blocks - num_places
        assert all(done[pool_block] < place for pool_block in range(end))


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
