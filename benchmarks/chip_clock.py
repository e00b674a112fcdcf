"""Small kernels that measure what the emulator's clock has to know of a chip, on a GPU or on the
clock itself.

    python -m benchmarks.chip_clock --json h100.json              # on the GPU, half a minute
    python -m benchmarks.chip_clock --chip h100 --json clock.json # the same kernels in the emulator
    python -m benchmarks.chip_clock --show h100.json clock.json   # beside each other

emulator/chips/ names these reports as the source of its values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deep_moe.jit.nvrtc import compile_source, compile_to_ptx

ARCH = "sm_90a"
REPEATS = 5
MIB = 1 << 20

PRELUDE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
extern __shared__ __align__(1024) unsigned char smem[];
__device__ __forceinline__ u64 ticks() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}
__device__ __forceinline__ u64 global_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
"""


class Device(Protocol):
    """Where probes run."""

    def memory(self, num_bytes: int, content: np.ndarray | None = None) -> int:
        """Address of memory that holds zeros, or `content` at its beginning."""

    def run(
        self, source: str, grid: int, block: int, shared_bytes: int, args: Sequence[Any], out: int
    ) -> tuple[np.ndarray, float]:
        """What the kernel `probe` wrote to the `out` u64 of its last parameter, and how long it
        took by events, in microseconds (in the emulator the kernel's own time)."""


class GpuDevice:
    """The current CUDA device."""

    def __init__(self) -> None:
        import torch
        from cuda.bindings import driver

        self._torch, self._driver = torch, driver
        torch.zeros(1, device="cuda")
        self._kept: list[Any] = []
        self._functions: dict[str, Any] = {}
        self.name = torch.cuda.get_device_name()

    def memory(self, num_bytes: int, content: np.ndarray | None = None) -> int:
        tensor = self._torch.zeros(num_bytes, dtype=self._torch.uint8, device="cuda")
        if content is not None:
            flat = self._torch.from_numpy(content.view(np.uint8))
            tensor[: flat.numel()].copy_(flat)
        self._kept.append(tensor)
        return tensor.data_ptr()

    def run(
        self, source: str, grid: int, block: int, shared_bytes: int, args: Sequence[Any], out: int
    ) -> tuple[np.ndarray, float]:
        torch, driver = self._torch, self._driver
        function = self._function(source, shared_bytes)
        results = torch.zeros(out, dtype=torch.int64, device="cuda")
        values = [*(np.uint64(a) for a in args), np.uint64(results.data_ptr())]
        holders = [np.array([v], np.uint64) for v in values]
        pointers = np.array([h.ctypes.data for h in holders], np.uint64)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream().cuda_stream
        begin.record()
        (status,) = driver.cuLaunchKernel(
            function, grid, 1, 1, block, 1, 1, shared_bytes, stream, pointers.ctypes.data, 0
        )
        end.record()
        if int(status):
            raise RuntimeError(f"CUDA could not launch a probe: {status}")
        torch.cuda.synchronize()
        return results.cpu().numpy().view(np.uint64), begin.elapsed_time(end) * 1e3

    def _function(self, source: str, shared_bytes: int) -> Any:
        driver = self._driver
        if source not in self._functions:
            compiled = compile_source(PRELUDE + source, arch=ARCH, kernel="probe")
            _, module = driver.cuModuleLoadData(np.frombuffer(compiled.cubin, np.uint8).ctypes.data)
            self._functions[source] = driver.cuModuleGetFunction(module, b"probe")[1]
        function = self._functions[source]
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(function, attribute, shared_bytes)
        return function


