"""The names of what warps record, out of the header that they record with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from deep_moe.jit.headers import library_path

_HEADER = "deep_moe/trace/tracer.cuh"


@dataclass(frozen=True)
class Names:
    """The enumerators of an enum in the header: C++ name -> number, number -> words."""

    number: Mapping[str, int]
    text: Mapping[int, str]


@lru_cache(maxsize=2)
def _names(enum: str) -> Names:
    source = (library_path() / _HEADER).read_text()
    body = re.search(rf"enum class {enum}\b[^{{]*\{{(.*?)\}};", source, re.DOTALL)
    if body is None:
        raise ValueError(f"{_HEADER} declares no enum class {enum}")
    entries = re.findall(r"^\s*(\w+) = (\d+),\s*// (.+)$", body.group(1), re.MULTILINE)
    return Names(
        {name: int(number) for name, number, _ in entries},
        {int(number): text for _, number, text in entries},
    )


def steps() -> Names:
    """What a warp can be at."""
    return _names("TraceStep")


def tracks() -> Names:
    """The warps of a CTA that record."""
    return _names("TraceTrack")


def numbers(*names: str) -> list[int]:
    """Of steps."""
    return [steps().number[name] for name in names]
