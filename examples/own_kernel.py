"""A kernel that has nothing to do with this library, run and checked without a GPU.

It transposes a matrix: tensor copies bring tiles into shared memory, all threads write them out.
`python examples/own_kernel.py` ends with what the checks say when nobody waits for a tile.
"""

from __future__ import annotations

import numpy as np

from deep_moe.emulator import EmulatorError, Machine, compile_to_ptx
from deep_moe.emulator.tensor_map import DataType, TensorMapSpec

TILE = 32
WAIT = """
    asm volatile("{ .reg .pred done;"
                 "again_%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;"
                 "@!done bra again_%=; }" ::"r"(loaded_at) : "memory");
"""
SOURCE = """
constexpr int TILE = 32;
struct alignas(64) TensorMap { unsigned char bytes[128]; };

extern "C" __global__ void transpose(float* out, int num_rows,
                                     const __grid_constant__ TensorMap tiles) {
    __shared__ alignas(128) float tile[TILE][TILE];
    __shared__ alignas(8) unsigned char loaded[8];
    const unsigned tile_at = __cvta_generic_to_shared(tile);
    const unsigned loaded_at = __cvta_generic_to_shared(loaded);
    const unsigned column = blockIdx.x * TILE, row = blockIdx.y * TILE;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(loaded_at) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;"
                     ::"r"(loaded_at) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(tile_at), "l"(&tiles), "r"(column), "r"(row), "r"(loaded_at) : "memory");
    }
    __syncthreads();
    WAIT
    for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x)
        out[(column + i / TILE) * num_rows + row + i % TILE] = tile[i % TILE][i / TILE];
}
"""


def transpose(matrix: np.ndarray, source: str, seed: int) -> np.ndarray:
    num_rows, num_columns = matrix.shape
    result = np.zeros((num_columns, num_rows), np.float32)
    machine = Machine(seed=seed)
    machine.add_array(matrix, "matrix", writable=False)
    machine.add_array(result, "result")
    module = machine.load(compile_to_ptx(source, arch="sm_90a"))
    tiles = TensorMapSpec(
        DataType.FLOAT32,
        address=matrix.ctypes.data,
        dims=(num_columns, num_rows),
        strides=(matrix.strides[0],),
        box=(TILE, TILE),
    )
    machine.launch(
        module,
        "transpose",
        grid=(num_columns // TILE, num_rows // TILE, 1),
        block=(128, 1, 1),
        args=[result, num_rows, tiles.encode_emulated()],
    )
    machine.run()
    return result


def main() -> None:
    matrix = np.arange(96 * 64, dtype=np.float32).reshape(96, 64)
    for seed in range(4):
        assert (transpose(matrix, SOURCE.replace("WAIT", WAIT), seed) == matrix.T).all()
    print("The transposed matrix is right under four schedules.\n\nWithout the wait:")
    try:
        transpose(matrix, SOURCE.replace("WAIT", ""), seed=0)
    except EmulatorError as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("nobody noticed that the wait is missing")


if __name__ == "__main__":
    main()
