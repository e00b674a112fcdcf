"""Activations, function by function as the epilogues call them, against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deep_moe.activations import (
    Activation,
    GatedActivation,
    GeluTanh,
    Relu2,
    Situ,
    Swiglu,
    SwigluOai,
    SwigluStep,
)
from tests.everyday import parametrize

NUM_VALUES = 4096

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/activations/apply_activation.cuh>

using namespace deep_moe;

// y: gates, ups and routing weights in, values out.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* values = static_cast<float*>(args.y);
    if (blockIdx.x != 0) return;
    for (uint32_t i = threadIdx.x; i < 4096; i += 32) {
        if constexpr (Config::Activation::has_gate) {
            values[12288 + i] =
                apply_activation<Config>(values[i], values[4096 + i], values[8192 + i]);
        } else {  // of up; the other of the two is not looked at
            const bool is_second = i % 2 != 0;
            const float2 two = apply_activation_to_two<Config>(
                is_second ? 1.0f : values[4096 + i], is_second ? values[4096 + i] : 1.0f,
                values[8192 + i]);
            values[12288 + i] = is_second ? two.y : two.x;
        }
    }
}
"""

ACTIVATIONS = [
    Swiglu(),
    Swiglu(7.3),
    Swiglu(2.0**-30),
    SwigluOai(),
    SwigluOai(alpha=0.3, limit=2.7),
    SwigluOai(alpha=40.0, limit=100.0),
    Situ(),
    Situ(beta=0.7, linear_beta=1.3),
    Situ(beta=3e38, linear_beta=1e30),
    Situ(beta=2.0**-30, linear_beta=2.0**-20),
    GeluTanh(),
    SwigluStep(),
    SwigluStep(2.7),
    Relu2(),
]


each_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
fast_and_precise = pytest.mark.parametrize("fast_math", [False, True])


class Applied:
    """What the kernel makes of gates, ups and routing weights, 4096 of each."""

    def __init__(
        self, make_config: Any, make_ranks: Any, activation: Activation, fast_math: bool
    ) -> None:
        config = make_config(activation=activation, fast_math=fast_math)
        self.ranks = make_ranks(config, output_bytes=4 * 4 * NUM_VALUES)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        values = self.ranks.output(0, np.float32, 4, NUM_VALUES)
        for row, tensor in zip(values, (gate, up, weight), strict=False):
            row[:] = tensor.numpy()
        self.ranks.run(KERNEL, arch="sm_100a")
        return torch.from_numpy(values[3].copy())


def formula(activation: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Of gate and up, or of up alone."""
    return (
        activation(gate, up)
        if isinstance(activation, GatedActivation)
        else activation.of_linear1(up)
    )


@parametrize("activation", ACTIVATIONS, everyday=ACTIVATIONS[1::3], ids=str)  # one of each kind
@fast_and_precise
def test_formula(
    make_config: Any, make_ranks: Any, activation: Activation, fast_math: bool
) -> None:
    """In FP64, for numbers of all usual sizes and on both sides of where functions change over."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        sizes = torch.exp2(torch.rand(NUM_VALUES, generator=generator) * 12 - 8)
        return torch.randn(NUM_VALUES, generator=generator) * sizes

    gate, up, weight = numbers(), numbers(), numbers().abs()
    parameters = activation.parameters.values()
    near = [f * p for p in parameters for f in (0.24, 0.25, 0.26, 0.99, 1.0, 1.01) if p < 1e4]
    gate[: len(near)] = torch.tensor(near)
    up[: len(near)] = torch.tensor(near)
    values = Applied(make_config, make_ranks, activation, fast_math)(gate, up, weight)
    expected = formula(activation, gate.bfloat16().double(), up.bfloat16().double())
    expected *= weight.double()
    is_normal = expected.abs() > 1e-30
    allowed = torch.full_like(expected, 5e-6)
    if isinstance(activation, GeluTanh):
        # Its sigmoid is of a cube, whose roundings count far below zero: what it declares.
        units, more_units = activation.error_units
        argument = activation.sigmoid_argument(gate.bfloat16().double())
        allowed[gate < -8] = ((units + more_units * -argument) * 2.0**-24)[gate < -8]
    errors = (values.double() - expected).abs() / expected.abs()
    assert (errors <= allowed)[is_normal].all(), (errors / allowed)[is_normal].max()
    assert (values[~is_normal].abs() < 2e-30).all()
    assert is_normal.sum() > NUM_VALUES / 3


@each_activation
@fast_and_precise
def test_extremes_and_nan(
    make_config: Any, make_ranks: Any, activation: Activation, fast_math: bool
) -> None:
    """As the formula in FP32, with the same infinities, and NaN in the same places only."""
    numbers = [0.0, 1.0, 3e38, 1e30, 200.0, 95.0, 80.0, 1e-30, 1e-38, torch.inf, torch.nan]
    numbers += [-number for number in numbers]
    pairs = torch.cartesian_prod(torch.tensor(numbers), torch.tensor(numbers))
    gate, up, weight = torch.ones(3, NUM_VALUES)
    gate[: len(pairs)], up[: len(pairs)] = pairs.T
    values = Applied(make_config, make_ranks, activation, fast_math)(gate, up, weight)
    single = formula(activation, gate.bfloat16().float(), up.bfloat16().float())
    same = torch.isclose(values, single, rtol=2e-5, atol=1e-30, equal_nan=True)
    assert same.all(), list(
        zip(gate[~same].tolist(), up[~same].tolist(), values[~same], single[~same], strict=True)
    )
