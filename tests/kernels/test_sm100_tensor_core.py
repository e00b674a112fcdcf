"""One k-block through the tensor core: scales to TMEM, four MMAs on both CTAs, accumulator back.

Tiles are written to shared memory by hand, as the tensor copies would leave them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deep_moe.formats.block_scaled import (
    dequantize_e2m1_ue8m0,
    dequantize_e4m3_ue8m0,
    quantize_e2m1_ue8m0,
    quantize_e4m3_ue8m0,
)

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/ptx/fence.cuh>
#include <deep_moe/experts/sm100/epilogue_warp.cuh>
#include <deep_moe/experts/sm100/mma.cuh>
#include <deep_moe/experts/sm100/shared_memory.cuh>

using namespace deep_moe;

extern __shared__ __align__(1024) uint8_t shared_bytes[];

// One warpgroup per CTA. y: this CTA's tiles (tokens, weights, their scales), then, behind both
// CTAs' tiles, the accumulator [256 rows][block_m].
extern "C" __global__ void __cluster_dims__(2) kernel(const __grid_constant__ KernelArgs args) {
    using Smem = sm100::SharedMemory<Config>;
    const Smem smem(ptx::shared_address(shared_bytes));
    const uint32_t rank = ptx::cluster_ctarank();
    const uint32_t warp_idx = ptx::warp_idx();
    const auto* tile = static_cast<const uint32_t*>(args.y) + rank * TILE_WORDS;
    const auto copy = [&](uint32_t dst, uint32_t num_bytes) {
        for (uint32_t i = threadIdx.x; i < num_bytes / 4; i += blockDim.x) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(dst + 4 * i), "r"(tile[i]) : "memory");
        }
        tile += num_bytes / 4;
    };
    copy(smem.activations(1), Smem::activation_tile_bytes);
    copy(smem.weights(1), Config::Smem::weights_stride);
    copy(smem.activation_sf(1), Config::Smem::activation_sf_stride);
    copy(smem.weight_sf(1), Config::Smem::weight_sf_stride);
    ptx::fence_proxy_async_shared_cta();
    if (threadIdx.x == 0) smem.init_barriers();
    if (warp_idx == 0) {
        ptx::tcgen05_alloc_cta_group2(smem.tmem_ptr(), Config::num_tmem_columns);
        ptx::tcgen05_relinquish_alloc_permit_cta_group2();
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();

    const uint32_t tmem =
        *reinterpret_cast<uint32_t*>(shared_bytes + Config::Smem::tmem_ptr_offset);
    const uint32_t accumulator = tmem + Config::Tmem::accumulator_column + Config::block_m;
    if (rank == 0 && warp_idx == 0 && ptx::elect_sync()) {
        const sm100::StageDescriptors<Config> descriptors(smem);
        sm100::multiply_scaled_k_block(descriptors, 1, tmem, accumulator, NUM_TOKENS, true);
        sm100::multiply_scaled_k_block(descriptors, 1, tmem, accumulator, NUM_TOKENS, false);
        ptx::tcgen05_commit_cta_group2_multicast(smem.tmem_full_barriers(1), 0b11);
    }
    Waiter waiter(args);
    waiter.warp_mbarrier(WaitSite::accumulator_full, smem.tmem_full_barriers(1), 0);
    ptx::tcgen05_fence_after_thread_sync();
    auto* out = static_cast<float*>(args.y) + 2 * TILE_WORDS + rank * 128 * Config::block_m;
    const sm100::Accumulator view{accumulator + (warp_idx * 32 << 16), 0};
    for (uint32_t token = 0; token < NUM_TOKENS; token += 8) {
        float values[2][4];
        view.load(token, values);
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t row = warp_idx * 32 + i / 4 * 16 + i % 4 / 2 * 8 + ptx::lane_idx() / 4;
            out[row * Config::block_m + token + ptx::lane_idx() % 4 * 2 + i % 2] =
                values[i / 4][i % 4];
        }
    }
    ptx::tcgen05_fence_before_thread_sync();
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    if (warp_idx == 0) ptx::tcgen05_dealloc_cta_group2(tmem, Config::num_tmem_columns);
}
"""


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Rows of 128 bytes as the 128-byte swizzle leaves them."""
    lin = np.arange(rows.size)
    out = np.empty(rows.size, np.uint8)
    out[lin ^ ((lin >> 3) & 0x70)] = rows.reshape(-1)
    return out


def unpacked(packed: np.ndarray) -> np.ndarray:
    """64 packed bytes per row to 128: 8 of data, 8 of padding, which nothing may depend on."""
    chunks = np.full((packed.shape[0], 8, 16), 0xAB, np.uint8)
    chunks[:, :, :8] = packed.reshape(-1, 8, 8)
    return chunks.reshape(-1, 128)


def scale_words(words: np.ndarray, num_rows: int) -> np.ndarray:
    """Words of rows in the order that a copy to TMEM wants, groups of 128."""
    row = np.arange(num_rows)
    out = np.zeros(-(-num_rows // 128) * 128, np.uint32)
    out[row // 128 * 128 + row % 32 * 4 + row % 128 // 32] = words[:num_rows]
    return out


@pytest.mark.parametrize(
    ("block_m", "num_tokens"), [(16, 16), (32, 32), (64, 48), (96, 96), (128, 80), (192, 192)]
)
def test_k_block(make_config: Any, make_ranks: Any, block_m: int, num_tokens: int) -> None:
    config = make_config(overrides={"block_m": block_m, "num_stages": 2})
    generator = torch.Generator().manual_seed(block_m)
    # Scales differ from row to row and from group to group.
    spread = torch.exp2(torch.randint(-4, 5, (256 + num_tokens, 4), generator=generator).float())
    values = torch.randn(256 + num_tokens, 128, generator=generator)
    values *= spread.repeat_interleave(32, dim=1)
    weights, weight_sf = quantize_e2m1_ue8m0(values[:256])
    tokens, token_sf = quantize_e4m3_ue8m0(values[256:])

    tiles = []
    for rank in range(2):
        half = np.zeros((block_m // 2, 128), np.uint8)
        first = rank * num_tokens // 2
        half[: num_tokens // 2] = tokens[first : first + num_tokens // 2].view(torch.uint8).numpy()
        rows = slice(128 * rank, 128 * rank + 128)
        parts = (
            swizzled(half),
            swizzled(unpacked(weights[rows].view(torch.uint8).numpy())),
            scale_words(token_sf[:, 0].numpy().view(np.uint32), num_tokens),
            scale_words(weight_sf[rows, 0].numpy().view(np.uint32), 128),
        )
        tiles.append(np.concatenate([part.view(np.uint8) for part in parts]))

    num_tile_bytes = tiles[0].size
    ranks = make_ranks(config, output_bytes=2 * num_tile_bytes + 256 * block_m * 4)
    output = ranks.output(0, np.uint8, ranks.outputs[0].size)
    output[: 2 * num_tile_bytes] = np.concatenate(tiles)
    source = KERNEL.replace("TILE_WORDS", str(num_tile_bytes // 4))
    ranks.run(
        source.replace("NUM_TOKENS", str(num_tokens)),
        arch="sm_100a",
        num_threads=128,
        shared_bytes=config.smem_bytes,
        cluster_size=2,
    )

    actual = output[2 * num_tile_bytes :].view(np.float32).reshape(256, block_m)[:, :num_tokens]
    exact = 2 * (
        dequantize_e2m1_ue8m0(weights, weight_sf, torch.float64)
        @ dequantize_e4m3_ue8m0(tokens, token_sf, torch.float64).T
    )
    # Two passes over the same k-block: FP32 rounds 8 times, each time within 2^-24 of the sum.
    np.testing.assert_allclose(actual, exact.numpy(), rtol=0, atol=float(exact.abs().max()) * 1e-6)
