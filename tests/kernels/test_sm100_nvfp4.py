"""What only SM100 kernels of NVFP4 weights have, most of it beside NVFP4 tokens, in the emulator:
exact layers bit for bit, random ones within what rounding explains. The rest stands in
test_other_weights.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import deep_moe
from deep_moe.formats.nvfp4 import LINEAR2_SCALE
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.heuristics import MoEShape
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import (
    Layer,
    Tokens,
    exact_layer,
    exact_tokens,
    random_layer,
    random_tokens,
)
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize

from .layer_case import LayerCase, small_shape

PAIR = "nvfp4 x nvfp4"
GROUP = (1, 16)
CLAMP = 24.0  # of exact layers: without it all of Linear1's output would be above what scales hold
shape_of = partial(small_shape, PAIR, hidden=512)
each_tokens = pytest.mark.parametrize("pair", [PAIR, "nvfp4 x bf16"])


def exact_case(**sizes: int) -> LayerCase:
    shape = shape_of(**sizes)
    return LayerCase(shape, exact_layer(shape, scale_block=GROUP))


def random_case(pair: str = PAIR) -> LayerCase:
    shape = small_shape(pair, hidden=512)
    return LayerCase(shape, random_layer(shape, scale_block=GROUP))


@parametrize("block_m", [16, 32, 64, 96, 128, 192], everyday=[16, 192])
def test_every_tile(block_m: int) -> None:
    case = exact_case(num_experts=2, num_max_tokens_per_rank=block_m + 11, hidden=256)
    tokens = exact_tokens(case.shape, block_m + 11, seed=block_m)
    (result,) = case.compare_call([tokens], activation_clamp=CLAMP, overrides={"block_m": block_m})
    assert result.is_exact, result


@parametrize(
    ("hidden", "intermediate_hidden"),
    [(128, 128), (384, 256), (640, 384), (768, 896)],
    everyday=[(384, 256)],
)
def test_last_k_blocks_of_128_values(hidden: int, intermediate_hidden: int) -> None:
    """Half of a k-block: behind it zeros, in place of another expert's scales."""
    case = exact_case(hidden=hidden, intermediate_hidden=intermediate_hidden)
    tokens = exact_tokens(case.shape, 40, seed=hidden)
    (result,) = case.compare_call([tokens], activation_clamp=CLAMP)
    assert result.is_exact, result


@pytest.mark.parametrize("exponent", [-80, 0, 60])
def test_tokens_of_any_size(exponent: int) -> None:
    """A token's own scale takes its size, which the groups' scales alone could not hold."""
    case = random_case()
    values = torch.randn(17, 512, generator=torch.Generator().manual_seed(3)) * 2.0**exponent
    routing = random_tokens(case.shape, 17, seed=3)
    tokens = replace(routing, **quantized(values))
    (result,) = case.compare_call([tokens])
    assert result.is_right, result


def quantized(values: torch.Tensor, token_scale: float | None = None) -> dict[str, torch.Tensor]:
    x, x_sf = deep_moe.quantize_nvfp4_tokens(values, token_scale)
    return {"x": x, "x_sf": x_sf}


def test_zero_tokens_give_zero() -> None:
    case = random_case()
    routing = random_tokens(case.shape, 9, seed=4)
    (y,) = case.call([replace(routing, **quantized(torch.zeros(9, 512)))])
    assert torch.equal(y, torch.zeros_like(y))


