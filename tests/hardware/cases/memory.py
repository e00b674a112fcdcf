"""Loads, stores, moves, special registers, address spaces, cp.async, hints."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..lanes import lane_case
from ..values import Source

FAMILY = Family("memory")
SHARED_OF_THREAD = "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, 64, %r2;\n"


def _random(name: str, num_bytes: int) -> np.ndarray:
    return Source(name).words(num_bytes, 8)


def _spaces(name: str, space: str) -> None:
    """Every width and vector: loads from one place, widened; stores to another, narrowed."""
    lines, rows = [], 0
    base = {"global": "%rd1", "generic": "%rd1", "shared": "%r3", "local": "%rd3", "const": "%rd4"}[
        space
    ]
    prefix = "" if space == "generic" else f".{space}"
    lines.append(
        SHARED_OF_THREAD + "mad.wide.u32 %rd1, %r1, 64, %p1; mad.wide.u32 %rd2, %r1, 64, %p0;"
        "mov.u64 %rd4, table; cvt.u64.u32 %rd5, %r1; mad.wide.u32 %rd4, %r1, 64, %rd4;"
    )
    if space == "local":
        lines.append("mov.u64 %rd3, frame;")
    if space in ("shared", "local"):  # first, bytes come there by stores of every width
        target = base
        for offset, form, registers in (
            (0, "v4.u32", "{%r10, %r11, %r12, %r13}"),
            (16, "v2.u64", "{%rd10, %rd11}"),
            (32, "u64", "%rd10"),
            (40, "v4.u16", "{%h1, %h2, %h3, %h4}"),
            (48, "v2.u32", "{%r10, %r11}"),
            (56, "u32", "%r10"),
            (60, "u16", "%h1"),
            (62, "u8", "%h1"),
            (63, "u8", "%h2"),
        ):
            lines.append(f"ld.global.{form} {registers}, [%rd1+{offset}];")
            lines.append(f"st.{space}.{form} [{target}+{offset}], {registers};")
    loads = [(t, "%r10", 4) for t in ("u8", "s8", "u16", "s16", "u32", "s32", "b32", "f32")]
    loads += [("u8", "%rd10", 8), ("s8", "%rd10", 8), ("s16", "%rd10", 8), ("s32", "%rd10", 8)]
    loads += [("u64", "%rd10", 8), ("f64", "%rd10", 8)]
    for t, register, size in loads:
        for offset in (0, 8, 40):
            lines.append(f"ld{prefix}.{t} {register}, [{base}+{offset}];")
            lines.append(f"st.global.b{8 * size} [%rd2+{rows * 4096}], {register};")
            rows += 1
    vectors = [
        ("v2.u8", "{%h1, %h2}", "mov.b32 %r10, {%h1, %h2};"),
        ("v2.s8", "{%h1, %h2}", "mov.b32 %r10, {%h1, %h2};"),
        ("v4.u8", "{%h1, %h2, %h3, %h4}", "mov.b64 %rd10, {%h1, %h2, %h3, %h4};"),
        ("v2.b16", "{%h1, %h2}", "mov.b32 %r10, {%h1, %h2};"),
        ("v4.s16", "{%h1, %h2, %h3, %h4}", "mov.b64 %rd10, {%h1, %h2, %h3, %h4};"),
        ("v2.b32", "{%r10, %r11}", "mov.b64 %rd10, {%r10, %r11};"),
        ("v4.f32", "{%r10, %r11, %r12, %r13}", "xor.b32 %r10, %r10, %r12; xor.b32 %r11, %r11, %r13;"
         "mov.b64 %rd10, {%r10, %r11};"),
        ("v2.b64", "{%rd10, %rd11}", "shl.b64 %rd11, %rd11, 1; xor.b64 %rd10, %rd10, %rd11;"),
    ]  # fmt: skip
    for form, registers, join in vectors:
        lines.append(f"ld{prefix}.{form} {registers}, [{base}+16]; mov.b64 %rd10, 0; {join}")
        if "%rd10" not in join:
            lines.append("cvt.u64.u32 %rd10, %r10;")
        lines.append(f"st.global.b64 [%rd2+{rows * 4096}], %rd10;")
        rows += 1
    module = ""
    if space == "const":
        words = ", ".join(str(int(word)) for word in Source("const table").words(1024))
        module = f".const .align 16 .b32 table[1024] = {{{words}}};"
    else:
        lines[0] = lines[0].replace("mov.u64 %rd4, table;", "mov.u64 %rd4, 0;")
    frame = ".local .align 16 .b8 frame[64];\n" if space == "local" else ""

    def arrays():
        return [np.zeros((rows, 4096), "u1"), _random(f"{name} in", 4096)]

    FAMILY.add(name, frame + "\n".join(lines), arrays, 2, block=(64, 1, 1),
               shared_bytes=4096, module=module)  # fmt: skip


for space in ("global", "generic", "shared", "local", "const"):
    _spaces(f"ld {space}", space)


def _stores() -> None:
    """Narrowing stores; hints, volatile, relaxed and release forms; 128-bit registers."""
    lines = ["mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 64, %p1;"
             " mad.wide.u32 %rd2, %r1, 64, %p0;",
             "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd1]; "
             "ld.global.v2.u64 {%rd10, %rd11}, [%rd1+16];",
             "createpolicy.fractional.L2::evict_last.b64 %rd20, 1.0;"]  # fmt: skip
    forms = [
        ("st.global.u8", "%r10"), ("st.global.u8", "%rd10"), ("st.global.u16", "%r11"),
        ("st.global.u32", "%rd11"), ("st.global.wb.u32", "%r10"), ("st.global.cg.u32", "%r11"),
        ("st.global.cs.u64", "%rd10"), ("st.global.wt.u32", "%r12"),
        ("st.volatile.global.u32", "%r13"),
        ("st.relaxed.gpu.global.u32", "%r10"), ("st.release.sys.global.u64", "%rd10"),
        ("st.relaxed.cta.u32", "%r12"), ("st.release.cluster.global.u32", "%r13"),
        ("st.global.L1::no_allocate.u32", "%r10"), ("st.weak.global.u32", "%r11"),
        ("st.global.v4.u32", "{%r13, %r12, %r11, %r10}"), ("st.v2.u64", "{%rd11, %rd10}"),
        ("st.mmio.relaxed.sys.global.u32", "%r10"),
    ]  # fmt: skip
    rows = 0
    for form, value in forms:
        lines.append(f"{form} [%rd2+{rows * 2048}], {value};")
        rows += 1
    lines.append(f"st.global.L2::cache_hint.u32 [%rd2+{rows * 2048}], %r10, %rd20;")
    rows += 1
    loads = ["ld.global.nc", "ld.global.ca", "ld.global.cg", "ld.global.cs", "ld.global.lu",
             "ld.global.cv",
             "ld.volatile.global", "ld.relaxed.gpu.global", "ld.acquire.gpu.global",
             "ld.acquire.cta",
             "ld.relaxed.sys", "ld.global.nc.L1::no_allocate.L2::128B", "ld.weak.global",
             "ldu.global",
             "ld.mmio.relaxed.sys.global", "ld.acquire.cluster.global"]  # fmt: skip
    for index, form in enumerate(loads):
        lines.append(f"{form}.u32 %r20, [%rd1+{4 * (index % 16)}];")
        lines.append(f"st.global.u32 [%rd2+{rows * 2048}], %r20;")
        rows += 1
    lines.append(
        f"ld.global.L2::cache_hint.u64 %rd21, [%rd1+8], %rd20; "
        f"st.global.u64 [%rd2+{rows * 2048}], %rd21;"
    )
    rows += 1
    lines.append(
        "ld.global.b128 %rq1, [%rd1+32]; mov.b128 {%rd22, %rd23}, %rq1; "
        "mov.b128 %rq2, {%rd23, %rd22};"
        f"st.global.b128 [%rd2+{rows * 2048}], %rq2;"
    )
    rows += 1

    def arrays():
        return [np.full((rows, 2048), 0xEE, "u1"), _random("stores", 2048)]

    FAMILY.add("forms of ld and st", "\n".join(lines), arrays, 2)


_stores()


def lanes(name, texts, out_bits, *kinds, **options):
    lane_case(FAMILY, name, texts, out_bits, kinds, **options)


lanes("pack and unpack 32", [
    "mov.b32 {%h1, %h2}, $a; mov.b32 $d, {%h2, %h1};",
    "mov.b32 {%h1, _}, $a; cvt.u32.u16 $d, %h1;",
    ".reg .b8 %y<5>; mov.b32 {%y0, %y1, %y2, %y3}, $a; mov.b32 $d, {%y3, %y1, %y2, %y0};",
    "mov.b16 %h1, 0x1234; mov.b32 {%h2, %h3}, $a; mov.b32 $d, {%h3, %h1};",
    "mov.u32 $d, 0xffffffff; mov.b32 $d, $a;",
], 32, "u32")  # fmt: skip
lanes("pack and unpack 64", [
    "mov.b64 {%r1, %r2}, $a; mov.b64 $d, {%r2, %r1};",
    "mov.b64 {%h1, %h2, %h3, %h4}, $a; mov.b64 $d, {%h4, %h1, %h3, %h2};",
    "mov.b64 {_, %r2}, $a; cvt.u64.u32 $d, %r2;",
    "mov.f64 $d, $a;",
], 64, "u64")  # fmt: skip


def _special_registers() -> None:
    names = [f"%{group}.{axis}" for group in (
        "tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid",
        "cluster_nctaid"
    ) for axis in "xyz"]  # fmt: skip
    names += ["%laneid", "%cluster_ctarank", "%cluster_nctarank", "%dynamic_smem_size"]
    names += [f"%lanemask_{kind}" for kind in ("eq", "le", "lt", "ge", "gt")]
    lines = [
        # thread number in the grid: CTAs by x, y, z, threads by x, y, z
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z; "
        "mov.u32 %r4, %nctaid.x;",
        "mov.u32 %r5, %nctaid.y; mad.lo.u32 %r6, %r3, %r5, %r2; mad.lo.u32 %r6, %r6, %r4, %r1;",
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ntid.x;",
        "mov.u32 %r5, %ntid.y; mad.lo.u32 %r7, %r3, %r5, %r2; mad.lo.u32 %r7, %r7, %r4, %r1;",
        "mad.lo.u32 %r6, %r6, 60, %r7; mad.wide.u32 %rd1, %r6, 4, %p0;",
    ]
    for row, name in enumerate(names):
        lines.append(f"mov.u32 %r8, {name}; st.global.u32 [%rd1+{row * 24 * 60 * 4}], %r8;")
    row = len(names)
    lines.append(
        "selp.u32 %r8, 1, 0, %is_explicit_cluster;"
        if False
        else "mov.pred %c1, %is_explicit_cluster; selp.u32 %r8, 1, 0, %c1;"
    )
    lines.append(f"st.global.u32 [%rd1+{row * 24 * 60 * 4}], %r8;")
    names.append("%is_explicit_cluster")
    FAMILY.add(
        "special registers",
        "\n".join(lines),
        lambda: [np.zeros((len(names), 24 * 60), "<u4")],
        1,
        grid=(4, 3, 2),
        block=(5, 4, 3),
        cluster=(2, 1, 2),
        shared_bytes=256,
        rows=tuple(names),
    )


_special_registers()


def _address_spaces() -> None:
    """Conversions there and back, isspacep, generic access to every space, mapa and its inverse."""
    body = (
        SHARED_OF_THREAD
        + """
