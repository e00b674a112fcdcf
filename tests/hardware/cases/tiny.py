"""Results next to the smallest normal number: what .ftz makes zero and what it leaves."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..lanes import lane_case
from ..values import NUM, Source

FAMILY = Family("tiny")
ROUNDINGS = ("rn", "rz", "rm", "rp")


def _near_one(source: Source) -> np.ndarray:
    """1 - d and 1 + d for d of a few 2^-26."""
    return 1 + (source.below(33, NUM) - 16) * 2.0**-26


def _significands(source: Source, exponent: int) -> np.ndarray:
    sign = source.words(NUM) & np.uint32(1 << 31)
    codes = source.words(NUM) & 0x7FFFFF | (127 + exponent) << 23 | sign
    return codes.astype("<u4")


def _factors() -> list[np.ndarray]:
    """Two numbers whose product is next to 2^-126."""
    source = Source("tiny factors")
    a = _significands(source, -60)
    exact = np.abs(a.view("<f4").astype(np.float64))
    b = (_near_one(source) * 2.0**-126 / exact).astype("<f4")
    return [a, b.view("<u4")]


def _quotients() -> list[np.ndarray]:
    source = Source("tiny quotients")
    b = _significands(source, 10)
    a = (_near_one(source) * 2.0**-126 * b.view("<f4").astype(np.float64)).astype("<f4")
    return [a.view("<u4"), b]


def _doubles() -> list[np.ndarray]:
    source = Source("tiny doubles")
    sign = np.where(source.words(NUM) & 1, -1.0, 1.0)
    return [(sign * _near_one(source) * 2.0**-126).astype("<f8").view("<u8")]


def lanes(name: str, texts: list[str], out_bits: int, kinds: tuple[str, ...], make) -> None:
    lane_case(FAMILY, name, texts, out_bits, kinds, make_inputs=make)


BOTH = [f"{r}{ftz}" for r in ROUNDINGS for ftz in ("", ".ftz")]
lanes("products", [
    f"{op}.{form}.f32 $d, $a, $b{tail};"
    for form in BOTH for op, tail in (("mul", ""), ("fma", ", 0f00000000"), ("fma", ", 0f80000000"))
], 32, ("f32", "f32"), _factors)  # fmt: skip
lanes("quotients", [f"div.{form}.f32 $d, $a, $b;" for form in BOTH], 32, ("f32", "f32"), _quotients)
lanes("f64 to f32", [f"cvt.{form}.f32.f64 $d, $a;" for form in BOTH], 32, ("f64",), _doubles)
