"""How a checkpoint's config describes the quantization of its weights.

Names, types and shapes of tensors identify the format of weights. A config has more: that weights
have zero points or an order of columns, or that modules are left out. Where both describe a module
they must agree. There is a file for each family of configs; `quantization_of` finds the right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import lexists
from pathlib import Path
from typing import Any

from deep_moe.errors import CheckpointError

from ..config import CONFIG_NAME
from ..files import read_json
from . import compressed_tensors, modelopt, other_methods
from .compressed_tensors import CompressedTensors
from .declared import Declared, Quantization
from .modelopt import ModelOpt

__all__ = ["Declared", "Quantization", "quantization_of"]

_OLD_MODELOPT_NAME = "hf_quant_config.json"
_KEYS = ("quantization_config", "compression_config")


def quantization_of(folder: Path) -> Quantization | None:
    """By config.json, or else by hf_quant_config.json. None: they do not say, or in a way that is
    not known; then the tensors alone do."""
    config = folder / CONFIG_NAME
    if lexists(config):
        found = _part(read_json(config))
        if found is not None:
            key, part = found
            return _of_method(f"{config}: {key}", part)
    old = folder / _OLD_MODELOPT_NAME
    said = read_json(old).get("quantization") if lexists(old) else None
    if isinstance(said, dict):
        return ModelOpt(f"{old}: quantization", said)
    return None


def _part(document: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The outermost part of a config that says how weights are quantized, with its key."""
    parts: list[Mapping[str, Any]] = [document]
    while parts:
        for part in parts:
            for key in _KEYS:
                if isinstance(part.get(key), dict):
                    return key, part[key]
        parts = [value for part in parts for value in part.values() if isinstance(value, dict)]
    return None


def _of_method(source: str, part: dict[str, Any]) -> Quantization | None:
    method = part.get("quant_method")
    if method is not None and not isinstance(method, str):
        raise CheckpointError(f"{source} must have a name as quant_method; got {method!r:.100}")
    name = (method or "").lower()
    if name in compressed_tensors.METHODS or (not name and "config_groups" in part):
        return CompressedTensors(source, part)
    if name in modelopt.METHODS:
        own = part.get("quantization")
        return ModelOpt(source, own if isinstance(own, dict) else part)
    other = other_methods.METHODS.get(name)
    return None if other is None else other(source, part)
