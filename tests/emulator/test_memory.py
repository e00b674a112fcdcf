"""State spaces, vectors, atomics, module variables, and every check of an access."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from warpcheck import LaunchError, Machine, Misaligned, OutOfBounds, Uninitialized

from .device import aligned, ptx_of, run_kernel
from .raw_ptx import entry, run_body


def test_shared_histogram_with_atomics():
    data = np.random.default_rng(0).integers(0, 64, 4096).astype(np.uint32)
    out = np.zeros(64, np.uint32)
    run_kernel(
        """
KERNEL()(const u32* data, u32* out) {
    __shared__ u32 bins[64];
    if (threadIdx.x < 64) bins[threadIdx.x] = 0;
    __syncthreads();
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < 4096; i += gridDim.x * blockDim.x)
        atomicAdd(&bins[data[i]], 1);
    __syncthreads();
    if (threadIdx.x < 64) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}
""",
        data,
        out,
        ctas=4,
        threads=256,
    )
    assert out.tolist() == np.bincount(data, minlength=64).tolist()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("atomicMax((int*)out, int(threadIdx.x) - 5)", 58),
        ("atomicExch(out, 9)", 9),
        ("atomicOr(out, 1u << threadIdx.x % 32)", 0xFFFFFFFF),
        ("atomicInc(out, 9)", 64 % 10),
        ("atomicAdd((u64*)out, 1ull << 26)", 0),
        ("atomicAdd((float*)out, 0.5f)", 0x42000000),
    ],
)
def test_global_atomics(call, expected):
    out = np.zeros(2, np.uint32)
    run_kernel(f"KERNEL()(u32* out) {{ {call}; }}", out, threads=64)
    assert int(out[0]) == expected
    if "u64" in call:
        assert int(out[1]) == 1


def test_compare_and_swap_builds_a_lock():
    out = np.zeros(2, np.uint32)
    run_kernel(
        """
KERNEL()(u32* out) {
    for (bool done = false; !done;) {
        if (atomicCAS(out, 0, 1) == 0) {
            ((volatile u32*)out)[1] += 1;
            __threadfence();
            atomicExch(out, 0);
            done = true;
        }
    }
}
""",
        out,
        ctas=4,
        threads=64,
    )
    assert out.tolist() == [0, 256]


def test_vectors_of_every_width():
    source = aligned(np.arange(256, dtype=np.uint32))
    out = aligned(np.zeros(256, np.uint32))
    run_body(
        """
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd0, %r0, 32;
add.u64 %rd1, %p0, %rd0;
add.u64 %rd2, %p1, %rd0;
ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];
st.global.v4.b32 [%rd2], {%r8, %r7, %r6, %r5};
.reg .b128 %q;
ld.global.b128 %q, [%rd1];
mov.b128 {%rd3, %rd4}, %q;
st.global.v2.b64 [%rd2+16], {%rd4, %rd3};
""",
        source,
        out,
    )
    rows = source.reshape(32, 8)
    np.testing.assert_array_equal(out.reshape(32, 8), rows[:, [7, 6, 5, 4, 2, 3, 0, 1]])


def test_narrow_loads_extend_into_wide_registers():
    source = np.array([0x80FF, 0x1234], np.uint16)
    out = np.zeros(3, np.int64)
    run_body(
        """
ld.global.s8 %rd1, [%p0];
ld.global.u8 %rd2, [%p0+1];
ld.global.s16 %r1, [%p0];
cvt.s64.s32 %rd3, %r1;
st.global.b64 [%p1], %rd1;
st.global.b64 [%p1+8], %rd2;
st.global.b64 [%p1+16], %rd3;
""",
        source,
        out,
        threads=1,
    )
    assert out.tolist() == [-1, 0x80, -32513]


def test_module_variables_live_as_long_as_the_module():
    module = (
        ".global .align 4 .u32 counter = 5;\n"
        ".const .align 4 .b8 table[8] = {1, 0, 0, 0, 7, 0, 0, 0};\n"
        ".global .align 8 .u64 pointer = generic(counter);\n"
    )
    body = """
