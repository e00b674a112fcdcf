"""B25 to B27 of docs/known-bugs.md: missing orders that the emulator's checks must see, planted
into small kernels, and our own kernels under the schedule that would show B26.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deep_moe.emulator import Deadlock, Finding, InvalidOperation, Machine, RaceDetected
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.emulator.device import ptx_of, run_kernel
from tests.kernels.layer_case import LayerCase

SEEDS = range(4)

# A warp fills 2 KiB of scales, each lane fences what it wrote, one elected lane copies them to
# tensor memory.
SCALES_OF_A_STAGE = """
KERNEL()(const u32* in) {
    u32 base = shared_address(dynamic_shared), barrier = base + 4096, is_elected;
    if (threadIdx.x == 0) init_barrier(barrier, 1);
    __syncthreads();
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;"
        :: "r"(base + 4104) : "memory");
    __syncwarp();
    u32 tmem = *(volatile u32*)(dynamic_shared + 4104);
    for (u32 i = threadIdx.x; i < 512; i += 32) ((u32*)dynamic_shared)[i] = in[i];
    fence_async();
    SYNC
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
        : "=r"(is_elected));
    if (is_elected) {
        u64 descriptor = 1ull << 46 | 8ull << 32 | 128ull << 16 | (base & 0x3FFFF) >> 4;
        asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;"
            :: "r"(tmem), "l"(descriptor) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(barrier) : "memory");
    }
    __syncwarp();
    wait(barrier, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(tmem));
}
"""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_b25_an_election_does_not_order_what_the_lanes_stored(seed: int, strict: bool):
    options = {"threads": 32, "seed": seed, "strict_tcgen05": strict}
    scales = np.arange(512, dtype=np.uint32)
    run_kernel(SCALES_OF_A_STAGE.replace("SYNC", "__syncwarp();"), scales, **options)
    with pytest.raises(RaceDetected, match=r"no bar\.warp\.sync orders the lanes") as caught:
        run_kernel(SCALES_OF_A_STAGE.replace("SYNC", ""), scales, **options)
    stored, copied = caught.value.finding.involved
    assert (stored.access, copied.access) == ("write", "asynchronous read")
    assert "st.shared" in stored.instruction
    assert "tcgen05.cp" in copied.instruction


# Warp 0 counts, warps 1 to 3 wait for the count, and the last of those cleans up.
COUNTER = """
KERNEL()(u32* counter, u32* num_done) {
    if (threadIdx.x % 32) return;
    if (threadIdx.x == 0) atomicAdd(counter, 1);
    else {
        WAIT_AND_COUNT
    }
}
"""
POLL = """
        u32 seen;
        do
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                : "=r"(seen) : "l"(counter) : "memory");
        while (seen == 0);
"""
CLEAN_UP_AFTER_TWO_OF_THREE = (
    POLL
    + """
        __threadfence();
        if (atomicAdd(num_done, 1) == 1) atomicExch(counter, 0);
"""
)
CLEAN_UP_AFTER_ALL = CLEAN_UP_AFTER_TWO_OF_THREE.replace("== 1", "== 2")


def run_counter(body: str, seed: int) -> None:
    counter, num_done = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    machine = Machine(seed=seed, schedule="last_warp")
    machine.add_array(counter, "counter")
    machine.add_array(num_done, "num_done")
    module = machine.load(ptx_of(COUNTER.replace("WAIT_AND_COUNT", body), "sm_90a"))
    machine.launch(module, grid=(1, 1, 1), block=(128, 1, 1), args=[counter, num_done])
    machine.run()
    assert (counter[0], num_done[0]) == (0, 3)


def test_b26_a_warp_that_comes_last_polls_a_counter_that_was_zeroed():
    """The seed's number is that of the warp; without warp 0 nobody gets on, so it has its turn."""
    for late_warp in range(4):
        run_counter(CLEAN_UP_AFTER_ALL, late_warp)
    for late_warp in range(1, 4):
        with pytest.raises(Deadlock, match=r"polls byte 0 of 'counter', which is 0x0"):
            run_counter(CLEAN_UP_AFTER_TWO_OF_THREE, late_warp)


def check_late_warps(arch: str, late_warps: range) -> None:
    shape = MoEShape(2, 4, 2, 256, 128, 8)
    case = LayerCase(shape, exact_layer(shape), arch=arch)
    tokens = [exact_tokens(shape, n, seed=n) for n in (8, 3)]
    expected = case.expected(tokens)
    for late_warp in late_warps:
        for _ in range(2):  # the second call finds what the first one's clean-up left
            ys = case.call(tokens, schedule="last_warp", schedule_seed=late_warp, num_sms=2)
            for y, reference in zip(ys, expected, strict=True):
                assert np.array_equal(y.float().numpy(), reference.float().numpy()), late_warp


# Two ranks of two CTAs with at most 16 warps each.
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_b26_any_late_warp_finds_its_way_out(arch: str):
    check_late_warps(arch, range(0, 64, 5))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_b26_every_late_warp_finds_its_way_out(arch: str):
    check_late_warps(arch, range(64))


BULK_STORE = """
KERNEL()(u32* out) {
    u32 base = shared_address(dynamic_shared);
    for (u32 i = threadIdx.x; i < 128; i += 32) ((u32*)dynamic_shared)[i] = i;
    fence_async();
    __syncwarp();
    if (threadIdx.x == 0) {
        asm volatile("INSTRUCTION [%0], [%1], 512;" :: "l"(out), "r"(base) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        WAIT
    }
}
"""


@pytest.mark.parametrize(
    "instruction",
    [
        "cp.async.bulk.global.shared::cta.bulk_group",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32",
    ],
)
def test_b27_a_cta_exits_with_bulk_stores_in_flight(instruction: str):
    kernel = BULK_STORE.replace("INSTRUCTION", instruction)

    def run(wait: str, **options: Any) -> list[Finding]:
        out = np.zeros(128, np.uint32)
        return run_kernel(kernel.replace("WAIT", wait), out, threads=32, **options)

    for group in (".wait_group 0", ".wait_group.read 0"):
        for seed in SEEDS:
            run(f'asm volatile("cp.async.bulk{group};" ::: "memory");', seed=seed)
        run(f'asm volatile("cp.async.bulk{group};" ::: "memory");', schedule="late_copies")
    (found,) = run("", schedule="late_copies", stop_at_findings=False)
    assert "the CTA exits while asynchronous copies that need its shared memory" in str(found)
    assert "issued by CTA 0, warp 0" in str(found)
    with pytest.raises(InvalidOperation, match="the CTA exits while asynchronous copies"):
        run("", schedule="late_copies")
