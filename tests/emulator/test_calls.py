"""Functions that are called: by name, by address, by themselves; their stack; the device's heap."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import InvalidOperation, OutOfBounds, Unsupported

from .device import run_kernel
from .raw_ptx import run_body

FUNCTIONS = """
typedef float (*Function)(float, u32);
__device__ __noinline__ float plus(float x, u32 n) { return x + n; }
__device__ __noinline__ float times(float x, u32 n) { return x * n; }
__device__ __noinline__ float twice(float x, u32 n) { return times(plus(x, n), 2); }
__device__ Function table[3] = {plus, times, twice};
"""


@pytest.mark.parametrize("seed", range(3))
def test_lanes_call_different_functions_by_address(seed):
    which = np.random.default_rng(seed).integers(0, 3, 64).astype(np.uint32)
    out = np.zeros(64, np.float32)
    source = """
KERNEL()(const u32* which, float* out) {
    u32 i = threadIdx.x;
    if (i % 8 == 7) return;
    out[i] = table[which[i]](i, 3) + (i % 2 ? table[0](i, 1) : 0);
}
"""
    run_kernel(FUNCTIONS + source, which, out, threads=64, seed=seed)
    i = np.arange(64)
    expected = np.choose(which, [i + 3, i * 3, (i + 3) * 2]) + np.where(i % 2, i + 1, 0)
    assert (out == np.where(i % 8 == 7, 0, expected)).all()


def test_virtual_functions():
    source = """
struct Shape {
    float side;
    __device__ Shape(float side) : side(side) {}
    __device__ virtual float area() const { return side * side; }
};
struct Cube : Shape {
    __device__ Cube(float side) : Shape(side) {}
    __device__ float area() const override { return 6 * Shape::area(); }
};
KERNEL()(float* out) {
    Shape square(threadIdx.x);
    Cube cube(threadIdx.x);
    const Shape* shape = out[threadIdx.x] ? static_cast<const Shape*>(&cube) : &square;
    out[threadIdx.x] = shape->area();
}
"""
    out = (np.arange(32) % 2).astype(np.float32)
    run_kernel(source, out, threads=32)
    assert (out == np.where(np.arange(32) % 2, 6, 1) * np.arange(32) ** 2).all()


def test_a_wrong_address_or_signature_is_named():
    call = "prototype: .callprototype _ (.param .b32 _); call %rd0, (x), prototype;"
    body = f"{{ .param .b32 x; st.param.b32 [x], 1; mov.u64 %rd0, 24; {call} }}"
    with pytest.raises(InvalidOperation, match="call of 0x18, which is no function's address"):
        run_body(body)
    function = ".func f(.param .b64 a) { ret; }\n"
    with pytest.raises(InvalidOperation, match="the call's parameters are not those of f"):
        run_body(body.replace("24", "f"), module=function)


def test_recursion_keeps_registers_and_locals():
    """Quicksort with its stack of ranges on the stack of calls, and Ackermann's function."""
    source = """
__device__ __noinline__ void sort(int* values, int low, int high) {
    int pivot[3] = {values[low], values[(low + high) / 2], values[high]};
    if (pivot[0] > pivot[1]) { int t = pivot[0]; pivot[0] = pivot[1]; pivot[1] = t; }
    if (pivot[1] > pivot[2]) pivot[1] = pivot[2] > pivot[0] ? pivot[2] : pivot[0];
    int i = low, j = high, middle = pivot[1];
    while (i <= j) {
        while (values[i] < middle) ++i;
        while (values[j] > middle) --j;
        if (i <= j) { int t = values[i]; values[i++] = values[j]; values[j--] = t; }
    }
    if (low < j) sort(values, low, j);
    if (i < high) sort(values, i, high);
}
__device__ __noinline__ int ackermann(int m, int n) {
    return m == 0 ? n + 1 : n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1));
}
KERNEL()(int* values, int* out) {
    int own[40];
    for (int i = 0; i < 40; ++i) own[i] = values[threadIdx.x * 40 + i];
    sort(own, 0, 39);
    for (int i = 0; i < 40; ++i) values[threadIdx.x * 40 + i] = own[i];
    out[threadIdx.x] = ackermann(2, threadIdx.x % 4);
}
"""
    values = np.random.default_rng(0).integers(-99, 99, (32, 40)).astype(np.int32)
    expected, out = np.sort(values, axis=1), np.zeros(32, np.int32)
    run_kernel(source, values, out, threads=32)
    assert (values == expected).all()
    assert out.tolist() == [2 * (n % 4) + 3 for n in range(32)]


