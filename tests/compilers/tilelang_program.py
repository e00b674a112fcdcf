"""A TileLang program: a product of halves by TMA and wgmma, checked against NumPy."""

import numpy as np
import tilelang
import tilelang.language as T
from tilelang import tvm


@tilelang.jit(target={"kind": "cuda", "arch": "sm_90a"})
def matmul(rows, columns, depth, bm, bn, bk):
    @T.prim_func
    def product(
        a: T.Tensor((rows, depth), "float16"),
        b: T.Tensor((depth, columns), "float16"),
        c: T.Tensor((rows, columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(columns, bn), T.ceildiv(rows, bm), threads=128) as (bx, by):
            a_tile = T.alloc_shared((bm, bk), "float16")
            b_tile = T.alloc_shared((bk, bn), "float16")
            sums = T.alloc_fragment((bm, bn), "float32")
            T.clear(sums)
            for k in T.Pipelined(T.ceildiv(depth, bk), num_stages=2):
                T.copy(a[by * bm, k * bk], a_tile)
                T.copy(b[k * bk, bx * bn], b_tile)
                T.gemm(a_tile, b_tile, sums)
            T.copy(sums, c[by * bm, bx * bn])

    return product


rng = np.random.default_rng(0)
a, b = (rng.integers(-4, 5, (128, 128)).astype(np.float16) for _ in range(2))
x, y, z = (
    tvm.runtime.tensor(array, device=tvm.cuda())
    for array in (a, b, np.zeros((128, 128), np.float32))
)
matmul(128, 128, 128, 64, 64, 64)(x, y, z)
assert (z.numpy() == a.astype(np.float32) @ b.astype(np.float32)).all()
print("ok")