class ClockDevice:
    """The emulator with a chip's clock."""

    def __init__(self, chip: str) -> None:
        from deep_moe.emulator import Machine

        self.name = f"emulator, {chip}"
        self._machine = Machine(clock=chip, checks=False, products=False)
        self._kept: list[np.ndarray] = []
        self._modules: dict[str, Any] = {}

    def memory(self, num_bytes: int, content: np.ndarray | None = None) -> int:
        array = np.zeros(num_bytes, np.uint8)
        if content is not None:
            flat = content.view(np.uint8)
            array[: flat.size] = flat
        self._kept.append(array)
        self._machine.add_array(array, f"memory {len(self._kept)}")
        return array.ctypes.data

    def run(
        self, source: str, grid: int, block: int, shared_bytes: int, args: Sequence[Any], out: int
    ) -> tuple[np.ndarray, float]:
        machine = self._machine
        if source not in self._modules:
            self._modules[source] = machine.load(compile_to_ptx(PRELUDE + source, arch=ARCH))
        results = np.zeros(out, np.uint64)
        machine.add_array(results, "results")
        machine.launch(
            self._modules[source],
            "probe",
            grid=(grid, 1, 1),
            block=(block, 1, 1),
            shared_bytes=shared_bytes,
            args=[*(int(a) for a in args), results],
        )
        machine.run()
        machine.remove_memory(0, results.ctypes.data)
        return results, machine.launch_times[0].ns / 1e3


@dataclass(frozen=True)
class Probe:
    """One figure: `unit` says of what."""

    name: str
    unit: str
    measure: Callable[[Device], float]


def median(measure: Callable[[], float]) -> float:
    """After one run that warms up."""
    measure()
    return statistics.median(measure() for _ in range(REPEATS))


# ---- chains of one instruction


def chain_source(body: str, per_body: int, setup: str = "", finish: str = "") -> str:
    """`out[0]`: cycles of 64 bodies."""
    return rf"""
extern "C" __global__ void probe(u64 seed, u64* out) {{
    u32 a = u32(seed) + threadIdx.x, b = a * 3 + 1, c = b ^ 77, d = c + 5;
    float x = a * 1e-9f, y = b * 1e-9f, z = c * 1e-9f, w = d * 1e-9f;
    {setup}
    u64 begin = 0, end = 0;
    for (int round = 0; round < 2; ++round) {{
        __syncthreads();
        begin = ticks();
        #pragma unroll
        for (int i = 0; i < 64; ++i) {{ {body} }}
        end = ticks();
    }}
    if (a + b + c + d == 12345 || x + y + z + w == 3.5f) out[1] = a + u32(x);
    {finish}
    if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = end - begin;
}}"""


LOP = 'asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"({0}) : "r"(seed_lo), "r"(seed_hi));'
FMA = 'asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"({0}) : "f"(1.5f), "f"(0.25f));'
EX2 = 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"({0}));'
SHF = 'asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 0x1f, 0xffffffff;" : "+r"({0}));'
LDS = 'asm volatile("ld.shared.u32 %0, [%0];" : "+r"({0}));'


def chain(body: str, setup: str, threads: int, per_body: int) -> Callable[[Device], float]:
    """Cycles per instruction of a warp."""
    source = chain_source(body, per_body, setup)

    def measure(device: Device) -> float:
        return median(
            lambda: float(device.run(source, 1, threads, 1024, [7], 2)[0][0]) / 64 / per_body
        )

    return measure


