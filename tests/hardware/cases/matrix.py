"""ldmatrix, stmatrix, movmatrix, mma.sync."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..case import Family
from ..values import Source

FAMILY = Family("matrix")

# ---- matrices of 8 rows of 16 bytes: each lane gives one row's address, all different

HEAD = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.wide.u32 %rd1, %r1, 4, %p1; "
    "ld.global.u32 %r3, [%rd1];"
    "add.u32 %r3, %r3, %r2; mad.wide.u32 %rd2, %r1, 4, %p0;\n"
)


def _addresses(name: str) -> np.ndarray:
    """32 rows of shared memory of 2 KiB, in any order."""
    return (Source(name).shuffled(np.arange(128))[:32] * 16).astype("<u4")


def _move(kind: str, count: int, trans: str) -> None:
    name = f"{kind} x{count}{trans}"
    registers = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
    stem = f"{kind}.sync.aligned.m8n8.x{count}{trans}.shared.b16"
    body = HEAD
    if kind == "ldmatrix":
        for at in range(0, 2048, 128):
            body += f"mad.wide.u32 %rd3, %r1, 4, %p2; ld.global.u32 %r4, [%rd3+{at}];"
            body += f"mad.lo.u32 %r5, %r1, 4, %r2; st.shared.u32 [%r5+{at}], %r4;"
        body += f"bar.sync 0; {stem} {registers}, [%r3];"
        body += "".join(f"st.global.u32 [%rd2+{128 * i}], %r{10 + i};" for i in range(count))
        num_words = 32 * count
    else:
        body += "mad.lo.u32 %r5, %r1, 4, %r2;"
        body += "".join(f"st.shared.u32 [%r5+{at}], -1;" for at in range(0, 2048, 128))
        body += "mad.wide.u32 %rd3, %r1, 4, %p2;"
        body += "".join(f"ld.global.u32 %r{10 + i}, [%rd3+{128 * i}];" for i in range(count))
        body += f"bar.sync 0; {stem} [%r3], {registers}; bar.sync 0;"
        body += "".join(
            f"ld.shared.u32 %r4, [%r5+{at}]; st.global.u32 [%rd2+{at}], %r4;"
            for at in range(0, 2048, 128)
        )
        num_words = 512

    def arrays():
        return [np.zeros(num_words, "<u4"), _addresses(name), Source(name + " data").words(512)]

    FAMILY.add(name, body, arrays, 3, shared_bytes=2048)


for kind in ("ldmatrix", "stmatrix"):
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            _move(kind, count, trans)
FAMILY.add(
    "movmatrix",
    "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p1; ld.global.u32 %r3, [%rd1];"
    "movmatrix.sync.aligned.m8n8.trans.b16 %r4, %r3; mad.wide.u32 %rd2, %r1, 4, %p0; "
    "st.global.u32 [%rd2], %r4;",
    lambda: [np.zeros(32, "<u4"), Source("movmatrix").words(32)],
    2,
)

# ---- mma.sync: integers in every type, then random values and awkward ones

EXPONENT_BITS = {"f16": 5, "bf16": 8, "tf32": 8, "e4m3": 4, "e5m2": 5}
ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "u8": 8, "s8": 8}


def elements(source: Source, kind: str, num: int, values: str) -> np.ndarray:
    """Codes of matrix elements. values: "integers" -8..8, "random" finite ones of exponents around
    1, "all" codes."""
    bits = ELEMENT_BITS[kind]
    dtype = f"<u{bits // 8}"
    if kind in ("u8", "s8"):
        return source.words(num, 8)
    e = EXPONENT_BITS[kind]
    bias = (1 << (e - 1)) - 1
    top = bits - 1
    if values == "integers":
        number = source.below(17, num) - 8
        magnitude = np.abs(number)
        exponent = np.where(magnitude > 0, np.log2(np.maximum(magnitude, 1)).astype(np.int64), 0)
        fraction = (magnitude << (bits - 1 - e)) >> exponent  # the leading one is cut off below
        fraction = fraction & ((1 << (bits - 1 - e)) - 1)
        code = np.where(magnitude > 0, (exponent + bias) << (bits - 1 - e) | fraction, 0)
        return (code | (number < 0).astype(np.int64) << top).astype(dtype)
    codes = source.words(num, bits).astype(np.int64)
    if values == "all":
        if kind == "tf32":  # also what the tensor core cuts off
            codes = np.where(source.words(num) % 4 == 0, codes, codes & 0xFFFFE000)
        return codes.astype(dtype)
    spread = min(12, (1 << e) - 2)
    exponent = np.clip(bias - spread // 2 + source.below(spread, num), 0, (1 << e) - 2)
    shift = bits - 1 - e
    codes = codes & ~(((1 << e) - 1) << shift) | exponent << shift
    if kind == "tf32":
        codes &= 0xFFFFE000
    # A tenth of zeros, so that sums of few terms appear too.
    return np.where(source.below(10, num) == 0, 0, codes).astype(dtype)


def addends(source: Source, kind: str, num: int, values: str) -> np.ndarray:
    """Of the accumulator: f32, f16 or s32 codes."""
    if kind == "s32":
        return source.words(num)
    bits = 32 if kind == "f32" else 16
    if values == "integers":
        number = (source.below(129, num) - 64).astype(np.float32)
        return number.view("<u4") if bits == 32 else number.astype(np.float16).view("<u2")
    if values == "all":
        return source.floats(kind, num)
    mixed = source.floats(kind, num, 24 if bits == 32 else 10)
    return np.where(source.below(4, num) == 0, 0, mixed).astype(mixed.dtype)


SHAPES = (
    [(k, "f32", t, t) for t in ("f16", "bf16") for k in (8, 16)]
    + [(k, "f16", "f16", "f16") for k in (8, 16)]
    + [(k, "f32", "tf32", "tf32") for k in (4, 8)]
    + [(k, "f32", a, b) for k in (16, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    + [(k, "f16", a, b) for k in (16, 32) for a, b in (("e4m3", "e5m2"), ("e4m3", "e4m3"))]
    + [(k, "s32", a, b) for k in (16, 32) for a in ("u8", "s8") for b in ("u8", "s8")]
)
TILES = 64


def _mma_body(instruction: str, counts: Sequence[int], last: str = "") -> str:
    """A warp's instruction. counts: registers of D, A, B, C and of what follows, each from an array
    of its own; D's and C's are as many. last: operands behind these."""
    first = (40, 10, 20, 30, 50)[: len(counts)]
    body = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;"
    for index, (count, register) in enumerate(zip(counts, first, strict=True)):
        body += (
            f"mad.lo.u32 %r3, %r2, {32 * count}, %r1; mad.wide.u32 %rd{index}, %r3, 4, %p{index};"
        )
        if index:
            body += "".join(
                f"ld.global.u32 %r{register + i}, [%rd{index}+{128 * i}];" for i in range(count)
            )
    braces = (
        "{" + ", ".join(f"%r{register + i}" for i in range(count)) + "}"
        for register, count in zip(first[:4], counts[:4], strict=True)
    )
    body += f"{instruction} {', '.join(braces)}{last};"
    return body + "".join(f"st.global.u32 [%rd0+{128 * i}], %r{40 + i};" for i in range(counts[0]))


def _words(source: Source, kinds: Sequence[tuple[str, int]], values: str) -> list[np.ndarray]:
    """kinds: of the elements of A and B, and registers of a lane."""
    return [
        elements(source, kind, TILES * 32 * count * 32 // ELEMENT_BITS[kind], values).view("<u4")
        for kind, count in kinds
    ]


def _mma(k: int, result: str, a: str, b: str, values: str) -> None:
    name = f"mma k{k} {result} {a} {b}, {values}"
    per_register = 32 // ELEMENT_BITS[a]
    num_a, num_b = 16 * k // per_register // 32, 8 * k // per_register // 32
    num_d = 2 if result == "f16" else 4
    instruction = f"mma.sync.aligned.m16n8k{k}.row.col.{result}.{a}.{b}.{result}"
    body = _mma_body(instruction, (num_d, num_a, num_b, num_d))

    def arrays():
        source = Source(name)
        words = _words(source, [(a, num_a), (b, num_b)], values)
        c = addends(
            source, result, TILES * 32 * num_d * (2 if result == "f16" else 1), values
        ).view("<u4")
        return [np.zeros((TILES, num_d, 32), "<u4"), *words, c]

    FAMILY.add(name, body, arrays, 4, grid=(TILES, 1, 1))


# ---- mma.sp.sync: the same with half of A's elements, and metadata that says which

SPARSE_SHAPES = (
    [(k, "f32", t, t) for t in ("f16", "bf16") for k in (16, 32)]
    + [(k, "f32", "tf32", "tf32") for k in (8, 16)]
    + [(64, "f32", "e4m3", "e5m2")]
    + [(k, "s32", "s8", "u8") for k in (32, 64)]
)


def metadata(source: Source, kind: str, num: int) -> np.ndarray:
    """Words of metadata that exist."""
    nibbles = (
        np.array([0b0100, 0b1110])
        if kind == "tf32"
        else np.array([low | high << 2 for low in range(4) for high in range(low + 1, 4)])
    )
    picked = nibbles[source.below(len(nibbles), num * 8)].reshape(num, 8)
    return (picked << 4 * np.arange(8)).sum(1).astype("<u4")


def _sparse_mma(k: int, result: str, a: str, b: str, selector: int, values: str) -> None:
    name = f"mma.sp k{k} {result} {a} {b} selector {selector}, {values}"
    per_register = 32 // ELEMENT_BITS[a]
    num_a, num_b = 8 * k // per_register // 32, 8 * k // per_register // 32
    shape = f"m16n8k{k}.row.col.{result}.{a}.{b}.{result}"
    body = _mma_body(
        f"mma.sp::ordered_metadata.sync.aligned.{shape}",
        (4, num_a, num_b, 4, 1),
        f", %r50, {selector}",
    )

    def arrays():
        source = Source(name)
        words = _words(source, [(a, num_a), (b, num_b)], values)
        c = addends(source, result, TILES * 32 * 4, values).view("<u4")
        return [np.zeros((TILES, 4, 32), "<u4"), *words, c, metadata(source, a, TILES * 32)]

    FAMILY.add(name, body, arrays, 5, grid=(TILES, 1, 1))


for k, result, a, b in SPARSE_SHAPES:
    last = (
        (0 if k == 64 else 1)
        if result == "s32" or a == "e4m3"
        else (3, 1)[k * ELEMENT_BITS[a] > 256]
    )
    for values in ("integers", "random") if result != "s32" else ("all",):
        for selector in range(last + 1):
            _sparse_mma(k, result, a, b, selector, values)

for k, result, a, b in SHAPES:
    for values in ("integers", "random", "all") if result != "s32" else ("all",):
        _mma(k, result, a, b, values)
