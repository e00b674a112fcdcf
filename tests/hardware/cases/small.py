"""mma.sync of elements of 4 bits and of bits, of 8 rows, of halves by quads of lanes; wgmma of
bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..case import Family
from ..values import Source
from .matrix import _mma_body, addends, elements, metadata

FAMILY = Family("small")
TILES = 16


def _integers(form: str, bits: int, m: int, k: int, num_d: int, tail: str = "") -> None:
    """A product of any bits."""
    num_a, num_b = m * k * bits // 1024, 8 * k * bits // 1024
    body = _mma_body(f"mma.sync.aligned.{form}{tail}", (num_d, num_a, num_b, num_d))

    def arrays():
        source = Source(form + tail)
        a, b, c = (source.words(TILES * 32 * count) for count in (num_a, num_b, num_d))
        return [np.zeros((TILES, num_d, 32), "<u4"), a, b, c]

    FAMILY.add(form + tail, body, arrays, 4, grid=(TILES, 1, 1))


SIGNS = [(a, b) for a in "us" for b in "us"]
for a, b in SIGNS:
    for end in ("", ".satfinite"):
        for m, k in ((8, 32), (16, 32), (16, 64)):
            _integers(f"m{m}n8k{k}.row.col{end}.s32.{a}4.{b}4.s32", 4, m, k, m // 4)
        _integers(f"m8n8k16.row.col{end}.s32.{a}8.{b}8.s32", 8, 8, 16, 2)
for operation in ("xor", "and"):
    for m, k in ((8, 128), (16, 128), (16, 256)):
        _integers(f"m{m}n8k{k}.row.col.s32.b1.b1.s32", 1, m, k, m // 4, f".{operation}.popc")


def _sparse(k: int, a: str, b: str, selector: int) -> None:
    name = f"mma.sp k{k} {a} {b} selector {selector}"
    num = 16 * k // 2 * 4 // 1024
    form = f"mma.sp::ordered_metadata.sync.aligned.m16n8k{k}.row.col.s32.{a}.{b}.s32"
    body = _mma_body(form, (4, num, num, 4, 1), f", %r50, {selector}")

    def arrays():
        source = Source(name)
        words = [source.words(TILES * 32 * count) for count in (num, num, 4)]
        return [np.zeros((TILES, 4, 32), "<u4"), *words, metadata(source, "s4", TILES * 32)]

    FAMILY.add(name, body, arrays, 5, grid=(TILES, 1, 1))


for k, selectors in ((64, 2), (128, 1)):
    for selector in range(selectors):
        _sparse(k, "s4", "u4", selector)
        _sparse(k, "u4", "s4", selector)


# ---- m8n8k4 of halves


def _quads(orders: Sequence[str], d: str, c: str, values: str) -> None:
    name = f"m8n8k4 {orders[0]} {orders[1]} {d} {c}, {values}"
    num_d, num_c = (8 if kind == "f32" else 4 for kind in (d, c))
    form = f"mma.sync.aligned.m8n8k4.{orders[0]}.{orders[1]}.{d}.f16.f16.{c}"
    body = _mma_body(form, (num_d, 2, 2, num_c))

    def arrays():
        source = Source(name)
        a, b = (elements(source, "f16", TILES * 32 * 4, values).view("<u4") for _ in range(2))
        num = TILES * 32 * num_c * (2 if c == "f16" else 1)
        return [
            np.zeros((TILES, num_d, 32), "<u4"),
            a,
            b,
            addends(source, c, num, values).view("<u4"),
        ]

    FAMILY.add(name, body, arrays, 4, grid=(TILES, 1, 1))


for orders in (("row", "col"), ("row", "row"), ("col", "col"), ("col", "row")):
    for d, c in (("f32", "f32"), ("f32", "f16"), ("f16", "f16")):
        for values in ("integers", "random"):
            _quads(orders, d, c, values)


# ---- wgmma of bits: operands without a swizzle, 16 bytes of all rows, then the next 16

for n in (8, 64):
    count = n // 2
    registers = "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"
    body = f".reg .b32 %d<{count}>;" + "mov.u32 %r1, %tid.x; mov.u32 %r2, smem;"
    total = (64 + n) * 32
    body += "mul.wide.u32 %rd1, %r1, 4; add.u64 %rd2, %rd1, %p1; mad.lo.u32 %r3, %r1, 4, %r2;"
    body += "".join(
        f"{f'setp.lt.u32 %c2, %r1, {(total - at) // 4}; @%c2 ' if at + 512 > total else ''}"
        f"ld.global.u32 %r4, [%rd2+{at}];"
        f"{'@%c2 ' if at + 512 > total else ''}st.shared.u32 [%r3+{at}], %r4;"
        for at in range(0, total, 512)
    )
    body += "fence.proxy.async.shared::cta; bar.sync 0;"
    body += "cvt.u64.u32 %rd3, %r2; and.b64 %rd3, %rd3, 0x3ffff; shr.u64 %rd3, %rd3, 4;"
    a_word, b_word = 8 << 32 | 64 << 16, 8 << 32 | n << 16
    body += f"or.b64 %rd4, %rd3, {a_word}; add.u64 %rd5, %rd3, 128; or.b64 %rd5, %rd5, {b_word};"
    body += f"mad.lo.u32 %r5, %r1, {4 * count}, 0; cvt.u64.u32 %rd6, %r5; add.u64 %rd6, %rd6, %p0;"
    body += "".join(f"ld.global.u32 %d{i}, [%rd6+{4 * i}];" for i in range(count))
    body += (
        "setp.eq.u32 %c1, %r1, %r1; wgmma.fence.sync.aligned;"
        f"wgmma.mma_async.sync.aligned.m64n{n}k256.s32.b1.b1.and.popc {registers}, %rd4, %rd5, %c1;"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    )
    body += "".join(f"st.global.u32 [%rd6+{4 * i}], %d{i};" for i in range(count))
    FAMILY.add(
        f"wgmma n{n} b1",
        body,
        lambda n=n, total=total: [
            Source(f"bits {n}").words(128 * n // 2).reshape(128, -1),
            Source(f"bits of {n}").words(total // 4),
        ],
        2,
        block=(128, 1, 1),
        shared_bytes=total,
    )