.local .align 8 .b8 frame[16];
mov.u32 %r4, %ctaid.x; mad.lo.u32 %r5, %r4, 32, %r1; mad.wide.u32 %rd1, %r5, 4, %p0;
cvt.u64.u32 %rd2, %r3; cvta.shared.u64 %rd3, %rd2;
mov.u64 %rd4, frame; cvta.local.u64 %rd5, %rd4; cvta.global.u64 %rd6, %p0;
mov.u64 %rd7, constant; cvta.const.u64 %rd7, %rd7;
mov.u32 %r6, 0;
"""
        + "".join(
            f"isspacep.{space} %c1, {register}; selp.u32 %r7, {1 << (5 * i + j)}, 0, %c1;"
            "or.b32 %r6, %r6, %r7;\n"
            for i, register in enumerate(("%rd3", "%rd5", "%rd6", "%rd7"))
            for j, space in enumerate(
                ("global", "shared::cta", "shared::cluster", "local", "const")
            )
        )
        + """
st.global.u32 [%rd1], %r6;
mad.lo.u32 %r8, %r5, 3, 100; st.u32 [%rd3], %r8; ld.shared.u32 %r9, [%r3];
st.global.u32 [%rd1+256], %r9;
add.u32 %r8, %r8, 7; st.u32 [%rd5+4], %r8; ld.local.u32 %r9, [%rd4+4];
st.global.u32 [%rd1+512], %r9;
cvta.to.shared.u64 %rd8, %rd3; cvt.u32.u64 %r9, %rd8; sub.u32 %r9, %r9, %r2;
st.global.u32 [%rd1+768], %r9;
cvta.to.local.u64 %rd8, %rd5; sub.u64 %rd8, %rd8, %rd4; cvt.u32.u64 %r9, %rd8;
st.global.u32 [%rd1+1024], %r9;
ld.u32 %r9, [%rd7+4]; st.global.u32 [%rd1+1280], %r9;
xor.b32 %r10, %r4, 1; mapa.shared::cluster.u32 %r11, %r3, %r10;
getctarank.shared::cluster.u32 %r12, %r11;
st.global.u32 [%rd1+1536], %r12;
mapa.u64 %rd9, %rd3, %r10; getctarank.u64 %r12, %rd9; st.global.u32 [%rd1+1792], %r12;
isspacep.shared::cluster %c1, %rd9; isspacep.shared::cta %c2, %rd9; selp.u32 %r13, 1, 0, %c1;
selp.u32 %r14, 2, 0, %c2; or.b32 %r13, %r13, %r14; st.global.u32 [%rd1+2048], %r13;
getctarank.shared::cluster.u32 %r12, %r3; st.global.u32 [%rd1+2304], %r12;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.shared::cluster.u32 %r15, [%r11]; st.global.u32 [%rd1+2560], %r15; ld.u32 %r15, [%rd9];
st.global.u32 [%rd1+2816], %r15;
sub.u32 %r16, %r11, %r3; st.global.u32 [%rd1+3072], %r16;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
    )
    FAMILY.add(
        "address spaces",
        body,
        lambda: [np.zeros((13, 64), "<u4")],
        1,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        shared_bytes=2048,
        module=".const .align 4 .b32 constant[2] = {17, 23};",
        rows=(
            "isspacep", "generic store to shared", "generic store to local", "cvta.to.shared",
            "cvta.to.local", "constant", "mapa u32", "mapa u64", "isspacep of a peer", "own rank",
            "peer's word", "the same, generic", "distance of the peer's address",
        ),
    )  # fmt: skip


