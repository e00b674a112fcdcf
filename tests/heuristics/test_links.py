"""What a call moves over the links, beside what they carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.heuristics.links import link_loads, work_per_byte
from deep_moe.targets import choose_config, target_of
from tests.pairs import formats, usual_pairs

FLASH = preset_shape("deepseek-v4-flash", num_ranks=4, num_max_tokens_per_rank=8192)
HOPPER = target_of("sm_90a").rates


def test_tokens_and_results_leave_for_all_other_ranks() -> None:
    tokens, results, both, alone = link_loads(FLASH, 1000, HOPPER)
    assert tokens.num_bytes == 1000 * 6 * 3 / 4 * (4096 + 128)
    assert results.num_bytes == alone.num_bytes == 1000 * 6 * 3 / 4 * 2 * 4096
    assert both.num_bytes == tokens.num_bytes + results.num_bytes
    assert alone.us == pytest.approx(both.us / 3)


def test_one_rank_sends_nothing() -> None:
    assert link_loads(replace(FLASH, num_ranks=1), 1000, HOPPER) == ()
    assert link_loads(FLASH, 0, HOPPER) == ()


@pytest.mark.parametrize("weights", usual_pairs("sm_90a"))
def test_more_ranks_send_more_of_the_same_rows(weights: str) -> None:
    """With as many experts on each rank."""
    shares = [
        link_loads(
            MoEShape(ranks, 8 * ranks, 6, 4096, 2048, 8192, **formats(weights)), 4096, HOPPER
        )[2].share
        for ranks in (2, 4, 8, 72)
    ]
    assert shares == sorted(shares)
    assert shares[3] / shares[0] == pytest.approx(2 * 71 / 72)


def test_few_tokens_have_the_time_of_their_weights() -> None:
    """64 experts of 3 * 4096 * 2048 weights in 17/32 of a byte, all of them read."""
    us = link_loads(FLASH, 512, HOPPER)[0].us
    assert us == pytest.approx(64 * 3 * 4096 * 2048 * 17 / 32 / 3.0e12 * 1e6)


def test_work_per_byte_is_at_least_twice_the_intermediate_size() -> None:
    """6 * hidden * intermediate operations a slot, 3 * hidden bytes and hidden/32 of scales."""
    found = work_per_byte(FLASH, HOPPER)
    assert found is not None
    assert found.flops == pytest.approx(6 * 4096 * 2048 / (0.75 * (3 * 4096 + 128)))
    assert found.flops_to_hide_links == HOPPER.flops["e4m3"] / HOPPER.link_bytes
    for ranks in (8, 72):
        more = work_per_byte(replace(FLASH, num_ranks=ranks, num_experts=288), HOPPER)
        assert more is not None
        assert 0.98 * 2 * 2048 < more.flops < found.flops
    shared = work_per_byte(replace(FLASH, num_shared_experts=3), HOPPER)
    assert shared is not None
    assert shared.flops == pytest.approx(1.5 * found.flops)
    assert work_per_byte(replace(FLASH, num_ranks=1), HOPPER) is None
    assert choose_config(FLASH, 8192, arch="sm_90a").explain().work_per_byte == found


def test_a_config_tells() -> None:
    links = choose_config(FLASH, 8192, arch="sm_90a").explain().links
    assert links == link_loads(FLASH, 8192, HOPPER)
    assert [load.share < 1 for load in links] == [True, True, True, False]
