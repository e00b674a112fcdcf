"""Roles of warps: the same numbers as in the kernels' role tables."""

from __future__ import annotations

import pytest

from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config

SHAPE = MoEShape(2, 8, 2, 256, 256, 64)


@pytest.mark.parametrize(
    ("arch", "idle"),
    [("sm_100a", {7}), ("sm_90a", set())],
)
def test_every_warp_has_one_role_or_none(arch: str, idle: set[int]) -> None:
    config = choose_config(SHAPE, 64, arch=arch)
    warps = [warp for warps in config.warp_roles.values() for warp in warps]
    assert len(warps) == len(set(warps))
    assert set(range(config.num_threads // 32)) - set(warps) == idle
