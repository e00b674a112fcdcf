"""What is laid out from Parameters, or laid back, has no history, which would keep their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe

HIDDEN, INTERMEDIATE = 256, 128


def layers(weights: str, arch: str) -> list[torch.Tensor]:
    """Values and scales of l1, then those of l2."""
    pairs = []
    for size in ((2, 2 * INTERMEDIATE, HIDDEN), (2, HIDDEN, INTERMEDIATE)):
        x = torch.randn(size)
        if weights == "bf16":
            pairs.append((x.bfloat16(), torch.empty(2, 0)))
        elif weights == "mxfp4":
            pairs.append(deep_moe.quantize_mxfp4(x))
        elif arch == "sm_90a":
            values, _ = deep_moe.quantize_mxfp8(x)
            pairs.append((values, torch.rand(2, size[1] // 128, size[2] // 128) + 0.5))
        else:
            pairs.append(deep_moe.quantize_mxfp8(x))
    return [tensor for pair in pairs for tensor in pair]


def as_parameters(tensors: Any) -> list[torch.Tensor]:
    return [torch.nn.Parameter(t) if t.is_floating_point() else t for t in tensors]


def flat(pairs: Any) -> list[torch.Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def assert_same(made: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for own, other in zip(made, expected, strict=True):
        assert not own.requires_grad
        assert torch.equal(own.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("weights", "requantize"),
    [("mxfp4", False), ("fp8", False), ("fp8", True), ("bf16", False)],
)
def test_weights(weights: str, arch: str, requantize: bool) -> None:
    options: Any = {"arch": arch, "weights": weights}
    given = layers(weights, arch)
    own = as_parameters(given)
    expected = deep_moe.transform_weights_for_mega_moe(
        (given[0], given[1]), (given[2], given[3]), requantize=requantize, **options
    )
    made = deep_moe.transform_weights_for_mega_moe(
        (own[0], own[1]), (own[2], own[3]), requantize=requantize, **options
    )
    assert_same(flat(made), flat(expected))
    own = as_parameters(flat(expected))
    back = deep_moe.inverse_transform_weights((own[0], own[1]), (own[2], own[3]), **options)
    assert_same(flat(back), flat(deep_moe.inverse_transform_weights(*expected, **options)))


def test_biases() -> None:
    options: Any = {"weights": "mxfp4"}
    given = torch.randn(2, 2 * INTERMEDIATE), torch.randn(2, HIDDEN)
    expected = deep_moe.transform_biases_for_mega_moe(*given, **options)
    own = as_parameters(given)
    assert_same([*deep_moe.transform_biases_for_mega_moe(own[0], own[1], **options)], [*expected])
    own = as_parameters(expected)
    options |= {"hidden": HIDDEN, "intermediate_hidden": INTERMEDIATE}
    assert_same([*deep_moe.inverse_transform_biases(own[0], own[1], **options)], [*given])
