"""The ring of the pool: when rows are used again, and m-blocks ahead that always fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deep_moe.heuristics import MoEShape, preset_shape, sm90_tiles, sm100
from deep_moe.targets import MegaMoEConfig, choose_config

TILES = [
    *(("sm_90a", {"block_m": rows, "block_m_step": step}) for rows, step in sm90_tiles.TILES),
    *(("sm_100a", {"block_m": tile.block_m}) for tile in sm100.TILES),
]


def config_of(shape: MoEShape, arch: str, tile: dict[str, int]) -> MegaMoEConfig:
    overrides = {**tile, "num_stages": 2}
    return choose_config(shape, 1, arch=arch, num_sms=4, overrides=overrides)


def num_pool_blocks(config: MegaMoEConfig, count: int) -> int:
    """Of an expert with so many tokens (layout/expert_tiles.cuh)."""
    num_tiles = -(-count // config.block_m)
    return max(
        -(-count // config.block_m_step), num_tiles * config.min_block_m // config.block_m_step
    )


def most_pool_blocks(config: MegaMoEConfig, shape: MoEShape) -> int:
    """That any distribution over two experts comes to, with the shared experts'."""
    num_routed = shape.num_ranks * shape.num_max_tokens_per_rank * shape.num_topk
    shared = num_pool_blocks(config, shape.num_max_tokens_per_rank)
    return shape.num_shared_experts * shared + max(
        num_pool_blocks(config, first) + num_pool_blocks(config, num_routed - first)
        for first in range(num_routed + 1)
    )


@pytest.mark.parametrize(("arch", "tile"), TILES)
@pytest.mark.parametrize("num_shared", [0, 3])
def test_a_kernel_wraps_where_a_call_may_have_more_blocks_than_places(
    arch: str, tile: dict[str, int], num_shared: int
) -> None:
    for num_tokens in (20, 30, 60, 90, 150, 190, 220):
        shape = MoEShape(1, 2, 2, 128, 128, num_tokens, 384, num_shared_experts=num_shared)
        config = config_of(shape, arch, tile)
        most = most_pool_blocks(config, shape)
        # The bound may be above what these experts can come to: a block, and one for each shared
        # expert, whose number of tokens is known.
        assert config.pool_wraps >= (most > config.num_ring_blocks)
        assert config.pool_wraps <= (
            most + 1 + num_shared * (config.min_block_m // config.block_m_step)
            > config.num_ring_blocks
        )


@pytest.mark.parametrize(("arch", "tile"), TILES)
def test_a_pool_without_bound_never_wraps(arch: str, tile: dict[str, int]) -> None:
    for sizes in ((1, 1, 1, 1), (2, 8, 3, 5), (8, 72, 8, 77), (64, 384, 6, 8192)):
        num_ranks, num_experts, num_topk, num_tokens = sizes
        shape = MoEShape(num_ranks, num_experts, num_topk, 128, 128, num_tokens)
        assert not config_of(shape, arch, tile).pool_wraps


@pytest.mark.parametrize(("arch", "tile"), TILES)
@pytest.mark.parametrize("num_pool_tokens", [384, 768, 1152, 3840, 24_576])
def test_places_lie_in_the_pool_and_what_linear1_is_ahead_in_the_ring(
    arch: str, tile: dict[str, int], num_pool_tokens: int
) -> None:
    shape = MoEShape(8, 64, 8, 256, 1024, 8192, num_pool_tokens)
    for num_sms in (2, 132, 148):
        overrides: dict[str, Any] = {**tile, "num_stages": 2, "num_sms": num_sms}
        config = choose_config(shape, 1, arch=arch, overrides=overrides)
        assert config.pool_wraps
        step = config.block_m_step
        # An m-block that begins in the last place.
        assert (config.num_ring_blocks - 1) * step + config.block_m <= num_pool_tokens
        columns = config.symm_buffer_layout["l1_token_sf"].shape[1]
        padded = step if arch == "sm_90a" else -(-config.block_m // 128) * 128
        assert config.num_ring_blocks * padded <= columns
        num_m_blocks = config.num_ring_blocks // (config.block_m // step)
        assert num_m_blocks >= 1
        assert 1 <= config.num_turn_m_blocks <= config.num_lead_m_blocks <= num_m_blocks
        if num_m_blocks >= 2:
            assert (
                config.num_lead_m_blocks < num_m_blocks
            )  # tokens are pulled while others are used


def test_every_field_of_a_ring_has_a_reason() -> None:
    shape = preset_shape("deepseek-v4-pro", num_ranks=8, num_max_tokens_per_rank=8192)
    config = choose_config(replace(shape, num_pool_tokens=24_576), 8192, arch="sm_90a")
    reasons = {field.name: field.reason for field in config.explain().fields}
    assert "a call may bring" in reasons["num_pool_tokens"]
    assert reasons["pool_wraps"].startswith("a call may have")
    assert config.shape == replace(shape, num_pool_tokens=24_576)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_turn_m_blocks": 0}, "num_turn_m_blocks must be 1 to 65536; got 0"),
        (
            {"num_lead_m_blocks": 0},
            "num_lead_m_blocks must be at least 8 with num_turn_m_blocks 1 and num_unit_m_blocks "
            "8; got 0",
        ),
        (
            {"num_lead_m_blocks": 126},
            "num_lead_m_blocks must be at most 125 with num_unit_m_blocks 8, of the 139 m-blocks "
            "that the pool certainly holds; got 126",
        ),
        ({"num_unit_m_blocks": 0}, "num_unit_m_blocks must be 1 to 65536; got 0"),
        (
            {"cluster_size": 2, "num_unit_m_blocks": 3},
            "num_unit_m_blocks must be 1 to 65536, and even in clusters of two; got 3",
        ),
    ],
)
def test_turns_that_do_not_fit_are_refused(overrides: dict[str, int], message: str) -> None:
    shape = preset_shape("deepseek-v4-pro", num_ranks=8, num_max_tokens_per_rank=8192)
    with pytest.raises(ValueError, match=message):
        choose_config(
            replace(shape, num_pool_tokens=24_576),
            8192,
            arch="sm_90a",
            overrides={"block_m": 176, **overrides},
        )
