"""quant_method "compressed-tensors": groups of modules, each with the arguments that its weights
were quantized by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deep_moe.errors import CheckpointError
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW

from .declared import Block, Declared, Quantization, patterns_of
from .patterns import any_matches

METHODS = ("compressed-tensors", "compressed_tensors", "sparseml")

# Targets by the module's class. Experts are such in all published models.
_CLASSES = ("Linear",)


class CompressedTensors(Quantization):
    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups") or {}
        if not isinstance(groups, dict):
            raise CheckpointError(f"{source} must have an object as config_groups")
        self._source = source
        self._ignore = patterns_of(source, "ignore", config)
        # Others are names of presets, with their targets.
        self._groups = {name: group for name, group in groups.items() if isinstance(group, dict)}
        self._targets = {
            name: patterns_of(f"{source}: {name}", "targets", group)
            for name, group in self._groups.items()
        }
        self._transforms = config.get("transform_config")

    def of(self, module: str) -> Declared | None:
        if any_matches(self._ignore, module, self._source):
            return None
        for is_by_class in (False, True):  # who names a module has said more than its class
            for name, targets in self._targets.items():
                named = [t for t in targets if t not in _CLASSES]
                is_named = len(named) < len(targets)
                if not is_by_class:
                    is_named = any_matches(named, module, f"{self._source}: {name}")
                if is_named:
                    return self._declared(name)
        return None

    def _declared(self, name: str) -> Declared | None:
        args = self._groups[name].get("weights")
        if not isinstance(args, dict):
            return None
        for key in ("type", "strategy", "actorder"):
            if not isinstance(args.get(key), (str, bool, type(None))):
                raise CheckpointError(
                    f"{self._source}: {name} must have a word as {key}; got {args[key]!r:.100}"
                )
        for key in ("num_bits", "group_size"):
            if not isinstance(args.get(key), (int, type(None))):
                raise CheckpointError(
                    f"{self._source}: {name} must have an int as {key}; got {args[key]!r:.100}"
                )
        kind, num_bits, block = args.get("type", "int"), args.get("num_bits", 8), _block(args)
        strategy = args.get("strategy") or _strategy(args)
        said = ", ".join(
            f"{key} {value}"
            for key, value in {**args, "strategy": strategy}.items()
            if key in _SAID and value is not None
        )
        words = f"{self._source} says of {name}: {said}"
        for is_refused, refusal in (
            (bool(self._transforms), "transform_config, which rotates tokens, is not taken"),
            (args.get("symmetric") is False, "weights must be symmetric, without zero points"),
            (
                args.get("actorder") in ("group", "dynamic", True),
                "columns must be in their order, actorder null, static or weight",
            ),
        ):
            if is_refused:
                return Declared(words, refusal=refusal)
        weights = _WEIGHTS.get((kind, num_bits, strategy))
        if weights is None or block is None:
            return Declared(words, refusal="weights of this kind are not taken")
        suffixes = {"global_scale": ".weight_global_scale"}
        return Declared(words, weights, (block,), suffixes=suffixes)


_SAID = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder")

_WEIGHTS: dict[tuple[object, object, object], tuple[str, ...]] = {
    ("float", 4, "tensor_group"): ("nvfp4",),
    ("float", 4, "group"): ("mxfp4",),
    ("float", 8, "group"): ("mxfp8", "fp8"),
    ("float", 8, "block"): ("fp8",),
    ("float", 8, "channel"): ("fp8",),
    ("float", 8, "tensor"): ("fp8",),
    ("int", 4, "group"): ("int4",),
}


def _strategy(args: Mapping[str, Any]) -> str:
    """Where none is said."""
    group_size = args.get("group_size")
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _block(args: Mapping[str, Any]) -> Block | None:
    """Rows and columns that share a scale; None: none that there may be."""
    strategy = args.get("strategy") or _strategy(args)
    if strategy in ("tensor", "channel"):
        return WHOLE_MATRIX if strategy == "tensor" else WHOLE_ROW
    if strategy == "block":
        own = args.get("block_structure")
        sides = own.split("x") if isinstance(own, str) else own
        if isinstance(sides, list) and len(sides) == 2:
            rows, columns = sides
            if str(rows).isdecimal() and str(columns).isdecimal():
                return int(rows), int(columns)
        return None
    group_size = args.get("group_size")
    return (1, group_size) if isinstance(group_size, int) and group_size > 0 else None
