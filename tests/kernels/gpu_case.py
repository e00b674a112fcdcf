"""One layer on the current GPU beside its reference: what the tests of real hardware share."""

from __future__ import annotations

from typing import Any

import torch

import deep_moe
from deep_moe.comparison import Comparison, compare
from deep_moe.heuristics import MoEShape
from deep_moe.reference import NUMERICS, reference_mega_moe
from deep_moe.synthetic import Layer, Tokens, exact_layer
from deep_moe.trial import fill_inputs
from deep_moe.weights import weight_arch


def gpu_numerics():
    """Of the current GPU's architecture."""
    return NUMERICS[weight_arch(torch.device("cuda"))]


def gpu_exact_layer(shape: MoEShape) -> Layer:
    """A layer whose sums the GPU's tensor cores hold exactly."""
    return exact_layer(shape, sum_bits=gpu_numerics().sum_bits)


def one_rank(num_tokens: int, **sizes: int) -> MoEShape:
    defaults = {"num_experts": 8, "num_topk": 2, "hidden": 512, "intermediate_hidden": 384}
    return MoEShape(num_ranks=1, num_max_tokens_per_rank=num_tokens, **{**defaults, **sizes})


class GpuCase:
    """A single rank. `call` runs the kernel once."""

    def __init__(self, shape: MoEShape, layer: Layer) -> None:
        self.shape = shape
        self.buffer = deep_moe.get_symm_buffer_for_mega_moe(
            None,
            shape.num_experts,
            shape.num_max_tokens_per_rank,
            shape.num_topk,
            shape.hidden,
            shape.intermediate_hidden,
            device="cuda",
        )
        self.l1, self.l2 = (
            tuple(tensor.cuda() for tensor in pair) for pair in (layer.l1, layer.l2)
        )
        self.weights = deep_moe.transform_weights_for_mega_moe(self.l1, self.l2)

    def launch(self, y: torch.Tensor, **options: Any) -> None:
        deep_moe.fp8_fp4_mega_moe(y, *self.weights, self.buffer, **options)

    def call(self, tokens: Tokens, **options: Any) -> torch.Tensor:
        """y. It is filled with NaN before, so that a row left out is noticed."""
        fill_inputs(self.buffer, tokens)
        y = torch.full(
            (tokens.num_tokens, self.shape.hidden), torch.nan, dtype=torch.bfloat16, device="cuda"
        )
        self.launch(y, **options)
        torch.cuda.synchronize()
        self.buffer.raise_if_failed()
        return y

    def expected(self, tokens: Tokens, activation_clamp: float | None = None) -> torch.Tensor:
        return reference_mega_moe(
            tokens.x.cuda(),
            tokens.x_sf.cuda(),
            tokens.topk_idx.cuda(),
            tokens.topk_weights.cuda(),
            self.l1,
            self.l2,
            activation_clamp=activation_clamp,
            numerics=gpu_numerics(),
        )

    def compare_call(
        self, tokens: Tokens, *, activation_clamp: float | None = None, **options: Any
    ) -> Comparison:
        y = self.call(tokens, activation_clamp=activation_clamp, **options)
        return compare(y, self.expected(tokens, activation_clamp))
