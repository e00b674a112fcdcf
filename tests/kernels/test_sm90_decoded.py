"""What only SM90 kernels have that decode weights to BF16 beside BF16 tokens, in the emulator. The
rest stands in test_other_weights.py, and what only MXFP4 has in test_sm90_mxfp4_bf16.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.targets import target_of
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens
from tests.everyday import parametrize
from tests.pairs import formats

from .layer_case import FITTED, LayerCase, small_shape

WEIGHTS = ("nvfp4 x bf16", "int4 x bf16", "mxfp8 x bf16")
each_weights = pytest.mark.parametrize("pair", WEIGHTS)


def scale_block(pair: str) -> tuple[int, int]:
    return target_of("sm_90a").weights_of(**formats(pair)).scale_block


# Products in pairs and one by one.
@parametrize(
    ("pair", "block_m"),
    [(pair, rows) for pair in WEIGHTS for rows in (8, 56, 152, 176)],
    everyday=[(WEIGHTS[0], 176), (WEIGHTS[2], 56)],
)
def test_tiles(pair: str, block_m: int) -> None:
    shape = small_shape(pair, num_experts=2, hidden=256, num_max_tokens_per_rank=block_m + 5)
    case = LayerCase(shape, exact_layer(shape, scale_block=scale_block(pair)), arch="sm_90a")
    tokens = exact_tokens(shape, block_m + 5, seed=block_m)
    (result,) = case.compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@parametrize(
    ("pair", "overrides"),
    [(pair, own) for pair in WEIGHTS for own in (FITTED, {"block_m": 64, "block_m_step": 8})],
    everyday=[(WEIGHTS[0], FITTED)],
)
def test_tiles_fitted_to_each_expert(pair: str, overrides: dict[str, int]) -> None:
    shape = small_shape(pair, num_max_tokens_per_rank=180)
    case = LayerCase(shape, exact_layer(shape, scale_block=scale_block(pair)), arch="sm_90a")
    tokens = exact_tokens(shape, 180, seed=1)
    tokens.topk_idx[:90, 0], tokens.topk_idx[:90, 1] = 0, 1
    (result,) = case.compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


@each_weights
def test_the_judge_sees_one_other_weight(pair: str) -> None:
    shape = small_shape(pair)
    case = LayerCase(shape, random_layer(shape, scale_block=scale_block(pair)), arch="sm_90a")
    tokens = random_tokens(shape, 20, seed=4)
    (y,) = case.call([tokens])
    (before,) = case.bounds([tokens])
    assert compare(y, before).is_right
    case.layer.l2.weight.view(torch.uint8)[:, 5, 17] ^= 0x33
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


def test_groups_of_128_int4_values() -> None:
    shape = small_shape("int4 x bf16")
    case = LayerCase(shape, exact_layer(shape, scale_block=(1, 128)), arch="sm_90a")
    (result,) = case.compare_call([exact_tokens(shape, 40, seed=2)])
    assert result.is_exact, result


def test_mantissas_of_nvfp4_scales_are_exact() -> None:
    """Scales of Linear2 of every mantissa, over 8 binades, whose sums FP32 holds: units are 2^-7,
    and 32 weights of up to 6 * 15 in a row, times up to 2^10, stay below 2^24 of them."""
    shape = small_shape("nvfp4 x bf16", num_ranks=2)
    layer = exact_layer(shape, scale_block=(1, 16))
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(0, 256, layer.l2.weight.shape, generator=generator).to(torch.uint8)
    weight[..., 16:] = 0
    sf = torch.randint(0x20, 0x58, layer.l2.sf.shape, generator=generator).to(torch.uint8)
    sf[..., 3:] = 0
    l2 = replace_tensors(layer.l2, weight=weight, sf=sf.view(torch.float8_e4m3fn))
    case = LayerCase(shape, replace(layer, l2=l2), arch="sm_90a")
    tokens = [exact_tokens(shape, 30, seed=seed) for seed in range(2)]
    for result in case.compare_call(tokens):
        assert result.is_exact, result


def replace_tensors(layer, **tensors: torch.Tensor):
    names = ("weight", "sf", "global_sf")
    return type(layer)(*(tensors.get(name, getattr(layer, name)) for name in names))
