"""cp.async.bulk and cp.reduce.async.bulk: bytes between global memory, the own CTA and the "
"cluster."""

from __future__ import annotations

import numpy as np

from ..case import Family
from ..values import Source, bits_of, operands

FAMILY = Family("bulk")
CLUSTER_SYNC = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def wait(label: str, parity: int, barrier: str = "%r3") -> str:
    return (
        f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %c9, [{barrier}], {parity};"
        f" @!%c9 bra {label};\n"
    )


def head(num_bytes: int) -> str:
    """128 threads; shared memory holds `num_bytes` of data, then an mbarrier at %r3."""
    return (
        f"mov.u32 %r1, %tid.x; mov.u32 %r2, smem; add.u32 %r3, %r2, {num_bytes}; "
        f"mov.u32 %r4, %ctaid.x;"
        f"mul.wide.u32 %rd1, %r4, {num_bytes}; add.u64 %rd1, %rd1, %p0; "
        f"mad.wide.u32 %rd1, %r1, 4, %rd1;"
        "mad.lo.u32 %r5, %r1, 4, %r2; setp.eq.u32 %c1, %r1, 0;"
        "@%c1 mbarrier.init.shared::cta.b64 [%r3], 1; fence.mbarrier_init.release.cluster;\n"
    )


def fill(num_bytes: int, value: str = "0xa5a5a5a5") -> str:
    """A pattern everywhere, so that it shows what is not written; then the fence and a barrier."""
    return (
        f"mov.u32 %r6, {value};"
        + "".join(f"st.shared.u32 [%r5+{at}], %r6;" for at in range(0, num_bytes, 512))
        + "fence.proxy.async.shared::cta; bar.sync 0;\n"
    )


def dump(num_bytes: int) -> str:
    return "".join(
        f"ld.shared.u32 %r6, [%r5+{at}]; st.global.u32 [%rd1+{at}], %r6;"
        for at in range(0, num_bytes, 512)
    )


BYTES = 8192
for space in ("shared::cluster", "shared::cta"):
    body = head(BYTES) + fill(BYTES) + "@!%c1 bra WAIT;"
    copies = [(0, 0, 16), (32, 16, 48), (512, 4096, 1024), (2048, 1040, 4112), (7168, 64, 1008)]
    body += f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {sum(c[2] for c in copies)};"
    for to, start, size in copies:
        body += (
            f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [%r2+{to}], "
            f"[%p1+{start}], {size}, [%r3];"
        )
    body += wait("WAIT", 0) + dump(BYTES)
    FAMILY.add(f"global to {space}", body,
               lambda: [np.zeros(BYTES, "u1"), Source("bulk").words(BYTES, 8)], 2,
               block=(128, 1, 1), shared_bytes=BYTES + 16)  # fmt: skip

body = head(BYTES).replace("add.u64 %rd1, %rd1, %p0;", "add.u64 %rd1, %rd1, %p1;")
body += "".join(
    f"ld.global.u32 %r6, [%rd1+{at}]; st.shared.u32 [%r5+{at}], %r6;" for at in range(0, BYTES, 512)
)
body += "fence.proxy.async.shared::cta; bar.sync 0; @!%c1 bra END;"
for index, (to, start, size) in enumerate(
    [(16, 0, 16), (48, 1024, 2048), (4096, 4096, 4096), (2512, 64, 80)]
):
    hint = "createpolicy.fractional.L2::evict_first.b64 %rd7, 1.0;" if index == 2 else ""
    body += (
        hint + "cp.async.bulk.global.shared::cta.bulk_group" + (".L2::cache_hint" if hint else "")
    )
    body += f" [%p0+{to}], [%r2+{start}], {size}" + (", %rd7;" if hint else ";")
    body += "cp.async.bulk.commit_group;" if index % 2 else ""
body += (
    "cp.async.bulk.wait_group 1; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0; END:"
)
FAMILY.add("shared to global", body,
           lambda: [np.full(BYTES, 0x5A, "u1"), Source("bulk out").words(BYTES, 8)], 2,
           block=(128, 1, 1), shared_bytes=BYTES + 16)  # fmt: skip

# To another CTA of the cluster, and from global memory to several at once.
SMALL = 2048
body = (
    head(SMALL)
    + fill(SMALL, "%r4")
    + CLUSTER_SYNC
    + "mov.u32 %r10, %cluster_ctarank; @!%c1 bra WAIT;"
)
body += (
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 528; add.u32 %r11, %r10, 1; "
    "and.b32 %r11, %r11, 3;"
    "mapa.shared::cluster.u32 %r12, %r2, %r11; mapa.shared::cluster.u32 %r13, %r3, %r11;"
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r12+512], [%r2], "
    "512, [%r13];"
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r12+1600], "
    "[%r2+256], 16, [%r13];"
)
body += wait("WAIT", 0) + dump(SMALL) + CLUSTER_SYNC
FAMILY.add("to another CTA", body, lambda: [np.zeros(4 * SMALL, "u1")], 1, block=(128, 1, 1),
           grid=(4, 1, 1), cluster=(4, 1, 1), shared_bytes=SMALL + 16)  # fmt: skip

