"""The layer over a group of ranks, each of which owns a part of the experts.

Slots travel to their owners, where each is a token of one slot, and the layer of one rank does the
rest; rows travel back, and their tokens' rank adds them with the routing weights, in slot order.
The backward pass goes the same ways: gradients of the output to the owners, those of tokens and
routing weights back. What it multiplies are the tokens that a rank *received*, which are sent once
more, unless they are kept; the rank's own tokens belong to other ranks' experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .exchange import Exchange, Ways
from .experts import Experts, Gradients, Linear1
from .operators import experts_of
from .rows import Rows

Parameters = tuple[torch.Tensor | None, ...]  # w1, w3, w2, b1, b3, b2


@dataclass(frozen=True)
class Options:
    """Of a call; activation as operators encode it."""

    activation: str
    precision: str
    arch: str | None
    recompute: bool
    keep_received: bool


@torch.compiler.disable
def expert_parallel_moe(
    exchange: Exchange,
    options: Options,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: Parameters,
) -> torch.Tensor:
    """The layer's output [tokens, hidden]. A compiler's graph breaks here."""
    out: torch.Tensor = _ExpertParallelMoE.apply(
        exchange, options, x, topk_idx, topk_weights, *parameters
    )
    return out


def _sent(tokens: torch.Tensor, exchange: Exchange, ways: Ways) -> torch.Tensor:
    """The tokens of this rank's slots, where they go."""
    slots = ways.sent.slot_of_row.long()
    return exchange.send_rows(tokens[slots // ways.sent.num_topk], ways)


def _experts(options: Options, x: torch.Tensor, parameters: Parameters) -> Experts:
    w1, w3, w2, b1, b3, b2 = parameters
    assert w1 is not None
    assert w2 is not None
    kind = (options.activation, options.precision, options.arch)
    return experts_of(x, w1, w3, w2, b1, b3, b2, *kind)


class _ExpertParallelMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        options: Options,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        experts = _experts(options, x, parameters)
        num_local_experts = experts.weights.gate.shape[0]
        ways = exchange.find_ways(topk_idx, num_local_experts)
        received = _sent(x, exchange, ways)
        kept: list[torch.Tensor | None] = [None] * 6
        if len(received):
            rows = experts.steps.route(ways.local_experts, num_local_experts)
            made, linear1 = experts.forward(received, rows, None)
            kept[:3] = rows.offs, rows.row_of_slot, rows.slot_of_row
            if not options.recompute:
                kept[3:5] = linear1.gate, linear1.up
            if options.keep_received:
                kept[5] = received
        else:
            made = received
        returned = exchange.return_rows(made, ways)
        ctx.exchange, ctx.options, ctx.ways = exchange, options, ways
        ctx.save_for_backward(x, topk_weights, *kept, *parameters)
        return experts.steps.scatter(returned, None, ways.sent, topk_weights=topk_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, topk_weights, *rest = ctx.saved_tensors
        offs, row_of_slot, slot_of_row, gate, up, received = rest[:6]
        parameters: Parameters = tuple(rest[6:])
        exchange, ways = ctx.exchange, ctx.ways
        experts = _experts(ctx.options, x, parameters)
        # Every rank sends and receives all of it, whatever gradients it wants itself.
        d_received = _sent(d_out.contiguous(), exchange, ways)
        slots = ways.sent.slot_of_row.long()
        weights = exchange.send_rows(topk_weights.reshape(-1)[slots].unsqueeze(1), ways)
        if not ctx.options.keep_received:
            received = _sent(x, exchange, ways)
        if offs is not None:
            gradients = experts.backward(
                d_received,
                received,
                Rows(offs, row_of_slot, slot_of_row),
                weights,
                None if gate is None else Linear1(gate, up),
            )
        else:
            gradients = Gradients(d_received, weights, None, None)
        assert gradients.x is not None
        d_x = experts.steps.scatter(exchange.return_rows(gradients.x, ways), None, ways.sent)
        d_topk_weights = torch.zeros_like(topk_weights)
        returned = exchange.return_rows(gradients.topk_weights, ways)
        d_topk_weights.view(-1)[slots] = returned.squeeze(1)
        return None, None, d_x, None, d_topk_weights, *_of_parameters(gradients, parameters)


def _of_parameters(gradients: Gradients, parameters: Parameters) -> list[torch.Tensor | None]:
    """In the parameters' types; zero for a rank that received nothing."""
    weights, biases = gradients.weights, gradients.biases
    found: list[torch.Tensor | None] = [None] * 6
    if weights is not None:
        found[:3] = weights.gate, weights.up, weights.down
    if biases is not None:
        found[3:] = biases.gate, biases.up, biases.down
    return [
        None if value is None else torch.zeros_like(value) if d is None else d.to(value.dtype)
        for d, value in zip(found, parameters, strict=True)
    ]
