"""What E4M3 tokens would cost beside INT4 and NVFP4 weights on Hopper, where these have BF16
tokens: the table of docs/paths.md. No kernel has these pairs. All is FP64 but the roundings."""

from __future__ import annotations

import pytest
import torch

import deep_moe

HIDDEN, INTERMEDIATE, TOKENS = 1024, 512, 128
LARGEST = 448  # of E4M3

Matrices = tuple[torch.Tensor, torch.Tensor]


def drawn(kind: str) -> tuple[Matrices, torch.Tensor]:
    """Weights of both layers, gate above up, and tokens. "tails": weights of Student's t with rows
    of different sizes and some larger columns; every 64th channel of tokens is 50 times larger."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        if kind == "normal":
            return normal(rows, columns) * 0.05
        # Student's t with 4 degrees of freedom.
        made = normal(rows, columns) / normal(4, rows, columns).square().mean(0).sqrt()
        made *= 0.03 * torch.exp2(0.7 * normal(rows, 1))
        made[:, ::97] *= 4
        return made

    weights = matrix(2 * INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE)
    x = normal(TOKENS, HIDDEN)
    if kind == "tails":
        x[:, ::64] *= 50
    return weights, x.bfloat16().double()


def e4m3(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scaled = (values / scales).clamp(-LARGEST, LARGEST).float()
    return scaled.to(torch.float8_e4m3fn).double() * scales


def one_scale(x: torch.Tensor) -> torch.Tensor:
    """A token with one float32 scale."""
    return e4m3(x, x.abs().amax(-1, keepdim=True) / LARGEST)


def folded(weight: torch.Tensor) -> torch.Tensor:
    """E4M3 weights with a power of two for each row, into which scales of groups went."""
    largest = weight.abs().amax(-1, keepdim=True) / LARGEST
    return e4m3(weight, torch.exp2(largest.log2().ceil()))


def checkpoint(weights: str, matrices: Matrices) -> Matrices:
    """What a checkpoint of this format means."""
    made = []
    for matrix, num_matrices in zip(matrices, (2, 1), strict=True):
        if weights == "nvfp4":
            stored = deep_moe.quantize_nvfp4(matrix[None], num_matrices=num_matrices)
            found = deep_moe.dequantize_nvfp4(*stored)
        else:
            stored = deep_moe.quantize_int4(matrix[None], group_size=128)
            found = deep_moe.dequantize_int4(*stored)
        made.append(found[0].double())
    return made[0], made[1]


def layer(x: torch.Tensor, weights: Matrices, middle: object) -> torch.Tensor:
    gate, up = (x @ weights[0].T).chunk(2, dim=1)
    assert callable(middle)
    out: torch.Tensor = middle(gate * gate.sigmoid() * up) @ weights[1].T
    return out


# Percent of the norm: of E4M3 tokens beside exact weights, and beside folded ones.
@pytest.mark.parametrize(
    ("weights", "kind", "exact", "rounded"),
    [
        ("int4", "normal", 4.5, 6.5),
        ("int4", "tails", 4.2, 6.1),
        ("nvfp4", "normal", 4.5, 6.2),
        ("nvfp4", "tails", 4.0, 6.0),
    ],
)
def test_errors_are_those_of_the_docs(
    weights: str, kind: str, exact: float, rounded: float
) -> None:
    matrices, x = drawn(kind)
    own = checkpoint(weights, matrices)
    expected = layer(x, own, lambda values: values)

    def error(found: torch.Tensor) -> float:
        return 100 * float((found - expected).norm() / expected.norm())

    assert error(layer(x, own, lambda values: values.bfloat16().double())) < 0.2
    tokens = one_scale(x)
    assert error(layer(tokens, own, one_scale)) == pytest.approx(exact, abs=0.15)
    fold = folded(own[0]), folded(own[1])
    assert error(layer(tokens, fold, one_scale)) == pytest.approx(rounded, abs=0.15)
    lost = (fold[0] - own[0]).norm() / own[0].norm()
    assert 0.02 < lost < 0.03
