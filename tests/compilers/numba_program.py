"""A program of numba-cuda: sums of blocks through shared memory, checked against NumPy."""

import numpy as np
from numba import cuda, float32


@cuda.jit
def block_sums(x, sums):
    part = cuda.shared.array(128, dtype=float32)
    thread, i = cuda.threadIdx.x, cuda.grid(1)
    part[thread] = x[i]
    cuda.syncthreads()
    width = 64
    while width > 0:
        if thread < width:
            part[thread] += part[thread + width]
        cuda.syncthreads()
        width //= 2
    if thread == 0:
        sums[cuda.blockIdx.x] = part[0]


host = (np.arange(512) % 7).astype(np.float32)
sums = cuda.to_device(np.zeros(4, np.float32))
block_sums[4, 128](cuda.to_device(host), sums)
assert (sums.copy_to_host() == host.reshape(4, 128).sum(1)).all()
print("ok")
