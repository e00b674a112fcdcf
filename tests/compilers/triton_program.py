"""A Triton program without PyTorch: a matrix product and a softmax, checked against NumPy."""

import numpy as np
import triton
import triton.language as tl
from cuda.bindings import driver
from cuda.core import Device

device = Device()
device.set_current()


class Tensor:
    """What Triton asks of one: an address and a type."""

    def __init__(self, array):
        self.array = array
        self.dtype = {"float32": tl.float32, "float16": tl.float16}[array.dtype.name]
        self.buffer = device.allocate(array.nbytes, stream=device.default_stream)
        (status,) = driver.cuMemcpyHtoD(int(self.buffer.handle), array.ctypes.data, array.nbytes)
        assert status == 0

    def data_ptr(self):
        return int(self.buffer.handle)

    def numpy(self):
        out = np.empty_like(self.array)
        (status,) = driver.cuMemcpyDtoH(out.ctypes.data, self.data_ptr(), out.nbytes)
        assert status == 0
        return out


@triton.jit
def matmul(a, b, c, rows, columns, depth, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    m = tl.program_id(0) * bm + tl.arange(0, bm)
    n = tl.program_id(1) * bn + tl.arange(0, bn)
    k = tl.arange(0, bk)
    acc = tl.zeros((bm, bn), tl.float32)
    for i in range(0, depth, bk):
        x = tl.load(a + m[:, None] * depth + (i + k)[None, :])
        y = tl.load(b + (i + k)[:, None] * columns + n[None, :])
        acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * columns + n[None, :], acc)


@triton.jit
def softmax(x, y, n, block: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, block)
    v = tl.load(x + row * n + i, mask=i < n, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * n + i, v / tl.sum(v, 0), mask=i < n)


rng = np.random.default_rng(0)
a, b = (rng.integers(-4, 5, (128, 128)).astype(np.float16) for _ in range(2))
c = Tensor(np.zeros((128, 128), np.float32))
matmul[(1, 2)](Tensor(a), Tensor(b), c, 128, 128, 128, bm=128, bn=64, bk=64, num_warps=4)
assert (c.numpy() == a.astype(np.float32) @ b.astype(np.float32)).all()
x = rng.normal(size=(4, 100)).astype(np.float32)
y = Tensor(np.zeros_like(x))
softmax[(4,)](Tensor(x), y, 100, block=128)
e = np.exp(x - x.max(1, keepdims=True))
assert np.allclose(y.numpy(), e / e.sum(1, keepdims=True), atol=1e-6)
print("ok")
