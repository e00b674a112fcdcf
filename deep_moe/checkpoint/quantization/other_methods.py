"""Methods that say little more than their name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def _ignored(source: str, config: Mapping[str, Any]) -> list[str]:
    keys = ("ignored_layers", "ignore", "modules_to_not_convert", "exclude_modules")
    return [one for key in keys for one in patterns_of(source, key, config)]
