"""Barriers of CTAs and clusters, seen by the data that they hand over; "
"distributed shared memory."""

from __future__ import annotations

import numpy as np

from ..case import Family

FAMILY = Family("barriers")
THREAD = (
    "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, 4, %r2; shr.u32 %r4, %r1, 5;"
    "mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ntid.x; mad.lo.u32 %r7, %r5, %r6, %r1;"
    "mad.wide.u32 %rd1, %r7, 4, %p0;\n"
)


def add(name: str, body: str, words: int, num_rows: int = 1, **options) -> None:
    FAMILY.add(name, THREAD + body, lambda: [np.zeros((num_rows, words), "<u4")], 1,
               shared_bytes=8192, **options)  # fmt: skip


# Each thread reads what another wrote, eight times over.
for name, barrier in (
    ("bar.sync", "bar.sync 0;"),
    ("bar.sync with a count", "bar.sync 3, 128;"),
    ("barrier.sync", "barrier.sync 15;"),
    ("barrier.sync.aligned with a count", "barrier.sync.aligned 9, 128;"),
    ("bar.sync by registers", "mov.u32 %r20, 7; mov.u32 %r21, 128; bar.sync %r20, %r21;"),
    ("bar.cta.sync", "bar.cta.sync 1; barrier.cta.sync 2, 128;"),
):
    body = "mul.lo.u32 %r10, %r1, 2654435761; "
    for step in range(8):
        body += (
            f"st.shared.u32 [%r3], %r10; {barrier} add.u32 %r11, %r1, {37 * step + 11};"
            "and.b32 %r11, %r11, 127; mad.lo.u32 %r12, %r11, 4, %r2; ld.shared.u32 %r13, [%r12];"
            f"mad.lo.u32 %r10, %r10, 3, %r13; {barrier}\n"
        )
    add(name, body + "st.global.u32 [%rd1], %r10;", 128, block=(128, 1, 1))

# Two warps produce and only arrive, two consume; a chain through all sixteen barriers.
add(
    "producers and consumers",
    "setp.lt.u32 %c1, %r1, 64; and.b32 %r20, %r1, 63; mad.lo.u32 %r21, %r20, 4, %r2; "
    "mov.u32 %r10, %r1;"
    + "".join(
        f"@!%c1 bra CONSUME{k}; mad.lo.u32 %r10, %r10, 5, {k}; "
        f"st.shared.u32 [%r21+{256 * k}], %r10;"
        f"bar.arrive {2 * k + 1}, 128; bra DONE{k};"
        f"CONSUME{k}: bar.sync {2 * k + 1}, 128; ld.shared.u32 %r22, [%r21+{256 * k}];"
        f"mad.lo.u32 %r10, %r10, 7, %r22; DONE{k}:\n"
        for k in range(7)
    )
    + "st.global.u32 [%rd1], %r10;",
    128,
    block=(128, 1, 1),
)
# Predicates are combined over the CTA, or over the two warps of a named barrier.
reductions = []
for prefix in ("bar", "barrier", "barrier.cta"):
    for limit in (0, 1, 77, 128):
        for op in ("popc.u32", "and.pred", "or.pred"):
            for count in ("", ", 128"):
                reductions.append((prefix, op, limit, count))
body = ""
for row, (prefix, op, limit, count) in enumerate(reductions):
    body += f"setp.lt.u32 %c1, %r1, {limit};"
    negate = "!" if row % 3 == 2 else ""
    if op == "popc.u32":
        body += f"{prefix}.red.{op} %r10, {row % 16}{count}, {negate}%c1;"
    else:
        body += f"{prefix}.red.{op} %c2, {row % 16}{count}, {negate}%c1; selp.u32 %r10, 1, 0, %c2;"
    body += f"st.global.u32 [%rd1+{row * 512}], %r10;\n"
add("reductions", body, 128, len(reductions), block=(128, 1, 1),
    rows=tuple(" ".join(map(str, r)) for r in reductions))  # fmt: skip
