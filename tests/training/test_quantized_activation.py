"""The step between two grouped products, against float64, and a layer of the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.formats.float_scaled import dequantize_e4m3_float, quantize_e4m3_float

ARCHS = (None, "sm_90a", "sm_100a")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).int()


CASES: dict[str, tuple[tuple[int, ...], torch.Tensor, torch.Tensor | None, list[int]]] = {
    "rows with gaps": ((11,), counts(3, 0, 4), counts(1, 4, 6), [1, 2, 3, 6, 7, 8, 9]),
    "first rows of each expert": ((2, 4), counts(3, 1), None, [0, 1, 2, 4]),
    "counts beyond the rows": ((2, 3), counts(9, 2), None, [0, 1, 2, 3, 4]),
    "begins and counts outside": ((6,), counts(4, 3), counts(-2, 5), [0, 1, 5]),
    "nobody has rows": ((4,), counts(0, 0), counts(0, 2), []),
    "no rows at all": ((0,), counts(0), counts(0), []),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CASES)
def test_used_rows_are_right_and_others_zero(name: str, arch: str | None) -> None:
    leading, count, begin, used = CASES[name]
    linear1 = (3 * random(*leading, 256)).bfloat16()
    row_weights = random(*leading, seed=1)
    unused = torch.ones(row_weights.numel(), dtype=torch.bool)
    unused[used] = False
    linear1.view(-1, 256)[unused] = torch.nan
    values, scales = deep_moe.quantized_activation(
        linear1, count, begin, row_weights=row_weights, arch=arch
    )
    assert (values.shape, scales.shape) == ((*leading, 128), (*leading, 1))
    assert (values.float().view(-1, 128)[unused] == 0).all()
    gate, up = linear1.double().view(-1, 256)[used].chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up * row_weights.double().view(-1, 1)[used]
    found = dequantize_e4m3_float(values, scales, torch.float64).view(-1, 128)[used]
    largest = exact.abs().amax(1, keepdim=True) if used else exact.abs()
    # Rounded to BF16 and to E4M3: relatively, or by half of the smallest step.
    bound = exact.abs() * (2.0**-4 + 2.0**-7) + largest * 2.0**-9 / 448
    assert ((found - exact).abs() <= bound).all()


def test_a_weight_rounds_nothing_but_scales() -> None:
    linear1, weights = random(5, 512).bfloat16(), torch.tensor([0.3, -2.0, 0.0, 1e-3, 7.0])
    plain = deep_moe.quantized_activation(linear1, counts(5), counts(0))
    weighted = deep_moe.quantized_activation(linear1, counts(5), counts(0), row_weights=weights)
    assert weighted[0].view(torch.uint8).equal(plain[0].view(torch.uint8))
    assert weighted[1].equal(plain[1] * weights[:, None])


def test_the_activation_is_the_one_that_is_named() -> None:
    linear1 = (9 * random(3, 256)).bfloat16()
    one = deep_moe.quantized_activation(linear1, counts(3), counts(0), activation_clamp=1.0)
    gate, up = linear1.double().chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate.clamp(max=1)) * up.clamp(-1, 1)
    found = dequantize_e4m3_float(*one, torch.float64)
    assert ((found - exact).abs() <= exact.abs() / 14 + 1e-5).all()


def test_a_layer_of_the_steps_is_right() -> None:
    """Product, activation with routing weights, product: the layer on rows that are there."""
    hidden, intermediate, count, begin = 256, 128, counts(3, 5), counts(0, 3)
    x = quantize_e4m3_float(random(8, hidden))
    weights = [
        random(2, rows, columns, seed=seed).to(torch.float8_e4m3fn)
        for seed, (rows, columns) in enumerate([(2 * intermediate, hidden), (hidden, intermediate)])
    ]
    scales = [torch.full((2, w.shape[1] // 128, w.shape[2] // 128), 0.05) for w in weights]
    row_weights = random(8, seed=3).abs()
    linear1 = deep_moe.grouped_product(*x, weights[0], scales[0], count, begin)
    activated = deep_moe.quantized_activation(
        linear1, count, begin, row_weights=row_weights, arch="sm_90a"
    )
    y = deep_moe.grouped_product(*activated, weights[1], scales[1], count, begin)
    tokens = dequantize_e4m3_float(*x, torch.float64)
    l1, l2 = (0.05 * w.double() for w in weights)
    for rows, expert in ((slice(0, 3), 0), (slice(3, 8), 1)):
        gate, up = (tokens[rows] @ l1[expert].t()).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up * row_weights.double()[rows, None]
        exact = inner @ l2[expert].t()
        # Each term by as much as E4M3 and BF16 round it.
        bound = (inner.abs() @ l2[expert].abs().t()) * 0.08
        assert ((y[rows].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"linear1": torch.zeros(8, 512)}, TypeError, "linear1 must be torch.bfloat16"),
        ({"linear1": torch.zeros(8, 384).bfloat16()}, ValueError, "multiple of 256 columns"),
        ({"linear1": torch.zeros(2, 4, 512).bfloat16()}, ValueError, r"linear1 must be \[rows"),
        ({"expert_count": torch.ones(2)}, TypeError, "expert_count must be torch.int32"),
        ({"expert_begin": counts(0)}, ValueError, r"expert_begin must have shape \(2,\)"),
        ({"expert_begin": None}, ValueError, r"linear1 must be \[2 experts"),
        ({"row_weights": torch.ones(7)}, ValueError, r"row_weights must have shape \(8,\)"),
        ({"row_weights": torch.ones(8).bfloat16()}, TypeError, "row_weights must be torch.float32"),
        ({"activation": "relu2"}, ValueError, "activation must be one with a gate"),
        ({"arch": "sm_80"}, ValueError, "sm_80"),
    ],
)
def test_errors_name_the_argument(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {
        "linear1": torch.zeros(8, 512).bfloat16(),
        "expert_count": counts(3, 2),
        "expert_begin": counts(0, 4),
    }
    with pytest.raises(error, match=message):
        deep_moe.quantized_activation(**{**given, **changed})
