"""What a call moves over the links, beside what they carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deep_moe.heuristics import MoEShape, choose_config, preset_shape
from deep_moe.heuristics.links import RATES, link_loads
from deep_moe.targets import TARGETS

FLASH = preset_shape("deepseek-v4-flash", num_ranks=4, num_max_tokens_per_rank=8192)


def test_every_target_has_rates() -> None:
    assert set(RATES) == set(TARGETS)


def test_tokens_and_results_leave_for_all_other_ranks() -> None:
    tokens, results, both, alone = link_loads(FLASH, 1000, "sm_90a")
    assert tokens.num_bytes == 1000 * 6 * 3 / 4 * (4096 + 128)
    assert results.num_bytes == alone.num_bytes == 1000 * 6 * 3 / 4 * 2 * 4096
    assert both.num_bytes == tokens.num_bytes + results.num_bytes
    assert alone.us == pytest.approx(both.us / 3)


def test_one_rank_sends_nothing() -> None:
    assert link_loads(replace(FLASH, num_ranks=1), 1000, "sm_90a") == ()
    assert link_loads(FLASH, 0, "sm_90a") == ()


@pytest.mark.parametrize("weights", ["mxfp4", "fp8", "bf16", "mxfp4_bf16"])
def test_more_ranks_send_more_of_the_same_rows(weights: str) -> None:
    """With as many experts on each rank."""
    shares = [
        link_loads(
            MoEShape(ranks, 8 * ranks, 6, 4096, 2048, 8192, weights=weights), 4096, "sm_90a"
        )[2].share
        for ranks in (2, 4, 8, 72)
    ]
    assert shares == sorted(shares)
    assert shares[3] / shares[0] == pytest.approx(2 * 71 / 72)


def test_few_tokens_have_the_time_of_their_weights() -> None:
    """64 experts of 3 * 4096 * 2048 weights in 17/32 of a byte, all of them read."""
    us = link_loads(FLASH, 512, "sm_90a")[0].us
    assert us == pytest.approx(64 * 3 * 4096 * 2048 * 17 / 32 / 3.0e12 * 1e6)


def test_a_config_tells() -> None:
    links = choose_config(FLASH, 8192, arch="sm_90a").explain().links
    assert links == link_loads(FLASH, 8192, "sm_90a")
    assert [load.share < 1 for load in links] == [True, True, True, False]