def test_recursion_without_end_is_an_error():
    source = """
__device__ __noinline__ u32 f(const u32* in, u32 n) {
    u32 value = in[n % 4];
    return value == 9 ? 0 : f(in, n + value) * 3 + value;
}
KERNEL()(u32* out) { out[0] = f(out, 1); }
"""
    with pytest.raises(OutOfBounds, match="stack overflow"):
        run_kernel(source, np.zeros(4, np.uint32), threads=1)


def test_memory_on_the_stack():
    body = """
mov.u32 %r0, %tid.x; add.u32 %r1, %r0, 1; mul.wide.u32 %rd0, %r1, 4;
stacksave.u64 %rd4;
alloca.u64 %rd1, %rd0, 16;
mov.u32 %r2, 0;
fill: mul.wide.u32 %rd2, %r2, 4; add.u64 %rd2, %rd2, %rd1; st.local.u32 [%rd2], %r2;
add.u32 %r2, %r2, 1; setp.lt.u32 %c0, %r2, %r1; @%c0 bra fill;
cvta.local.u64 %rd2, %rd1; mad.wide.u32 %rd2, %r0, 4, %rd2; ld.u32 %r3, [%rd2];
mad.wide.u32 %rd3, %r0, 4, %p0; st.global.u32 [%rd3], %r3;
stackrestore.u64 %rd4;
"""
    out = np.zeros(32, np.uint32)
    run_body(body, out)
    assert (out == np.arange(32)).all()
    with pytest.raises(OutOfBounds, match="has 0 bytes of stack"):
        run_body(body + "ld.local.u32 %r3, [%rd1];", out)


def test_heap_of_the_device():
    source = """
KERNEL()(u32* out, u32 frees_twice) {
    u32* own = new u32[threadIdx.x + 1];
    for (u32 i = 0; i <= threadIdx.x; ++i) own[i] = i;
    out[threadIdx.x] = own[threadIdx.x];
    delete[] own;
    if (frees_twice && threadIdx.x == 3) delete[] own;
}
"""
    out = np.zeros(32, np.uint32)
    run_kernel(source, out, 0, threads=32)
    assert (out == np.arange(32)).all()
    with pytest.raises(InvalidOperation, match="which malloc has not given"):
        run_kernel(source, out, 1, threads=32)
    with pytest.raises(OutOfBounds, match="'memory from malloc'"):
        run_kernel(source.replace("own[threadIdx.x]", "own[threadIdx.x + 1]"), out, 0, threads=32)


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%rd0, {%r4, %r5}];", "tex.2d.v4.f32.f32"),
        ("sust.b.1d.b32.trap [%rd0, {%r0}], {%r1};", "sust.b.1d.b32.trap"),
        ("vadd.s32.s32.s32 %r0, %r1.b0, %r2.b1;", "vadd.s32.s32.s32"),
        ("vadd4.s32.s32.s32 %r0, %r1.b0123, %r2, %r3;", "selection of parts"),
        (
            "cvt.rn.satfinite.scaled::n2::ue8m0.f16x2.e4m3x2 %r0, %h0, %h1;",
            "this conversion with scales",
        ),
        (
            "cp.async.bulk.tensor.3d.shared::cta.global.im2col::w.mbarrier::complete_tx::bytes"
            " [%r0], [%rd0, {%r1, %r2, %r3}], [%r4], {%h0, %h1};",
            "im2col::w",
        ),
    ],
)
def test_what_is_missing_is_named_with_its_line(statement, name):
    with pytest.raises(Unsupported, match=rf"PTX line \d+: .*{name}"):
        run_body(statement)
