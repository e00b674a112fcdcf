"""What each kernel of weights other than MXFP4 has to show, by every name that it has: exact layers
bit for bit, random ones within what rounding explains. What only one of them has stands in
test_sm90_fp8.py and its neighbours."""

from __future__ import annotations

import pytest
import torch

from deep_moe.targets import target_of
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens
from tests.everyday import parametrize
from tests.pairs import formats

from .layer_case import FEW, LayerCase, small_shape

KERNELS = (
    ("sm_90a", "fp8"),
    ("sm_90a", "bf16"),
    ("sm_90a", "mxfp4 x bf16"),
    ("sm_90a", "nvfp4"),
    ("sm_90a", "int4"),
    ("sm_90a", "mxfp8"),
    ("sm_100a", "fp8"),
    ("sm_100a", "bf16"),
    ("sm_100a", "mxfp4 x bf16"),
    ("sm_100a", "nvfp4"),
    ("sm_100a", "int4"),
    ("sm_100a", "nvfp4 x nvfp4"),
    ("sm_100a", "mxfp8 x mxfp8"),
)
each_kernel = pytest.mark.parametrize(("arch", "weights"), KERNELS)


def exact_case(arch: str, weights: str, num_ranks: int = 1, **sizes: int) -> LayerCase:
    shape = small_shape(weights, num_ranks, **sizes)
    scale_block = target_of(arch).weights_of(**formats(weights)).scale_block
    return LayerCase(shape, exact_layer(shape, scale_block=scale_block), arch=arch)


def random_case(arch: str, weights: str, **sizes: int) -> LayerCase:
    """FP32 scales are no powers of two."""
    shape = small_shape(weights, **sizes)
    scale_block = target_of(arch).weights_of(**formats(weights)).scale_block
    return LayerCase(shape, random_layer(shape, scale_block=scale_block), arch=arch)


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize(("hidden", "intermediate_hidden"), [(128, 128), (384, 128), (128, 640)])
def test_odd_numbers_of_blocks(
    arch: str, weights: str, hidden: int, intermediate_hidden: int
) -> None:
    case = exact_case(arch, weights, hidden=hidden, intermediate_hidden=intermediate_hidden)
    (result,) = case.compare_call([exact_tokens(case.shape, 24, seed=hidden)])
    assert result.is_exact, result


@parametrize(("arch", "weights"), KERNELS, everyday=[("sm_90a", "fp8"), ("sm_100a", "bf16")])
def test_ranks_and_calls_in_a_row(arch: str, weights: str) -> None:
    case = exact_case(arch, weights, num_ranks=2)
    calls = [
        [exact_tokens(case.shape, count, seed=10 * i + count) for count in counts]
        for i, counts in enumerate([(17, 5), (0, 30)])
    ]
    for of_call in case.compare_calls_in_a_row(calls):
        assert all(result.is_exact for result in of_call), of_call


@parametrize(
    "weights",
    ["mxfp4 x bf16", "nvfp4", "int4", "nvfp4 x nvfp4"],
    everyday=["nvfp4", "nvfp4 x nvfp4"],
)
def test_sm_103a_and_biases_of_ranks(weights: str) -> None:
    case = exact_case("sm_103a", weights, num_ranks=2, biases=True)
    results = case.compare_call([exact_tokens(case.shape, n, seed=n) for n in (31, 17)])
    assert all(result.is_exact for result in results), results


@each_kernel
@parametrize("activation_clamp", [None, 0.3], everyday=[0.3])
def test_random_layer_is_right(arch: str, weights: str, activation_clamp: float | None) -> None:
    case = random_case(arch, weights, hidden=512)
    tokens = random_tokens(case.shape, 50, seed=1)
    (result,) = case.compare_call([tokens], activation_clamp=activation_clamp)
    assert result.is_right, result
    # A value of Linear1's output that is rounded the other way moves many of a token's by a little.
    if not case.shape.tokens.has_scales:
        assert result.num_near > 0.995 * result.num_values


@each_kernel
def test_nan_stays_in_its_token(arch: str, weights: str) -> None:
    case = random_case(arch, weights)
    tokens = random_tokens(case.shape, FEW, seed=5)
    (clean,) = case.call([tokens])
    if not case.shape.tokens.has_scales:
        tokens.x[7, 100] = torch.nan
    elif case.shape.tokens.has_token_scale:
        tokens.x_sf.view(torch.float32)[7, 0] = torch.nan
    else:
        tokens.x.view(torch.uint8)[7, 100] = 0x7F
    (y,) = case.call([tokens])
    assert y[7].isnan().all()
    others = torch.arange(FEW) != 7
    assert torch.equal(y[others], clean[others])
