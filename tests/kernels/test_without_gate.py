"""Layers of an activation without a gate, whose Linear1 has I rows: with every pair of formats and
kind of main loop as the reference, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.heuristics import MoEShape
from deep_moe.targets import TARGETS, target_of
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer
from tests.everyday import parametrize
from tests.kernels.layer_case import LayerCase
from tests.pairs import BESIDE, formats

PAIRS = [
    (arch, f"{own.weights}{BESIDE}{own.token_format}")
    for arch in ("sm_90a", "sm_100a")
    for own in TARGETS[arch].weights
]
# Of blocks: one of Linear1 with half of its values on SM90, and behind an odd last one on SM100.
ODD = 384


def case_of(arch: str, pair: str, **sizes: Any) -> LayerCase:
    sizes = {"num_ranks": 2, "hidden": 256, "intermediate_hidden": ODD, **sizes}
    shape = MoEShape(
        num_experts=4,
        num_topk=2,
        num_max_tokens_per_rank=40,
        has_gate=False,
        **formats(pair),
        **sizes,
    )
    on_target = target_of(arch).weights_of(**formats(pair))
    layer = exact_layer(shape, seed=1, scale_block=on_target.scale_block)
    return LayerCase(shape, layer, arch=arch)


def check(case: LayerCase, counts: tuple[int, ...], **options: Any) -> None:
    tokens = [exact_tokens(case.shape, count, seed=count) for count in counts]
    ys = case.call(tokens, num_sms=4, activation="relu2", **options)
    for y, own in zip(ys, tokens, strict=True):
        routing = (own.topk_idx, own.topk_weights)
        expected = reference_mega_moe(
            *(own.x, own.x_sf, *routing, case.layer.l1, case.layer.l2),
            activation="relu2",
            numerics=case.numerics,
        )
        assert torch.equal(y, expected)
        assert expected.any()
    case.check_control_words()


@parametrize(
    ("arch", "pair", "tile"),
    [(*own, tile) for own in PAIRS for tile in range(4)],
    everyday=[(*own, i % 4) for i, own in enumerate(PAIRS)],
)
def test_every_main_loop_with_an_odd_number_of_blocks(arch: str, pair: str, tile: int) -> None:
    overrides = target_of(arch).weights_of(**formats(pair)).fuzz_tiles[tile]
    check(case_of(arch, pair), (40, 7), overrides=dict(overrides))


@parametrize(("arch", "pair"), PAIRS, everyday=PAIRS[::3])
def test_a_size_that_is_padded(arch: str, pair: str) -> None:
    check(case_of(arch, pair, num_ranks=1, intermediate_hidden=96), (33,))


@parametrize(("arch", "pair"), PAIRS, everyday=PAIRS[1::4])
def test_rows_of_a_small_pool_are_used_again(arch: str, pair: str) -> None:
    """A CTA behind an odd last block must not read what belongs to tokens that may be over."""
    check(case_of(arch, pair, num_pool_tokens=384), (40, 39), overrides={"block_m": 16})


@pytest.mark.parametrize(("arch", "pair"), PAIRS)
@pytest.mark.parametrize("intermediate", [96, ODD])
def test_weights_come_back_from_their_layout(arch: str, pair: str, intermediate: int) -> None:
    on_target = target_of(arch).weights_of(**formats(pair))
    hidden = 256 if "fp8_" in on_target.token_format else 160
    shape = MoEShape(1, 2, 1, hidden, intermediate, 1, has_gate=False, **formats(pair))
    layer = random_layer(shape, seed=3, scale_block=on_target.scale_block)
    made = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch, **formats(pair))
    assert not made.has_gate
    again = deep_moe.inverse_transform_weights(
        *made,
        arch,
        **formats(pair),
        hidden=hidden,
        intermediate_hidden=intermediate,
        has_gate=False,
    )
    for own, expected in zip(again, (layer.l1, layer.l2), strict=True):
        assert own.weight.shape == expected.weight.shape
        assert torch.equal(own.weight, expected.weight)


def test_weights_of_the_other_kind_are_refused_by_name() -> None:
    case = case_of("sm_90a", "bf16", num_ranks=1, intermediate_hidden=128)
    tokens = [exact_tokens(case.shape, 3)]
    words = "weights.0. must have no rows of gate in l1 for activation 'relu2'; got bf16 weights"
    case.weights = [
        deep_moe.empty_weights_for_mega_moe(4, 256, 128, arch="sm_90a", **formats("bf16"))
    ]
    with pytest.raises(ValueError, match=words):
        case.call(tokens, activation="relu2")
    case.weights = [
        deep_moe.empty_weights_for_mega_moe(
            4, 256, 128, arch="sm_90a", **formats("bf16"), has_gate=False
        )
    ]
    words = "must have rows of gate above those of up in l1 for activation 'swiglu'; got .*"
    with pytest.raises(ValueError, match=words + re.escape("for sm90, without a gate")):
        case.call(tokens)


def test_there_are_no_biases() -> None:
    with pytest.raises(ValueError, match="biases must be False with an activation without a gate"):
        MoEShape(1, 2, 1, 256, 256, 1, has_gate=False, biases=True)