_address_spaces()


def _asynchronous_copies() -> None:
    lines = [
        SHARED_OF_THREAD + "mad.wide.u32 %rd1, %r1, 64, %p1; mad.wide.u32 %rd2, %r1, 64, %p0;",
        *(f"st.shared.v4.u32 [%r3+{16 * i}], {{-1, -1, -1, -1}};" for i in range(4)),
        "and.b32 %r5, %r1, 15; setp.gt.u32 %c1, %r1, 20; and.b32 %r6, %r1, 7; min.u32 %r6, %r6, 4;"
        "min.u32 %r7, %r6, 8; bar.sync 0;",
        "cp.async.cg.shared.global [%r3], [%rd1], 16;",
        "cp.async.ca.shared.global [%r3+16], [%rd1+16], 4;",
        "cp.async.ca.shared::cta.global [%r3+24], [%rd1+40], 8;",
        "cp.async.commit_group;",
        "cp.async.ca.shared.global [%r3+32], [%rd1+32], 16, %r5;",
        "cp.async.ca.shared.global [%r3+20], [%rd1+20], 4, %r6;",
        "cp.async.commit_group;",
        "cp.async.cg.shared.global [%r3+48], [%rd1+48], 16, %c1;",
        "cp.async.wait_group 1; ld.shared.u32 %r8, [%r3+4]; st.global.u32 [%rd2], %r8;",
        "cp.async.wait_all; bar.sync 0;",
        *(
            f"ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r3+{16 * i}];"
            f"st.global.v4.u32 [%rd2+{4096 + 16 * i}], {{%r10, %r11, %r12, %r13}};"
            for i in range(4)
        ),
    ]
    FAMILY.add("cp.async", "\n".join(lines),
               lambda: [np.zeros((2, 4096), "u1"), _random("cp", 4096)], 2,
               block=(64, 1, 1), shared_bytes=4096)  # fmt: skip


