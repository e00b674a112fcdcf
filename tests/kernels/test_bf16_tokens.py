"""What only kernels for BF16 tokens have, in the emulator: weights are BF16 or decoded to it. The
rest stands in test_other_weights.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.activations import Activation, Situ, SwigluOai
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config, target_of
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize
from tests.pairs import formats

from .layer_case import FEW, FITTED, LayerCase, small_shape

DECODED = {
    "sm_90a": ("mxfp4 x bf16", "nvfp4 x bf16", "int4 x bf16", "mxfp8 x bf16"),
    "sm_100a": ("mxfp4 x bf16", "nvfp4 x bf16", "int4 x bf16"),
}
# Of SM90's, products in pairs and one by one.
TILES = {"sm_90a": (8, 56, 152, 176), "sm_100a": (16, 32, 64, 96, 128, 192)}
KERNELS = [(arch, pair) for arch, pairs in DECODED.items() for pair in ("bf16", *pairs)]


def exact_case(
    pair: str, arch: str = "sm_90a", group: int | None = None, num_ranks: int = 1, **sizes: int
) -> LayerCase:
    return case_of(small_shape(pair, num_ranks, **sizes), arch, group)


def case_of(shape: MoEShape, arch: str = "sm_90a", group: int | None = None) -> LayerCase:
    """group: values per scale, if not as usual."""
    own = target_of(arch).weights_of(shape.weights, shape.token_format)
    block = own.scale_block if group is None else (1, group)
    return LayerCase(shape, exact_layer(shape, scale_block=block), arch=arch)


def random_case(pair: str, arch: str = "sm_90a") -> LayerCase:
    shape = small_shape(pair)
    block = target_of(arch).weights_of(**formats(pair)).scale_block
    return LayerCase(shape, random_layer(shape, scale_block=block), arch=arch)


@parametrize(
    ("arch", "pair", "block_m"),
    [
        *(("sm_90a", "bf16", rows) for rows in range(8, 184, 24)),
        *(("sm_100a", "bf16", rows) for rows in TILES["sm_100a"]),
        *(
            (arch, pair, rows)
            for arch, pairs in DECODED.items()
            for pair in pairs
            for rows in TILES[arch]
            if (pair, rows) != ("int4 x bf16", 176)
        ),
    ],
    everyday=[
        *(("sm_90a", "bf16", rows) for rows in (8, 104, 176)),
        *(("sm_100a", "bf16", rows) for rows in (16, 192)),
        *(("sm_90a", "mxfp4 x bf16", rows) for rows in TILES["sm_90a"]),
        ("sm_90a", "nvfp4 x bf16", 176),
        ("sm_90a", "mxfp8 x bf16", 56),
        ("sm_100a", "mxfp4 x bf16", 16),
        ("sm_100a", "nvfp4 x bf16", 192),
        ("sm_100a", "int4 x bf16", 64),
    ],
)
def test_tiles(arch: str, pair: str, block_m: int) -> None:
    num_tokens = block_m + (11 if arch == "sm_100a" else 5)
    case = exact_case(pair, arch, num_experts=2, hidden=256, num_max_tokens_per_rank=num_tokens)
    tokens = exact_tokens(case.shape, num_tokens, seed=block_m)
    (result,) = case.compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


@parametrize(
    ("pair", "overrides"),
    [
        (pair, own)
        for pair in ("bf16", *DECODED["sm_90a"])
        for own in (FITTED, {"block_m": 64, "block_m_step": 8})
    ],
    everyday=[
        ("bf16", FITTED),
        ("mxfp4 x bf16", {"block_m": 64, "block_m_step": 8}),
        ("nvfp4 x bf16", FITTED),
    ],
)
def test_tiles_fitted_to_each_expert(pair: str, overrides: dict[str, int]) -> None:
    case = exact_case(pair, num_max_tokens_per_rank=180)
    tokens = exact_tokens(case.shape, 180, seed=1)
    tokens.topk_idx[:90, 0], tokens.topk_idx[:90, 1] = 0, 1
    (result,) = case.compare_call([tokens], overrides=overrides)
    assert result.is_exact, result


@pytest.mark.parametrize(
    ("arch", "pair", "more"),
    [
        ("sm_90a", "bf16", {}),
        ("sm_90a", "mxfp4 x bf16", {"cluster_size": 2}),
        ("sm_100a", "bf16", {}),
    ],
)
def test_a_ring_of_the_smallest_size(arch: str, pair: str, more: dict[str, int]) -> None:
    shape = replace(small_shape(pair, num_max_tokens_per_rank=300), num_pool_tokens=384)
    tokens = exact_tokens(shape, 300, seed=3)
    (result,) = case_of(shape, arch).compare_call([tokens], overrides={"block_m": 32, **more})
    assert result.is_exact, result


@pytest.mark.parametrize(("arch", "pair"), KERNELS)
def test_the_judge_sees_one_other_weight(arch: str, pair: str) -> None:
    case = random_case(pair, arch)
    tokens = random_tokens(case.shape, FEW, seed=4)
    (y,) = case.call([tokens])
    (before,) = case.bounds([tokens])
    assert compare(y, before).is_right
    case.layer.l2.weight.view(torch.uint8)[:, 5, 17] ^= 0x33
    (bounds,) = case.bounds([tokens])
    assert not compare(y, bounds).is_right


@pytest.mark.parametrize("arch", DECODED)
def test_groups_of_128_int4_values(arch: str) -> None:
    case = exact_case("int4 x bf16", arch, group=128)
    (result,) = case.compare_call([exact_tokens(case.shape, 40, seed=2)])
    assert result.is_exact, result


# Fewer stages than tensor memory has room for decoded blocks, as many, and more; odd and even, for
# two warpgroups take them in turn.
@parametrize("num_stages", [2, 3, 4, 5, 6, 9], everyday=[3, 5])
def test_few_and_many_stages_of_sm100(num_stages: int) -> None:
    sizes = {"num_experts": 2, "num_max_tokens_per_rank": 40, "hidden": 896}
    case = exact_case("int4 x bf16", "sm_100a", **sizes)
    tokens = exact_tokens(case.shape, 40, seed=num_stages)
    (result,) = case.compare_call([tokens], overrides={"block_m": 32, "num_stages": num_stages})
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
    l2 = LayerWeights(weight, sf.view(torch.float8_e4m3fn), layer.l2.global_sf)
    case = LayerCase(shape, replace(layer, l2=l2), arch="sm_90a")
    tokens = [exact_tokens(shape, 30, seed=seed) for seed in range(2)]
    for result in case.compare_call(tokens):
        assert result.is_exact, result


def test_shared_experts_with_biases_of_ranks() -> None:
    shape = replace(small_shape("mxfp4 x bf16", num_ranks=2), num_shared_experts=1, biases=True)
    tokens = [exact_tokens(shape, count, seed=count) for count in (17, 5)]
    for result in case_of(shape).compare_call(tokens):
        assert result.is_exact, result


@pytest.mark.parametrize("activation", [SwigluOai(), Situ()])
def test_other_activations(activation: Activation) -> None:
    case = random_case("mxfp4 x bf16")
    tokens = random_tokens(case.shape, 30, seed=6)
    (y,) = case.call([tokens], activation=activation)
    bounds = reference_bounds(
        *case.layer.operands(tokens),
        activation=activation,
        numerics=case.numerics,
        sum_bits=FP32_SUM_BITS,
    )
    assert compare(y, bounds).is_right


def test_groups_of_mxfp4_that_are_far_apart_keep_their_values() -> None:
    """One group of each row is 2^90 times as large as the others, and what it is multiplied by is
    zero: what counts is decoded 2^90 below what the row is scaled to."""
    shape = small_shape("mxfp4 x bf16")
    layer = random_layer(shape)
    for own in (layer.l1, layer.l2):
        own.sf.view(torch.uint8)[..., 0] += 90
    layer.l2.weight[..., :16] = 0
    tokens = random_tokens(shape, 30, seed=2)
    tokens.x[:, :32] = 0
    (result,) = LayerCase(shape, layer, arch="sm_90a").compare_call([tokens])
    assert result.is_right, result
    assert result.num_near > 0.999 * result.num_values


@pytest.mark.parametrize(("pair", "block_bytes"), [("bf16", 32768), ("mxfp4 x bf16", 8704)])
def test_tiles_and_shared_memory_of_sm90(pair: str, block_bytes: int) -> None:
    config = choose_config(small_shape(pair), 50, arch="sm_90a")
    layout = config.smem_layout
    assert config.block_k == 64
    assert config.num_l1_k_blocks == 6
    assert layout["weight_blocks"].shape == (config.num_stages, block_bytes)
    assert layout["activations"].shape[2] == 128
    assert layout["pull_buffers"].shape == (2, 768)
    names = {segment.name for segment in layout.segments}
    assert ("row_factors" in names) == (pair != "bf16")
    assert not names & {"amax_exchange", "l1_token_factors", "rescale_factors"}
    names = {segment.name for segment in config.symm_buffer_layout.segments}
    assert not names & {"input_x_sf", "l1_token_sf", "l2_token_sf"}


def test_memory_of_sm100_has_no_scales() -> None:
    config = choose_config(small_shape("bf16"), 50)
    smem, tmem = config.smem_layout, config.tmem_layout
    assert config.block_k == 64
    assert smem["weights"].shape == (config.num_stages, 128, 128)
    assert smem["activations"].shape == (config.num_stages, config.block_m // 2, 128)
    names = {segment.name for segment in smem.segments}
    assert not names & {"activation_sf", "weight_sf", "amax_exchange"}
    assert tmem is not None
    assert [segment.name for segment in tmem.segments] == ["accumulator"]
    assert target_of("sm_100a").weights_of("bf16").numerics.scale_block is None
