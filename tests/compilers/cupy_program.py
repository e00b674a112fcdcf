"""A CuPy program: kernels of its own and CuPy's, checked against NumPy."""

import cupy as cp
import numpy as np

axpy = cp.RawKernel(
    r"""
    extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] += a * x[i];
    }
    """,
    "axpy",
)
scale = cp.ElementwiseKernel("float32 x, float32 a", "float32 y", "y = a * x", "scale")

host = (np.arange(500) % 7).astype(np.float32)
x, y = cp.asarray(host), cp.ones(500, dtype=cp.float32)
axpy((4,), (128,), (x, y, np.float32(2), np.int32(500)))
assert (cp.asnumpy(y) == 2 * host + 1).all()
assert (cp.asnumpy(scale(x, np.float32(3))) == 3 * host).all()
assert int((x * x).sum()) == int((host * host).sum())
print("ok")
