"""Floating-point arithmetic. What IEEE 754 defines must be equal bit for bit; approximate functions
have bounds (docs/emulator.md)."""

from __future__ import annotations

import numpy as np

from ..case import Bound, Family
from ..lanes import lane_case
from ..values import Source, operands

FAMILY = Family("floating")
ROUNDINGS = ("rn", "rz", "rm", "rp")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def lanes(name, texts, out_bits, *kinds, **options):
    lane_case(FAMILY, name, texts, out_bits, kinds, **options)


def bits(kind: str) -> int:
    return 64 if kind == "f64" else 32 if kind in ("f32", "f16x2", "bf16x2") else 16


for op in ("add", "sub", "mul"):
    lanes(f"{op} f32", [
        f"{op}.{r}{ftz}{sat}.f32 $d, $a, $b;"
        for r in ROUNDINGS for ftz in ("", ".ftz") for sat in ("", ".sat")
    ], 32, "f32", "f32")  # fmt: skip
    lanes(f"{op} f64", [f"{op}.{r}.f64 $d, $a, $b;" for r in ROUNDINGS], 64, "f64", "f64")
    for kind in HALVES:
        forms = ("", ".rn", ".ftz", ".sat", ".ftz.sat") if kind.startswith("f") else ("", ".rn")
        lanes(
            f"{op} {kind}", [f"{op}{f}.{kind} $d, $a, $b;" for f in forms], bits(kind), kind, kind
        )

lanes("fma f32", [
    f"fma.{r}{ftz}{sat}.f32 $d, $a, $b, $c;"
    for r in ROUNDINGS for ftz in ("", ".ftz") for sat in ("", ".sat")
] + ["mad.rn.f32 $d, $a, $b, $c;"], 32, "f32", "f32", "f32")  # fmt: skip
lanes("fma f64", [f"fma.{r}.f64 $d, $a, $b, $c;" for r in ROUNDINGS], 64, "f64", "f64", "f64")


def _near_products(name: str, kind: str):
    """c close to -a·b, where one rounding and two differ."""
    a, b, c = operands(name, (kind, kind, kind))
    if kind in ("f32", "f64"):
        dtype = np.float32 if kind == "f32" else np.float64
        with np.errstate(all="ignore"):
            product = -(a.view(dtype) * b.view(dtype))
        near = product.view(a.dtype) + (Source(name + " near").below(5, len(a)) - 2).astype(a.dtype)
        c = np.where(np.isfinite(product), near, c)
    return [a, b, c]


for kind in ("f32", "f64"):
    texts = [f"fma.{r}.{kind} $d, $a, $b, $c;" for r in ROUNDINGS]
    lanes(f"fma {kind}, cancelling", texts, bits(kind), kind, kind, kind,
          make_inputs=lambda kind=kind: _near_products("cancelling", kind))  # fmt: skip
for kind in HALVES:
    forms = ("", ".ftz", ".sat", ".ftz.sat", ".relu") if kind.startswith("f") else ("", ".relu")
    texts = [f"fma.rn{form}.{kind} $d, $a, $b, $c;" for form in forms]
    lanes(f"fma {kind}", texts, bits(kind), kind, kind, kind)

for kind in ("f32", "f64"):
    forms = [r + ftz for r in ROUNDINGS for ftz in (("", ".ftz") if kind == "f32" else ("",))]
    lanes(f"div {kind}", [f"div.{f}.{kind} $d, $a, $b;" for f in forms], bits(kind), kind, kind)
    lanes(f"rcp and sqrt {kind}", [
        f"{op}.{form}.{kind} $d, $a;" for op in ("rcp", "sqrt") for form in forms
    ], bits(kind), kind)  # fmt: skip

for op in ("min", "max"):
    forms = [
        ftz + nan + xor
        for ftz in ("", ".ftz")
        for nan in ("", ".NaN")
        for xor in ("", ".xorsign.abs")
    ]
    lanes(f"{op} f32", [f"{op}{form}.f32 $d, $a, $b;" for form in forms], 32, "f32", "f32")
    lanes(f"{op} f64", [f"{op}.f64 $d, $a, $b;"], 64, "f64", "f64")
    for kind in HALVES:
        chosen = [f for f in forms if kind.startswith("f") or "ftz" not in f]
        texts = [f"{op}{form}.{kind} $d, $a, $b;" for form in chosen]
        lanes(f"{op} {kind}", texts, bits(kind), kind, kind)