def chain_probes() -> Iterator[Probe]:
    seeds = "u32 seed_lo = u32(seed) * 5, seed_hi = seed_lo ^ 99;"
    in_shared = (
        "reinterpret_cast<u32*>(smem)[threadIdx.x % 32] = shared_address(smem);"
        "__syncthreads(); a = shared_address(smem);"
    )
    for name, text, setup, names in (
        ("LOP3", LOP, seeds, "abcd"),
        ("FFMA", FMA, "", "xyzw"),
        ("MUFU.EX2", EX2, "", "xyzw"),
        ("SHFL", SHF, "", "abcd"),
    ):
        one = text.format(names[0])
        four = " ".join(text.format(n) for n in names)
        yield Probe(f"{name}, dependent, 1 warp", "cycles", chain(one, setup, 32, 1))
        yield Probe(f"{name}, 4 chains, 1 warp", "cycles", chain(four, setup, 32, 4))
        yield Probe(f"{name}, 4 chains, 2 warps/scheduler", "cycles", chain(four, setup, 256, 4))
        yield Probe(f"{name}, 4 chains, 4 warps/scheduler", "cycles", chain(four, setup, 512, 4))
    yield Probe("LDS, dependent", "cycles", chain(LDS.format("a"), in_shared, 32, 1))
    for threads in (128, 256, 384):
        yield Probe(
            f"bar.sync, {threads} threads",
            "cycles",
            chain('asm volatile("bar.sync 0;" ::: "memory");', "", threads, 1),
        )
    for name, text in (
        ("red.release.gpu", "red.release.gpu.global.add.u32 [%0], 1;"),
        ("st.release.sys", "st.release.sys.global.u32 [%0], 1;"),
    ):
        body = f'asm volatile("{text}" :: "l"(out + 1) : "memory");'
        yield Probe(f"{name}, the one before outstanding", "cycles", chain(body, "", 32, 1))
    for fence in (
        "fence.acq_rel.gpu",
        "fence.acq_rel.sys",
        "fence.proxy.async",
        "fence.proxy.async.global",
        "membar.cta",
    ):
        yield Probe(
            f"{fence}, nothing outstanding",
            "cycles",
            chain(f'asm volatile("{fence};" ::: "memory");', "", 32, 1),
        )
    yield Probe(
        "mbarrier arrive and wait, 1 thread",
        "cycles",
        chain(
            "arrive(bar); wait(bar, i & 1);",
            "u32 bar = shared_address(smem); if (threadIdx.x == 0) init_barrier(bar, 1);",
            1,
            1,
        ),
    )


LOOP = r"""
extern "C" __global__ void probe(u64 count, u64* out) {
    u32 a = threadIdx.x;
    u64 begin = ticks();
    #pragma unroll 1
    for (u32 i = 0; i < u32(count); ++i)
        asm volatile("lop3.b32 %0, %0, %1, %1, 0x96;" : "+r"(a) : "r"(i));
    u64 end = ticks();
    if (a == 12345) out[1] = a;
    if (threadIdx.x == 0) out[0] = end - begin;
}"""

PING_PONG = r"""
extern "C" __global__ void probe(u64 count, u64* out) {
    u32 ping = shared_address(smem), pong = ping + 8;
    if (threadIdx.x == 0) { init_barrier(ping, 1); init_barrier(pong, 1); }
    __syncthreads();
    u64 begin = ticks();
    if (threadIdx.x == 0)
        for (u32 i = 0; i < u32(count); ++i) { arrive(ping); wait(pong, i & 1); }
    if (threadIdx.x == 32)
        for (u32 i = 0; i < u32(count); ++i) { wait(ping, i & 1); arrive(pong); }
    u64 end = ticks();
    if (threadIdx.x == 0) out[0] = end - begin;
}"""

FLAGS = r"""
__device__ u32 load(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ void store(u32* p, u32 v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
extern "C" __global__ void probe(u64 count, u32* flags, u64* out) {
    if (threadIdx.x == 0) {
        u32 first = load(flags + 128);
        u64 begin = global_ns();
        for (u32 i = first + 1; i <= first + u32(count); ++i) {
            if (blockIdx.x == 0) {
                store(flags, i);
                while (load(flags + 64) != i) {}
            } else if (blockIdx.x == 1) {
                while (load(flags) != i) {}
                store(flags + 64, i);
            }
        }
        u64 end = global_ns();
        if (blockIdx.x == 0) { out[0] = end - begin; store(flags + 128, first + u32(count)); }
    }
}"""

CHASE = r"""
extern "C" __global__ void probe(u64 count, const u64* chain, u64* out) {
    u64 at = 0;
    u64 begin = ticks();
    #pragma unroll 8
    for (u32 i = 0; i < u32(count); ++i)
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(at) : "l"(chain + at) : "memory");
    u64 end = ticks();
    if (at == 12345) out[1] = at;
    out[0] = end - begin;
}"""

ATOMICS = r"""
extern "C" __global__ void probe(u64 count, u32* word, u64 stride, u64* out) {
    u32* at = word + (blockIdx.x * blockDim.x + threadIdx.x) * stride;
    u32 v = 0;
    u64 begin = global_ns();
    for (u32 i = 0; i < u32(count); ++i)
        asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(at) : "memory");
    u64 end = global_ns();
    if (v == 0xffffffff) out[1] = v;
    if (threadIdx.x == 0) { out[2 + 2 * blockIdx.x] = begin; out[3 + 2 * blockIdx.x] = end; }
}"""

