"""What shared experts take, how they stand among routed ones, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest

import deep_moe
from deep_moe.heuristics import MoEShape, sm90_tiles
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.targets import choose_config, target_of
from tests.pairs import formats, usual_pairs

PRO = MoEShape(4, 384, 6, 7168, 3072, 8192)


def test_they_take_rows_slots_and_weights() -> None:
    shape = replace(PRO, num_shared_experts=2)
    assert (shape.num_local_experts, shape.num_slots) == (98, 8)
    assert shape.num_max_received == PRO.num_max_received + 2 * 8192
    assert shape.most_pool_tokens >= PRO.most_pool_tokens + 2 * 8192
    layout = symm_buffer_layout(shape)
    assert layout["combine"].shape == (8, 8192, 7168)
    assert layout["src_list_pages"].shape == (96, 4, 95)  # their tokens need no list
    assert layout["src_token_topk_idx"].shape == (384 + 4 * 95, 512)
    assert layout["expert_recv_sum"].shape == (96,)
    sizes = (4, 384, 8192, 6, 7168, 3072)
    size = partial(deep_moe.buffer_size, *sizes, num_shared_experts=2)
    assert size(num_pool_tokens=None) == layout.num_bytes


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_part_in_front_of_as_many_experts_as_a_token_names(arch: str) -> None:
    config = choose_config(replace(PRO, num_shared_experts=1), 256, arch=arch)
    assert (config.num_shared_experts, config.num_experts_per_part) == (1, 6)
    assert config.shape == replace(PRO, num_shared_experts=1)
    many = MoEShape(1, 384, 6, 128, 128, 64, num_shared_experts=4)
    config = choose_config(many, 64, arch=arch)
    assert config.num_experts_per_part == 48  # 8 parts of each, 32 in all
    without = choose_config(PRO, 256, arch=arch)
    assert (without.num_experts_per_part, without.num_part_m_blocks) == (0, 0)


@pytest.mark.parametrize("weights", usual_pairs("sm_90a"))
def test_the_tile_costs_least_with_their_tokens_in_it(weights: str) -> None:
    """4 shared experts of few routed ones have most of a rank's tokens, each in parts."""
    shape = MoEShape(8, 64, 2, 4096, 2048, 4096, **formats(weights), num_shared_experts=4)
    kind = target_of("sm_90a").weights_of(**formats(weights)).kind
    num_others = 0
    for num_tokens in (17, 50, 100, 190, 300, 700, 1500):
        config = choose_config(shape, num_tokens, arch="sm_90a")
        assert f"{num_tokens} per shared expert" in config.decision.reasons["block_m"]
        work = sm90_tiles.SharedWork.of(shape, num_tokens, config.kernel_fields())
        expected = shape.expected_tokens_per_expert(num_tokens)
        routed = sm90_tiles.expected_costs(Fraction(round(expected)), False, kind)
        costs = {
            tile: 8 * of_one + sm90_tiles.shared_cost(tile, work, kind)
            for tile, of_one in routed.items()
        }
        chosen = (config.block_m, config.block_m_step)
        assert costs[chosen] <= 1.02 * min(costs.values())  # means count to 1/64
        without = choose_config(replace(shape, num_shared_experts=0), num_tokens, arch="sm_90a")
        num_others += chosen != (without.block_m, without.block_m_step)
    assert num_others >= 3


def test_parts_are_those_of_the_kernel() -> None:
    work = sm90_tiles.SharedWork(2, 48, 1000, num_parts=8, num_part_m_blocks=2)
    assert work.parts(64) == ((128, 7), (104, 1))
    assert work.parts(176) == ((352, 2), (296, 1))
    assert replace(work, num_tokens=0).parts(64) == ()


def test_sm100_counts_them_in_the_mean() -> None:
    shape = MoEShape(8, 64, 2, 4096, 2048, 4096, num_shared_experts=4)
    config = choose_config(shape, 64, arch="sm_100a")  # 8 experts of 16 tokens, 4 of 64
    assert config.block_m == 64
    assert config.decision.reasons["block_m"].startswith("32 tokens per expert expected, those of")
    assert choose_config(replace(shape, num_shared_experts=0), 64, arch="sm_100a").block_m == 32


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_schedule_has_their_blocks(arch: str) -> None:
    shape = replace(PRO, num_shared_experts=2)
    config = choose_config(shape, 1000, arch=arch, overrides={"block_m": 128})
    schedule = config.explain().schedule
    assert schedule.num_shared_m_blocks == 2 * 8
    n_blocks = config.num_l1_n_blocks + config.num_l2_n_blocks
    assert schedule.num_blocks == (schedule.num_routed_m_blocks + 16) * n_blocks


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_so_many_entries_are_kept(arch: str) -> None:
    most = MoEShape(1, 508, 2, 128, 128, 8, num_shared_experts=4)
    assert choose_config(most, 8, arch=arch).num_experts_per_part == 508
    with pytest.raises(ValueError, match="at most 508 per rank beside 4 shared"):
        choose_config(replace(most, num_experts=512), 8, arch=arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_overrides_out_of_range(arch: str) -> None:
    shape = replace(PRO, num_shared_experts=1)
    for name, value, words in (
        ("num_experts_per_part", 0, "must be 1 to 96; got 0"),
        ("num_experts_per_part", 97, "must be 1 to 96; got 97"),
        ("num_part_m_blocks", 0, "must be 1 to 64; got 0"),
    ):
        with pytest.raises(ValueError, match=f"{name} {words}"):
            choose_config(shape, 256, arch=arch, overrides={name: value})
    with pytest.raises(ValueError, match="num_part_m_blocks must be 0 without shared experts"):
        choose_config(PRO, 256, arch=arch, overrides={"num_part_m_blocks": 1})


def test_slots_are_lanes_of_a_warp() -> None:
    with pytest.raises(ValueError, match="num_shared_experts must be at most 1 with num_topk 31"):
        MoEShape(1, 32, 31, 128, 128, 8, num_shared_experts=2)