for kind in ("f32", "f64", *HALVES):
    forms = ("", ".ftz") if kind in ("f32", "f16", "f16x2") else ("",)
    texts = [f"{op}{form}.{kind} $d, $a;" for op in ("abs", "neg") for form in forms]
    lanes(f"sign {kind}", texts, bits(kind), kind)
for kind in ("f32", "f64"):
    lanes(f"copysign {kind}", [f"copysign.{kind} $d, $a, $b;"], bits(kind), kind, kind)
    lanes(f"testp {kind}", [
        f"testp.{p}.{kind} %c1, $a; selp.u32 $d, 1, 0, %c1;"
        for p in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    ], 32, kind)  # fmt: skip

# ---- approximate functions: all exponents, many mantissas

APPROXIMATE = 4096


def _unary(name: str, kind: str, spread: int | None = None):
    first = operands(name, (kind,), 512)[0]
    return [np.concatenate([first, Source(name).floats(kind, APPROXIMATE - 512, spread)])]


def approximate(name: str, texts: list[str], kind: str, bound: Bound, spread: int | None = None):
    lanes(name, texts, bits(kind), kind, num=APPROXIMATE, bound=bound,
          make_inputs=lambda: _unary(name, kind, spread))  # fmt: skip


def both(op: str) -> list[str]:
    return [f"{op}.approx.f32 $d, $a;", f"{op}.approx.ftz.f32 $d, $a;"]


approximate("rcp.approx", both("rcp"), "f32", Bound(ulps=1))
approximate("sqrt.approx", both("sqrt"), "f32", Bound(ulps=1))
approximate("rsqrt.approx", both("rsqrt"), "f32", Bound(ulps=1))
approximate("ex2.approx", both("ex2"), "f32", Bound(ulps=2), 24)
approximate("lg2.approx", both("lg2"), "f32", Bound(ulps=1, absolute=2.0**-22))
approximate("lg2.approx near 1", both("lg2"), "f32", Bound(ulps=1, absolute=2.0**-22), 4)
approximate("sin.approx", both("sin"), "f32", Bound(absolute=2.0**-21), 8)
approximate("cos.approx", both("cos"), "f32", Bound(absolute=2.0**-21), 8)
approximate("tanh.approx", ["tanh.approx.f32 $d, $a;"], "f32", Bound(ulps=128), 16)
approximate("rcp.approx f64", ["rcp.approx.ftz.f64 $d, $a;"], "f64", Bound(ulps=1 << 32))
approximate("rsqrt.approx f64", [
    "rsqrt.approx.f64 $d, $a;", "rsqrt.approx.ftz.f64 $d, $a;"
], "f64", Bound(ulps=1 << 32))  # fmt: skip
approximate("div.approx", [
    f"mov.b32 %r1, 0x40490fdb; div.{form}.f32 $d, $a, %r1; "
    for form in ("approx", "approx.ftz", "full", "full.ftz")
], "f32", Bound(ulps=2))  # fmt: skip
lanes("div.approx f32", [
    f"div.{form}.f32 $d, $a, $b;" for form in ("approx", "approx.ftz", "full", "full.ftz")
], 32, "f32", "f32", bound=Bound(ulps=2))  # fmt: skip


def _every_half():
    return [np.arange(65536, dtype="<u2")]


def every_half(name: str, texts: list[str], kind: str, bound: Bound) -> None:
    lanes(name, texts, 16, kind, num=65536, bound=bound, make_inputs=_every_half)


every_half("ex2.approx f16", ["ex2.approx.f16 $d, $a;"], "f16", Bound(ulps=1))
every_half("tanh.approx f16", ["tanh.approx.f16 $d, $a;"], "f16", Bound(ulps=1))
every_half("ex2.approx bf16", ["ex2.approx.ftz.bf16 $d, $a;"], "bf16", Bound(ulps=1))
every_half("tanh.approx bf16", ["tanh.approx.bf16 $d, $a;"], "bf16", Bound(ulps=1))
for kind, ops in (
    ("f16x2", ("ex2.approx", "tanh.approx")),
    ("bf16x2", ("ex2.approx.ftz", "tanh.approx")),
):
    lanes(f"functions {kind}", [f"{op}.{kind} $d, $a;" for op in ops], 32, kind,
          bound=Bound(ulps=1, packed=2))  # fmt: skip
