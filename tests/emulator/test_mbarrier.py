"""mbarrier.*: the order of phases, waits, and misuse."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import BarrierMisuse, EmulatorError, Machine, RaceDetected

from .device import aligned, ptx_of, run_kernel

KERNEL = """
KERNEL(CLUSTER)(u32* out) {
    u32 base = shared_address(dynamic_shared);
    BODY
}
"""


def run_body(body: str, threads: int = 1, cluster: int = 1, seed: int = 0) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    dims = f"__cluster_dims__({cluster})" if cluster > 1 else ""
    source = KERNEL.replace("BODY", body).replace("CLUSTER", dims)
    run_kernel(source, out, threads=threads, ctas=cluster, cluster=cluster, seed=seed)
    return out


TEST_PARITY = """
    auto done = [&](u32 parity) {
        u32 result;
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }" : "=r"(result) : "r"(base), "r"(parity) : "memory");
        return result;
    };
"""


def test_phases_need_arrivals_and_bytes():
    out = run_body(
        TEST_PARITY
        + """
    init_barrier(base, 2);
    out[0] = done(1); out[1] = done(0);
    asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 64;" :: "r"(base));
    expect_bytes(base, 192);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(base) : "memory");
    out[2] = done(0);
    asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 128;"
        :: "r"(base));
    out[3] = done(0); out[4] = done(1);
    u64 state;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(base)
        : "memory");
    u32 by_state;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(by_state) : "r"(base), "l"(state) : "memory");
    out[5] = by_state; out[6] = done(1);
"""
    )
    assert out[:7].tolist() == [1, 0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_remote_arrivals_pass_data_between_ctas(seed):
    out = run_body(
        """
    u32 rank = cluster_rank();
    if (threadIdx.x == 0) init_barrier(base, 32);
    cluster_sync();
    if (rank == 1) {
        asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, 0;"
            "st.shared::cluster.u32 [remote+16], %1; }"
            :: "r"(base + 4 * threadIdx.x), "r"(threadIdx.x) : "memory");
        asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, 0;"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }"
                :: "r"(base) : "memory");
    } else {
        wait(base, 0);
        out[threadIdx.x] = ((u32*)dynamic_shared)[4 + threadIdx.x];
    }
    cluster_sync();
""",
        threads=32,
        cluster=2,
        seed=seed,
    )
    assert out[:32].tolist() == list(range(32))


ARRIVE = 'asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(base) : "memory");'


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (ARRIVE, "nobody has initialized"),
        ("init_barrier(base, 1); init_barrier(base, 1);", "needs mbarrier.inval first"),
        ("init_barrier(base, 1); expect_bytes(base, 16); " + ARRIVE, "waits for 0 more"),
        ("init_barrier(base + 4, 1);", "multiple of 8"),
        ("init_barrier(base, out[0]);", "count 0"),
        ("init_barrier(base, 1); expect_bytes(base, 1 << 20);", "byte count"),
        ("init_barrier(base, 1); " + ARRIVE + ARRIVE, "nobody has seen"),
    ],
)
def test_misuse_is_named(body, text):
    with pytest.raises(EmulatorError, match=text):
        run_body(body)


# PTX asks for it, but nothing else depends on it: released kernels have such barriers.
def test_a_run_can_go_on_behind_a_phase_that_nobody_has_seen():
    data = np.zeros(4, np.uint32)
    machine = Machine(stop_at_findings=False)
    machine.add_array(data, "data")
    body = "init_barrier(base, 1);\n" + (ARRIVE + "\n") * 3 + "wait(base, 0); out[0] = 7;"
    source = f"KERNEL()(u32* out) {{ u32 base = shared_address(dynamic_shared); {body} }}"
    module = machine.load(ptx_of(source, "sm_90a"))
    machine.launch(module, grid=(1, 1, 1), block=(1, 1, 1), shared_bytes=64, args=[data])
    machine.run()
    found = machine.findings
    assert [finding.error for finding in found] == [BarrierMisuse, BarrierMisuse]
    assert "completes phase 1 although nobody has seen" in str(found[0])
    assert "completes phase 2 although nobody has seen" in str(found[1])
    assert data[0] == 7


def test_invalidated_barriers_may_be_initialized_again():
    out = run_body(
        TEST_PARITY
        + "init_barrier(base, 1);"
        + ARRIVE
        + """
    out[0] = done(0);
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(base) : "memory");
    init_barrier(base, 3);
    out[1] = done(0);
