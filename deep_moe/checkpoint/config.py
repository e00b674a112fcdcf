"""The experts' entries of a checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from deep_moe.errors import CheckpointError

from .files import read_json

CONFIG_NAME = "config.json"
# What published models call the number of routed experts of a layer.
NUM_EXPERTS_KEYS = (
    "n_routed_experts",
    "num_routed_experts",
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
)


def count_of_config(config: Path) -> int | None:
    """Experts of a layer by config.json, by its outermost part that speaks of them."""
    parts = [read_json(config)] if lexists(config) else []
    while parts:
        counts = {
            key: part[key]
            for part in parts
            for key in NUM_EXPERTS_KEYS
            if part.get(key) is not None
        }
        if counts:
            return _one_count(counts, config)
        parts = [value for part in parts for value in part.values() if isinstance(value, dict)]
    return None


def _one_count(counts: Mapping[str, Any], config: Path) -> int:
    said = ", ".join(f"{key} {repr(value)[:100]}" for key, value in counts.items())
    first, *others = counts.values()
    if not isinstance(first, int) or isinstance(first, bool) or first < 1:
        raise CheckpointError(f"{config} must give experts as a positive int; got {said}")
    if any(other != first for other in others):
        raise CheckpointError(
            f"{config} must give one number of experts; got {said}: give num_experts"
        )
    return first
