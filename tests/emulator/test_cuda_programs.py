"""Kernels as people write them in CUDA C++: softmax, cooperative groups, SIMD video instructions,
writes into a neighbour's shared memory, tensor maps that a kernel edits."""

from __future__ import annotations

import re

import numpy as np
import pytest

from deep_moe.emulator import Machine, RaceDetected, compile_to_ptx
from deep_moe.jit.headers import find_headers

from .device import aligned, run_kernel
from .tensor_images import tensor_map

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_softmax_of_rows(seed):
    source = """
__device__ float of_block(float value, float* shared, bool is_sum) {
    for (int step = 16; step; step /= 2) {
        float other = __shfl_xor_sync(~0u, value, step);
        value = is_sum ? value + other : fmaxf(value, other);
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (u32 i = 1; i < blockDim.x / 32; ++i)
        value = is_sum ? value + shared[i] : fmaxf(value, shared[i]);
    __syncthreads();
    return value;
}
KERNEL()(const float* __restrict__ x, float* __restrict__ y, int columns) {
    __shared__ float shared[32];
    const float* row = x + blockIdx.x * columns;
    float largest = -INFINITY, sum = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) largest = fmaxf(largest, row[i]);
    largest = of_block(largest, shared, false);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += expf(row[i] - largest);
    sum = of_block(sum, shared, true);
    for (int i = threadIdx.x; i < columns; i += blockDim.x)
        y[blockIdx.x * columns + i] = expf(row[i] - largest) / sum;
}
""".replace("INFINITY", "__int_as_float(0x7f800000)")
    x = np.random.default_rng(seed).normal(0, 5, (3, 1000)).astype(np.float32)
    y = np.zeros_like(x)
    run_kernel(source, x, y, 1000, ctas=3, threads=256, seed=seed)
    exact = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(y, exact / exact.sum(axis=1, keepdims=True), rtol=2e-6)