# One thread of each CTA copies `count` pieces through `stages` slots.
COPIES = r"""
extern "C" __global__ void probe(u64 count, u64 bytes, u64 stages, const char* from, u64 region,
                                 u64* out) {
    u32 bar = shared_address(smem), data = bar + 1024;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < stages; ++s) init_barrier(bar + 8 * s, 1);
        u64 offset = (u64(blockIdx.x) * count * bytes) % region;
        u32 s = 0, parity = 1;
        u64 begin = ticks(), begin_ns = global_ns();
        for (u32 i = 0; i < u32(count + stages); ++i) {
            if (i >= u32(stages)) wait(bar + 8 * s, parity);
            if (i < u32(count)) {
                expect(bar + 8 * s, u32(bytes));
                bulk_load(data + s * u32(bytes), from + offset, u32(bytes), bar + 8 * s);
                offset += bytes;
                if (offset >= region) offset = 0;
            }
            if (++s == u32(stages)) { s = 0; parity ^= 1; }
        }
        out[3 * blockIdx.x] = ticks() - begin;
        out[3 * blockIdx.x + 1] = begin_ns;
        out[3 * blockIdx.x + 2] = global_ns();
    }
}"""

READ = r"""
extern "C" __global__ void probe(u64 count, const uint4* from, u64* out) {
    u64 begin = global_ns();
    u32 sum = 0;
    const u64 step = gridDim.x * blockDim.x;
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * step) {
        #pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            u64 at = i + k * step;
            if (at < count) { uint4 v = __ldcg(from + at); sum += v.x ^ v.w; }
        }
    }
    if (sum == 12345) out[2] = sum;
    if (threadIdx.x == 0) {
        out[3 + 2 * blockIdx.x] = begin;
        out[4 + 2 * blockIdx.x] = global_ns();
    }
}"""

SPAN = r"""
extern "C" __global__ void probe(u64 unused, u64* out) {
    u64 begin = global_ns();
    __syncthreads();
    if (threadIdx.x == 0) { out[2 * blockIdx.x] = begin; out[2 * blockIdx.x + 1] = global_ns(); }
}"""


