"""One small kernel for each family of instructions that access memory, as PTX.

In all of them %r1 is the address of 512 bytes of shared memory, %p0 that of 256 bytes of global
memory and %p1 that of a tensor map of these. %r2 (shared) and %rd1 (global) are addresses of which
an access is wrong; for `in_range` they are right ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from warpcheck import Machine

from .device import aligned
from .raw_ptx import entry
from .tensor_images import tensor_map

SHARED_BYTES, GLOBAL_BYTES = 512, 256
MODULE = f".shared .align 1024 .b8 s[{SHARED_BYTES}];\n"

FILL = "st.bulk.weak.shared::cta [%r1], 512, 0; fence.proxy.async;\n"
BARRIER = """
mbarrier.init.shared.b64 [%r1], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], BYTES;
"""
WAIT = "L: mbarrier.try_wait.parity.shared::cta.b64 %c1, [%r1], 0; @!%c1 bra L;\n"
GROUP = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;\n"
TENSOR_MEMORY = """
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
bar.warp.sync -1;
ld.shared.u32 %r6, [%r1];
"""
LEADER = "mov.u32 %r9, %tid.x; setp.eq.u32 %c3, %r9, 0;\n"
# Of an operand at %r2: bits of SM90 in %rd5, of SM100 in %rd6.
DESCRIPTORS = """
cvt.u64.u32 %rd5, %r2; and.b64 %rd5, %rd5, 262143; shr.u64 %rd5, %rd5, 4;
or.b64 %rd6, %rd5, 70368744177664;
"""


def counted(copy: str, num_bytes: int = 64) -> str:
    """With an mbarrier that counts its bytes."""
    return BARRIER.replace("BYTES", str(num_bytes)) + copy + WAIT


def wmma_registers(first: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(8)) + "}"


@dataclass(frozen=True)
class Family:
    body: str
    threads: int = 1
    needs_checks: bool = False  # without them nothing is looked at


TO_SHARED = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
WITHIN = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
REDUCE_WITHIN = (
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 "
)
TO_GLOBAL = "cp.async.bulk.global.shared::cta.bulk_group "
LOAD = "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
STORE = "cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group "
MMA = "tcgen05.mma.cta_group::1.kind::f16 "
SPARSE_MMA = "tcgen05.mma.sp.cta_group::1.kind::f16 "
STATIONARY_MMA = "tcgen05.mma.ws.cta_group::1.kind::f16 "
SHAPE = 4 << 24 | 1 << 17 | 1 << 4  # M = 64, N = 8, FP32 results

FAMILIES: dict[str, Family] = {
    "ld.shared": Family("ld.shared.u32 %r3, [%r2];"),
    "ld.shared.v4": Family("ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2];"),
    "ld.volatile.shared": Family("ld.volatile.shared.u32 %r2, [%r2];"),
    "ld generic": Family("cvt.u64.u32 %rd3, %r2; cvta.shared.u64 %rd4, %rd3; ld.u32 %r3, [%rd4];"),
    "st.shared": Family("st.shared.u32 [%r2], %r0;"),
    "atom.shared": Family("atom.shared.add.u32 %r3, [%r2], 1;"),
    "atom.shared.cas": Family("atom.shared.cas.b32 %r2, [%r2], 1, 2;"),
    "red.shared": Family("red.shared.add.u32 [%r2], 1;"),
    "ld.global": Family("ld.global.u32 %r3, [%rd1];"),
    "ld.global.v8": Family("ld.global.v8.u32 {%r3, %r4, %r5, %r6, %r7, %r8, %r9, %r10}, [%rd1];"),
    "st.global": Family("st.global.u32 [%rd1], %r0;"),
    "atom.global": Family("atom.global.add.u32 %r3, [%rd1], 1;"),
    "red.global": Family("red.global.add.u32 [%rd1], 1;"),
    "st.bulk": Family("st.bulk.weak.shared::cta [%r2], 64, 0;"),
    "cp.async, destination": Family(
        "cp.async.ca.shared.global [%r2], [%p0], 16; cp.async.wait_all;"
    ),
    "cp.async, source": Family("cp.async.ca.shared.global [%r1], [%rd1], 16; cp.async.wait_all;"),
    "cp.async.mbarrier": Family("cp.async.mbarrier.arrive.shared.b64 [%r2];"),
    "bulk load, destination": Family(counted(TO_SHARED + "[%r2], [%p0], 64, [%r1];")),
    "bulk load, source": Family(counted(TO_SHARED + "[%r1+64], [%rd1], 64, [%r1];")),
    "bulk load, mbarrier": Family(counted(TO_SHARED + "[%r1+64], [%p0], 64, [%r2];")),
    "bulk load, size": Family(counted(TO_SHARED + "[%r1+64], [%p0], 4294967280, [%r1];")),
    "bulk copy in shared memory": Family(FILL + counted(WITHIN + "[%r2], [%r1+64], 64, [%r1];")),
    "bulk reduction in shared memory": Family(
        FILL + counted(REDUCE_WITHIN + "[%r2], [%r1+64], 64, [%r1];")
    ),
    "bulk store, source": Family(TO_GLOBAL + "[%p0], [%r2], 64;" + GROUP),
    "bulk store, destination": Family(FILL + TO_GLOBAL + "[%rd1], [%r1], 64;" + GROUP),
    "bulk reduction, source": Family(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%p0], [%r2], 64;" + GROUP
    ),
    "tensor load, destination": Family(counted(LOAD + "[%r2], [%p1, {%r5}], [%r1];", 256)),
    "tensor load, mbarrier": Family(counted(LOAD + "[%r1+128], [%p1, {%r5}], [%r2];", 256)),
    "tensor load, map": Family(counted(LOAD + "[%r1+128], [%rd1, {%r5}], [%r1];", 256)),
    "tensor store, source": Family(STORE + "[%p1, {%r5}], [%r2];" + GROUP),
    "tensor reduction, source": Family(
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group "
        "[%p1, {%r5}], [%r2];" + GROUP
    ),
    "tensor prefetch, map": Family(
        "cp.async.bulk.prefetch.tensor.1d.L2.global.tile [%rd1, {%r5}];"
    ),
    "bulk prefetch": Family("cp.async.bulk.prefetch.L2.global [%rd1], 64;", needs_checks=True),
    "mbarrier.init": Family("mbarrier.init.shared.b64 [%r2], 1;"),
    "mbarrier.inval": Family("mbarrier.inval.shared.b64 [%r2];"),
    "mbarrier.arrive": Family("mbarrier.arrive.shared.b64 _, [%r2];"),
    "mbarrier.arrive_drop": Family("mbarrier.arrive_drop.shared.b64 _, [%r2];"),
    "mbarrier.expect_tx": Family("mbarrier.expect_tx.relaxed.cta.shared.b64 [%r2], 64;"),
    "mbarrier.complete_tx": Family("mbarrier.complete_tx.relaxed.cta.shared.b64 [%r2], 64;"),
    "mbarrier.test_wait": Family("mbarrier.test_wait.parity.shared.b64 %c1, [%r2], 0;"),
    "mbarrier.try_wait": Family("mbarrier.try_wait.parity.shared.b64 %c1, [%r2], 0;"),
    "st.async": Family(
        BARRIER.replace("BYTES", "4")
        + "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r2], %r5, [%r1];"
        + WAIT
    ),
    "st.async, mbarrier": Family(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r1], %r5, [%r2];"
        "nanosleep.u32 1000;"
    ),
    "red.async": Family(
        BARRIER.replace("BYTES", "4")
        + "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
        " [%r2], %r5, [%r1];" + WAIT
    ),
    "clusterlaunchcontrol": Family(
        BARRIER.replace("BYTES", "16")
        + "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%r2], [%r1];"
        + WAIT
    ),
    "tensormap.replace": Family("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r2], 1;"),
    "tensormap.cp_fenceproxy": Family(
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
        " [%p0], [%r2], 128;",
        32,
    ),
    "ldmatrix": Family("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];", 32),
    "stmatrix": Family("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r5};", 32),
    "ldmatrix generic": Family(
        "cvt.u64.u32 %rd3, %r2; cvta.shared.u64 %rd4, %rd3;"
        "ldmatrix.sync.aligned.m8n8.x1.b16 {%r3}, [%rd4];",
        32,
    ),
    "wmma.load": Family(
        f"wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {wmma_registers(10)}, [%r2], 16;", 32
    ),
    "wmma.store": Family(
        f"wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r2], {wmma_registers(20)}, 8;", 32
    ),
    "wgmma, A": Family(
        "wgmma.fence.sync.aligned;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
        " {%r20, %r21, %r22, %r23}, %rd5, %rd5, %c2, 1, 1, 0, 0;"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        128,
    ),
    "wgmma, B": Family(
        "wgmma.fence.sync.aligned;"
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
        " {%r20, %r21, %r22, %r23}, {%r24, %r25, %r26, %r27}, %rd5, %c2, 1, 1, 0;"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        128,
    ),
    "tcgen05.alloc": Family(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;", 32
    ),
    "tcgen05.mma, A": Family(
        TENSOR_MEMORY
        + LEADER
        + f"@%c3 {MMA} [%r6], %rd6, %rd6, {SHAPE}, %c2;"
        + "nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.mma, D": Family(
        TENSOR_MEMORY
        + LEADER
        + "@%c3 st.bulk.weak.shared::cta [%r1+256], 256, 0; fence.proxy.async;"
        + "or.b32 %r6, %r6, 65504; mov.b64 %rd6, 70368744177744;"
        + f"@%c3 {MMA} [%r6], %rd6, %rd6, {SHAPE}, %c2;"
        + "nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.mma.sp, A": Family(
        TENSOR_MEMORY
        + LEADER
        + f"@%c3 {SPARSE_MMA} [%r6], %rd6, %rd6, [%r6+8], {SHAPE | 4}, %c2;"
        + "nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.mma.sp, metadata": Family(
        TENSOR_MEMORY
        + LEADER
        + "@%c3 st.bulk.weak.shared::cta [%r1+256], 256, 0; fence.proxy.async;"
        + "or.b32 %r7, %r6, 65504; mov.b64 %rd6, 70368744177744;"
        + f"@%c3 {SPARSE_MMA} [%r6], %rd6, %rd6, [%r7], {SHAPE | 4}, %c2;"
        + "nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.mma.ws, shifted columns": Family(
        TENSOR_MEMORY
        + LEADER
        + f"mov.b64 %rd7, 8; shl.b64 %rd7, %rd7, 56; @%c3 {STATIONARY_MMA} [%r6], %rd6, %rd6,"
        + f" {2 << 24 | 8 << 17 | 1 << 4 | 1 << 30}, %c2, %rd7; nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.cp, decompression": Family(
        TENSOR_MEMORY
        + LEADER
        + "@%c3 tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b6x16_p32 [%r6], %rd6;"
        + "nanosleep.u32 1000;",
        32,
    ),
    "wgmma of bits": Family(
        "wgmma.fence.sync.aligned;"
        "wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc"
        " {%r20, %r21, %r22, %r23}, %rd5, %rd5, %c2;"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        128,
    ),
    "tcgen05.cp": Family(
        TENSOR_MEMORY
        + LEADER
        + "@%c3 tcgen05.cp.cta_group::1.128x256b [%r6], %rd6;"
        + "nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.shift": Family(
        TENSOR_MEMORY
        + LEADER
        + "@%c3 tcgen05.shift.cta_group::1.down [%r6+512]; nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.commit": Family(
        LEADER + "@%c3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"
        "nanosleep.u32 1000;",
        32,
    ),
    "tcgen05.ld": Family(
        TENSOR_MEMORY + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r6+512];", 32
    ),
    "tcgen05.ld, second half": Family(
        TENSOR_MEMORY
        + "tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r6], 4294967295, {%r5};"
        + "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r3}, [%r6], 4294967295;",
        32,
    ),
    "tcgen05.st": Family(
        TENSOR_MEMORY + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6+512], {%r5};", 32
    ),
}


def kernel(family: Family, shared_offset: int, global_offset: int) -> str:
    """PTX whose %r2 and %rd1 lie so many bytes behind the start of their memory."""
    zeros = "".join(f"mov.u32 %r{i}, 0;" for i in (0, 3, 4, 5, *range(10, 28)))
    begin = (
        f"{zeros} mov.u32 %r1, s; add.u32 %r2, %r1, {shared_offset};"
        f"add.u64 %rd1, %p0, {global_offset}; setp.ne.u32 %c2, %r5, 0;\n{DESCRIPTORS}"
    )
    return entry(begin + family.body, 2, module=MODULE)


def run(family: Family, shared_offset: int, global_offset: int, *, checks: bool) -> None:
    data = aligned(np.zeros(GLOBAL_BYTES // 4, np.uint32))
    image = aligned(
        np.frombuffer(tensor_map(2, data.ctypes.data, (64,), (), (64,)), np.uint8).copy()
    )
    machine = Machine(checks=checks)
    machine.add_array(data, "data")
    machine.add_array(image, "map")
    module = machine.load(kernel(family, shared_offset, global_offset), name="test.ptx")
    block = (family.threads, 1, 1)
    machine.launch(module, grid=(1, 1, 1), block=block, args=[data, image])
    machine.run()