_asynchronous_copies()


def _hints() -> None:
    """Instructions that may not change anything, between a store and a load."""
    hints = [
        "prefetch.global.L1 [%rd1];", "prefetch.global.L2 [%rd1];", "prefetchu.L1 [%rd1];",
        "prefetch.global.L2::evict_last [%rd1];"
        "", "applypriority.global.L2::evict_normal [%rd5], 128;",
        "cp.async.bulk.prefetch.L2.global [%rd5], 64;", "membar.cta;", "membar.gl;", "membar.sys;",
        "fence.sc.gpu;", "fence.acq_rel.cluster;", "fence.acq_rel.sys;", "fence.proxy.alias;",
        "fence.proxy.async;", "fence.proxy.async.global;", "fence.proxy.async.shared::cta;",
        "griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "nanosleep.u32 20;"
        "", "pmevent 3;",
        "createpolicy.range.global.L2::evict_first.L2::evict_unchanged.b64 %rd7, [%rd5], 128, "
        "4096;",
        "createpolicy.fractional.L2::evict_first.b64 %rd7, 0.5;",
    ]  # fmt: skip
    body = (
        "mov.u32 %r1, %tid.x; mad.wide.u32 %rd1, %r1, 4, %p1; mad.wide.u32 %rd2, %r1, 4, %p0;"
        "mov.b64 %rd5, %p1; ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 5; "
        "st.global.u32 [%rd2], %r2;\n"
        + "\n".join(hints)
        + "\nld.global.u32 %r3, [%rd2]; mul.lo.u32 %r3, %r3, 3; st.global.u32 [%rd2+128], %r3;"
        # What is discarded may not be read; it is overwritten.
        "add.u64 %rd6, %p0, 1024; setp.eq.u32 %c1, %r1, 0; @%c1 discard.global.L2 [%rd6], 128;"
        "bar.sync 0; mad.wide.u32 %rd8, %r1, 4, %rd6; st.global.u32 [%rd8], %r1;"
    )
    FAMILY.add("hints", body, lambda: [np.zeros(512, "<u4"), Source("hints").words(2048)], 2)


_hints()