@each_tokens
def test_every_code_and_scale_of_weights(pair: str) -> None:
    """Among them scales of zero, subnormal ones and the largest, and the code of -0."""
    shape = small_shape(pair, num_experts=2, num_topk=2, hidden=512)
    generator = torch.Generator().manual_seed(0)

    def layer(num_rows: int, num_columns: int, num_matrices: int) -> LayerWeights:
        def bytes_of(high: int, num: int) -> torch.Tensor:
            size = (2, num_rows, num)
            return torch.randint(high, size, dtype=torch.uint8, generator=generator)

        sf = bytes_of(0x7F, num_columns // 16).view(torch.float8_e4m3fn)
        global_sf = torch.rand(2, num_matrices, generator=generator) * 2.0**-9
        return LayerWeights(bytes_of(256, num_columns // 2), sf, global_sf)

    made = Layer(layer(2 * 256, 512, 2), layer(512, 256, 1))
    (result,) = LayerCase(shape, made).compare_call([random_tokens(shape, 30, seed=2)])
    assert result.is_right, result


@each_tokens
def test_gate_and_up_have_scales_of_their_own(pair: str) -> None:
    case = random_case(pair)
    tokens = random_tokens(case.shape, 20, seed=4)
    (y,) = case.call([tokens])
    global_sf = case.layer.l1.global_sf
    assert global_sf is not None
    global_sf[:, 1] *= 1.5
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right
    global_sf[:, 1] /= 1.5
    (bounds,) = case.bounds([tokens])
    assert compare(y, bounds).is_right


def test_the_judge_sees_a_scale_of_a_neighbouring_group() -> None:
    case = random_case()
    tokens = random_tokens(case.shape, 20, seed=4)
    ys = case.call([tokens])
    case.layer.l1.sf.view(torch.uint8)[:, 3, 1] += 4
    (bounds,) = case.bounds([tokens])
    assert not compare(ys[0], bounds).is_right


# Of Linear1's output, by what its largest magnitudes are of the constant beside their scales.
@pytest.mark.parametrize("size", [2.0**-12, 2.0**-5, 1.0, 2.0**12])
def test_any_size_of_linear1_output(size: float) -> None:
    """Where scales are subnormal, zero or at their end, too."""
    case = random_case()
    global_sf = case.layer.l1.global_sf
    assert global_sf is not None
    # SiLU of a large gate is the gate, of a small one half of it.
    global_sf *= size**0.5
    case = LayerCase(case.shape, case.layer)
    (result,) = case.compare_call([random_tokens(case.shape, 20, seed=1)])
    assert result.is_right, result


def test_prepared_tokens() -> None:
    """Every byte, of zeros, tiny and uneven tokens, too."""
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(1))
    x[3] *= 100
    x[4], x[5] = 0, x[5] * 2.0**-125
    x[6] *= torch.exp2(-torch.arange(512.0) // 16)
    check_prepared(x.bfloat16(), None)


def test_tokens_with_a_static_scale() -> None:
    """As checkpoints have it; tokens above what it holds are cut off."""
    x = torch.randn(20, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[3] *= 100
    scale = torch.tensor([4.0 / 2688])
    tokens = check_prepared(x, scale)
    case = random_case()
    (result,) = case.compare_call([tokens])
    assert result.is_right, result


def check_prepared(x: torch.Tensor, token_scale: torch.Tensor | None) -> Tokens:
    shape = shape_of()
    (buffer,) = EmulatedRanks(1, **shape.buffer_arguments).buffers
    routing = random_tokens(shape, len(x), seed=1)
    deep_moe.prepare_inputs(
        x, routing.topk_idx, routing.topk_weights, buffer, token_scale=token_scale
    )
    static = None if token_scale is None else token_scale.item()
    packed, sf = deep_moe.quantize_nvfp4_tokens(x, static)
    assert torch.equal(buffer.x[: len(x)], packed)
    assert torch.equal(buffer.x_sf[: len(x)], sf)
    return Tokens(packed, sf, routing.topk_idx, routing.topk_weights)


def test_an_error_beside_float64(record_property: pytest.RecordProperty) -> None:
    """What the two roundings to E2M1 cost a layer of random numbers: about a tenth each."""
    shape = MoEShape(1, 4, 2, 512, 512, 64, weights="nvfp4", token_format="nvfp4")
    layer = random_layer(shape, scale_block=GROUP)
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    tokens = replace(random_tokens(shape, 64, seed=1), **quantized(values))
    case = LayerCase(shape, layer)
    (y,) = case.call([tokens])
    exact = torch.zeros(64, 512, dtype=torch.float64)
    dequantize = deep_moe.weights.weight_format("nvfp4").dequantize
    for expert in range(4):
        token, slot = (tokens.topk_idx == expert).nonzero(as_tuple=True)
        l1, l2 = (
            dequantize(tuple(t[expert] for t in own), m)
            for own, m in ((layer.l1, 2), (layer.l2, 1))
        )
        gate, up = (values[token].double() @ l1.T).chunk(2, dim=1)
        out = torch.nn.functional.silu(gate) * up @ l2.T
        exact.index_add_(0, token, out * tokens.topk_weights[token, slot].double().unsqueeze(1))
    error = float((y.double() - exact).norm() / exact.norm())
    record_property("relative error", error)
    assert 0.05 < error < 0.2
    assert LINEAR2_SCALE == 2.0**-2