"""
    )
    assert out[:2].tolist() == [1, 0]


def test_a_run_can_go_on_behind_an_init_of_a_barrier_in_use():
    data = np.zeros(4, np.uint32)
    machine = Machine(stop_at_findings=False)
    machine.add_array(data, "data")
    # All lanes initialize it, as released kernels do.
    body = """
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(base) : "memory");
    __syncwarp();
    if (threadIdx.x == 3) { ARRIVE }
    wait(base, 0);
    out[threadIdx.x % 4] = 7;
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(base + 8) : "memory");
""".replace("ARRIVE", ARRIVE)
    source = f"KERNEL()(u32* out) {{ u32 base = shared_address(dynamic_shared); {body} }}"
    module = machine.load(ptx_of(source, "sm_90a"))
    machine.launch(module, grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=64, args=[data])
    machine.run()
    assert [finding.error for finding in machine.findings] == [BarrierMisuse, BarrierMisuse]
    assert "needs mbarrier.inval first" in str(machine.findings[0])
    assert "mbarrier.inval on the mbarrier" in str(machine.findings[1])
    assert (data == 7).all()


# A copy fills the tile; whoever tries in vain then waits for the phase `parity`.
SLOW_PATH = """
KERNEL()(const u32* in, u32* out) {
    u32 base = shared_address(dynamic_shared), ok;
    if (threadIdx.x == 0) {
        init_barrier(base, 1);
        expect_bytes(base, 1024);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], 1024, [%2];" :: "r"(base + 1024), "l"(in), "r"(base) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;"
        " selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(base) : "memory");
    out[256 + threadIdx.x] = ok;
    SLOW
    out[threadIdx.x] = ((u32*)dynamic_shared)[256 + threadIdx.x];
}
"""


def run_slow_path(slow: str, seed: int) -> tuple[Machine, np.ndarray, np.ndarray]:
    data, out = aligned(np.arange(256, dtype=np.uint32)), np.zeros(512, np.uint32)
    machine = Machine(seed=seed, stop_at_findings=False)
    machine.add_array(data, "data")
    machine.add_array(out, "out")
    module = machine.load(ptx_of(SLOW_PATH.replace("SLOW", slow), "sm_90a"))
    machine.launch(module, grid=(1, 1, 1), block=(256, 1, 1), shared_bytes=2048, args=[data, out])
    machine.run()
    return machine, data, out


def test_a_try_may_fail_although_its_phase_comes():
    failed = 0
    for seed in range(24):
        machine, data, out = run_slow_path("if (!ok) wait(base, 0);", seed)
        assert not machine.findings
        assert (out[:256] == data).all()
        failed += int((out[256:] == 0).any())
    assert failed > 0


def test_what_follows_a_failed_try_is_checked():
    found = [run_slow_path("", seed)[0].findings for seed in range(24)]
    kinds = {finding.kind for findings in found for finding in findings}
    assert kinds
    assert kinds <= {"race", "uninitialized"}


# The barrier's own CTA initializes it, both CTAs arrive.
INIT = """
KERNEL(__cluster_dims__(2))(u32* out) {
    u32 base = shared_address(dynamic_shared);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" :: "r"(base) : "memory");
        FENCE
    }
    asm volatile("barrier.cluster.arrive.ORDER.aligned; barrier.cluster.wait.acquire.aligned;"
        ::: "memory");
    if (threadIdx.x == 0)
        asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, 0;"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }"
            :: "r"(base) : "memory");
    if (cluster_rank() == 0) wait(base, 0);
    cluster_sync();
}
"""
INIT_FENCE = 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");'


@pytest.mark.parametrize(
    ("order", "fence", "is_ordered"),
    [
        ("release", "", True),
        ("relaxed", INIT_FENCE, True),
        ("release", INIT_FENCE, True),
        ("relaxed", "", False),
    ],
)
def test_other_ctas_need_the_init_before_their_use(order, fence, is_ordered):
    machine = Machine(stop_at_findings=False)
    module = machine.load(ptx_of(INIT.replace("ORDER", order).replace("FENCE", fence), "sm_90a"))
    machine.launch(module, grid=(2, 1, 1), block=(32, 1, 1), shared_bytes=64, args=[0])
    machine.run()
    if is_ordered:
        assert not machine.findings
    else:
        assert [finding.error for finding in machine.findings] == [RaceDetected]
        assert "needs fence.mbarrier_init" in str(machine.findings[0])
