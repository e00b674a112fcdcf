"""atom and red: all operations, types, spaces. The old values are compared where no two threads
share an element, the sums of many threads where their order does not matter."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..values import NUM, Source, bits_of, operands

FAMILY = Family("atomics")
INTEGER = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "inc": ("u32",),
    "dec": ("u32",),
}
FORMS = [(op, t) for op, types in INTEGER.items() for t in types]
FLOATING = [("add", "f32"), ("add", "f64")]
HALVES = [("add.noftz", t) for t in ("f16", "bf16", "f16x2", "bf16x2")]
THREADS = 256


def kind_of(t: str) -> str:
    return "u" + t[1:] if t[0] in "bus" and not t.startswith("bf") else t


def register(bits: int, index: int) -> str:
    return {16: f"%h{index}", 32: f"%r{index}", 64: f"%rd{index}"}[bits]


def one_thread_each(space: str, op: str, t: str, *, returns: bool) -> None:
    """atom (or red) on an element of each thread's own: the old value and what is left."""
    kind = kind_of(t)
    bits = bits_of(kind)
    size = bits // 8
    name = f"{'atom' if returns else 'red'} {space} {op} {t}"
    old, value, left, compare = (register(bits, i) for i in (10, 11, 12, 13))
    in_shared = space.startswith("shared")
    target = "%r5" if in_shared else "%rd4"
    cas = op == "cas"
    inputs = 3 if cas else 2
    lines = [
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 256, %r1;",
        f"mad.wide.u32 %rd4, %r3, {size}, %p1;",
        f"mov.u32 %r4, smem; mad.lo.u32 %r5, %r1, {size}, %r4;" if in_shared else "",
        f"mad.wide.u32 %rd1, %r3, {size}, %p0; mad.wide.u32 %rd2, %r3, {size}, %p2;",
        f"ld.global.b{bits} {value}, [%rd2];",
    ]
    if cas:
        lines.append(f"mad.wide.u32 %rd3, %r3, {size}, %p3; ld.global.b{bits} {compare}, [%rd3];")
    if in_shared:
        lines.append(f"ld.global.b{bits} {left}, [%rd4]; st.shared.b{bits} [%r5], {left};")
    scope = {"global": "", "generic": ".relaxed.gpu", "shared::cta": "", "shared::cluster": ""}[
        space
    ]
    prefix = "" if space == "generic" else f".{space}"
    stem = f"{'atom' if returns else 'red'}{scope}{prefix}.{op}.{t}"
    arguments = f"[{target}], {compare + ', ' if cas else ''}{value}"
    lines.append(f"{stem} {old + ', ' if returns else ''}{arguments};")
    if returns:
        lines.append(f"st.global.b{bits} [%rd1], {old};")
    if in_shared:
        lines.append(f"ld.shared.b{bits} {left}, [%r5];")
    else:
        lines.append(f"fence.acq_rel.gpu; ld.global.b{bits} {left}, [%rd4];")
    lines.append(f"st.global.b{bits} [%rd1+{NUM * size}], {left};")

    def arrays():
        kinds = (kind,) * inputs
        values = operands(f"atomics {op} {t}", kinds)
        return [np.zeros((2, NUM), f"<u{size}"), *values]

    FAMILY.add(name, "\n".join(lines), arrays, 1 + inputs, grid=(NUM // THREADS, 1, 1),
               block=(THREADS, 1, 1), shared_bytes=THREADS * 8 if in_shared else 0,
               rows=("old value", "new value"))  # fmt: skip


for space in ("global", "shared::cta", "shared::cluster", "generic"):
    for op, t in [*FORMS, *FLOATING, *HALVES]:
        one_thread_each(space, op, t, returns=True)
        if op != "exch":
            one_thread_each(space, op, t, returns=False)
    for t in ("b16", "b32", "b64"):
        one_thread_each(space, "cas", t, returns=True)


def _vectors() -> None:
    """sm_90's vectors of floats and halves, on global memory."""
    for vector, t, parts in (
        ("v2", "f32", 2), ("v4", "f32", 4),
        ("v2", "f16", 2), ("v4", "f16", 4), ("v8", "f16", 8),
        ("v2", "bf16", 2), ("v4", "bf16", 4), ("v8", "bf16", 8),
        ("v2", "f16x2", 2), ("v4", "f16x2", 4), ("v2", "bf16x2", 2), ("v4", "bf16x2", 4),
    ):  # fmt: skip
        bits = bits_of(t)
        size = bits // 8 * parts
        noftz = "" if t == "f32" else ".noftz"
        names = [register(bits, 20 + i) for i in range(parts)]
        olds = [register(bits, 40 + i) for i in range(parts)]
        lines = [
            "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 64, %r1;",
            f"mad.wide.u32 %rd1, %r3, {size}, %p0; mad.wide.u32 %rd4, %r3, {size}, %p1;"
            f"mad.wide.u32 %rd2, %r3, {size}, %p2; mad.wide.u32 %rd5, %r3, {size}, %p3;",
        ]
        lines += [f"ld.global.b{bits} {n}, [%rd2+{i * bits // 8}];" for i, n in enumerate(names)]
        braces, old = "{" + ", ".join(names) + "}", "{" + ", ".join(olds) + "}"
        lines.append(f"atom.global.add{noftz}.{vector}.{t} {old}, [%rd4], {braces};")
        lines.append(f"red.global.add{noftz}.{vector}.{t} [%rd5], {braces};")
        lines += [f"st.global.b{bits} [%rd1+{i * bits // 8}], {n};" for i, n in enumerate(olds)]
        num = 64 * 8

        def arrays(t=t, parts=parts, num=num):
            a, b = operands(f"vector {t} {parts}", (t, t), num * parts)
            return [np.zeros_like(a), a, b, a.copy()]

        FAMILY.add(f"vector {vector} {t}", "\n".join(lines), arrays, 4, outputs=(0, 1, 3),
                   grid=(8, 1, 1), block=(64, 1, 1))  # fmt: skip


_vectors()


def _many_threads() -> None:
    """All threads of several CTAs on a few elements; integers, so that no order shows."""
    lines = [
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 128, %r1;",
        "mad.wide.u32 %rd1, %r3, 8, %p1; ld.global.b64 %rd2, [%rd1]; cvt.u32.u64 %r4, %rd2;",
        "and.b32 %r5, %r4, 7; mad.wide.u32 %rd3, %r5, 8, %p0;",
    ]
    slot = 0
    for op, t in FORMS:
        if op == "exch":
            continue
        value = "%r4" if t.endswith("32") else "%rd2"
        limit = "100" if op in ("inc", "dec") else value
        lines.append(f"red.global.{op}.{t} [%rd3+{slot * 64}], {limit};")
        slot += 1
        lines.append(f"atom.relaxed.sys.global.{op}.{t} {'%r6' if value == '%r4' else '%rd6'}, "
                     f"[%rd3+{slot * 64}], {limit};")  # fmt: skip
        slot += 1

    def arrays():
        start = np.zeros((slot, 8), "<u8")
        start[:] = Source("many start").words(8, 64)
        start[-4:] = 50  # inc and dec count in 0..100
        start &= 0xFFFFFFFF
        return [start, Source("many").words(16 * 128, 64)]

    FAMILY.add("many threads", "\n".join(lines), arrays, 2, grid=(16, 1, 1), block=(128, 1, 1))


_many_threads()


def _order_forms() -> None:
    """Semantics and scopes change nothing here; a sink as result."""
    lines = ["mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p0;"]
    row = 0
    for form in ("relaxed", "acquire", "release", "acq_rel"):
        for scope in ("cta", "cluster", "gpu", "sys"):
            lines.append(f"atom.{form}.{scope}.global.add.u32 %r2, [%rd1+{row * 128}], {row};")
            row += 1
            if form in ("relaxed", "release"):
                lines.append(f"red.{form}.{scope}.global.add.u32 [%rd1+{row * 128}], {row};")
                row += 1
    lines.append(f"atom.global.add.u32 _, [%rd1+{row * 128}], 3;")
    row += 1
    FAMILY.add("semantics and scopes", "\n".join(lines),
               lambda: [np.arange(row * 32, dtype="<u4").reshape(row, 32)], 1)  # fmt: skip


_order_forms()
