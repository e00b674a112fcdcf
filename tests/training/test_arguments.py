"""What is refused, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe

from .plain_layer import Layer


def replaced(name: str, value: Any) -> tuple[Layer, dict[str, Any]]:
    layer = Layer.random()
    if name == "topk_idx":
        layer.topk_idx = value
    elif name in layer.tensors or name in ("b1", "b2", "b3"):
        layer.tensors[name] = value
    else:
        return layer, {name: value}
    return layer, {}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("x", [[1.0]], TypeError, "x must be a tensor; got list"),
        ("x", torch.zeros(7, 16), TypeError, "x must be torch.bfloat16 or torch.float64"),
        ("x", bf16(7, 2, 8), ValueError, r"x must be \[tokens, hidden\]"),
        ("x", bf16(16, 7).t(), ValueError, "x must be contiguous"),
        ("topk_idx", [[1]], TypeError, "topk_idx must be a tensor; got list"),
        ("topk_idx", torch.zeros(7, 3), TypeError, "topk_idx must be torch.int64 or torch.int32"),
        ("topk_idx", torch.zeros(6, 3).long(), ValueError, r"topk_idx must be \[7 tokens, topk\]"),
        ("topk_idx", torch.zeros(7, 33).long(), ValueError, "topk_idx must have 1 to 32 columns"),
        ("topk_weights", bf16(7, 3), TypeError, "topk_weights must be torch.float32; got"),
        ("topk_weights", torch.zeros(7, 2), ValueError, r"topk_weights must have shape \(7, 3\)"),
        ("w1", None, TypeError, "w1 must be a tensor; got NoneType"),
        ("w1", bf16(5, 24, 16), ValueError, r"w3 must have shape \(5, 16, 16\)"),
        ("w1", bf16(5, 16, 48)[..., ::2], ValueError, "w1 must be contiguous, or w1.transpose"),
        ("w1", bf16(5, 16), ValueError, r"w1 must be \[experts, hidden, intermediate\]"),
        ("w1", bf16(1025, 16, 24), ValueError, "w1 must have 1 to 1024 experts; got 1025"),
        ("w3", torch.zeros(5, 16, 24), TypeError, "w3 must be torch.bfloat16; got torch.float32"),
        ("w2", bf16(5, 24, 8), ValueError, r"w2 must have shape \(5, 24, 16\)"),
        ("w2", bf16(5, 24, 16).to("meta"), ValueError, "w2 must be on cpu"),
        ("b1", torch.zeros(5, 24), ValueError, "b3 must be a tensor where another bias is"),
        ("precision", "fp4", ValueError, "precision must be .* or 'fp8_wgrad'; got 'fp4'"),
        ("precision", "fp8", ValueError, "hidden must be a multiple of 128 with precision"),
        ("precision", "mxfp8", ValueError, "hidden must be a multiple of 32 with precision"),
        ("activation", "gelu", ValueError, "activation must be one of"),
        ("activation", "relu2", ValueError, "activation must be one with a gate.*got .relu2."),
        ("arch", "sm_70", ValueError, "sm_70"),
        ("recompute", "yes", TypeError, "recompute must be a bool; got str"),
        ("keep_received", 1, TypeError, "keep_received must be a bool; got int"),
        ("quantize_kept", 1, TypeError, "quantize_kept must be a bool; got int"),
        ("quantize_kept", True, ValueError, "intermediate must be a multiple of 128 with quantize"),
        ("group", "all", TypeError, "group must be a process group that .*; got 'all'"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(name: str, value: Any, error: type, words: str) -> None:
    layer, options = replaced(name, value)
    with pytest.raises(error, match=words):
        layer(**options)


def test_sizes_are_multiples_of_8() -> None:
    with pytest.raises(ValueError, match="intermediate must be a multiple of 8"):
        Layer.random(intermediate=12)()


def test_float64_is_not_for_mxfp8() -> None:
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16; got torch\.float64"):
        Layer.random(dtype=torch.float64)(precision="mxfp8")


def test_weights_in_one_tensor_have_two_halves() -> None:
    layer = Layer.random(fused=True)
    layer.tensors["w1"] = bf16(5, 16, 25)
    with pytest.raises(ValueError, match="w1 without w3 must hold gate and up"):
        layer()


def test_a_checkpoint_of_other_sizes_is_refused() -> None:
    layer = deep_moe.MoELayer(16, 24, 3)
    with pytest.raises(ValueError, match=r"l1 must have shape \(3, 48, 16\); got \(3, 24, 16\)"):
        layer.load_transposed(bf16(3, 24, 16), bf16(3, 16, 24))


def test_a_checkpoint_of_codes_is_refused() -> None:
    layer = deep_moe.MoELayer(16, 24, 3)
    with pytest.raises(TypeError, match=r"l1 must be of a float type; got torch.int8"):
        layer.load_transposed(bf16(3, 48, 16).char(), bf16(3, 16, 24))
    with pytest.raises(TypeError, match="l2 must be a tensor; got NoneType"):
        layer.load_transposed(bf16(3, 48, 16), None)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden": 0}, ValueError, "hidden must be at least 1 and below"),
        ({"intermediate": -8}, ValueError, "intermediate must be at least 1 and below"),
        ({"num_experts": 0}, ValueError, "num_experts must be at least 1 and below"),
        ({"num_experts": "8"}, TypeError, "num_experts must be an int, at least 1; got '8'"),
        ({"biases": 3}, TypeError, "biases must be a bool; got int"),
        ({"dtype": torch.float32}, ValueError, "dtype must be .*; got torch.float32"),
    ],
)
def test_a_module_names_what_it_cannot_be(changes: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        deep_moe.MoELayer(**{"hidden": 16, "intermediate": 24, "num_experts": 3, **changes})


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("x", bf16(14, 8), ValueError, r"x must be \[..., hidden \(16\)\]; got \(14, 8\)"),
        ("x", bf16(16, 7).t().contiguous().t(), ValueError, r"got \(16, 7\)"),
        ("x", None, TypeError, "x must be a tensor; got NoneType"),
        ("topk_idx", torch.tensor(1), ValueError, r"topk_idx must be \[..., topk\]; got \(\)"),
        ("topk_weights", torch.zeros(7, 0), ValueError, r"topk_weights must be \[..., topk\]"),
    ],
)
def test_rows_of_another_length_do_not_pass_for_other_tokens(
    name: str, value: Any, error: type, words: str
) -> None:
    layer = deep_moe.MoELayer(16, 24, 3)
    given = {
        "x": bf16(7, 16),
        "topk_idx": torch.zeros(7, 2, dtype=torch.int64),
        "topk_weights": torch.ones(7, 2),
    }
    layer(**given)
    with pytest.raises(error, match=words):
        layer(**{**given, name: value})
