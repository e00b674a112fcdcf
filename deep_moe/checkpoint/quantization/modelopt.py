"""quant_method "modelopt", and hf_quant_config.json, which older exports have instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deep_moe.errors import CheckpointError
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW

from .declared import Block, Declared, Quantization, group_size_of, patterns_of
from .patterns import any_matches

METHODS = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed")

_MIXED = "MIXED_PRECISION"

# Formats and blocks of scales, by quant_algo.
_Allowed = tuple[tuple[str, ...], tuple[Block, ...]]
_NVFP4: _Allowed = ("nvfp4",), ((1, 16),)
_MXFP4: _Allowed = ("mxfp4",), ((1, 32),)
_BLOCKS: _Allowed = ("fp8",), ((128, 128),)
ALGORITHMS: dict[str, _Allowed] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": _NVFP4,
    "MXFP4": _MXFP4,
    "W4A8_MXFP4_FP8": _MXFP4,
    "MXFP8": (("mxfp8", "fp8"), ((1, 32),)),
    "FP8": (("fp8",), (WHOLE_MATRIX, WHOLE_ROW)),
    "FP8_PER_CHANNEL_PER_TOKEN": (("fp8",), (WHOLE_ROW,)),
    "FP8_PB_WO": _BLOCKS,
    "FP8_BLOCK_SCALES": _BLOCKS,
}

_REFUSED = {
    "AWQ": "tokens would have to be multiplied by pre_quant_scale",
    "SVD": "tokens would have to be multiplied by pre_quant_scale, and a product of low rank added",
    "SQ": "weights of int8 are not taken",
    "W8A16": "weights of int8 are not taken",
}


class ModelOpt(Quantization):
    """config: with quant_algo; lists of modules have one of two names."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self._source = source
        self._ignore = patterns_of(source, "ignore", config) + patterns_of(
            source, "exclude_modules", config
        )
        self._config = config
        layers = config.get("quantized_layers") or {}
        if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
            raise CheckpointError(f"{source} must have an object of objects as quantized_layers")
        self._layers = layers

    def of(self, module: str) -> Declared | None:
        if any_matches(self._ignore, module, self._source):
            return None
        if str(self._config.get("quant_algo")).upper() != _MIXED:
            return declared(self._source, self._config)
        # The module itself, or one that it is part of: experts may be one module.
        while module not in self._layers:
            module, _, last = module.rpartition(".")
            if not last:
                return None
        return declared(f"{self._source}: quantized_layers: {module}", self._layers[module])


def declared(source: str, config: Mapping[str, Any]) -> Declared | None:
    """By quant_algo and group_size."""
    algorithm, group_size = config.get("quant_algo"), group_size_of(source, config)
    if algorithm is None:
        return None
    name = str(algorithm).upper()
    size = f", group_size {group_size}" if group_size else ""
    words = f"{source} says quant_algo {algorithm}{size}"
    if name not in ALGORITHMS:
        why = next((why for part, why in _REFUSED.items() if part in name), None)
        return Declared(words, refusal=why or f"it must be one of {', '.join(ALGORITHMS)}")
    weights, blocks = ALGORITHMS[name]
    has_groups = all(block[0] == 1 and block != WHOLE_ROW for block in blocks)
    if group_size and has_groups:
        blocks = ((1, group_size),)
    return Declared(words, weights, blocks, suffixes={"global_scale": ".weight_scale_2"})
