"""The bits of tcgen05's descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/experts/sm100/descriptors.cuh>

using namespace deep_moe;

__device__ uint32_t descriptor(uint32_t num_tokens, uint32_t scale_idx) {
    return sm100::instruction_descriptor<Config::Weights>(num_tokens, scale_idx);
}

extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    auto* words = static_cast<uint64_t*>(args.y);
    const uint32_t second_cta = 1u << 24;
    words[0] = sm100::operand_descriptor(second_cta + 0x38400);
    words[1] = sm100::advance(words[0], 3, 32);
    words[2] = sm100::scale_descriptor(0x400 + 512);
    for (uint32_t i = 0; i < 4; ++i) words[3 + i] = descriptor(128, i);
    words[7] = descriptor(16, 0);
    words[8] = descriptor(192, 3);
}
"""

OPERAND_HIGH = 0x4000_4040  # 128-byte swizzle, version 1, 1024 bytes per 8 rows
SCALE_HIGH = 0x0000_4008  # no swizzle, version 1, 128 bytes per 8 rows


# The format of A, from bit 7 on.
FORMATS = {"mxfp4": 5 << 7, "fp8": 0}


@pytest.mark.parametrize("weights", FORMATS)
def test_descriptor_bits(make_config: Any, make_ranks: Any, weights: str) -> None:
    ranks = make_ranks(make_config(weights=weights), output_bytes=256)
    ranks.run(KERNEL, arch="sm_100a")
    words = ranks.output(0, np.uint64, 9).tolist()
    assert words[0] == OPERAND_HIGH << 32 | 0x38400 >> 4
    assert words[1] == words[0] + 6  # 96 bytes in units of 16
    assert words[2] == SCALE_HIGH << 32 | 0x600 >> 4
    instructions = [word - FORMATS[weights] for word in words[3:]]
    # Weights, E4M3 tokens, UE8M0, M 256, N 128, scale byte 0..3.
    assert instructions[:4] == [0x10A0_0000, 0x30A0_0010, 0x50A0_0020, 0x70A0_0030]
    assert instructions[4] == 0x10A0_0000 - (128 >> 3 << 17) + (16 >> 3 << 17)
    assert instructions[5] == 0x70A0_0030 - (128 >> 3 << 17) + (192 >> 3 << 17)
