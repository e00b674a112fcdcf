"""A rank's tile fits what its experts receive, not what the rank itself sends."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from deep_moe.fused.emulated_call import prepare_launch
from deep_moe.fused.options import CallOptions
from deep_moe.heuristics import MoEShape
from deep_moe.jit.kernel_args import RECEIVED_UNEVENLY
from deep_moe.targets import MegaMoEConfig, choose_config, target_of
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens
from tests.kernels.layer_case import LayerCase

SHAPE = MoEShape(2, 4, 2, 256, 256, 64)
NUM_TOKENS = (0, 64)


@pytest.fixture(params=["sm_90a", "sm_100a"])
def case(request) -> LayerCase:
    arch = request.param
    return LayerCase(
        SHAPE,
        exact_layer(SHAPE, sum_bits=target_of(arch).weights_of().numerics.sum_bits),
        arch=arch,
    )


def block_m(case: LayerCase, num_tokens: int, **changes) -> int:
    """Of rank 0's next call."""
    y = torch.empty((num_tokens, SHAPE.hidden), dtype=torch.bfloat16)
    options = CallOptions(arch=case.arch, checked=False, **changes)
    return prepare_launch(y, *case.weights[0], case.ranks.buffers[0], {}, options).config.block_m


def formula_block_m(case: LayerCase, num_tokens: int) -> int:
    return choose_config(SHAPE, num_tokens, arch=case.arch, num_sms=4).block_m


def test_a_rank_without_tokens_fits_its_tile_to_what_it_received(case) -> None:
    tokens = [exact_tokens(SHAPE, n, seed=n) for n in NUM_TOKENS]
    small, large = formula_block_m(case, 0), formula_block_m(case, 48)
    assert small < large
    assert block_m(case, 0) == small
    case.compare_call(tokens)

    num_received = int((tokens[1].topk_idx < 2).sum())  # experts 0 and 1 are rank 0's
    assert 2 * 32 < num_received <= 2 * 48
    assert case.ranks.buffers[0].memory.status.received == num_received
    assert block_m(case, 0) == large
    assert block_m(case, 0, expected_tokens_per_rank=0) == small
    assert block_m(case, 64) == formula_block_m(case, 64)
    assert all(c.is_exact for c in case.compare_call(tokens, schedule_seed=1))

    case.ranks.reset()
    assert block_m(case, 0) == small


def test_a_rank_learns_of_uneven_routing_from_the_call_before() -> None:
    """16 experts: with 32 tokens each, or more or less by chance, they are even; with 16 and 48
    they are not, though as many came."""
    shape = MoEShape(1, 16, 2, 128, 128, 256)
    sum_bits = target_of("sm_90a").weights_of().numerics.sum_bits
    case = LayerCase(shape, exact_layer(shape, sum_bits=sum_bits), arch="sm_90a")
    (tokens,) = [exact_tokens(shape, 256, seed=3)]
    slots = torch.arange(512).view(256, 2)
    even = slots % 16
    uneven = torch.where(slots < 256, slots % 16, slots % 8)  # 16 + 32 and 16 tokens
    by_chance = tokens.topk_idx
    status = case.ranks.buffers[0].memory.status
    y = torch.empty((256, 128), dtype=torch.bfloat16)

    def next_config() -> MegaMoEConfig:
        options = CallOptions(arch="sm_90a", checked=False)
        (weights,) = case.weights
        return prepare_launch(y, *weights, case.ranks.buffers[0], {}, options).config

    formula = partial(choose_config, shape, 256, arch="sm_90a", num_sms=4)
    assert formula().block_m != formula(is_uneven=True).block_m
    for topk_idx, is_uneven in ((even, False), (uneven, True), (by_chance, False)):
        changed = Tokens(tokens.x, tokens.x_sf, topk_idx, tokens.topk_weights)
        (result,) = case.compare_call([changed])
        assert result.is_exact, result
        assert status.received == 512 | (RECEIVED_UNEVENLY if is_uneven else 0)
        assert next_config() == formula(is_uneven=is_uneven)


def test_a_caller_who_knows_all_ranks_says_so(case) -> None:
    for num_tokens in (0, 8, 64):
        assert block_m(case, 8, expected_tokens_per_rank=num_tokens) == formula_block_m(
            case, num_tokens
        )
    tokens = [exact_tokens(SHAPE, n, seed=n) for n in NUM_TOKENS]
    assert all(c.is_exact for c in case.compare_call(tokens, expected_tokens_per_rank=32))


@pytest.mark.parametrize("value", [-1, 65])
def test_expectations_that_no_call_can_have(case, value: int) -> None:
    message = rf"expected_tokens_per_rank must be 0 to num_max_tokens_per_rank \(64\); got {value}"
    with pytest.raises(ValueError, match=message):
        block_m(case, 8, expected_tokens_per_rank=value)
