"""The layer on a chip's clock: its results, and what the clock says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.activations import Relu2
from deep_moe.emulator import chips
from deep_moe.heuristics import MoEShape
from deep_moe.trial.calls import run_emulated_ranks
from deep_moe.trial.simulated import simulate_call
from deep_moe.trial.synthetic import random_layer, random_tokens
from deep_moe.trial.trace import aligned, breakdown
from tests.everyday import parametrize
from tests.pairs import formats, usual_pairs

COUNTS = (5, 3)
CHIPS = ("h100", "b200")


def small_shape(**more: Any) -> MoEShape:
    return MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=2,
        hidden=256,
        intermediate_hidden=128,
        num_max_tokens_per_rank=8,
        **more,
    )


@pytest.mark.parametrize("name", CHIPS)
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


PAIRS = [(name, pair) for name in CHIPS for pair in usual_pairs(chips.load(name).arch)]


@parametrize(("name", "pair"), PAIRS, everyday=[("h100", "fp8 x fp8_token")])
def test_every_pair_of_formats_has_a_time_without_products(name: str, pair: str):
    call = simulate_call(small_shape(**formats(pair)), COUNTS, chips.load(name), num_sms=4)
    assert 5 < call.kernel_us < 60


@pytest.mark.parametrize("name", CHIPS)
def test_experts_without_a_gate_have_a_time(name: str):
    shape = small_shape(has_gate=False)
    call = simulate_call(shape, COUNTS, chips.load(name), num_sms=4, activation=Relu2())
    assert 5 < call.kernel_us < 60
