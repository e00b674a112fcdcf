"""What a kernel asks of the driver: printf, breakpoints, the place of another cluster."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import KernelTrap, RaceDetected, Uninitialized

from .device import run_kernel


def test_printf(capfd):
    run_kernel(
        """
extern "C" int printf(const char*, ...);
KERNEL()(u32* out) {
    if (threadIdx.x != 1) return;
    out[0] = printf("%d %u %5.2f|%-4s|%c %lld %x %%\\n", -3, 7u, 1.25, "ab", 'z',
                    -(1ll << 40), 255u);
    printf("plain\\n");
}
""",
        np.zeros(1, np.uint32),
        threads=32,
    )
    assert capfd.readouterr().out == "-3 7  1.25|ab  |z -1099511627776 ff %\nplain\n"


def test_breakpoint_ends_the_kernel():
    with pytest.raises(KernelTrap, match="breakpoint"):
        run_kernel('KERNEL()(u32*) { asm volatile("brkpt;"); }', np.zeros(1, np.uint32))


@pytest.mark.parametrize("multicast", ["", ".multicast::cluster::all"])
def test_no_cluster_is_ever_cancelled(multicast):
    """The answer counts 16 bytes on the mbarrier of every CTA that it goes to."""
    canceled = np.full(4, 9, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    __shared__ __align__(16) u64 response[2];
    __shared__ u64 barrier;
    u32 at = shared_address(&barrier), to = shared_address(response);
    if (threadIdx.x == 0) {
        init_barrier(at, 1);
        expect_bytes(at, 16);
    }
    cluster_sync();
    if (threadIdx.x == 0 && (ALL == 0 || cluster_rank() == 0))
        asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta"
            ".mbarrier::complete_tx::bytesMULTICAST.b128 [%0], [%1];"
            ::"r"(to), "r"(at) : "memory");
    wait(at, 0);
    u32 found;
    asm volatile("{ .reg .b128 answer; .reg .pred p; ld.shared.b128 answer, [%1];"
        " clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;"
        " selp.u32 %0, 1, 0, p; }" : "=r"(found) : "r"(to) : "memory");
    if (threadIdx.x == 0) out[blockIdx.x] = found;
    cluster_sync();
}
""".replace("MULTICAST", multicast).replace("ALL", "1" if multicast else "0"),
        canceled,
        ctas=4,
        cluster=2,
    )
    assert canceled.tolist() == [0] * 4


ANSWER = """
// Warp 0 copies, and nobody waits for that before warp 1 asks.
KERNEL()(const u32* in, u32* out) {
    __shared__ __align__(16) u64 response[2], copied[2];
    __shared__ u64 barriers[2];
    u32 at = shared_address(barriers), to = shared_address(response);
    if (threadIdx.x < 2) {
        init_barrier(at + 8 * threadIdx.x, 1);
        expect_bytes(at + 8 * threadIdx.x, 16);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 16, [%2];"
            :: "r"(shared_address(copied)), "l"(in), "r"(at + 8) : "memory");
    if (threadIdx.x == 32)
        asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta"
            ".mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(to), "r"(at) : "memory");
    if (threadIdx.x >= 32) {
        WAIT
        out[threadIdx.x - 32] = u32(response[0]) + u32(response[1]);
    }
    wait(at + 8, 0);
    wait(at, 0);
}
"""


@pytest.mark.parametrize("seed", range(4))
def test_the_answer_to_a_launch_request_is_ordered_by_its_own_barrier(seed):
    words, out = np.zeros(4, np.uint32), np.ones(32, np.uint32)
    run_kernel(ANSWER.replace("WAIT", "wait(at, 0);"), words, out, threads=64, seed=seed)
    assert not out.any()
    with pytest.raises((RaceDetected, Uninitialized)):
        run_kernel(ANSWER.replace("WAIT", ""), words, out, threads=64, seed=seed)
