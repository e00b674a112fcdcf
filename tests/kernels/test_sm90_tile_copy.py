"""How SM90 brings a tile of tokens: the block's rows from the pool, and zeros behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deep_moe.jit.kernel_args import kernel_args
from deep_moe.targets.sm90.weights import sm90_tensor_maps

from .layer_case import FITTED

LINEAR1, LINEAR2 = 0, 1
UNTOUCHED = 0xAA  # in front of the copy
K_BLOCK_IDX = 1

KERNEL = r"""
#include <deep_moe/experts/sm90/kernel_args.cuh>
#include <deep_moe/ptx/fence.cuh>
#include <deep_moe/ptx/ld_st.cuh>
#include <deep_moe/ptx/mbarrier.cuh>
#include <deep_moe/ptx/warp.cuh>
#include <deep_moe/experts/sm90/tile_copy.cuh>

using namespace deep_moe;

// y: the stage, as it lies in shared memory.
extern "C" __global__ void kernel(const __grid_constant__ sm90::KernelArgs args) {
    extern __shared__ __align__(1024) uint8_t tile[];
    __shared__ uint64_t barrier_word;
    constexpr uint32_t num_bytes = Config::block_m * Config::block_k;
    const uint32_t barrier = ptx::shared_address(&barrier_word);
    for (uint32_t i = threadIdx.x; i < num_bytes; i += 32) tile[i] = UNTOUCHED;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(barrier, 1);
    }
    ptx::fence_proxy_async_shared_cta();
    __syncwarp();
    if (threadIdx.x == 0) {
        const BlockRows block{static_cast<Phase>(PHASE), POOL_BLOCK, NUM_ROWS, NUM_VALID_ROWS};
        const sm90::TileCopy<Config> copy(args, block);
        ptx::mbarrier_arrive_expect_tx(barrier, copy.num_bytes);
        copy.start(ptx::shared_address(tile), K_BLOCK, barrier);
    }
    while (!ptx::mbarrier_try_wait_parity(barrier, 0)) {}
    auto* y = static_cast<uint8_t*>(args.y);
    for (uint32_t i = threadIdx.x; i < num_bytes; i += 32) y[i] = tile[i];
}
"""


def unswizzled(stage: np.ndarray) -> np.ndarray:
    """[rows, 128] of a stage: the 16-byte chunks of a row are exchanged by the row's number."""
    chunks = stage.reshape(-1, 8, 16)
    rows = np.arange(len(chunks))[:, None]
    return chunks[rows, np.arange(8)[None, :] ^ rows % 8].reshape(-1, 128)


@pytest.mark.parametrize("phase", [LINEAR1, LINEAR2])
@pytest.mark.parametrize(
    ("tile", "pool_block_idx", "num_rows", "num_valid_rows"),
    [
        ({"block_m": 24}, 0, 24, 1),
        ({"block_m": 24}, 2, 24, 17),
        ({"block_m": 24}, -1, 24, 23),
        ({"block_m": 24}, -1, 24, 24),
        (FITTED, 0, 64, 33),
        (FITTED, 1, 96, 70),
        (FITTED, 1, 96, 96),
        (FITTED, -4, 128, 64),
        (FITTED, -4, 128, 101),
    ],
)
def test_rows_behind_the_block_are_zero(
    make_config: Any,
    make_ranks: Any,
    phase: int,
    tile: dict[str, int],
    pool_block_idx: int,
    num_rows: int,
    num_valid_rows: int,
) -> None:
    config = make_config(300, arch="sm_90a", num_sms=1, intermediate_hidden=256, overrides=tile)
    ranks = make_ranks(config, output_bytes=config.block_m * config.block_k)
    ranks.args_type = kernel_args("sm90")
    ranks.tensor_maps = sm90_tensor_maps(config, ranks.buffers[0].ctypes.data)
    pool = ranks.segment(0, ("l1_tokens", "l2_tokens")[phase])
    pool[:] = np.random.default_rng(1).integers(1, 256, pool.shape)
    pool_block_idx %= len(pool) // config.block_m_step
    block = {
        "PHASE": phase,
        "POOL_BLOCK": pool_block_idx,
        "NUM_ROWS": num_rows,
        "NUM_VALID_ROWS": num_valid_rows,
        "K_BLOCK": K_BLOCK_IDX,
        "UNTOUCHED": UNTOUCHED,
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in block.items())

    ranks.run(defines + KERNEL.lstrip(), shared_bytes=config.block_m * config.block_k)

    stage = unswizzled(ranks.output(0, np.uint8, config.block_m * config.block_k))
    first_row = pool_block_idx * config.block_m_step
    columns = slice(K_BLOCK_IDX * config.block_k, (K_BLOCK_IDX + 1) * config.block_k)
    expected = np.full_like(stage, UNTOUCHED)
    expected[:] = 0
    expected[:num_valid_rows] = pool[first_row : first_row + num_valid_rows, columns]
    np.testing.assert_array_equal(stage, expected)