add(
    "reductions of two warps",
    "shr.u32 %r20, %r1, 6; add.u32 %r20, %r20, 1; and.b32 %r21, %r1, 3; "
    "setp.eq.u32 %c1, %r21, %r20;"
    "bar.red.popc.u32 %r10, %r20, 64, %c1; st.global.u32 [%rd1], %r10;"
    "bar.red.or.pred %c2, %r20, 64, %c1; selp.u32 %r10, 5, 6, %c2; st.global.u32 [%rd1+512], %r10;",
    128,
    2,
    block=(128, 1, 1),
)
# Warps that have ended are not waited for.
add(
    "after warps have ended",
    "st.shared.u32 [%r3], %r7; bar.sync 0; setp.ge.u32 %c1, %r1, 64; @%c1 exit;"
    "xor.b32 %r10, %r1, 32; mad.lo.u32 %r11, %r10, 4, %r2; add.u32 %r12, %r7, 1000;"
    "bar.sync 0; st.shared.u32 [%r3], %r12; bar.sync 0; ld.shared.u32 %r13, [%r11];"
    "ld.shared.u32 %r14, [%r11+256]; add.u32 %r13, %r13, %r14; st.global.u32 [%rd1], %r13;",
    128,
    block=(128, 1, 1),
)

# ---- clusters

ARRIVALS = (
    ("aligned", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"),
    ("plain", "barrier.cluster.arrive; barrier.cluster.wait;"),
    ("release, acquire", "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"),
    ("relaxed", "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned;"
     "barrier.cluster.wait.acquire.aligned;"),
)  # fmt: skip
for size, (name, barrier) in zip((2, 4, 8, 4), ARRIVALS, strict=True):
    body = "mov.u32 %r30, %cluster_ctarank; mul.lo.u32 %r10, %r7, 2654435761;"
    for step in range(4):
        body += (
            f"st.shared.u32 [%r3], %r10; {barrier} add.u32 %r31, %r30, {step + 1};"
            f"and.b32 %r31, %r31, {size - 1}; mapa.shared::cluster.u32 %r32, %r3, %r31;"
            "ld.shared::cluster.u32 %r13, [%r32];"
            f"mad.lo.u32 %r10, %r10, 3, %r13; {barrier}\n"
        )
    body += f"st.global.u32 [%rd1], %r10; {barrier}"
    add(f"cluster barrier, {name}", body, 64 * 2 * size, block=(64, 1, 1), grid=(2 * size, 1, 1),
        cluster=(size, 1, 1))  # fmt: skip

# Stores, vectors, atomics into another CTA's shared memory, by 32-bit and generic addresses.
SYNC = ARRIVALS[0][1]
add(
    "distributed shared memory",
    "mov.u32 %r30, %cluster_ctarank; mov.u32 %r10, 0;"
    "st.shared.u32 [%r3], %r10; st.shared.u32 [%r3+256], %r10; st.shared.u32 [%r3+2048], %r10;"
    "st.shared.u32 [%r3+4096], %r10;" + SYNC + "add.u32 %r31, %r30, 1; and.b32 %r31, %r31, 3;"
    "mapa.shared::cluster.u32 %r32, %r2, %r31; mad.lo.u32 %r33, %r1, 8, %r32;"
    "cvt.u64.u32 %rd5, %r2; cvta.shared.u64 %rd5, %rd5; mapa.u64 %rd6, %rd5, %r31;"
    "mad.wide.u32 %rd7, %r1, 4, %rd6;"
    "st.shared::cluster.v2.u32 [%r33], {%r7, %r30}; st.u32 [%rd7+2048], %r7;"
    "atom.shared::cluster.add.u32 %r40, [%r32+4096], 3; "
    "red.shared::cluster.max.u32 [%r32+4100], %r7;"
    "atom.or.b32 %r41, [%rd6+4104], %r30; "
    "red.relaxed.cluster.shared::cluster.add.u32 [%r32+4108], %r1;"
    + SYNC
    + "mad.lo.u32 %r34, %r1, 8, %r2; ld.shared.v2.u32 {%r35, %r36}, [%r34];"
    "ld.shared.u32 %r37, [%r3+2048];"
    "ld.shared.v4.u32 {%r42, %r43, %r44, %r45}, [%r2+4096];"
    "st.global.u32 [%rd1], %r35; st.global.u32 [%rd1+1024], %r36; st.global.u32 [%rd1+2048], %r37;"
    "st.global.u32 [%rd1+3072], %r42; st.global.u32 [%rd1+4096], %r43; "
    "st.global.u32 [%rd1+5120], %r44;"
    "st.global.u32 [%rd1+6144], %r45;",
    256,
    7,
    block=(64, 1, 1),
    grid=(4, 1, 1),
    cluster=(4, 1, 1),
)  # fmt: skip
