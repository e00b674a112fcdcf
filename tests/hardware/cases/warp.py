"""Exchange between lanes: shfl, vote, match, redux, elect, activemask, bar.warp.sync."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..values import Source, operands

FAMILY = Family("warp")
WARPS = 16
# Members of the mask take part, the others skip the instruction.
MASKS = (0xFFFFFFFF, 0x0000FFFF, 0xF0F0F0F0, 0x80000001, 0x55555555, 0x00000100, 0x7FFFFFFE)
GLOBAL_ID = (
    "mov.u32 %r60, %tid.x; mov.u32 %r61, %ctaid.x; mad.lo.u32 %r62, %r61, 32, %r60;"
    "mov.u32 %r63, %laneid; mov.u32 %r59, 1; shl.b32 %r59, %r59, %r63;\n"
)


def per_mask(texts: list[str], masks: tuple[int, ...], out_bits: int = 32) -> tuple[str, tuple]:
    """Every text under every mask ($m); its result %d goes to a row of its own."""
    lines, rows = [], []
    for text in texts:
        for mask in masks:
            row = len(rows)
            lines.append(
                f"{{ .reg .b{out_bits} %d; mov.b{out_bits} %d, -1; and.b32 %r58, %r59, {mask};"
                f" setp.eq.u32 %c30, %r58, 0; @%c30 bra SKIP;\n"
                + text.replace("$m", str(mask - (1 << 32) if mask >> 31 else mask))
                + f"\nSKIP: bar.warp.sync -1; st.global.b{out_bits}"
                f" [%rd61+{row * WARPS * 32 * out_bits // 8}], %d; }}"
            )
            rows.append(f"{text} mask {mask:#010x}")
    return "\n".join(lines), tuple(rows)


def collective(name: str, texts: list[str], kind: str, masks=MASKS, make=None, out_bits=32) -> None:
    """Texts from %r1 (or %rd1), a value per thread, to %d."""
    bits = int(kind[1:])
    body, rows = per_mask(texts, masks, out_bits)
    register = "%r1" if bits == 32 else "%rd1"
    head = (
        GLOBAL_ID
        + f"mad.wide.u32 %rd60, %r62, {bits // 8}, %p1; ld.global.b{bits} {register}, [%rd60];"
        f"mad.wide.u32 %rd61, %r62, {out_bits // 8}, %p0;\n"
    )

    def arrays():
        values = make() if make else operands(name, (kind,), WARPS * 32)[0]
        return [np.zeros((len(rows), WARPS * 32), f"<u{out_bits // 8}"), values]

    FAMILY.add(name, head + body, arrays, 2, grid=(WARPS, 1, 1), rows=rows)


PAIR = "selp.u32 %r3, 1, 0, %c1; shl.b32 %r3, %r3, 31; xor.b32 %d, %d, %r3;"


def _shuffles() -> None:
    """Lane, segment and clamp of every kind; what they read is inside of the mask."""
    texts = []
    for mode in ("up", "down", "bfly", "idx"):
        for control in (0x1F, 0x00, 0x101F, 0x181F, 0x1C07, 0x0F0F, 0x1E03, 0x0010, 0x1C00):
            texts.append(f"shfl.sync.{mode}.b32 %d|%c1, %r1, %r2, {control}, $m; {PAIR}")
    body, rows = per_mask(texts, (0xFFFFFFFF,))
    few = [f"shfl.sync.{mode}.b32 %d|%c1, %r1, 1, {control}, $m; {PAIR}"
           for mode, control in (
               ("bfly", 0x1F), ("idx", 0x1E1F), ("down", 0x1E1F), ("up", 0x1E00)
           )]  # fmt: skip
    more, more_rows = per_mask(few, (0x0000FFFF, 0xFFFF0000, 0xC000000C))
    more = more.replace("[%rd61+", f"[%rd61+{len(rows) * WARPS * 128}+")
    head = GLOBAL_ID + (
        "mad.wide.u32 %rd60, %r62, 4, %p1; ld.global.b32 %r1, [%rd60];"
        "mad.wide.u32 %rd60, %r62, 4, %p2; ld.global.b32 %r2, [%rd60];"
        "mad.wide.u32 %rd61, %r62, 4, %p0;\n"
    )

    def arrays():
        source = Source("shfl")
        num = WARPS * 32
        amount = np.where(source.words(num) % 2 == 0, source.below(33, num), source.words(num))
        return [
            np.zeros((len(rows) + len(more_rows), num), "<u4"),
            source.words(num),
            amount.astype("<u4"),
        ]

    FAMILY.add("shfl", head + body + "\n" + _sum_offsets(more), arrays, 3, grid=(WARPS, 1, 1),
               rows=rows + more_rows)  # fmt: skip


def _sum_offsets(text: str) -> str:
    import re

    return re.sub(r"\+(\d+)\+(\d+)\]", lambda m: f"+{int(m[1]) + int(m[2])}]", text)


_shuffles()


def _few_values(limit: int, bits: int = 32):
    def make():
        source = Source(f"few {limit} {bits}")
        values = source.below(limit, WARPS * 32)
        values[:32] = 7  # one warp all alike
        values[32:64] = np.arange(32)
        return values.astype(f"<u{bits // 8}") * np.array((1 << bits) // 16 + 1, f"<u{bits // 8}")

    return make


collective("vote", [
    "setp.lt.u32 %c1, %r1, 0x70000000;"
    f"vote.sync.{mode}.pred %c2, {negate}%c1, $m; selp.u32 %d, 1, 0, %c2;"
    for mode in ("all", "any", "uni") for negate in ("", "!")
] + [
    "setp.lt.u32 %c1, %r1, 0x70000000; vote.sync.ballot.b32 %d, %c1, $m;",
    "setp.lt.u32 %c1, %r1, 0x70000000; vote.sync.ballot.b32 %d, !%c1, $m;",
], "u32", make=_few_values(16))  # fmt: skip
for bits, register in ((32, "%r1"), (64, "%rd1")):
    collective(f"match {bits}", [
        f"match.any.sync.b{bits} %d, {register}, $m;",
        f"match.all.sync.b{bits} %d|%c1, {register}, $m; {PAIR}",
    ], f"u{bits}", make=_few_values(8, bits))  # fmt: skip
collective("redux", [
    f"redux.sync.{op}.{t} %d, %r1, $m;"
    for op, t in (
        *((op, t) for op in ("add", "min", "max") for t in ("u32", "s32")),
        ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    )
], "u32")  # fmt: skip
collective("elect", [f"elect.sync %d|%c1, $m; {PAIR}"], "u32")
# Lanes of one mask, together: every branch has one way in.
collective("activemask", ["activemask.b32 %d;"], "u32", masks=(0xFFFFFFFF,))


def _warp_barrier() -> None:
    """Each lane writes, lanes of a mask meet, each reads its neighbour's word."""
    body = GLOBAL_ID + (
        "mov.u32 %r1, smem; mad.lo.u32 %r2, %r63, 4, %r1; xor.b32 %r3, %r63, 5;"
        "mad.lo.u32 %r4, %r3, 4, %r1; mad.lo.u32 %r5, %r62, 77, 13; st.shared.u32 [%r2], %r5;"
        "bar.warp.sync 0xffffffff; ld.shared.u32 %r6, [%r4];"
        "bar.warp.sync 0xffffffff; setp.lt.u32 %c1, %r63, 16; @%c1 bra LOW;"
        "add.u32 %r6, %r6, 1; st.shared.u32 [%r2], %r6; bar.warp.sync 0xffff0000;"
        "ld.shared.u32 %r6, [%r4]; bra DONE;"
        "LOW: mul.lo.u32 %r6, %r6, 3; st.shared.u32 [%r2], %r6; bar.warp.sync 0x0000ffff;"
        "ld.shared.u32 %r6, [%r4]; DONE:"
        "mad.wide.u32 %rd61, %r62, 4, %p0; st.global.u32 [%rd61], %r6;"
    )
    FAMILY.add("bar.warp.sync", body, lambda: [np.zeros(WARPS * 32, "<u4")], 1,
               grid=(WARPS, 1, 1), shared_bytes=128)  # fmt: skip


_warp_barrier()
