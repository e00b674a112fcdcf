"""cvt.rs: random bits are added to those that are cut off."""

from __future__ import annotations

import numpy as np
import pytest

from .raw_ptx import run_body, run_lanes


def rounded(values: np.ndarray, random: np.ndarray, mantissa_bits: int, bits: int) -> np.ndarray:
    """Magnitudes, which are normal numbers: up where the bits cut off, and so many random ones on
    top of them, carry."""
    magnitude = np.abs(values.astype(np.float64))
    unit = np.exp2(np.floor(np.log2(magnitude)) - mantissa_bits)
    low = np.floor(magnitude / unit)
    cut = np.floor((magnitude / unit - low) * 2**bits)
    return np.copysign((low + (cut + random >= 2**bits)) * unit, values)


@pytest.mark.parametrize(("form", "mantissa_bits", "bits"), [("f16x2", 10, 13), ("bf16x2", 7, 16)])
def test_two(form: str, mantissa_bits: int, bits: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(64).astype(np.float32) + 4 for _ in range(2))
    random = rng.integers(0, 2**32, 64, dtype=np.uint32)
    out = run_lanes(f"cvt.rs.{form}.f32 $d, $a, $b, $c;", np.uint32, a, b, random)
    for values, shift in ((a, 16), (b, 0)):
        codes = out >> shift & 0xFFFF
        got = (
            codes.astype(np.uint16).view(np.float16)
            if form == "f16x2"
            else (codes << 16).astype(np.uint32).view(np.float32)
        )
        expected = rounded(values, random >> shift & (2**bits - 1), mantissa_bits, bits)
        assert np.array_equal(got.astype(np.float64), expected)


def test_the_ends_of_a_format() -> None:
    infinite = np.array([0x7C007BFF] * 2, np.uint32)
    a, b = np.full(2, 65535.9, np.float32), np.full(2, 65504, np.float32)
    random = np.array([0xFFFFFFFF] * 2, np.uint32)
    assert np.array_equal(
        run_lanes("cvt.rs.f16x2.f32 $d, $a, $b, $c;", np.uint32, a, b, random), infinite
    )
    finite = run_lanes("cvt.rs.satfinite.f16x2.f32 $d, $a, $b, $c;", np.uint32, a, b, random)
    assert (finite == 0x7BFF7BFF).all()
    negative = run_lanes("cvt.rs.relu.f16x2.f32 $d, $a, $b, $c;", np.uint32, -a, b, random)
    assert (negative >> 16 == 0).all()


@pytest.mark.parametrize(
    ("form", "mantissa_bits", "bias", "width"),
    [
        ("e4m3x4", 3, 7, 8),
        ("e5m2x4", 2, 15, 8),
        ("e2m3x4", 3, 1, 8),
        ("e3m2x4", 2, 3, 8),
        ("e2m1x4", 1, 1, 4),
    ],
)
def test_four(form: str, mantissa_bits: int, bias: int, width: int) -> None:
    rng = np.random.default_rng(1)
    values = (rng.uniform(1, 3.4, (4, 32)) * rng.choice([-1, 1], (4, 32))).astype(np.float32)
    random = rng.integers(0, 2**32, 32, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    loads = "".join(f"ld.global.b32 %r{i + 1}, [%rd0+{128 * i}];" for i in range(4))
    run_body(
        "mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %p0; mad.wide.u32 %rd1, %r0, 4, %p1;"
        f"mad.wide.u32 %rd2, %r0, 4, %p2; ld.global.b32 %r5, [%rd1]; {loads}"
        + (".reg .b16 %d; " if width == 4 else ".reg .b32 %d; ")
        + f"cvt.rs.satfinite.{form}.f32 %d, {{%r1, %r2, %r3, %r4}}, %r5;"
        + ("cvt.u32.u16 %r6, %d;" if width == 4 else "mov.b32 %r6, %d;")
        + "st.global.b32 [%rd2], %r6;",
        values,
        random,
        out,
    )
    high, low = random >> 16, random & 0xFFFF
    if width == 4:
        high, low = (
            (random >> 24 & 0xFF) << 8 | random >> 8 & 0xFF,
            (random >> 16 & 0xFF) << 8 | random & 0xFF,
        )
    for index, own in enumerate((high, high, low, low)):
        code = out >> width * (3 - index) & (2**width - 1)
        bits = 7 if width == 8 and form[1] in "45" else 5 if width == 8 else 3
        exponent = (code >> mantissa_bits) & (2 ** (bits - mantissa_bits) - 1)
        fraction = code & (2**mantissa_bits - 1)
        magnitude = (1 + fraction / 2**mantissa_bits) * np.exp2(exponent.astype(float) - bias)
        got = np.where(code >> bits & 1, -magnitude, magnitude)
        assert np.array_equal(got, rounded(values[index], own, mantissa_bits, 16))
