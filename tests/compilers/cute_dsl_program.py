"""A program of CuTe DSL: a transposition through shared memory, checked against NumPy."""

import cutlass
import numpy as np
from cuda.bindings import driver
from cuda.core import Device
from cutlass import cute
from cutlass.cute.runtime import make_ptr

SIDE = 64
TILE = 16


@cute.kernel
def transpose_tile(x: cute.Tensor, y: cute.Tensor):
    column, row, _ = cute.arch.thread_idx()
    block_column, block_row, _ = cute.arch.block_idx()
    tile = cutlass.utils.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout((TILE, TILE), stride=(TILE + 1, 1)), 16
    )
    tile[row, column] = x[block_row * TILE + row, block_column * TILE + column]
    cute.arch.sync_threads()
    y[block_column * TILE + row, block_row * TILE + column] = tile[column, row]


@cute.jit
def transpose(x_ptr: cute.Pointer, y_ptr: cute.Pointer):
    layout = cute.make_layout((SIDE, SIDE), stride=(SIDE, 1))
    x, y = cute.make_tensor(x_ptr, layout), cute.make_tensor(y_ptr, layout)
    transpose_tile(x, y).launch(grid=[SIDE // TILE, SIDE // TILE, 1], block=[TILE, TILE, 1])


def global_pointer(buffer):
    return make_ptr(cutlass.Float32, int(buffer.handle), cute.AddressSpace.gmem)


device = Device()
device.set_current()
host = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
source, target = (device.allocate(host.nbytes, stream=device.default_stream) for _ in range(2))
(status,) = driver.cuMemcpyHtoD(int(source.handle), host.ctypes.data, host.nbytes)
assert status == 0
transpose(global_pointer(source), global_pointer(target))
out = np.empty_like(host)
(status,) = driver.cuMemcpyDtoH(out.ctypes.data, int(target.handle), out.nbytes)
assert status == 0
assert (out == host.T).all()
print("ok")
