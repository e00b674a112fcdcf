"""The layer on a chip's clock: its results, and what the clock says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_moe.activations import Relu2
from deep_moe.emulator import LaunchTime, Machine, chips
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.heuristics import MoEShape
from deep_moe.trial.calls import fill_inputs, run_emulated_ranks
from deep_moe.trial.simulated import simulate_call
from deep_moe.trial.synthetic import random_layer, random_tokens
from deep_moe.trial.trace import aligned, breakdown
from deep_moe.weights.transform import transform_weights_for_mega_moe
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


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_a_rank_with_mirrored_peers_gets_what_it_gets_among_equals(name: str):
    # Every rank has the same experts, and the same tokens with their experts a rank further on.
    num_ranks, count = 4, 5
    chip = chips.load(name)
    shape = MoEShape(num_ranks, 8, 3, 256, 128, 8)
    alone = MoEShape(1, shape.num_experts_per_rank, 1, 256, 128, 8)
    pairs = random_layer(alone, seed=1).of_rank(0, 1)
    weights = transform_weights_for_mega_moe(
        *pairs, arch=chip.arch, weights=shape.weights, token_format=shape.token_format
    )
    tokens = random_tokens(shape, count, seed=2)

    def call(**options: Any) -> tuple[torch.Tensor, list[LaunchTime]]:
        machines: list[Machine] = []
        with EmulatedRanks(num_ranks, **shape.buffer_arguments) as ranks:
            ys = [torch.zeros(count, shape.hidden, dtype=torch.bfloat16) for _ in ranks.buffers]
            for rank, buffer in enumerate(ranks.buffers):
                turned = (tokens.topk_idx + rank * alone.num_experts) % shape.num_experts
                fill_inputs(buffer, replace(tokens, topk_idx=turned))
            ranks.call(
                ys,
                [weights] * num_ranks,
                arch=chip.arch,
                num_sms=4,
                chip=chip,
                checked=False,
                observe=machines.append,
                **options,
            )
        return ys[0], machines[0].launch_times

    y, launches = call()
    mirrored_y, mirrored_launches = call(mirrored=True)
    assert y.abs().max() > 0
    assert torch.equal(mirrored_y.view(torch.int16), y.view(torch.int16))
    assert (len(launches), len(mirrored_launches)) == (num_ranks, 1)
    (first,) = (launch for launch in launches if launch.rank == 0)
    assert mirrored_launches[0].ns == pytest.approx(first.ns, rel=0.05)
    assert mirrored_launches[0].link_bytes == first.link_bytes > 0


def test_only_equal_ranks_can_be_mirrored():
    chip = chips.load("h100")
    with pytest.raises(ValueError, match=r"as many tokens on each rank.*got \(5, 3\)"):
        simulate_call(small_shape(), COUNTS, chip, num_sms=4, mirrored=True)
    with pytest.raises(ValueError, match="needs a chip as clock, and checks=False"):
        simulate_call(
            small_shape(), (5, 5), chip, num_sms=4, mirrored=True, checked=True, products=True
        )


def test_a_call_that_masks_a_rank_cannot_be_mirrored():
    """Its peers would mask other ranks. A mask of zeros is like none."""
    chip, shape = chips.load("h100"), MoEShape(3, 6, 2, 128, 128, 8)
    options = {"num_sms": 2, "mirrored": True}
    masks = [torch.zeros(3, dtype=torch.int32)] * 3
    (launch,) = simulate_call(shape, (4,) * 3, chip, masked_ranks=masks, **options).launches
    assert launch.link_bytes > 0
    masks[0][1] = 1
    with pytest.raises(ValueError, match=r"masked_ranks\[0\] must leave out no rank.*\[0, 1, 0\]"):
        simulate_call(shape, (4,) * 3, chip, masked_ranks=masks, **options)