ld.global.u64 %rd0, [pointer];
ld.const.u32 %r1, [table+4];
atom.global.add.u32 %r2, [%rd0], %r1;
st.global.u32 [%p0], %r2;
"""
    machine = Machine()
    out = np.zeros(1, np.uint32)
    machine.add_memory(0, out.ctypes.data, 4, "out")
    machine.add_memory(1, out.ctypes.data, 4, "out")
    loaded = machine.load(entry(body, 1, module=module))
    seen = []
    for rank in (0, 0, 1):
        machine.launch(
            loaded,
            "kernel",
            grid=(1, 1, 1),
            block=(1, 1, 1),
            args=out.ctypes.data.to_bytes(8, "little"),
            rank=rank,
        )
        machine.run()
        seen.append(int(out[0]))
    assert seen == [5, 12, 5]  # every rank has its own


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ("st.global.u32 [%p0+256], 1;", OutOfBounds, "0 bytes past the end of 'array 0'"),
        (
            "ld.global.b64 %rd0, [%p0+248]; ld.global.v2.b64 {%rd0, %rd1}, [%p0+256];",
            OutOfBounds,
            "read of 16",
        ),
        ("mov.u64 %rd0, 64; ld.u32 %r0, [%rd0];", OutOfBounds, "before 'array 0'|parameters"),
        ("ld.global.u32 %r0, [%p0+2];", Misaligned, "not aligned to 4"),
        (
            ".shared .b8 s[64]; st.shared.u32 [s+64], 1;",
            OutOfBounds,
            "shared memory is 0x400..0x440",
        ),
        (".shared .b8 s[64]; ld.shared.u32 %r0, [s];", Uninitialized, "never written"),
        (
            ".local .b8 l[16]; mov.u64 %rd0, l; ld.local.u32 %r0, [%rd0+16];",
            OutOfBounds,
            "the lane has 16",
        ),
        ("mov.u32 %r0, 0x1000400; st.shared.u32 [%r0], 1;", OutOfBounds, "CTA rank 1"),
        (
            "ld.param.u64 %rd0, [q0]; mov.u64 %rd1, q0; st.u64 [%rd1], %rd0;",
            OutOfBounds,
            "read-only",
        ),
    ],
)
def test_bad_accesses_are_named(body, error, text):
    with pytest.raises(error, match=text) as caught:
        run_body(body, np.zeros(64, np.uint32), threads=1)
    assert "rank 0, CTA 0, warp 0, lane 0" in str(caught.value)
    assert "test.ptx, PTX line" in str(caught.value)


def test_unwritten_shared_memory_may_be_read_without_checks():
    machine = Machine(checks=False)
    loaded = machine.load(entry(".shared .b8 s[64]; ld.shared.u32 %r0, [s];", 0))
    machine.launch(loaded, "kernel", grid=(1, 1, 1), block=(32, 1, 1))
    machine.run()


def test_errors_name_the_source_line():
    out = np.zeros(4, np.uint32)
    with pytest.raises(OutOfBounds, match=r"source /kernel\.cu:\d+"):
        run_kernel("KERNEL()(u32* out) { out[threadIdx.x] = 1; }", out, threads=5)


def test_memory_must_not_overlap_and_can_be_removed():
    data = np.zeros(64, np.uint8)
    address = data.ctypes.data
    machine = Machine()
    machine.add_memory(0, address + 16, 16, "first")
    for offset, size in ((0, 17), (16, 16), (20, 4), (31, 8), (0, 64)):
        with pytest.raises(LaunchError, match="'second' overlaps 'first'"):
            machine.add_memory(0, address + offset, size, "second")
    machine.add_memory(0, address, 16, "before")
    machine.add_memory(0, address + 32, 32, "behind")
    machine.add_memory(1, address + 4, 60, "of another rank")
    machine.remove_memory(0, address + 16)
    machine.add_memory(0, address + 20, 8, "second")
    with pytest.raises(LaunchError, match="no memory region"):
        machine.remove_memory(0, address + 16)


VARIABLES = """
__device__ u32 counts[4];
__constant__ float factor;
KERNEL()(u32* out) {
    counts[threadIdx.x] += threadIdx.x;
    out[threadIdx.x] = u32(factor * 10);
}
"""


def test_the_host_reads_and_writes_module_variables():
    machine = Machine()
    out = np.zeros(4, np.uint32)
    machine.add_array(out, "out")
    module = machine.load(ptx_of(VARIABLES, "sm_90a"))
    counts = machine.variable(module, "counts").view(np.uint32)
    counts[:] = 100
    machine.variable(module, "factor").view(np.float32)[0] = 0.5
    machine.launch(module, grid=(1, 1, 1), block=(4, 1, 1), args=[out])
    machine.run()
    assert counts.tolist() == [100, 101, 102, 103]
    assert out.tolist() == [5] * 4
    # Each rank has its own.
    assert machine.variable(module, "counts", rank=1).tolist() == [0] * 16
    with pytest.raises(LaunchError, match="has no variable 'sums'"):
        machine.variable(module, "sums")
    with pytest.raises(LaunchError, match="belongs to another machine"):
        Machine().variable(module, "counts")


def test_a_variable_outlives_the_machine_variable():
    machine = Machine()
    values = machine.variable(machine.load(ptx_of(VARIABLES, "sm_90a")), "counts")
    del machine
    gc.collect()
    values[:] = 3
    assert values.sum() == 48


def test_arrays_live_as_long_as_they_are_registered():
    machine = Machine()
    array = np.zeros(64, np.uint32)
    known, address = weakref.ref(array), array.ctypes.data
    machine.add_array(array, "array")
    del array
    gc.collect()
    assert known() is not None
    machine.remove_memory(0, address)
    gc.collect()
    assert known() is None
