"""What each format of weights beside BF16 tokens costs: the table of docs/numerics.md."""

from __future__ import annotations

import pytest
import torch

from deep_moe.activations import Swiglu
from deep_moe.targets import target_of
from deep_moe.trial.reference import expert_output
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerTensors, one_expert

HIDDEN, INTERMEDIATE, TOKENS = 1024, 512, 128
# In percent: to the dequantized checkpoint, and to the weights that were quantized.
ERRORS = {
    "mxfp4": (0.35, 19.9),
    "nvfp4": (0.34, 16.4),
    "int4": (0.43, 16.9),
    "int4, groups of 128": (0.42, 20.5),
    "mxfp8": (0.35, 4.6),
}


def dense_output(tokens: torch.Tensor, l1: torch.Tensor, l2: torch.Tensor) -> torch.Tensor:
    """In float64, nothing rounded."""
    gate, up = (tokens @ l1.T).chunk(2, dim=1)
    return (gate * gate.sigmoid() * up) @ l2.T


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return 100 * float((result - expected).norm() / expected.norm())


def errors_of(name: str) -> tuple[float, float]:
    weights, _, size = name.partition(", groups of ")
    on_target = target_of("sm_90a").weights_of(weights, "bf16")
    block = (1, int(size)) if size else on_target.scale_block
    generator = torch.Generator().manual_seed(0)

    def normal(num_rows: int, num_columns: int) -> torch.Tensor:
        return torch.randn(1, num_rows, num_columns, generator=generator) * num_columns**-0.5

    dense = normal(2 * INTERMEDIATE, HIDDEN), normal(HIDDEN, INTERMEDIATE)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().double()
    made = weight_format(weights)
    layers: list[LayerTensors] = [
        one_expert(made.quantize(own, block, num_matrices), 0)
        for own, num_matrices in zip(dense, (2, 1), strict=True)
    ]
    result = expert_output(
        tokens,
        torch.ones(TOKENS),
        *layers,
        activation=Swiglu(),
        numerics=on_target.numerics,
    ).double()
    checkpoint = [made.dequantize(own, num) for own, num in zip(layers, (2, 1), strict=True)]
    return (
        error(result, dense_output(tokens, *checkpoint)),
        error(result, dense_output(tokens, *(own[0].double() for own in dense))),
    )


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_the_table(name: str) -> None:
    for found, expected in zip(errors_of(name), ERRORS[name], strict=True):
        assert found == pytest.approx(expected, rel=0.05)
