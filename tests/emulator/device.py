"""A device for instruction tests: CUDA C++ with inline PTX in, changed arrays out."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from warpcheck import Finding, Machine, compile_to_ptx
from warpcheck.machine import Schedule

PRELUDE = """
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
extern __shared__ __align__(1024) u8 dynamic_shared[];

// Dynamic shared memory starts 1 KiB into the window, so this is 1024-byte aligned.
__device__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void expect_bytes(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(barrier), "r"(num_bytes) : "memory");
}
__device__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
        " @!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}
__device__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
struct alignas(64) Map { u64 words[16]; };
#define KERNEL(...) extern "C" __global__ void __VA_ARGS__ kernel
"""


@functools.cache
def ptx_of(source: str, arch: str) -> str:
    text = PRELUDE.replace("again:", "again_%=:").replace("bra again;", "bra again_%=;") + source
    # CUDA's own headers, for a source that names one.
    includes: tuple[Path, ...] = ()
    if "#include" in source:
        from deep_moe.jit.headers import find_headers

        includes = find_headers().include_paths
    return compile_to_ptx(text, arch=arch, include_paths=includes)


def aligned(array: np.ndarray, alignment: int = 1024) -> np.ndarray:
    """A copy of `array` at an address that is a multiple of `alignment`."""
    array = np.ascontiguousarray(array)
    storage = np.zeros(array.nbytes + alignment, np.uint8)
    offset = -storage.ctypes.data % alignment
    copy = storage[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def pack_arguments(values: tuple[Any, ...]) -> bytes:
    """Arrays by address, integers as u32, bytes (tensor maps) aligned to 64."""
    packed = b""
    for value in values:
        if isinstance(value, np.ndarray):
            item, alignment = value.ctypes.data.to_bytes(8, "little"), 8
        elif isinstance(value, bytes):
            item, alignment = value, 64
        else:
            item, alignment = (int(value) & 0xFFFFFFFF).to_bytes(4, "little"), 4
        packed += bytes(-len(packed) % alignment) + item
    return packed


def run_kernel(
    source: str,
    *arguments: Any,
    arch: str = "sm_100a",
    ctas: int = 1,
    threads: int = 128,
    cluster: int = 1,
    shared_bytes: int = 65536,
    memory: tuple[np.ndarray, ...] = (),
    seed: int = 0,
    hopper_fp8_sums: bool = False,
    checks: bool = True,
    strict_tcgen05: bool = False,
    stop_at_findings: bool = True,
    schedule: Schedule = "random",
) -> list[Finding]:
    """Compile and run; arrays among the arguments, and those in `memory`, are its global memory.

    What was found, where that does not stop the run.
    """
    machine = Machine(
        seed=seed,
        checks=checks,
        hopper_fp8_sums=hopper_fp8_sums,
        strict_tcgen05=strict_tcgen05,
        stop_at_findings=stop_at_findings,
        schedule=schedule,
    )
    for index, array in enumerate(
        [a for a in arguments if isinstance(a, np.ndarray)] + list(memory)
    ):
        machine.add_memory(0, array.ctypes.data, array.nbytes, f"array {index}")
    module = machine.load(ptx_of(source, arch), name="test kernel")
    machine.launch(
        module,
        "kernel",
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1) if cluster > 1 else None,
        shared_bytes=shared_bytes,
        args=pack_arguments(arguments),
    )
    machine.run()
    return machine.findings
