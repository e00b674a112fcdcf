"""Methods that say little more than their name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deep_moe.errors import CheckpointError
from deep_moe.formats.block_scaled import GROUP_SIZE
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW

from .declared import Declared, Quantization, group_size_of, patterns_of
from .modelopt import declared
from .patterns import any_matches


@dataclass(frozen=True)
class OneFormat(Quantization):
    """All modules but some have weights of one format."""

    own: Declared
    ignore: list[str]

    def of(self, module: str) -> Declared | None:
        return None if any_matches(self.ignore, module, self.own.words) else self.own


@dataclass(frozen=True)
class OneOfSome:
    """What is said of modules that patterns name."""

    patterns: list[str]
    own: Declared


@dataclass(frozen=True)
class Several(Quantization):
    """What is said of some modules goes before what is said of the others."""

    some: list[OneOfSome]
    others: OneFormat

    def of(self, module: str) -> Declared | None:
        if any_matches(self.others.ignore, module, self.others.own.words):
            return None
        found = (one.own for one in self.some if any_matches(one.patterns, module, one.own.words))
        return next(found, self.others.own)


def mxfp8(source: str, config: Mapping[str, Any]) -> Quantization:
    own = Declared(f"{source} says quant_method mxfp8", ("mxfp8", "fp8"), ((1, 32),))
    return OneFormat(own, _ignored(source, config))


def w4afp8(source: str, config: Mapping[str, Any]) -> Quantization:
    """Of experts; all else is FP8."""
    group_size = group_size_of(source, config) or 128
    words = f"{source} says quant_method w4afp8, group_size {group_size}"
    return OneFormat(Declared(words, ("int4",), ((1, group_size),)), _ignored(source, config))


def fp8(source: str, config: Mapping[str, Any]) -> Quantization | None:
    """Blocks of FP8, but experts may be of another format: DeepSeek-V4's are, of which only
    derived checkpoints say so."""
    own = declared(source, {"quant_algo": config.get("moe_quant_algo")})
    return None if own is None else OneFormat(own, _ignored(source, config))


def gptq(source: str, config: Mapping[str, Any]) -> Quantization:
    """`dynamic` leaves modules out, or says something else of them."""
    rules = config.get("dynamic") or {}
    if not isinstance(rules, dict) or not all(isinstance(own, dict) for own in rules.values()):
        raise CheckpointError(f"{source} must have an object of objects as dynamic")
    left_out = [f"re:{key[2:]}" for key in rules if key.startswith("-:")]
    others = [
        OneOfSome(
            [f"re:{key.removeprefix('+:')}"],
            _gptq_weights(f"{source}: dynamic: {key}", {**config, **own}),
        )
        for key, own in rules.items()
        if not key.startswith("-:")
    ]
    ignored = [*_ignored(source, config), *left_out]
    return Several(others, OneFormat(_gptq_weights(source, config), ignored))


def _gptq_weights(source: str, config: Mapping[str, Any]) -> Declared:
    layout = str(config.get("checkpoint_format") or "gptq")
    refused = (
        (config.get("desc_act") is True, "columns must be in their order, desc_act false"),
        (layout != "gptq", f"checkpoint_format must be gptq; got {layout}"),
    )
    return _integers(source, "gptq", config, config.get("sym") is False, refused)


def awq(source: str, config: Mapping[str, Any]) -> Quantization:
    version = str(config.get("version") or "gemm").lower()
    refused = ((version != "gemm", f"version must be gemm; got {version}"),)
    own = _integers(source, "awq", config, config.get("zero_point") is True, refused)
    return OneFormat(own, _ignored(source, config))


def auto_round(source: str, config: Mapping[str, Any]) -> Quantization | None:
    """AutoRound packs weights as others do."""
    packing = str(config.get("packing_format") or "")
    if "awq" in packing:
        return awq(source, {**config, "zero_point": config.get("sym") is False})
    return gptq(source, config) if "gptq" in packing else None


def _integers(
    source: str,
    method: str,
    config: Mapping[str, Any],
    has_zeros: bool,
    refused: tuple[tuple[bool, str], ...],
) -> Declared:
    num_bits, group_size = config.get("bits", 4), group_size_of(source, config)
    words = f"{source} says quant_method {method}, bits {num_bits}, group_size {group_size}"
    for is_refused, refusal in (
        (num_bits != 4, "integers must have 4 bits"),
        (has_zeros, "weights must be symmetric, without zero points"),
        *refused,
    ):
        if is_refused:
            return Declared(words, refusal=refusal)
    return Declared(words, ("int4",), ((1, group_size),) if group_size else ())


def quark(source: str, config: Mapping[str, Any]) -> Quantization:
    """Of all modules, of some that patterns name, and of those left out."""
    layers = config.get("layer_quant_config") or {}
    if not isinstance(layers, dict):
        raise CheckpointError(f"{source} must have an object as layer_quant_config")
    some = [
        OneOfSome([pattern], _quark_weights(f"{source}: layer_quant_config: {pattern}", own))
        for pattern, own in layers.items()
    ]
    own = _quark_weights(f"{source}: global_quant_config", config.get("global_quant_config"))
    return Several(some, OneFormat(own, _ignored(source, config)))


# By dtype and qscheme.
_QUARK: dict[tuple[object, object], tuple[str, ...]] = {
    ("fp4", "per_group"): ("mxfp4",),
    ("fp8_e4m3", "per_group"): ("mxfp8", "fp8"),
    ("fp8_e4m3", "per_block"): ("fp8",),
    ("fp8_e4m3", "per_channel"): ("fp8",),
    ("fp8_e4m3", "per_tensor"): ("fp8",),
}
_QUARK_BLOCKS = {"per_channel": WHOLE_ROW, "per_tensor": WHOLE_MATRIX, "per_block": (128, 128)}


def _quark_weights(source: str, config: object) -> Declared:
    weight = config.get("weight") if isinstance(config, dict) else None
    if not isinstance(weight, dict):  # a list: rounded twice
        return Declared(f"{source} says {weight!r:.100} of weights", refusal=_ONE_OBJECT)
    dtype, scheme, group_size = (weight.get(key) for key in ("dtype", "qscheme", "group_size"))
    words = f"{source} says of weights: dtype {dtype}, qscheme {scheme}, group_size {group_size}"
    formats = next((own for kind, own in _QUARK.items() if kind == (dtype, scheme)), None)
    if formats is None or (dtype == "fp4" and weight.get("scale_format") not in (None, "e8m0")):
        return Declared(words, refusal="weights of this kind are not taken")
    block = _QUARK_BLOCKS.get(str(scheme)) or (1, group_size_of(source, weight) or GROUP_SIZE)
    return Declared(words, formats, (block,))


_ONE_OBJECT = "weights must be described by one object"


def _ignored(source: str, config: Mapping[str, Any]) -> list[str]:
    keys = ("ignored_layers", "ignore", "modules_to_not_convert", "exclude_modules", "exclude")
    return [one for key in keys for one in patterns_of(source, key, config)]


METHODS: dict[str, Callable[[str, dict[str, Any]], Quantization | None]] = {
    "mxfp8": mxfp8,
    "w4afp8": w4afp8,
    "fp8": fp8,
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "quark": quark,
}
