"""What only the SM100 kernel with FP8 weights has, in the emulator: exact layers bit for bit,
random ones within what rounding explains. The rest stands in test_other_weights.py."""

from __future__ import annotations

from functools import partial

import torch

from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import Layer, exact_layer, exact_tokens, random_layer, random_tokens
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize

from .layer_case import LayerCase, small_shape

shape_of = partial(small_shape, "fp8", hidden=256)


@parametrize("block_m", [16, 32, 64, 96, 128, 192], everyday=[16, 192])
def test_every_tile(block_m: int) -> None:
    shape = shape_of(num_experts=2, num_max_tokens_per_rank=block_m + 11)
    tokens = exact_tokens(shape, block_m + 11, seed=block_m)
    case = LayerCase(shape, exact_layer(shape))
    (result,) = case.compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


def test_every_e4m3_weight() -> None:
    """Subnormal, largest and negative ones, which random weights rarely are."""
    shape = shape_of(num_experts=1, num_topk=1)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    generator = torch.Generator().manual_seed(0)

    def layer(num_rows: int, num_columns: int) -> LayerWeights:
        order = torch.rand(num_rows, num_columns, generator=generator).argsort(dim=1) % 256
        sf = torch.randint(110, 118, (1, num_rows, num_columns // 32), generator=generator)
        values = codes[order].view(torch.float8_e4m3fn)[None]
        return LayerWeights(values, sf.to(torch.uint8).view(torch.float8_e8m0fnu))

    case = LayerCase(shape, Layer(layer(512, 256), layer(256, 256)))
    (result,) = case.compare_call([random_tokens(shape, 20, seed=2)])
    assert result.is_right, result


def test_scales_per_128_by_128() -> None:
    shape = shape_of(hidden=384)
    generator = torch.Generator().manual_seed(5)
    made = random_layer(shape)

    def with_block_scales(layer: LayerWeights) -> LayerWeights:
        num_experts, num_rows, num_columns = layer.weight.shape
        size = (num_experts, num_rows // 128, num_columns // 128)
        exponents = torch.randint(-15, -9, size, generator=generator)
        return LayerWeights(layer.weight, torch.exp2(exponents.float()))

    case = LayerCase(shape, Layer(with_block_scales(made.l1), with_block_scales(made.l2)))
    (result,) = case.compare_call([random_tokens(shape, 40, seed=3)])
    assert result.is_right, result


def test_the_judge_sees_a_scale_of_a_neighbouring_block() -> None:
    shape = shape_of()
    case = LayerCase(shape, random_layer(shape))
    tokens = random_tokens(shape, 20, seed=4)
    ys = case.call([tokens])
    sf = case.layer.l1.sf
    sf.view(torch.uint8)[:, 3, 1] += 1
    (bounds,) = case.bounds([tokens])
    assert not compare(ys[0], bounds).is_right