def wgmma_text(n: int, in_registers: bool) -> str:
    """A product of d, f or desc, and desc."""
    registers = ", ".join(f"%{i}" for i in range(n // 2))
    b = n // 2
    fragment = ", ".join(f"%{b + 1 + i}" for i in range(4))
    a = f"{{{fragment}}}" if in_registers else f"%{b + 1}"
    d = ", ".join(f'"+f"(d[{i}])' for i in range(n // 2))
    a_operands = '"r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3])' if in_registers else '"l"(desc)'
    return (
        f'asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "\n'
        f'"{{{registers}}}, {a}, %{b}, 1, 1, 1;" : {d} : "l"(desc), {a_operands});'
    )


def wgmma_source(n: int, loop: str, finish: str = "") -> str:
    """loop: of products with n columns, over `groups`. finish: behind the last reading of time."""
    return rf"""
extern "C" __global__ void __launch_bounds__(256, 1) probe(u64 groups, u64 per_group, u64* out) {{
    for (u32 i = threadIdx.x; i < 16384; i += blockDim.x)
        reinterpret_cast<u32*>(smem)[i] = i * 2654435761u & 0x37373737u;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    float d[{n // 2}];
    #pragma unroll
    for (int i = 0; i < {n // 2}; ++i) d[i] = 0;
    u32 f[4] = {{threadIdx.x * 77u & 0x37373737u, 0x31323334u, 0x30313033u, 0x32313031u}};
    u32 r[8], seed_lo = u32(groups) * 5, seed_hi = seed_lo ^ 99;
    float x[8];
    for (int i = 0; i < 8; ++i) {{ r[i] = threadIdx.x * i; x[i] = r[i] * 1e-9f; }}
    u64 desc = (u64(shared_address(smem)) & 0x3ffff) >> 4 | u64(1) << 16 | u64(64) << 32 |
               u64(1) << 62;
    u64 begin = ticks(), begin_ns = global_ns();
    for (u32 g = 0; g < u32(groups); ++g) {{
        {loop}
    }}
    u64 end = ticks(), end_ns = global_ns();
    {finish}
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < {n // 2}; ++i) sum += d[i];
    if (sum == 12345.f) out[3] = 1;
    if (threadIdx.x == 0 && blockIdx.x == 0) {{ out[0] = end - begin; out[1] = end_ns - begin_ns; }}
}}"""


WGMMA_FENCE = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
WGMMA_COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");'
WGMMA_WAIT = 'asm volatile("wgmma.wait_group.sync.aligned {0};" ::: "memory");'


def groups_source(n: int, in_registers: bool) -> str:
    """Groups of products, one after the other."""
    return wgmma_source(
        n,
        rf"""
        {WGMMA_FENCE}
        #pragma unroll 4
        for (u32 i = 0; i < u32(per_group); ++i) {{
            {wgmma_text(n, in_registers)}
        }}
        {WGMMA_COMMIT}
        {WGMMA_WAIT.format(0)}""",
    )


def wgmma(n: int, in_registers: bool, warpgroups: int, per_group: int) -> Callable[[Device], float]:
    """Cycles per wgmma of a warpgroup."""
    source = groups_source(n, in_registers)

    def measure(device: Device) -> float:
        groups = 16
        found = median(
            lambda: float(
                device.run(source, 1, 128 * warpgroups, 65536, [groups, per_group], 4)[0][0]
            )
        )
        return found / groups / per_group

    return measure


def beside_wgmma(
    n: int, in_registers: bool, instruction: str, array: str, count: int
) -> Callable[[Device], float]:
    """Cycles per wgmma of a warpgroup, if each scheduler has two warps, and each of these `count`
    instructions on an array of eight for a wgmma. Groups of two, four under way."""
    texts = [instruction.format(f"{array}[{i % 8}]") for i in range(2 * count)]
    product = wgmma_text(n, in_registers)
    group = [*texts, WGMMA_FENCE, product, product, WGMMA_COMMIT, WGMMA_WAIT.format(3)]
    used = [f'asm volatile("" :: "r"(r[{i}]), "f"(x[{i}]));' for i in range(8)]
    num_groups, rounds = 4, 200
    source = wgmma_source(
        n, "\n".join(group * num_groups), "\n".join([WGMMA_WAIT.format(0), *used])
    )

    def measure(device: Device) -> float:
        found = median(lambda: float(device.run(source, 1, 256, 65536, [rounds, 0], 4)[0][0]))
        return found / rounds / num_groups / 2

    return measure


def clock_mhz(num_ctas: int, per_group: int, n: int = 128) -> Callable[[Device], float]:
    source = groups_source(n, False)

    def measure(device: Device) -> float:
        found = device.run(source, num_ctas, 256, 65536, [per_group, 256], 4)[0]
        found = device.run(source, num_ctas, 256, 65536, [per_group, 256], 4)[0]
        return float(found[0]) * 1e3 / float(found[1])

    return measure


def copies(
    grid: int, num_bytes: int, stages: int, count: int, region: int, what: str
) -> Callable[[Device], float]:
    """what: "cycles" of a piece, or "GB/s" of all. Of a region that L2 does not hold each run
    reads another quarter."""
    step = region // 4 if region > 64 * MIB and grid == 1 else 0

    def measure(device: Device) -> float:
        address = device.memory(region)
        found: list[float] = []
        for index in range(3):
            start = address + index * step
            out, _ = device.run(
                COPIES,
                grid,
                32,
                1024 + stages * num_bytes,
                [count, num_bytes, stages, start, region - index * step],
                3 * grid,
            )
            rows = out.reshape(grid, 3)
            if what == "cycles":
                found.append(float(rows[:, 0].mean()) / count)
            else:
                span = float(rows[:, 2].max() - rows[:, 1].min())
                found.append(grid * count * num_bytes / span)
        return statistics.median(found[1:])

    return measure


def chase(num_bytes: int, count: int) -> Callable[[Device], float]:
    def measure(device: Device) -> float:
        lines = num_bytes // 128
        visited = np.random.default_rng(1).permutation(lines)[: min(lines, count)].astype(np.uint64)
        visited[np.argmin(visited)], visited[0] = visited[0], visited[np.argmin(visited)]
        content = np.zeros(num_bytes // 8, np.uint64)
        content[visited * 16] = np.roll(visited, -1) * 16
        if visited[0]:
            content[0] = visited[0] * 16
        address = device.memory(num_bytes, content)
        steps = min(lines, count)

        def run() -> float:
            return float(device.run(CHASE, 1, 1, 0, [steps, address], 2)[0][0]) / steps

        if num_bytes > 64 * MIB:  # only what is met for the first time comes from memory
            return run()
        return median(run)

    return measure


def flags(device: Device) -> float:
    address = device.memory(4096)
    return median(lambda: float(device.run(FLAGS, 2, 32, 0, [200, address], 2)[0][0]) / 400)


def atomics(stride: int, grid: int, threads: int) -> Callable[[Device], float]:
    """Nanoseconds of one of each thread's atomics."""

    def measure(device: Device) -> float:
        address = device.memory(4 * max(1, stride) * grid * threads + 4096)

        def once() -> float:
            out = device.run(ATOMICS, grid, threads, 0, [16, address, stride], 2 + 2 * grid)[0]
            rows = out[2:].reshape(grid, 2)
            return float(rows[:, 1].max() - rows[:, 0].min()) / 16

        return median(once)

    return measure


def read(num_bytes: int) -> Callable[[Device], float]:
    def measure(device: Device) -> float:
        address, grid = device.memory(num_bytes), 264
        rates = []
        for _ in range(3):
            out = device.run(READ, grid, 512, 0, [num_bytes // 16, address], 3 + 2 * grid)[0]
            rows = out[3:].reshape(grid, 2)
            rates.append(num_bytes / float(rows[:, 1].max() - rows[:, 0].min()))
        return statistics.median(rates)

    return measure


def launch(what: str) -> Callable[[Device], float]:
    def measure(device: Device) -> float:
        def once() -> float:
            out, us = device.run(SPAN, 132, 384, 200 * 1024, [0], 264)
            rows = out.reshape(132, 2)
            inside = float(rows[:, 1].max() - rows[:, 0].min())
            return (
                us * 1e3 - inside
                if what == "outside"
                else float(rows[:, 0].max() - rows[:, 0].min())
            )

        return median(once)

    return measure


def probes(large: bool) -> Iterator[Probe]:
    """large: those of a GPU's whole memory, which take the emulator long."""
    yield from chain_probes()
    yield Probe(
        "loop of one LOP3",
        "cycles",
        lambda d: median(lambda: float(d.run(LOOP, 1, 32, 0, [4096], 2)[0][0]) / 4096),
    )
    yield Probe(
        "mbarrier, from one warp to another",
        "cycles",
        lambda d: median(lambda: float(d.run(PING_PONG, 1, 64, 64, [512], 2)[0][0]) / 1024),
    )
    yield Probe("flag in L2, from one CTA to another", "ns", flags)
    for mib, count in ((1, 4096), (8, 4096), (24, 8192)):
        yield Probe(f"load, chain over {mib} MiB", "cycles", chase(mib * MIB, count))
    yield Probe("load, chain over 512 MiB", "cycles", chase(512 * MIB, 4096))
    for num_bytes in (1024, 4096, 16384, 65536):
        yield Probe(
            f"bulk copy of {num_bytes}, alone, L2 has it",
            "cycles",
            copies(1, num_bytes, 1, 32, 4 * MIB, "cycles"),
        )
        yield Probe(
            f"bulk copy of {num_bytes}, alone, from memory",
            "cycles",
            copies(1, num_bytes, 1, 512, 512 * MIB, "cycles"),
        )
    for num_bytes, stages in ((4096, 8), (8192, 4), (8192, 24), (16384, 12)):
        yield Probe(
            f"bulk copies of {num_bytes}, {stages} in flight, one SM, L2 has them",
            "cycles",
            copies(1, num_bytes, stages, 256, 4 * MIB, "cycles"),
        )
        yield Probe(
            f"bulk copies of {num_bytes}, {stages} in flight, all SMs, L2 has them",
            "GB/s",
            copies(132, num_bytes, stages, 256, 16 * MIB, "GB/s"),
        )
        yield Probe(
            f"bulk copies of {num_bytes}, {stages} in flight, all SMs, from memory",
            "GB/s",
            copies(132, num_bytes, stages, 8 * MIB // num_bytes, 1056 * MIB, "GB/s"),
        )
    for in_registers in (False, True):
        words = "A in registers" if in_registers else "A in shared memory"
        for n in (8, 16, 32, 64, 128, 256):
            yield Probe(
                f"wgmma m64n{n}k32, {words}, 64 in a group", "cycles", wgmma(n, in_registers, 1, 64)
            )
            yield Probe(
                f"wgmma m64n{n}k32, {words}, 1 in a group", "cycles", wgmma(n, in_registers, 1, 1)
            )
        yield Probe(
            f"wgmma m64n128k32, {words}, two warpgroups", "cycles", wgmma(128, in_registers, 2, 64)
        )
        # So many that both warps' fill most of the time that a product takes by itself, and more.
        for n, most in ((8, 10), (32, 10), (128, 60)):
            for name, instruction, array, count in (
                ("nothing", "", "r", 0),
                (f"{most} LOP3", LOP, "r", most),
                (f"{most} FFMA", FMA, "x", most),
            ):
                yield Probe(
                    f"wgmma m64n{n}k32, {words}, two warpgroups, {name} beside each",
                    "cycles",
                    beside_wgmma(n, in_registers, instruction, array, count),
                )
    yield Probe("atomic, one thread", "ns", atomics(0, 1, 1))
    yield Probe("atomics on one address, 132 threads", "ns", atomics(0, 132, 1))
    yield Probe("atomics on one address, 132 x 32 threads", "ns", atomics(0, 132, 32))
    yield Probe(
        "atomics on addresses 128 bytes apart, 132 x 32 threads", "ns", atomics(32, 132, 32)
    )
    yield Probe("launch: events less the kernel's inside", "ns", launch("outside"))
    yield Probe("launch: first to last CTA's begin", "ns", launch("skew"))
    yield Probe("clock, products in one CTA", "MHz", clock_mhz(1, 40))
    yield Probe("clock, products in all CTAs, about 30 us", "MHz", clock_mhz(132, 2))
    if large:
        yield Probe("clock, products in all CTAs, about 0.6 ms", "MHz", clock_mhz(132, 40))
        yield Probe("clock, products in all CTAs, about 3 ms", "MHz", clock_mhz(132, 200))
        yield Probe("clock, products in all CTAs, about 15 ms", "MHz", clock_mhz(132, 1000))
        yield Probe("reading 2 GiB", "GB/s", read(2048 * MIB))


def measure_all(device: Any, large: bool) -> dict[str, dict[str, Any]]:
    found = {}
    for probe in probes(large):
        try:
            value: float | None = probe.measure(device)
        except RuntimeError as error:
            print(f"{probe.name}: {error}", file=sys.stderr)
            value = None
        found[probe.name] = {"value": value, "unit": probe.unit}
        print(f"{probe.name}: {value} {probe.unit}", file=sys.stderr)
    return found


def show(reports: Sequence[Path]) -> None:
    loaded = [json.loads(path.read_text()) for path in reports]
    print("| | unit | " + " | ".join(one["device"] for one in loaded) + " |")
    print("|---|---|" + "---:|" * len(loaded))
    for name, first in loaded[0]["probes"].items():
        values = [one["probes"].get(name, {}).get("value") for one in loaded]
        texts = ["" if v is None else f"{v:.1f}" for v in values]
        print(f"| {name} | {first['unit']} | " + " | ".join(texts) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", help="run in the emulator, on this chip's clock")
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--show", type=Path, nargs="+", help="print reports, and measure nothing")
    given = parser.parse_args(arguments)
    if given.show:
        show(given.show)
        return
    device: Any = GpuDevice() if given.chip is None else ClockDevice(given.chip)
    report = {
        "device": device.name,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "probes": measure_all(device, large=given.chip is None),
    }
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
