"""cvt between all types."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..lanes import lane_case
from ..values import NUM, Source, operands

FAMILY = Family("convert")
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
ROUNDINGS = ("rn", "rz", "rm", "rp")


def size(kind: str) -> int:
    return int(kind.strip("bfsu"))


def lanes(name, texts, out_bits, *kinds, **options):
    lane_case(FAMILY, name, texts, out_bits, kinds, **options)


def holds(to: str, source: str) -> bool:
    """Whether every value of one integer type is one of the other, so that .sat is not allowed."""
    if to[0] == source[0]:
        return size(to) >= size(source)
    return to[0] == "s" and size(to) > size(source)


def source_kind(kind: str) -> str:
    return "u" + kind[1:] if kind in INTEGERS else kind


# Destinations grouped by size, since a case has one size of results.
for source in INTEGERS:
    for bits in (16, 32, 64):
        texts = []
        for to in INTEGERS:
            if max(16, size(to)) != bits:
                continue
            texts.append(f"cvt.{to}.{source} $d, $a;")
            if not holds(to, source):
                texts.append(f"cvt.sat.{to}.{source} $d, $a;")
        lanes(f"{source} to {bits}-bit integers", texts, bits, source_kind(source))
        texts = [
            f"cvt.{r}{sat}.{to}.{source} $d, $a;"
            for to in FLOATS
            if size(to) == bits and not (to == "bf16" and size(source) == 8)
            for r in ROUNDINGS
            for sat in (("", ".sat") if to != "bf16" else ("",))
        ]
        lanes(f"{source} to {bits}-bit floats", texts, bits, source_kind(source))

for source in FLOATS:
    ftz = ("", ".ftz") if source == "f32" else ("",)
    for bits in (16, 32, 64):
        texts = [
            f"cvt.{r}{f}{sat}.{to}.{source} $d, $a;"
            for to in INTEGERS
            if max(16, size(to)) == bits and not (source == "bf16" and size(to) == 8)
            for r in ("rni", "rzi", "rmi", "rpi")
            for f in ftz
            for sat in (("", ".sat") if source != "bf16" else ("",))
        ]
        lanes(f"{source} to {bits}-bit integers", texts, bits, source)
    if source != "bf16":
        texts = [f"cvt.{r}{f}.{source}.{source} $d, $a;" for r in ("rni", "rzi", "rmi", "rpi")
                 for f in ftz]  # fmt: skip
        lanes(f"{source} to an integral value", texts, size(source), source)

lanes("f16 to f32", [
    f"cvt{f}.f32.f16 $d, $a;" for f in ("", ".ftz", ".sat", ".ftz.sat")
], 32, "f16", num=65536, make_inputs=lambda: [np.arange(65536, dtype="<u2")])  # fmt: skip
lanes("bf16 to f32", ["cvt.f32.bf16 $d, $a;"], 32, "bf16", num=65536,
      make_inputs=lambda: [np.arange(65536, dtype="<u2")])  # fmt: skip
lanes("f16 to f64", ["cvt.f64.f16 $d, $a;"], 64, "f16")
lanes("bf16 to f64", ["cvt.f64.bf16 $d, $a;"], 64, "bf16")
lanes("f32 to f64", ["cvt.f64.f32 $d, $a;", "cvt.ftz.f64.f32 $d, $a;", "cvt.sat.f64.f32 $d, $a;"],
      64, "f32")  # fmt: skip
lanes("f32 to f32", ["cvt.f32.f32 $d, $a;", "cvt.ftz.f32.f32 $d, $a;", "cvt.sat.f32.f32 $d, $a;",
                     "cvt.ftz.sat.f32.f32 $d, $a;"], 32, "f32")  # fmt: skip
lanes("f64 to f64", ["cvt.f64.f64 $d, $a;", "cvt.sat.f64.f64 $d, $a;"], 64, "f64")
lanes("f64 to f32", [
    f"cvt.{r}{f}.f32.f64 $d, $a;" for r in ROUNDINGS for f in ("", ".ftz", ".sat")
], 32, "f64")  # fmt: skip
lanes(
    "f64 to f16",
    [f"cvt.{r}{f}.f16.f64 $d, $a;" for r in ROUNDINGS for f in ("", ".sat")],
    16,
    "f64",
)
lanes("f64 to bf16", [f"cvt.{r}.bf16.f64 $d, $a;" for r in ROUNDINGS], 16, "f64")
lanes("f16 to bf16", [f"cvt.{r}.bf16.f16 $d, $a;" for r in ROUNDINGS], 16, "f16")
lanes("bf16 to f16", [f"cvt.{r}.f16.bf16 $d, $a;" for r in ROUNDINGS], 16, "bf16")


def _around(format_bits: int, exponent_bits: int, mantissa_bits: int):
    """f32 values on, between and next to the codes of a small format, both signs."""
    bias = (1 << (exponent_bits - 1)) - 1

    def make():
        source = Source(f"around {format_bits} {exponent_bits}")
        codes = np.arange(1 << (format_bits - 1), dtype=np.int64)
        if format_bits > 8:
            codes = source.shuffled(codes)[:384]
        exponent, fraction = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
        significand = np.where(exponent > 0, fraction + (1 << mantissa_bits), fraction)
        scale = np.maximum(exponent, 1) - bias - mantissa_bits
        # Exact: a few bits times a power of two.
        with np.errstate(over="ignore"):
            value = np.ldexp(significand.astype(np.float64), scale).astype(np.float32)
            step = np.ldexp(np.ones(len(codes)), scale - 1).astype(np.float32)
            middle = value + step
        near = np.concatenate([value, middle]).view("<u4").astype(np.int64)
        near = np.concatenate([near + d for d in (-1, 0, 1)])
        near = near[(near >= 0) & (near < 1 << 31)]
        near = np.concatenate([near, near + (1 << 31)]).astype("<u4")
        rest = operands(f"around {format_bits}", ("f32",), NUM)[0]
        return np.resize(np.concatenate([source.shuffled(near), rest]), 2 * NUM)

    return make


def small_float(name: str, texts: list[str], out_bits: int, make, pair: bool) -> None:
    def inputs():
        a = make()
        return [a, Source(name).shuffled(a)] if pair else [a]

    lanes(name, texts, out_bits, *(("f32",) * (1 + pair)), num=2 * NUM, make_inputs=inputs)


small_float("f32 to f16", [
    f"cvt.{r}{f}.f16.f32 $d, $a;" for r in ROUNDINGS for f in ("", ".sat", ".ftz")
] + [
    f"cvt.{r}{f}.f16.f32 $d, $a;"
    f"" for r in ("rn", "rz") for f in (".relu", ".satfinite", ".relu.satfinite")
], 16, _around(16, 5, 10), False)  # fmt: skip
small_float("f32 to bf16", [f"cvt.{r}.bf16.f32 $d, $a;" for r in ROUNDINGS] + [
    f"cvt.{r}{f}.bf16.f32 $d, $a;"
    f"" for r in ("rn", "rz") for f in (".relu", ".satfinite", ".relu.satfinite")
], 16, _around(16, 8, 7), False)  # fmt: skip
for to, layout in (("f16x2", (16, 5, 10)), ("bf16x2", (16, 8, 7))):
    small_float(f"f32 to {to}", [
        f"cvt.{r}{f}.{to}.f32 $d, $a, $b;"
        for r in ("rn", "rz")
        for f in ("", ".relu", ".satfinite", ".relu.satfinite")
    ], 32, _around(*layout), True)  # fmt: skip


def _pairs_of_halves():
    return [Source("halves").shuffled(np.arange(65536, dtype="<u2")).view("<u4")]


for to, layout in (("e4m3x2", (8, 4, 3)), ("e5m2x2", (8, 5, 2))):
    small_float(f"f32 to {to}", [
        f"cvt.rn.satfinite{relu}.{to}.f32 $d, $a, $b;" for relu in ("", ".relu")
    ], 16, _around(*layout), True)  # fmt: skip
    lanes(f"f16x2 to {to}", [
        f"cvt.rn.satfinite{relu}.{to}.f16x2 $d, $a;" for relu in ("", ".relu")
    ], 16, "u32", num=32768,
          make_inputs=_pairs_of_halves)  # fmt: skip
    lanes(f"{to} to f16x2", [
        f"cvt.rn{relu}.f16x2.{to} $d, $a;" for relu in ("", ".relu")
    ], 32, "u16", num=65536, make_inputs=lambda: [np.arange(65536, dtype="<u2")])  # fmt: skip
small_float("f32 to tf32", [
    f"cvt.{form}.tf32.f32 $d, $a;"
    for form in ("rna", "rn", "rz", "rn.relu", "rz.relu", "rna.satfinite")
], 32, _around(16, 8, 7), False)  # fmt: skip

lanes("pack two", [f"cvt.pack.sat.{t}.s32 $d, $a, $b;" for t in ("u16", "s16")], 32, "u32", "u32")
lanes("pack four", [
    f"cvt.pack.sat.{t}.s32.b32 $d, $a, $b, $c;" for t in ("u8", "s8")
], 32, "u32", "u32", "u32")  # fmt: skip
