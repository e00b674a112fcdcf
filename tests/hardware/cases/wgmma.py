"""wgmma.mma_async: every element type, A from registers and from shared memory, all swizzles, both
majors, many N."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..values import Source
from .matrix import ELEMENT_BITS, addends, elements, metadata

FAMILY = Family("wgmma")
# name: bytes of a swizzled row, code in the descriptor
SWIZZLES = {"none": (0, 0), "32B": (32, 3), "64B": (64, 2), "128B": (128, 1)}
A_AT, B_AT, SHARED = 0, 40960, 106496  # byte offsets in dynamic shared memory, and its size


def swizzled(address: int, span: int) -> int:
    return address ^ (address >> 3 & {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[span])


class Layout:
    """Where element (row, k) of an operand lies; rows are M or N. In bytes from the operand's
    place, a multiple of 1024, plus `base`: the swizzle acts on the whole address."""

    def __init__(
        self, size: int, swizzle: str, mn_major: bool, num_rows: int, num_k: int, base: int = 0
    ) -> None:
        self.base = base
        self.size, self.mn_major, self.num_rows = size, mn_major, num_rows
        self.span, self.code = SWIZZLES[swizzle]
        self.k_bytes = num_k * size
        if mn_major:
            if self.span:  # atoms of span bytes of rows by 8 of K
                self.stride = 8 * self.span
                self.leading = self.stride * (num_k // 8)
            else:  # core matrices of 16 bytes of rows by 8 of K; both distances beyond their size
                self.leading = 128
                self.stride = 128 * (num_k // 8) + 128
        elif self.span:
            self.stride, self.leading = 8 * self.span, 16
        else:  # core matrices of 8 rows by 16 bytes
            self.leading = 128
            self.stride = 128 * (self.k_bytes // 16) + 128

    def at(self, row: int, k: int) -> int:
        byte = row * self.size if self.mn_major else k * self.size
        chunk, rest = byte // 16, byte % 16
        if self.mn_major:
            if not self.span:
                return chunk * self.stride + k % 8 * 16 + k // 8 * self.leading + rest
            atom = self.span // 16
            linear = (
                chunk // atom * self.leading
                + chunk % atom * 16
                + k % 8 * self.span
                + k // 8 * self.stride
            )
            return swizzled(self.base + linear + rest, self.span)
        if not self.span:
            return row // 8 * self.stride + row % 8 * 16 + chunk * self.leading + rest
        # Rows of the span's length, one instruction's K after the other in them.
        per_row = self.span
        block, inside = byte // per_row, byte % per_row
        linear = (
            block * self.num_rows * per_row + row // 8 * self.stride + row % 8 * per_row + inside
        )
        return swizzled(self.base + linear, self.span)

    def step(self, index: int, num_k: int) -> int:
        """Bytes from the start to that of the instruction `index`, each of `num_k` of K."""
        if self.mn_major:
            return index * num_k // 8 * (self.stride if self.span else self.leading)
        byte = index * num_k * self.size
        if not self.span:
            return byte // 16 * self.leading
        return byte // self.span * self.num_rows * self.span + byte % self.span

    def descriptor(self) -> int:
        """Without the start address."""
        return (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | self.code << 62


def image(layout: Layout, codes: np.ndarray) -> np.ndarray:
    """Shared memory's bytes that hold the matrix `codes` [row][k]."""
    rows, num_k = codes.shape
    place = np.array([[layout.at(r, k) for k in range(num_k)] for r in range(rows)])
    out = np.zeros((int(place.max()) + layout.size + 1023) // 1024 * 1024, "u1")
    data = np.ascontiguousarray(codes).view("u1").reshape(rows, num_k, layout.size)
    for byte in range(layout.size):
        out[place + byte] = data[:, :, byte]
    return out


def add(
    a: str,
    b: str,
    result: str,
    n: int,
    values: str,
    *,
    registers: bool = False,
    swizzle: str = "128B",
    b_swizzle: str = "",
    a_mn: bool = False,
    b_mn: bool = False,
    scale_d: bool = True,
    negate: tuple[int, int] = (1, 1),
    steps: int = 1,
    base: int = 0,
) -> None:
    """D = A B + D over `steps` instructions along K. base: both operands start that many bytes
    later, off the swizzle pattern's own boundary."""
    size = ELEMENT_BITS[a] // 8
    k = 32 // size
    name = f"n{n} {result} {a} {b}, {values}, A {'registers' if registers else swizzle}"
    name += f", B {b_swizzle or swizzle}"
    for flag, text in ((a_mn, "A by columns"), (b_mn, "B by rows"), (not scale_d, "no addend")):
        name += f", {text}" if flag else ""
    name += f", scales {negate[0]} {negate[1]}" if negate != (1, 1) else ""
    name += f", {steps} steps" if steps > 1 else ""
    name += f", base {base}" if base else ""
    a_layout = Layout(size, swizzle, a_mn, 64, k * steps, base)
    b_layout = Layout(size, b_swizzle or swizzle, b_mn, n, k * steps, base)
    num_d = n // (4 if result == "f16" else 2)

    def arrays():
        source = Source(name)
        a_codes = elements(source, a, 64 * k * steps, values).reshape(64, k * steps)
        b_codes = elements(source, b, n * k * steps, values).reshape(n, k * steps)
        d = addends(source, result, 128 * num_d * (2 if result == "f16" else 1), values).view("<u4")
        if registers:
            # Register r of lane t: row t/4 (+8), K by a register's elements.
            per = 4 // size
            fragment = np.zeros((steps, 4, 128, per), a_codes.dtype)
            thread = np.arange(128)
            warp, lane = thread // 32, thread % 32
            for step in range(steps):
                for r in range(4):
                    for e in range(per):
                        row = 16 * warp + lane // 4 + 8 * (r & 1)
                        column = step * k + per * (lane % 4) + e + 4 * per * (r >> 1)
                        fragment[step, r, :, e] = a_codes[row, column]
            a_data = fragment.view("u1").reshape(-1)
        else:
            a_data = image(a_layout, a_codes)
        b_data = image(b_layout, b_codes)
        a_data, b_data = (np.resize(x, -(-len(x) // 2048) * 2048) for x in (a_data, b_data))
        return [np.zeros((num_d, 128), "<u4"), a_data, b_data, d.reshape(num_d, 128)]

    # Sizes are needed for the copy loops; they do not depend on the values.
    def image_bytes(layout: Layout, rows: int) -> int:
        last = max(layout.at(r, c) for r in range(rows) for c in range(k * steps)) + size
        return -(-(-(-last // 1024) * 1024) // 2048) * 2048

    body = (
        ".reg .b32 %d<128>; .reg .b32 %f<32>; .reg .b64 %da; .reg .b64 %db; .reg .pred %scale;\n"
        "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mul.lo.u32 %r3, %r1, 16; mov.u32 %r7, 0;\n"
    )
    for label, index, at, count in (
        ("A", 1, A_AT, 0 if registers else image_bytes(a_layout, 64)),
        ("B", 2, B_AT, image_bytes(b_layout, n)),
    ):
        if not count:
            continue
        body += (
            f"add.u32 %r4, %r2, {at}; add.u32 %r4, %r4, %r3; cvt.u64.u32 %rd1, %r3;"
            f"add.u64 %rd1, %rd1, %p{index}; mov.u32 %r5, 0;\n"
            f"COPY{label}: ld.global.v4.u32 {{%r10, %r11, %r12, %r13}}, [%rd1];"
            "st.shared.v4.u32 [%r4], {%r10, %r11, %r12, %r13};"
            "add.u64 %rd1, %rd1, 2048; add.u32 %r4, %r4, 2048; add.u32 %r5, %r5, 2048;"
            f"setp.lt.u32 %c1, %r5, {count}; @%c1 bra COPY{label};\n"
        )
    body += "mad.wide.u32 %rd2, %r1, 4, %p3; mad.wide.u32 %rd3, %r1, 4, %p0;\n"
    body += "".join(f"ld.global.u32 %d{i}, [%rd2+{512 * i}];" for i in range(num_d))
    if registers:
        body += "mad.wide.u32 %rd4, %r1, 4, %p1;"
        body += "".join(f"ld.global.u32 %f{i}, [%rd4+{512 * i}];" for i in range(4 * steps))
    body += (
        f"\nsetp.{'eq' if scale_d else 'ne'}.u32 %scale, %r7, 0; fence.proxy.async.shared::cta; "
        f"bar.sync 0;"
        "wgmma.fence.sync.aligned;\n"
    )
    accumulators = "{" + ", ".join(f"%d{i}" for i in range(num_d)) + "}"
    for step in range(steps):
        for register, at, layout in (("%da", A_AT, a_layout), ("%db", B_AT, b_layout)):
            if register == "%da" and registers:
                continue
            body += (
                f"add.u32 %r4, %r2, {at + base + layout.step(step, k)}; and.b32 %r4, %r4, 0x3ffff;"
                f"shr.u32 %r4, %r4, 4; cvt.u64.u32 {register}, %r4;"
                f"or.b64 {register}, {register}, {layout.descriptor():#x};\n"
            )
        if registers:
            operand = "{" + ", ".join(f"%f{4 * step + i}" for i in range(4)) + "}"
        else:
            operand = "%da"
        tail = "%scale" if step == 0 else "1"
        if step:
            body += "setp.eq.u32 %scale, %r7, 0;"
            tail = "%scale"
        if result != "s32":
            tail += f", {negate[0]}, {negate[1]}"
        if size == 2:
            tail += f", {int(b_mn)}" if registers else f", {int(a_mn)}, {int(b_mn)}"
        body += (
            f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{result}.{a}.{b} {accumulators}, "
            f"{operand}, %db, {tail};\n"
        )
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"
    body += "".join(f"st.global.u32 [%rd3+{512 * i}], %d{i};" for i in range(num_d))
    FAMILY.add(name, body, arrays, 4, block=(128, 1, 1), shared_bytes=SHARED)


FP8 = [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
# Values: one instruction, so that the sum's rounding can be told.
for a, b in FP8:
    for values in ("integers", "random", "all"):
        for registers in (False, True):
            add(a, b, "f32", 64, values, registers=registers)
    add(a, b, "f16", 64, "random")
    add(a, b, "f16", 64, "integers", registers=True)
for t in ("f16", "bf16", "tf32"):
    for values in ("integers", "random", "all"):
        for registers in (False, True):
            add(t, t, "f32", 64, values, registers=registers)
for values in ("integers", "random", "all"):
    add("f16", "f16", "f16", 64, values)
for a in ("u8", "s8"):
    for b in ("u8", "s8"):
        add(a, b, "s32", 64, "all")
        add(a, b, "s32", 32, "all", registers=True)
# Sizes.
for n in (8, 16, 24, 40, 96, 128, 136, 192, 248, 256):
    add("e4m3", "e4m3", "f32", n, "random", registers=n % 16 == 0)
    if n in (8, 24, 128, 256):
        add("bf16", "bf16", "f32", n, "random", registers=n == 24)
        add("e4m3", "e5m2", "f16", n, "integers")
# Layouts; integers, so that no rounding hides anything.
for swizzle in SWIZZLES:
    for t in ("e4m3", "f16", "tf32", "s8"):
        result = "s32" if t == "s8" else "f32"
        n = 48 if t == "s8" else 40
        add(t, t, result, n, "integers", swizzle=swizzle)
        add(t, t, result, n, "integers", registers=True, swizzle=swizzle)
    other = {"none": "128B", "32B": "none", "64B": "32B", "128B": "64B"}[swizzle]
    add("e4m3", "e4m3", "f32", 40, "integers", swizzle=swizzle, b_swizzle=other)
    steps = {"none": 4, "32B": 2, "64B": 4, "128B": 8}[swizzle]
    add("e4m3", "e4m3", "f32", 48, "integers", swizzle=swizzle, steps=steps)
    add("e4m3", "e4m3", "f32", 48, "integers", swizzle=swizzle, steps=4, registers=True)
    add("bf16", "bf16", "f32", 48, "integers", swizzle=swizzle, steps=steps)
    for a_mn, b_mn in ((True, False), (False, True), (True, True)):
        add("bf16", "bf16", "f32", 64, "integers", swizzle=swizzle, a_mn=a_mn, b_mn=b_mn)
    add("f16", "f16", "f32", 128, "integers", swizzle=swizzle, a_mn=True, b_mn=True, steps=4)
    add("bf16", "bf16", "f32", 64, "integers", swizzle=swizzle, b_mn=True, registers=True)
for base in (128, 256, 896):
    add("e4m3", "e4m3", "f32", 32, "integers", base=base, steps=4)
add("e4m3", "e4m3", "f32", 32, "integers", base=128, swizzle="64B", steps=2)
# Flags.
for registers in (False, True):
    add("e4m3", "e4m3", "f32", 32, "random", registers=registers, scale_d=False)
    add("f16", "f16", "f32", 32, "random", registers=registers, scale_d=False)
    add("s8", "u8", "s32", 32, "all", registers=registers, scale_d=False)
    for negate in ((-1, 1), (1, -1), (-1, -1)):
        add("e5m2", "e4m3", "f32", 32, "integers", registers=registers, negate=negate)
        add("bf16", "bf16", "f32", 32, "integers", registers=registers, negate=negate)
# Sums over many instructions.
for registers in (False, True):
    add("e4m3", "e4m3", "f32", 64, "random", registers=registers, steps=8)
    add("bf16", "bf16", "f32", 64, "random", registers=registers, steps=8)


# ---- sparse A: in registers, beside B of no swizzle, whose bytes may be any elements


def add_sparse(a: str, b: str, result: str, selector: int, values: str) -> None:
    n, k = 16, 64 // (ELEMENT_BITS[a] // 8)
    name = f"wgmma.sp k{k} {result} {a} {b} selector {selector}, {values}"
    num_d = n // 2
    body = (
        ".reg .b32 %d<8>; .reg .b32 %f<5>; .reg .b64 %db; .reg .pred %scale;\n"
        "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mul.lo.u32 %r3, %r1, 8; mov.u32 %r7, 0;\n"
        "add.u32 %r4, %r2, %r3; cvt.u64.u32 %rd1, %r3; add.u64 %rd1, %rd1, %p2;"
        "ld.global.v2.u32 {%r10, %r11}, [%rd1]; st.shared.v2.u32 [%r4], {%r10, %r11};\n"
        "mad.wide.u32 %rd2, %r1, 4, %p3; mad.wide.u32 %rd3, %r1, 4, %p0;"
        "mad.wide.u32 %rd4, %r1, 4, %p1; mad.wide.u32 %rd5, %r1, 4, %p4;"
        "ld.global.u32 %f4, [%rd5];\n"
    )
    body += "".join(f"ld.global.u32 %d{i}, [%rd2+{512 * i}];" for i in range(num_d))
    body += "".join(f"ld.global.u32 %f{i}, [%rd4+{512 * i}];" for i in range(4))
    # Chunks of 16 bytes along K are 128 bytes apart, groups of 8 rows 512.
    descriptor = 128 >> 4 << 16 | 512 >> 4 << 32
    tail = "" if result == "s32" else ", 1, 1"
    tail += ", 0" if (ELEMENT_BITS[a] // 8) == 2 else ""
    accumulators = "{" + ", ".join(f"%d{i}" for i in range(num_d)) + "}"
    body += (
        "\nsetp.eq.u32 %scale, %r7, 0; fence.proxy.async.shared::cta; bar.sync 0;"
        "and.b32 %r4, %r2, 0x3ffff; shr.u32 %r4, %r4, 4; cvt.u64.u32 %db, %r4;"
        f"or.b64 %db, %db, {descriptor:#x}; wgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sp.sync.aligned.m64n{n}k{k}.{result}.{a}.{b} {accumulators},"
        f" {{%f0, %f1, %f2, %f3}}, %db, %f4, {selector}, %scale{tail};\n"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;\n"
    )
    body += "".join(f"st.global.u32 [%rd3+{512 * i}], %d{i};" for i in range(num_d))

    def arrays():
        source = Source(name)
        words = [
            elements(source, kind, num_bytes // (ELEMENT_BITS[kind] // 8), values).view("<u4")
            for kind, num_bytes in ((a, 4 * 512), (b, 64 * n))
        ]
        d = addends(source, result, 128 * num_d, values).view("<u4")
        return [np.zeros((num_d, 128), "<u4"), *words, d, metadata(source, a, 128)]

    FAMILY.add(name, body, arrays, 5, block=(128, 1, 1), shared_bytes=SHARED)


for t in ("f16", "bf16", "tf32"):
    for selector in (0, 1):
        for values in ("integers", "random"):
            add_sparse(t, t, "f32", selector, values)
for values in ("integers", "random"):
    add_sparse("e4m3", "e5m2", "f32", 0, values)
add_sparse("u8", "s8", "s32", 0, "all")
