"""The bits of tcgen05's descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/experts/sm100/descriptors.cuh>

using namespace deep_moe;

extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    auto* words = static_cast<uint64_t*>(args.y);
    const uint32_t second_cta = 1u << 24;
    words[0] = sm100::operand_descriptor(second_cta + 0x38400);
    words[1] = sm100::advance_along_k(words[0], 96);
    words[2] = sm100::scale_descriptor(0x400 + 512);
    for (uint32_t i = 0; i < 4; ++i) words[3 + i] = sm100::instruction_descriptor(128, i);
    words[7] = sm100::instruction_descriptor(16, 0);
    words[8] = sm100::instruction_descriptor(192, 3);
}
"""

OPERAND_HIGH = 0x4000_4040  # 128-byte swizzle, version 1, 1024 bytes per 8 rows
SCALE_HIGH = 0x0000_4008  # no swizzle, version 1, 128 bytes per 8 rows


def test_descriptor_bits(make_config: Any, make_ranks: Any) -> None:
    ranks = make_ranks(make_config(), output_bytes=256)
    ranks.run(KERNEL, arch="sm_100a")
    words = ranks.output(0, np.uint64, 9).tolist()
    assert words[0] == OPERAND_HIGH << 32 | 0x38400 >> 4
    assert words[1] == words[0] + 6  # 96 bytes in units of 16
    assert words[2] == SCALE_HIGH << 32 | 0x600 >> 4
    # E2M1 weights, E4M3 tokens, UE8M0, M 256, N 128, scale byte 0..3.
    assert words[3:7] == [0x10A0_0280, 0x30A0_0290, 0x50A0_02A0, 0x70A0_02B0]
    assert words[7] == 0x10A0_0280 - (128 >> 3 << 17) + (16 >> 3 << 17)
    assert words[8] == 0x70A0_02B0 - (128 >> 3 << 17) + (192 >> 3 << 17)
