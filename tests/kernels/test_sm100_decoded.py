"""What only SM100 kernels have that decode weights to BF16 beside BF16 tokens, in the emulator. The
rest stands in test_other_weights.py."""

from __future__ import annotations

import pytest
import torch

from deep_moe.targets import target_of
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import (
    Layer,
    exact_layer,
    exact_tokens,
    random_layer,
    random_tokens,
)
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize
from tests.pairs import formats

from .layer_case import LayerCase, small_shape

WEIGHTS = ("mxfp4 x bf16", "nvfp4 x bf16", "int4 x bf16")
each_weights = pytest.mark.parametrize("pair", WEIGHTS)


def scale_block(pair: str) -> tuple[int, int]:
    return target_of("sm_100a").weights_of(**formats(pair)).scale_block


def exact_case(pair: str, arch: str = "sm_100a", num_ranks: int = 1, **sizes: int) -> LayerCase:
    shape = small_shape(pair, num_ranks, **sizes)
    return LayerCase(shape, exact_layer(shape, scale_block=scale_block(pair)), arch=arch)


@parametrize(
    ("pair", "block_m"),
    [(pair, rows) for pair in WEIGHTS for rows in (16, 32, 64, 96, 128, 192)],
    everyday=[(WEIGHTS[0], 16), (WEIGHTS[1], 192), (WEIGHTS[2], 64)],
)
def test_tiles(pair: str, block_m: int) -> None:
    case = exact_case(pair, num_experts=2, num_max_tokens_per_rank=block_m + 11, hidden=256)
    tokens = exact_tokens(case.shape, block_m + 11, seed=block_m)
    (result,) = case.compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


# Fewer stages than tensor memory has room for decoded blocks, as many, and more; odd and even, for
# two warpgroups take them in turn.
@parametrize("num_stages", [2, 3, 4, 5, 6, 9], everyday=[3, 5])
def test_few_and_many_stages(num_stages: int) -> None:
    case = exact_case("int4 x bf16", num_experts=2, num_max_tokens_per_rank=40, hidden=896)
    tokens = exact_tokens(case.shape, 40, seed=num_stages)
    (result,) = case.compare_call([tokens], overrides={"block_m": 32, "num_stages": num_stages})
    assert result.is_exact, result


@parametrize("pair", WEIGHTS, everyday=[WEIGHTS[1]])
def test_sm_103a_and_several_ranks(pair: str) -> None:
    case = exact_case(pair, "sm_103a", num_ranks=2, biases=True)
    results = case.compare_call([exact_tokens(case.shape, n, seed=n) for n in (31, 17)])
    assert all(result.is_exact for result in results), results


@each_weights
def test_the_judge_sees_one_other_weight(pair: str) -> None:
    shape = small_shape(pair)
    case = LayerCase(shape, random_layer(shape, scale_block=scale_block(pair)))
    tokens = random_tokens(shape, 20, seed=4)
    (y,) = case.call([tokens])
    (before,) = case.bounds([tokens])
    assert compare(y, before).is_right
    case.layer.l2.weight.view(torch.uint8)[:, 5, 17] ^= 0x33
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


def test_groups_of_128_int4_values() -> None:
    shape = small_shape("int4 x bf16")
    case = LayerCase(shape, exact_layer(shape, scale_block=(1, 128)))
    (result,) = case.compare_call([exact_tokens(shape, 40, seed=2)])
    assert result.is_exact, result


def test_every_code_and_scale_of_nvfp4() -> None:
    """Among them scales of zero, subnormal ones and the largest, and the code of -0."""
    shape = small_shape("nvfp4 x bf16", num_experts=2, num_topk=2, hidden=512)
    generator = torch.Generator().manual_seed(0)

    def layer(num_rows: int, num_columns: int, num_matrices: int) -> LayerWeights:
        def bytes_of(high: int, num: int) -> torch.Tensor:
            size = (2, num_rows, num)
            return torch.randint(high, size, dtype=torch.uint8, generator=generator)

        sf = bytes_of(0x7F, num_columns // 16).view(torch.float8_e4m3fn)
        global_sf = torch.rand(2, num_matrices, generator=generator) * 2.0**-9
        return LayerWeights(bytes_of(256, num_columns // 2), sf, global_sf)

    made = Layer(
        layer(2 * shape.intermediate_hidden, 512, 2), layer(512, shape.intermediate_hidden, 1)
    )
    (result,) = LayerCase(shape, made).compare_call([random_tokens(shape, 30, seed=2)])
    assert result.is_right, result


def test_gate_and_up_of_nvfp4_have_scales_of_their_own() -> None:
    shape = small_shape("nvfp4 x bf16")
    case = LayerCase(shape, random_layer(shape, scale_block=(1, 16)))
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
