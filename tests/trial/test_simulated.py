"""The layer on a chip's clock: its results, and what the clock says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.emulator import chips
from deep_moe.heuristics import MoEShape
from deep_moe.trial.calls import run_emulated_ranks
from deep_moe.trial.simulated import simulate_call
from deep_moe.trial.synthetic import random_layer, random_tokens
from deep_moe.trial.trace import aligned, breakdown

COUNTS = (5, 3)


def small_shape() -> MoEShape:
    return MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=2,
        hidden=256,
        intermediate_hidden=128,
        num_max_tokens_per_rank=8,
    )


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_results_are_the_same_bit_for_bit(name: str):
    shape, chip = small_shape(), chips.load(name)
    layer = random_layer(shape, seed=1)
    calls = [[random_tokens(shape, count, seed=rank) for rank, count in enumerate(COUNTS)]] * 2
    common: dict[str, Any] = {"arch": chip.arch, "num_sms": 4}
    expected = run_emulated_ranks(shape, layer, calls, **common)
    found = run_emulated_ranks(shape, layer, calls, chip=chip, **common)
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine.y.view(torch.int16), other.y.view(torch.int16))
            assert torch.equal(mine.stats, other.stats)


def test_time_does_not_depend_on_values():
    def launches(**options: Any) -> Any:
        return simulate_call(
            small_shape(), COUNTS, chips.load("h100"), num_sms=4, **options
        ).launches

    expected = launches()
    assert len(expected) == 2
    assert launches(products=True) == expected
    assert launches(checked=True, products=True) == expected


def test_a_call_has_phases_on_the_chips_clock():
    call = simulate_call(small_shape(), COUNTS, chips.load("h100"), num_sms=4, traced=True)
    phases = breakdown(aligned(call.traces))
    assert 1700 < phases["sm_clock_mhz"] < 1990
    timeline = phases["timeline"]
    assert 0 < timeline["first tokens there, first CTA"] < timeline["kernel ends"] < call.kernel_us
    assert call.kernel_us < call.us < 60
