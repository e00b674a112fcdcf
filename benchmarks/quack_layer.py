"""A layer of experts from QuACK's grouped GEMMs (quack-kernels), for training.py: forward and
backward as their fused forms allow. Linear1 and the backward of Linear2 fetch tokens themselves and
have the activation in their epilogues; weight gradients fetch tokens too. What is left to PyTorch,
sorting and the sum over a token's experts, is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Products:
    """QuACK's three calls. Columns of W1 and W3 take turns in what `gated` and `dgated` know as one
    weight; `A_idx` says where a row lies in memory, `cu_seqlens_*` where an expert's rows begin.
    """

    gemm: Callable[..., Any]
    gated: Callable[..., Any]
    dgated: Callable[..., Any]


def installed_products() -> Products:
    from quack import gemm_interface

    return Products(gemm_interface.gemm, gemm_interface.gemm_gated, gemm_interface.gemm_dgated)


def interleaved(w13: torch.Tensor) -> torch.Tensor:
    """[experts, hidden, 2 * intermediate], W1 before W3, as QuACK stores it:
    [experts, 2 * intermediate, hidden], their columns in turn.
    """
    num_experts, hidden, width = w13.shape
    pairs = w13.view(num_experts, hidden, 2, width // 2)
    return pairs.permute(0, 3, 2, 1).reshape(num_experts, width, hidden)


def separated(w13: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleaved`."""
    num_experts, width, hidden = w13.shape
    pairs = w13.view(num_experts, width // 2, 2, hidden)
    return pairs.permute(0, 3, 2, 1).reshape(num_experts, hidden, width)


def sorted_slots(
    topk_idx: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """By expert: the slot of each row, the row of each slot, the token of each row, and where each
    expert's rows begin."""
    experts = topk_idx.reshape(-1)
    slot_of_row = experts.argsort(stable=True)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row] = torch.arange(experts.numel(), device=experts.device)
    begins = torch.searchsorted(
        experts[slot_of_row], torch.arange(num_experts + 1, device=experts.device)
    )
    return slot_of_row, row_of_slot, (slot_of_row // topk_idx.shape[1]).int(), begins.int()


def weighted_sum(
    y: torch.Tensor, row_of_slot: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    rows = y[row_of_slot].view(*topk_weights.shape, -1).float()
    return (rows * topk_weights.unsqueeze(-1)).sum(1).to(y.dtype)


def plain_sum(rows: torch.Tensor, row_of_slot: torch.Tensor, num_topk: int) -> torch.Tensor:
    slots = rows[row_of_slot].view(-1, num_topk, rows.shape[1])
    return slots.sum(1, dtype=torch.float32).to(rows.dtype)


class QuackLayer:
    """layer(x, topk_idx, topk_weights, w13, w2): W1 and W3 as `interleaved` has them, W2 [experts,
    intermediate, hidden]. With `tuned` QuACK tries its tiles on the first call of a size."""

    def __init__(self, products: Products, *, tuned: bool) -> None:
        self.products, self.options = products, {"tuned": tuned}
        self.sort = torch.compile(sorted_slots)
        self.weighted_sum = torch.compile(weighted_sum)
        self.plain_sum = torch.compile(plain_sum)

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return _Layer.apply(self, *tensors)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: QuackLayer,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> torch.Tensor:
        slot_of_row, row_of_slot, tokens, begins = layer.sort(topk_idx, w2.shape[0])
        linear1, activated = layer.products.gated(
            x, w13.mT, activation="swiglu", cu_seqlens_m=begins, A_idx=tokens, **layer.options
        )
        y = layer.products.gemm(activated, w2, cu_seqlens_m=begins, **layer.options)
        ctx.layer = layer
        ctx.save_for_backward(
            x, topk_weights, w13, w2, linear1, slot_of_row, row_of_slot, tokens, begins
        )
        return layer.weighted_sum(y, row_of_slot, topk_weights)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
        x, topk_weights, w13, w2, linear1, slot_of_row, row_of_slot, tokens, begins = (
            ctx.saved_tensors
        )
        layer: QuackLayer = ctx.layer
        gemm, options = layer.products.gemm, layer.options
        weights = topk_weights.reshape(-1)[slot_of_row]
        d_linear1, weighted, d_weights = layer.products.dgated(
            d_out,
            w2.mT,
            linear1,
            activation="swiglu",
            colvec_scale=weights,
            colvec_reduce=True,
            cu_seqlens_m=begins,
            A_idx=tokens,
            **options,
        )
        d_w2 = gemm(d_out.mT, weighted, cu_seqlens_k=begins, A_idx=tokens, **options)
        d_w13 = gemm(x.mT, d_linear1, cu_seqlens_k=begins, A_idx=tokens, **options)
        d_rows = gemm(d_linear1, w13, cu_seqlens_m=begins, **options)
        d_x = layer.plain_sum(d_rows, row_of_slot, topk_weights.shape[1])
        d_topk_weights = d_weights[row_of_slot].view_as(topk_weights)
        return None, d_x, None, d_topk_weights, d_w13.mT, d_w2.mT
