"""The formats of tokens, by name: an axis beside the weights. Each format is a folder here, whose
`FORMAT` has everything that Python knows of it. For a new format, write the folder and name it in
`TokenFormatName`. The weights' folder for a target says which tokens go with which weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Literal, cast, get_args

from deep_moe.axes import further_values

from .format import TokenFormat

__all__ = [
    "ALL_TO_ALL_FORMATS",
    "TOKEN_FORMATS",
    "TokenFormat",
    "TokenFormatName",
    "token_format",
]

# The shortest first for each: a format that several would serve is the first of them.
TokenFormatName = Literal[
    "mxfp8", "fp8_128_ue8m0", "fp8_128_pow2", "fp8_128", "fp8_token", "nvfp4", "bf16"
]
TOKEN_FORMATS = cast(
    "tuple[TokenFormatName, ...]",
    (*get_args(TokenFormatName), *further_values(__name__, __path__)),
)


def token_format(name: str, known: Sequence[str] = TOKEN_FORMATS) -> TokenFormat:
    """The format of this name, or an error that says which there are. known: names that may be.

    >>> token_format("fp8_128").has_float_scales, token_format("bf16").block_k
    (True, 64)
    """
    allowed = f"one of {', '.join(known)}"
    if not isinstance(name, str):
        raise TypeError(f"token_format must be {allowed}; got {name!r}")
    if name not in known:
        raise ValueError(f"token_format must be {allowed}; got {name!r}")
    return _format_of(name)


@cache
def _format_of(name: str) -> TokenFormat:
    found = importlib.import_module(f"{__name__}.{name}").FORMAT
    assert isinstance(found, TokenFormat)
    return found


ALL_TO_ALL_FORMATS = tuple(name for name in TOKEN_FORMATS if _format_of(name).is_of_all_to_alls)
