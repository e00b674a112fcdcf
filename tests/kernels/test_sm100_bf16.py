"""What only the SM100 kernel with BF16 weights has, in the emulator. The rest stands in
test_other_weights.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config, target_of
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.everyday import parametrize

from .layer_case import LayerCase, small_shape

shape_of = partial(small_shape, "bf16")


def exact_case(shape: MoEShape) -> LayerCase:
    return LayerCase(shape, exact_layer(shape))


@parametrize("block_m", [16, 32, 64, 96, 128, 192], everyday=[16, 192])
def test_every_tile(block_m: int) -> None:
    shape = shape_of(num_experts=2, hidden=256, num_max_tokens_per_rank=block_m + 5)
    tokens = exact_tokens(shape, block_m + 5, seed=block_m)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": block_m})
    assert result.is_exact, result


def test_a_ring_of_the_smallest_size() -> None:
    shape = replace(shape_of(num_max_tokens_per_rank=300), num_pool_tokens=384)
    tokens = exact_tokens(shape, 300, seed=3)
    (result,) = exact_case(shape).compare_call([tokens], overrides={"block_m": 32})
    assert result.is_exact, result


def test_memory_has_no_scales() -> None:
    config = choose_config(shape_of(), 50)
    smem, tmem = config.smem_layout, config.tmem_layout
    assert config.block_k == 64
    assert smem["weights"].shape == (config.num_stages, 128, 128)
    assert smem["activations"].shape == (config.num_stages, config.block_m // 2, 128)
    names = {segment.name for segment in smem.segments}
    assert not names & {"activation_sf", "weight_sf", "amax_exchange"}
    assert tmem is not None
    assert [segment.name for segment in tmem.segments] == ["accumulator"]
    assert target_of("sm_100a").weights_of("bf16").numerics.scale_block is None
