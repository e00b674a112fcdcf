"""Lane-wise instructions against numpy, over random and awkward values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .raw_ptx import run_lanes

NUM = 256
RANDOM = np.random.default_rng(7)
AWKWARD = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x8000, 31, 32, 33, 255]


def words(dtype=np.uint32) -> np.ndarray:
    size = np.dtype(dtype).itemsize * 8
    values = RANDOM.integers(0, 2**size, NUM, dtype=np.uint64)
    values[: len(AWKWARD)] = AWKWARD
    values[40 : 40 + len(AWKWARD)] = AWKWARD[::-1]
    return values.astype(f"u{size // 8}").view(dtype)


def amounts(limit: int = 40) -> np.ndarray:
    return RANDOM.integers(0, limit, NUM).astype(np.uint32)


def big(values: np.ndarray) -> list[int]:
    return [int(v) for v in values]


def wrap(values: list[int], dtype: type) -> np.ndarray:
    size = np.dtype(dtype).itemsize * 8
    return np.array([v % 2**size for v in values], f"u{size // 8}").view(dtype)


BINARY = [
    ("add.s32", np.int32, lambda a, b: a + b),
    ("sub.u32", np.uint32, lambda a, b: a - b),
    ("add.u64", np.uint64, lambda a, b: a + b),
    ("add.s16", np.int16, lambda a, b: a + b),
    ("mul.lo.s32", np.int32, lambda a, b: a * b),
    ("mul.hi.u32", np.uint32, lambda a, b: (a * b) >> 32),
    ("mul.hi.s64", np.int64, lambda a, b: (a * b) >> 64),
    ("mul.lo.u16", np.uint16, lambda a, b: a * b),
    ("add.sat.s32", np.int32, lambda a, b: min(max(a + b, -(2**31)), 2**31 - 1)),
    ("min.s32", np.int32, min),
    ("max.u64", np.uint64, max),
    ("and.b32", np.uint32, lambda a, b: a & b),
    ("or.b64", np.uint64, lambda a, b: a | b),
    ("xor.b32", np.uint32, lambda a, b: a ^ b),
    ("div.u32", np.uint32, lambda a, b: a // b if b else 2**32 - 1),
    ("rem.u64", np.uint64, lambda a, b: a % b if b else 2**64 - 1),
    (
        "div.s32",
        np.int32,
        lambda a, b: int(abs(a) // abs(b)) * (-1) ** ((a < 0) != (b < 0)) if b else -1,
    ),
    ("rem.s32", np.int32, lambda a, b: int(abs(a) % abs(b)) * (-1 if a < 0 else 1) if b else -1),
]


@pytest.mark.parametrize(("name", "dtype", "model"), BINARY, ids=[row[0] for row in BINARY])
def test_integer_pairs(name, dtype, model):
    a, b = words(dtype), words(dtype)[::-1].copy()
    out = run_lanes(f"{name} $d, $a, $b;", dtype, a, b)
    expected = wrap([model(x, y) for x, y in zip(big(a), big(b), strict=True)], dtype)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("name", "dtype", "wide"),
    [("s32", np.int32, np.int64), ("u32", np.uint32, np.uint64), ("u16", np.uint16, np.uint32)],
)
def test_wide_products(name, dtype, wide):
    a, b, c = words(dtype), words(dtype)[::-1].copy(), words(wide)
    out = run_lanes(f"mad.wide.{name} $d, $a, $b, $c;", wide, a, b, c)
    rows = zip(big(a), big(b), big(c), strict=True)
    np.testing.assert_array_equal(out, wrap([x * y + z for x, y, z in rows], wide))


@pytest.mark.parametrize("name", ["shl.b32", "shr.u32", "shr.s32"])
def test_shifts_past_the_width(name):
    a, n = words(np.int32 if "s32" in name else np.uint32), amounts()
    out = run_lanes(f"{name} $d, $a, $b;", a.dtype.type, a, n)
    model = (lambda x, k: x << k) if "shl" in name else (lambda x, k: x >> k)
    expected = wrap([model(x, k) for x, k in zip(big(a), big(n), strict=True)], a.dtype.type)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
@pytest.mark.parametrize("side", ["l", "r"])
def test_funnel_shift(side, mode):
    a, b, n = words(), words()[::-1].copy(), amounts(70)
    out = run_lanes(f"shf.{side}.{mode}.b32 $d, $a, $b, $c;", np.uint32, a, b, n)
    expected = []
    for x, y, k in zip(big(a), big(b), big(n), strict=True):
        k = k % 32 if mode == "wrap" else min(k, 32)
        both = y << 32 | x
        expected.append((both << k) >> 32 if side == "l" else both >> k)
    np.testing.assert_array_equal(out, wrap(expected, np.uint32))


def test_sixty_four_bit_sum_through_the_carry():
    a, b = words(np.uint64), words(np.uint64)[::-1].copy()
    out = run_lanes(
        "mov.b64 {%r1, %r2}, $a; mov.b64 {%r3, %r4}, $b;"
        "add.cc.u32 %r5, %r1, %r3; addc.u32 %r6, %r2, %r4; mov.b64 $d, {%r5, %r6};",
        np.uint64,
        a,
        b,
    )
    np.testing.assert_array_equal(out, a + b)
    out = run_lanes(
        "mov.b64 {%r1, %r2}, $a; mov.b64 {%r3, %r4}, $b;"
        "sub.cc.u32 %r5, %r1, %r3; subc.u32 %r6, %r2, %r4; mov.b64 $d, {%r5, %r6};",
        np.uint64,
        a,
        b,
    )
    np.testing.assert_array_equal(out, a - b)


UNARY_BITS = [
    ("popc.b32", np.uint32, lambda a: bin(a).count("1")),
    ("clz.b32", np.uint32, lambda a: 32 - a.bit_length()),
    ("brev.b32", np.uint32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32", np.uint32, lambda a: a.bit_length() - 1),
    ("bfind.shiftamt.u32", np.uint32, lambda a: 32 - a.bit_length() if a else 2**32 - 1),
    ("not.b32", np.uint32, lambda a: ~a),
    ("neg.s32", np.int32, lambda a: -a),
    ("abs.s32", np.int32, abs),
]


@pytest.mark.parametrize(("name", "dtype", "model"), UNARY_BITS, ids=[r[0] for r in UNARY_BITS])
def test_bit_counts(name, dtype, model):
    a = words(dtype)
    out = run_lanes(f"{name} $d, $a;", dtype, a)
    np.testing.assert_array_equal(out, wrap([model(x) for x in big(a)], dtype))


def test_byte_permutation_replicates_signs():
    a, b, selector = words(), words()[::-1].copy(), words()
    out = run_lanes("prmt.b32 $d, $a, $b, $c;", np.uint32, a, b, selector)
    expected = []
    for x, y, s in zip(big(a), big(b), big(selector), strict=True):
        source = (y << 32 | x).to_bytes(8, "little")
        row = []
        for k in range(4):
            code = s >> 4 * k & 15
            byte = source[code & 7]
            row.append((255 if byte & 128 else 0) if code & 8 else byte)
        expected.append(int.from_bytes(bytes(row), "little"))
    np.testing.assert_array_equal(out, np.array(expected, np.uint32))


@pytest.mark.parametrize("table", [0x80, 0xFE, 0x96, 0xCA, 0x3C, 0x01])
def test_lop3_is_its_truth_table(table):
    a, b, c = words(), words()[::-1].copy(), RANDOM.permutation(words())
    out = run_lanes(f"lop3.b32 $d, $a, $b, $c, {table};", np.uint32, a, b, c)
    expected = np.zeros(NUM, np.uint32)
    for row in range(8):
        if table >> row & 1:
            x, y, z = (v if row >> k & 1 else ~v for v, k in ((a, 2), (b, 1), (c, 0)))
            expected |= x & y & z
    np.testing.assert_array_equal(out, expected)


def test_bit_fields():
    a, position, length = words(), amounts(34), amounts(34)
    out = run_lanes("bfe.u32 $d, $a, $b, $c;", np.uint32, a, position, length)
    expected = [
        x >> p & ((1 << n) - 1) for x, p, n in zip(big(a), big(position), big(length), strict=True)
    ]
    np.testing.assert_array_equal(out, wrap(expected, np.uint32))
    out = run_lanes("bfi.b32 $d, $a, 0, $b, $c;", np.uint32, a, position, length)
    expected = [
        (x & ((1 << n) - 1)) << p
        for x, p, n in zip(big(a), big(position), big(length), strict=True)
    ]
    np.testing.assert_array_equal(out, wrap(expected, np.uint32))


def floats(dtype=np.float32) -> np.ndarray:
    values = (RANDOM.standard_normal(NUM) * 10.0 ** RANDOM.integers(-6, 7, NUM)).astype(dtype)
    values[:10] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 65504.0, 1e-7, 0.5]
    return values


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div.rn"])
def test_float_pairs(name, dtype):
    a, b = floats(dtype), RANDOM.permutation(floats(dtype))
    out = run_lanes(f"{name}.f{dtype().itemsize * 8} $d, $a, $b;", dtype, a, b)
    with np.errstate(all="ignore"):
        expected = {"add": a + b, "sub": a - b, "mul": a * b, "div.rn": a / b}[name]
    np.testing.assert_array_equal(out, expected)


def test_fma_rounds_once():
    a = np.full(32, 1 + 2.0**-23, np.float32)
    c = np.full(32, -(1 + 2.0**-22), np.float32)
    assert run_lanes("fma.rn.f32 $d, $a, $a, $b;", np.float32, a, c)[0] == 2.0**-46
    assert run_lanes("mul.f32 $d, $a, $a; add.f32 $d, $d, $b;", np.float32, a, c)[0] == 0


@pytest.mark.parametrize(("mode", "target"), [("rz", 0.0), ("rm", -np.inf), ("rp", np.inf)])
def test_directed_rounding(mode, target):
    a = floats()[10:]
    out = run_lanes(f"add.{mode}.f32 $d, $a, $b;", np.float32, a, np.full_like(a, 1e-3))
    exact = a.astype(np.float64) + np.float64(np.float32(1e-3))
    expected = []
    for value in exact:
        nearest = np.float32(value)
        beyond = {
            "rz": abs(float(nearest)) > abs(value),
            "rm": nearest > value,
            "rp": nearest < value,
        }[mode]
        expected.append(np.nextafter(nearest, np.float32(target)) if beyond else nearest)
    np.testing.assert_array_equal(out, np.array(expected, np.float32))


def test_minimum_and_nan():
    a, b = floats(), RANDOM.permutation(floats())
    np.testing.assert_array_equal(run_lanes("min.f32 $d, $a, $b;", np.float32, a, b), np.fmin(a, b))
    np.testing.assert_array_equal(
        run_lanes("max.NaN.f32 $d, $a, $b;", np.float32, a, b), np.maximum(a, b)
    )


@pytest.mark.parametrize(
    ("name", "model", "ulps"),
    [
        ("ex2.approx.ftz.f32", np.exp2, 2),
        ("lg2.approx.f32", np.log2, 2),
        ("rcp.approx.ftz.f32", lambda a: 1 / a, 1),
        ("rsqrt.approx.f32", lambda a: 1 / np.sqrt(a), 2),
        ("sqrt.rn.f32", np.sqrt, 0),
        ("tanh.approx.f32", np.tanh, 2),
    ],
)
def test_functions(name, model, ulps):
    a = RANDOM.uniform(0.01, 20, NUM).astype(np.float32)
    out = run_lanes(f"{name} $d, $a;", np.float32, a)
    expected = model(a.astype(np.float64)).astype(np.float32)
    if ulps:
        np.testing.assert_array_max_ulp(out, expected, ulps)
    else:
        np.testing.assert_array_equal(out, expected)


def test_sine_knows_the_number_of_turns_to_one_rounding():
    a = RANDOM.uniform(0.01, 2000, NUM).astype(np.float32)
    out = run_lanes("sin.approx.f32 $d, $a;", np.float32, a)
    assert (np.abs(out - np.sin(a.astype(np.float64))) <= 2.0**-22 * np.abs(a)).all()


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_precision(name, kind):
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    a, b = (torch.from_numpy(floats()).to(dtype) for _ in range(2))
    out = run_lanes(
        f"{name}.{kind} $d, $a, $b;",
        np.uint16,
        a.view(torch.int16).numpy().view(np.uint16),
        b.view(torch.int16).numpy().view(np.uint16),
    )
    expected = {"add": a + b, "sub": a - b, "mul": a * b}[name]
    result = torch.from_numpy(out.view(np.int16)).view(dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_packed_floats_are_two_sums():
    a, b = floats().reshape(-1, 2).copy(), RANDOM.permutation(floats()).reshape(-1, 2).copy()
    out = run_lanes(
        "add.rn.f32x2 $d, $a, $b;", np.uint64, a.view(np.uint64).ravel(), b.view(np.uint64).ravel()
    )
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out.view(np.float32), (a + b).ravel())


@pytest.mark.parametrize(
    ("mode", "model"),
    [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)],
)
@pytest.mark.parametrize("kind", ["s32", "u32", "s8", "u64"])
def test_float_to_integer_saturates(kind, mode, model):
    a = np.concatenate([floats(), [1e20, -1e20, 2.5, -2.5, 127.5, 300]]).astype(np.float32)
    dtype = {"s32": np.int32, "u32": np.uint32, "s8": np.int32, "u64": np.uint64}[kind]
    low, high = {
        "s32": (-(2**31), 2**31 - 1),
        "u32": (0, 2**32 - 1),
        "s8": (-128, 127),
        "u64": (0, 2**64 - 1),
    }[kind]
    out = run_lanes(f"cvt.{mode}.{kind}.f32 $d, $a;", dtype, a)
    nan = 2**63 if kind == "u64" else 0
    expected = [
        nan if np.isnan(v) else low if v < low else high if v >= high else int(v)
        for v in model(a.astype(np.float64))
    ]
    np.testing.assert_array_equal(out, wrap(expected, dtype))


def test_integer_conversions():
    a = words(np.int32)
    np.testing.assert_array_equal(run_lanes("cvt.s64.s32 $d, $a;", np.int64, a), a.astype(np.int64))
    np.testing.assert_array_equal(run_lanes("cvt.s32.s8 $d, $a;", np.int32, a), a.astype(np.int8))
    np.testing.assert_array_equal(
        run_lanes("cvt.sat.u8.s32 $d, $a;", np.uint32, a), np.clip(a, 0, 255).astype(np.uint32)
    )
    np.testing.assert_array_equal(
        run_lanes("cvt.rn.f32.s32 $d, $a;", np.float32, a), a.astype(np.float32)
    )
    wide = words(np.uint64)
    np.testing.assert_array_equal(
        run_lanes("cvt.rn.f32.u64 $d, $a;", np.float32, wide), wide.astype(np.float32)
    )


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_float_to_half_and_back(kind):
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    a = floats()
    halves = run_lanes(f"cvt.rn.{kind}.f32 $d, $a;", np.uint16, a)
    expected = torch.from_numpy(a).to(dtype)
    result = torch.from_numpy(halves.view(np.int16)).view(dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    back = run_lanes(f"cvt.f32.{kind} $d, $a;", np.float32, halves)
    np.testing.assert_array_equal(back, expected.float().numpy())


def test_fp8_pairs_put_the_first_source_high():
    a = np.clip(floats(), -1e4, 1e4)
    a = np.where(np.isnan(a), 0, a).astype(np.float32)
    b = a[::-1].copy()
    out = run_lanes("cvt.rn.satfinite.e4m3x2.f32 $d, $a, $b;", np.uint16, a, b)
    codes = [
        torch.from_numpy(np.clip(v, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        for v in (b, a)
    ]
    np.testing.assert_array_equal(out.view(np.uint8).reshape(-1, 2), np.stack(codes, 1))


COMPARE = [
    ("lt.s32", np.int32, np.less),
    ("hi.u32", np.uint32, np.greater),
    ("ge.s64", np.int64, np.greater_equal),
    ("eq.f32", np.float32, np.equal),
    ("ltu.f32", np.float32, lambda a, b: ~(a >= b)),
    ("ne.f32", np.float32, lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)),
    ("nan.f32", np.float32, lambda a, b: np.isnan(a) | np.isnan(b)),
]


@pytest.mark.parametrize(("name", "dtype", "model"), COMPARE, ids=[row[0] for row in COMPARE])
def test_comparison(name, dtype, model):
    make = floats if dtype is np.float32 else words
    a, b = make(dtype), RANDOM.permutation(make(dtype))
    b[::3] = a[::3]
    out = run_lanes(f"setp.{name} %c1, $a, $b; selp.u32 $d, 1, 0, %c1;", np.uint32, a, b)
    np.testing.assert_array_equal(out, model(a, b).astype(np.uint32))


def test_comparison_combines_and_gives_the_complement():
    a, b = words(np.int32), RANDOM.permutation(words(np.int32))
    out = run_lanes(
        "setp.gt.s32 %c0, $a, 0; setp.lt.and.s32 %c1|%c2, $a, $b, !%c0;"
        "selp.u32 %r1, 1, 0, %c1; selp.u32 %r2, 2, 0, %c2; or.b32 $d, %r1, %r2;",
        np.uint32,
        a,
        b,
    )
    less, not_positive = a < b, a <= 0
    expected = (less & not_positive) + 2 * (~less & not_positive)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_pairs_of_halves_compare_separately(kind):
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    values = [torch.from_numpy(RANDOM.permutation(floats())).to(dtype) for _ in range(2)]
    values[1][::4] = values[0][::4]
    a, b = (v.view(torch.int16).numpy().view(np.uint32) for v in values)
    ones = run_lanes(f"set.ge.{kind}.{kind} $d, $a, $b;", np.uint32, a, b)
    expected = (values[0] >= values[1]).to(dtype)
    result = torch.from_numpy(ones.view(np.int16)).view(dtype)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    bits = run_lanes(
        f"setp.ge.{kind} %c1|%c2, $a, $b;"
        "selp.u32 %r1, 1, 0, %c1; selp.u32 %r2, 2, 0, %c2; or.b32 $d, %r1, %r2;",
        np.uint32,
        a,
        b,
    )
    low, high = expected.float().numpy().reshape(-1, 2).T
    np.testing.assert_array_equal(bits, low + 2 * high)