COOPERATIVE = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_cooperative_groups(seed):
    """A reduction over the grid in two steps with a barrier over the grid between them."""
    source = """
KERNEL()(const int* in, int* partial, int* out, int n) {
    auto grid = cg::this_grid();
    auto block = cg::this_thread_block();
    auto tile = cg::tiled_partition<32>(block);
    auto pair = cg::tiled_partition<64>(block);
    __shared__ int total;
    if (block.thread_rank() == 0) total = 0;
    block.sync();
    int sum = 0;
    for (int i = grid.thread_rank(); i < n; i += grid.size()) sum += in[i];
    sum = cg::reduce(tile, sum, cg::plus<int>());
    if (tile.thread_rank() == 0) atomicAdd(&total, sum);
    block.sync();
    if (block.thread_rank() == 0) partial[blockIdx.x] = total;
    grid.sync();
    if (grid.thread_rank() == 0) {
        for (u32 i = 0; i < gridDim.x; ++i) out[0] += partial[i];
    }
    out[1 + grid.thread_rank()] = cg::inclusive_scan(tile, int(threadIdx.x));
    if (threadIdx.x % 3 == 0) {
        auto some = cg::coalesced_threads();
        atomicAdd(&out[1 + grid.size() + blockIdx.x], some.thread_rank() ? 0 : some.size());
    }
    __shared__ int of_warps[4];
    if (tile.thread_rank() == 0) of_warps[threadIdx.x / 32] = threadIdx.x;
    pair.sync();
    out[1 + grid.size() + gridDim.x + grid.thread_rank()] = of_warps[threadIdx.x / 32 ^ 1];
}
"""
    ctas, threads, n = 3, 128, 5000
    values = np.random.default_rng(seed).integers(-9, 9, n).astype(np.int32)
    out = np.zeros(1 + 2 * ctas * threads + ctas, np.int32)
    run_kernel(
        COOPERATIVE + source,
        *(values, np.zeros(ctas, np.int32), out, n),
        ctas=ctas,
        threads=threads,
        seed=seed,
    )
    assert out[0] == values.sum()
    scan = np.arange(threads).reshape(-1, 32).cumsum(axis=1).reshape(-1)
    assert (out[1 : 1 + ctas * threads].reshape(ctas, -1) == scan).all()
    assert out[1 + ctas * threads :][:ctas].tolist() == [43] * ctas
    other_warps = np.tile((np.arange(threads) // 32 ^ 1) * 32, ctas)
    assert (out[-ctas * threads :] == other_warps).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_votes_of_two_warps_by_cooperative_groups(seed):
    """True of CUDA 13's header: the warp that arrives last has its first lane acquire, and
    the others read what the other warp wrote behind a shuffle, which orders no memory."""
    source = """
KERNEL()(int* out) {
    auto pair = cg::tiled_partition<64>(cg::this_thread_block());
    out[threadIdx.x] = pair.any(threadIdx.x == 64);
}
"""
    out = np.zeros(128, np.int32)
    findings = run_kernel(COOPERATIVE + source, out, seed=seed, stop_at_findings=False)
    assert (out == np.arange(128) // 64).all()
    assert findings
    for finding in findings:
        assert finding.error is RaceDetected
        assert "cooperative_groups.h" in str(finding)
        assert re.search(r"then: read by .*, lane [1-9]", str(finding))


@pytest.mark.parametrize("seed", SEEDS)
def test_writes_into_a_neighbours_shared_memory(seed):
    """st.async and red.async count their bytes on the receiver's mbarrier."""
    source = """
KERNEL(__cluster_dims__(2))(u32* out) {
    __shared__ u32 words[64], sums[2];
    __shared__ u64 barrier;
    u32 at = shared_address(&barrier), rank = cluster_rank(), peer = rank ^ 1;
    if (threadIdx.x == 0) {
        init_barrier(at, 1);
        expect_bytes(at, 32 * 8 + 32 * 4);
        sums[0] = 100;
    }
    cluster_sync();
    u32 to, add, remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(to) : "r"(shared_address(&words[2 * threadIdx.x])), "r"(peer));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(add) : "r"(shared_address(sums)), "r"(peer));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(peer));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32"
        " [%0], {%1, %2}, [%3];"
        :: "r"(to), "r"(rank * 1000 + threadIdx.x), "r"(7), "r"(remote) : "memory");
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
        " [%0], %1, [%2];" :: "r"(add), "r"(threadIdx.x), "r"(remote) : "memory");
    wait(at, 0);
    out[rank * 64 + threadIdx.x] = words[2 * threadIdx.x] + words[2 * threadIdx.x + 1];
    out[rank * 64 + 32 + threadIdx.x] = sums[0];
    cluster_sync();
}
"""
    out = np.zeros((2, 64), np.uint32)
    run_kernel(source, out, ctas=2, threads=32, seed=seed)
    for rank in range(2):
        assert (out[rank, :32] == (1 - rank) * 1000 + np.arange(32) + 7).all()
        assert (out[rank, 32:] == 100 + 31 * 16).all()


def halves(words: np.ndarray, parts: int, signed: bool) -> np.ndarray:
    return (
        words[:, None].view({2: np.uint16, 4: np.uint8}[parts]).astype(np.int64)
        if not signed
        else words[:, None].view({2: np.int16, 4: np.int8}[parts]).astype(np.int64)
    )


@pytest.mark.parametrize("sign", ["u32", "s32"])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("vadd", lambda a, b: a + b),
        ("vsub", lambda a, b: a - b),
        ("vavrg", lambda a, b: np.where(a + b >= 0, (a + b + 1) >> 1, (a + b) >> 1)),
        ("vabsdiff", lambda a, b: abs(a - b)),
        ("vmin", np.minimum),
        ("vmax", np.maximum),
    ],
)
def test_simd_video_instructions(name, function, parts, sign):
    rng = np.random.default_rng(parts)
    a, b, c = (rng.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(3))
    source = f"""
KERNEL()(const u32* a, const u32* b, const u32* c, u32* out) {{
    u32 i = threadIdx.x;
    asm("{name}{parts}.{sign}.{sign}.{sign} %0, %1, %2, %3;"
        : "=r"(out[i]) : "r"(a[i]), "r"(b[i]), "r"(c[i]));
    asm("{name}{parts}.{sign}.{sign}.{sign}.add %0, %1, %2, %3;"
        : "=r"(out[64 + i]) : "r"(a[i]), "r"(b[i]), "r"(c[i]));
    asm("{name}{parts}.{sign}.{sign}.{sign}.sat %0, %1, %2, %3;"
        : "=r"(out[128 + i]) : "r"(a[i]), "r"(b[i]), "r"(c[i]));
}}
"""
    out = np.zeros((3, 64), np.uint32)
    run_kernel(source, a, b, c, out, threads=64)
    signed, bits = sign == "s32", 32 // parts
    expected = function(halves(a, parts, signed), halves(b, parts, signed))

    def packed(values: np.ndarray) -> np.ndarray:
        shifts = np.arange(parts) * bits
        return ((values & (2**bits - 1)) << shifts).sum(axis=1)

    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    assert (out[0] == packed(expected)).all()
    assert (out[1] == (c + expected.sum(axis=1)) % 2**32).all()
    assert (out[2] == packed(expected.clip(low, high))).all()


@pytest.mark.parametrize("before", ["original.words[threadIdx.x]", "0"])
@pytest.mark.parametrize("through", ["stores", "cp_fenceproxy"])
def test_tensor_map_edited_by_the_kernel(through, before):
    """A map of one matrix, or zeros, becomes the map of another one."""
    publish = {
        "stores": """
    ((uint4*)edited)[threadIdx.x % 8] = ((uint4*)map)[threadIdx.x % 8];
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
""",
        "cp_fenceproxy": """
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu"
        ".sync.aligned [%0], [%1], 128;" :: "l"(edited), "r"(own) : "memory");
""",
    }[through]
    source = f"""
KERNEL()(const __grid_constant__ Map original, void* edited, const u16* other, u32* out) {{
    __shared__ __align__(128) u64 map[16];
    __shared__ u64 barrier;
    u32 own = shared_address(map), at = shared_address(&barrier);
    u32 to = shared_address(dynamic_shared);
    if (threadIdx.x < 16) map[threadIdx.x] = {before};
    if (threadIdx.x == 0) init_barrier(at, 1);
    __syncwarp();
    if (threadIdx.x == 0) {{
#define REPLACE(field, type, value, constraint) \\
    asm volatile("tensormap.replace.tile." field ".shared::cta.b1024." type " [%0], " value ";" \\
        :: "r"(own), constraint : "memory")
        REPLACE("global_address", "b64", "%1", "l"(other));
        REPLACE("global_dim", "b32", "0, %1", "r"(32));
        REPLACE("global_dim", "b32", "1, %1", "r"(6));
        REPLACE("global_stride", "b64", "0, %1", "l"(96ull));
        REPLACE("box_dim", "b32", "0, %1", "r"(32));
        REPLACE("box_dim", "b32", "1, %1", "r"(8));
        REPLACE("element_stride", "b32", "1, %1", "r"(1));
        REPLACE("elemtype", "b32", "0x1", "r"(0));
        REPLACE("swizzle_mode", "b32", "0x2", "r"(0));
        REPLACE("fill_mode", "b32", "0x0", "r"(0));
        REPLACE("rank", "b32", "%1", "r"(1));
    }}
    __syncwarp();
    {publish}
    __syncwarp();
    if (threadIdx.x == 0) {{
        asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(edited));
        expect_bytes(at, 8 * 64);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1, {{%2, %3}}], [%4];"
            :: "r"(to), "l"(edited), "r"(0), "r"(0), "r"(at) : "memory");
    }}
    wait(at, 0);
    for (u32 i = threadIdx.x; i < 128; i += 32) out[i] = ((u32*)dynamic_shared)[i];
}}
"""
    first = aligned(np.zeros((16, 16), np.uint32))
    other = aligned(np.arange(6 * 48, dtype=np.uint16).reshape(6, 48))
    edited, out = aligned(np.zeros(128, np.uint8)), np.zeros((8, 4, 8), np.uint16)
    image = tensor_map(2, first.ctypes.data, [16, 16], [64], [4, 4])
    run_kernel(source, image, edited, other, out, threads=32, memory=(first,))
    expected = np.zeros((8, 32), np.uint16)
    expected[:6] = other[:, :32]
    for row in range(8):
        for chunk in range(4):
            at = chunk ^ row // 2 % 4  # 64-byte swizzle
            assert (out[row, at] == expected[row, 8 * chunk : 8 * chunk + 8]).all()


def test_code_on_cute_with_options_of_its_own():
    """As docs/emulator.md shows it."""
    source = """
#include <iostream>
#include "cute/tensor.hpp"
extern "C" __global__ void scale(float* data) {
    auto tensor = cute::make_tensor(cute::make_gmem_ptr(data), cute::Int<NUM>{});
    tensor(threadIdx.x) *= 2;
}
"""
    ptx = compile_to_ptx(
        source,
        arch="sm_90a",
        include_paths=find_headers().include_paths,
        options=["-std=c++17", "-DNUM=32"],
        headers={"iostream": ""},
    )
    data = np.ones(32, np.float32)
    machine = Machine()
    machine.add_array(data, "data")
    machine.launch(machine.load(ptx), grid=(1, 1, 1), block=(32, 1, 1), args=[data])
    machine.run()
    assert (data == 2).all()