body = head(SMALL) + fill(SMALL) + "mov.u32 %r10, %cluster_ctarank; @!%c1 bra READY;"
# Rank r is a receiver of the masks that have its bit: 256 bytes of each.
masks = (0b1111, 0b0101, 0b1000, 0b0110)
body += "mov.u32 %r12, 0;"
for mask in masks:
    body += (
        f"mov.u32 %r13, {mask}; shr.u32 %r13, %r13, %r10; and.b32 %r13, %r13, 1; "
        "mad.lo.u32 %r12, %r13, 256, %r12;"
    )
body += "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], %r12; READY:" + CLUSTER_SYNC
body += "setp.eq.u32 %c2, %r10, 1; and.pred %c2, %c2, %c1; @!%c2 bra WAIT;"
for index, mask in enumerate(masks):
    body += (
        f"mov.u16 %h1, {mask}; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f".multicast::cluster [%r2+{256 + 384 * index}], [%p1+{512 * index}], 256, [%r3], %h1;"
    )
body += wait("WAIT", 0) + dump(SMALL) + CLUSTER_SYNC
FAMILY.add("multicast", body,
           lambda: [np.zeros(4 * SMALL, "u1"), Source("multicast").words(2048, 8)], 2,
           block=(128, 1, 1), grid=(4, 1, 1), cluster=(4, 1, 1),
           shared_bytes=SMALL + 16)  # fmt: skip

# ---- reductions: what lies in memory against what comes, element by element

TO_GLOBAL = [
    *(("add", t) for t in ("u32", "s32", "u64", "f16", "bf16", "f32", "f64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16", "bf16")),
    ("inc", "u32"), ("dec", "u32"),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")),
]  # fmt: skip
TO_CLUSTER = [
    *(("add", t) for t in ("u32", "s32", "u64")),
    *((op, t) for op in ("min", "max") for t in ("u32", "s32")),
    ("inc", "u32"), ("dec", "u32"),
    *((op, t) for op in ("and", "or", "xor") for t in ("b32",)),
]  # fmt: skip


def _pairs(op: str, t: str) -> list[np.ndarray]:
    kind = "u" + t[1:] if t[0] in "us" or t in ("b32", "b64") else t
    num = BYTES * 8 // bits_of(kind)
    values = operands(f"bulk {op} {t}", (kind, kind), num)
    return [array.view("u1") for array in values]


for op, t in TO_GLOBAL:
    body = head(BYTES).replace("add.u64 %rd1, %rd1, %p0;", "add.u64 %rd1, %rd1, %p1;")
    body += "".join(
        f"ld.global.u32 %r6, [%rd1+{at}]; st.shared.u32 [%r5+{at}], %r6;"
        for at in range(0, BYTES, 512)
    )
    noftz = ".noftz" if op == "add" and t in ("f16", "bf16") else ""
    body += (
        "fence.proxy.async.shared::cta; bar.sync 0; @!%c1 bra END;"
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{noftz}.{t} [%p0], [%r2], {BYTES};"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"
    )
    FAMILY.add(f"{op} {t} to global", body, lambda op=op, t=t: _pairs(op, t), 2, block=(128, 1, 1),
               shared_bytes=BYTES + 16)  # fmt: skip
for op, t in TO_CLUSTER:
    half = BYTES // 2
    body = head(BYTES)
    # The lower half of shared memory is the source, the upper the peer's operand.
    for at in range(0, half, 512):
        body += (
            f"mad.wide.u32 %rd3, %r1, 4, %p1; ld.global.u32 %r6, [%rd3+{at}]; "
            f"st.shared.u32 [%r5+{at}], %r6;"
        )
        body += (
            f"mad.wide.u32 %rd3, %r1, 4, %p2; ld.global.u32 %r6, [%rd3+{at}]; "
            f"st.shared.u32 [%r5+{half + at}], %r6;"
        )
    body += (
        f"fence.proxy.async; @%c1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], {half};"
        + CLUSTER_SYNC
        + "mov.u32 %r10, %cluster_ctarank; xor.b32 %r11, %r10, 1;"
        "mapa.shared::cluster.u32 %r12, %r2, %r11;"
        "mapa.shared::cluster.u32 %r13, %r3, %r11; @!%c1 bra WAIT;"
        f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{t}"
        f" [%r12+{half}], [%r2], {half}, [%r13];"
    )
    body += wait("WAIT", 0) + dump(BYTES) + CLUSTER_SYNC

    def arrays(op=op, t=t):
        a, b = _pairs(op, t)
        return [np.zeros(2 * BYTES, "u1"), b[:4096].copy(), a[:4096].copy()]

    FAMILY.add(f"{op} {t} to another CTA", body, arrays, 3, block=(128, 1, 1), grid=(2, 1, 1),
               cluster=(2, 1, 1), shared_bytes=BYTES + 16)  # fmt: skip
