"""The scale of an activation's results, against the formats of the package."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from deep_moe.formats.block_scaled import quantize_e4m3_ue8m0, unpack_ue8m0

NUM_VALUES = 4096

SCALE_KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/formats/quantize.cuh>

using namespace deep_moe;

// y: magnitudes in, scale bytes and factors out.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* words = static_cast<uint32_t*>(args.y);
    if (blockIdx.x != 0) return;
    for (uint32_t i = threadIdx.x; i < 4096; i += 32) {
        const uint32_t amax = magnitude_bits(__uint_as_float(words[i]));
        const uint32_t scale_byte = e4m3_scale_byte(amax);
        words[4096 + i] = scale_byte;
        words[8192 + i] = __float_as_uint(e4m3_factor(amax, scale_byte));
    }
}
"""


def test_scale_is_that_of_the_formats(make_config: Any, make_ranks: Any) -> None:
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 32, NUM_VALUES, dtype=np.uint32)
    # On both sides of every power of two and of 1.75 times it; zero, infinities and NaN.
    edges = [
        (exponent << 23) + mantissa
        for exponent, mantissa in itertools.product(
            range(256), (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF)
        )
    ]
    bits[: len(edges)] = edges
    ranks = make_ranks(make_config(), output_bytes=3 * 4 * NUM_VALUES)
    words = ranks.output(0, np.uint32, 3, NUM_VALUES)
    words[0] = bits
    ranks.run(SCALE_KERNEL, arch="sm_100a")

    groups = torch.zeros(NUM_VALUES, 128)
    groups[:, 0] = torch.from_numpy(bits.copy()).view(torch.float32)
    quantized, sf = quantize_e4m3_ue8m0(groups)
    expected_bytes = unpack_ue8m0(sf)[:, 0].numpy()
    finite = groups[:, 0].isfinite().numpy()
    assert np.array_equal(words[1], expected_bytes)
    # What the factor makes of the value is what the formats say it is.
    factors = torch.from_numpy(words[2].copy()).view(torch.float32)
    assert torch.equal(
        (groups[finite, 0] * factors[finite]).to(torch.float8_e4m3fn).view(torch.uint8),
        quantized[finite, 0].view(torch.uint8),
    )
    assert factors[~torch.from_numpy(finite)].isnan().all()
