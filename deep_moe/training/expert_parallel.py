"""The layer over ranks, each of which owns a part of the experts. It is the layer of one rank,
except that gather and scatter travel (ways.py).

The backward pass uses the same ways: gradients of the output go to the owners, and those of tokens
and routing weights come back. The tokens that a rank *received* are sent once more, unless they are
kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from .experts import Experts, Gradients, Linear1
from .operators import NUM_TRANSPOSED, experts_of, flat, transposed_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.split.throughput import AllToAll

    from .ways import Exchange

Parameters = tuple[torch.Tensor | None, ...]  # w1, w3, w2, b1, b3, b2


@dataclass(frozen=True)
class Options:
    """Of a call; activation as operators encode it."""

    activation: str
    precision: str
    arch: str | None
    recompute: bool
    keep_received: bool
    quantize_kept: bool


@torch.compiler.disable
def expert_parallel_moe(
    group: ProcessGroup | AllToAll,
    max_recv_slots: int | None,
    options: Options,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: Parameters,
) -> torch.Tensor:
    """The layer's output [tokens, hidden]. A compiler's graph breaks here."""
    out: torch.Tensor = _ExpertParallelMoE.apply(
        exchange_over(group, max_recv_slots), options, x, topk_idx, topk_weights, *parameters
    )
    return out


def exchange_over(group: ProcessGroup | AllToAll, max_recv_slots: int | None) -> Exchange:
    """Who carries rows between the ranks of this group."""
    from deep_moe.split.throughput import AllToAll

    from .all_to_all import AllToAllExchange
    from .process_group import ProcessGroupExchange

    if not isinstance(group, AllToAll):
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group must be a process group that this process belongs to, an AllToAll or None; "
                f"got {group!r}"
            )
        return ProcessGroupExchange(group, max_recv_slots)
    if max_recv_slots is not None:
        raise ValueError(
            "max_recv_slots must be None with an AllToAll as group, whose max_recv_rows is the "
            f"bound; got {max_recv_slots}"
        )
    return AllToAllExchange(group)


def experts_of_call(options: Options, x: torch.Tensor, parameters: Parameters) -> Experts:
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
        experts = experts_of_call(options, x, parameters)
        num_local_experts = experts.weights.gate.shape[0]
        ways, received = exchange.dispatch(
            x, topk_idx, topk_weights, num_local_experts, experts.steps
        )
        computing = experts.of_forward() if options.recompute else experts
        out, linear1, transposed = computing.forward(received, ways, topk_weights)
        if options.quantize_kept:
            linear1 = experts.quantized(linear1)
        ctx.options, ctx.ways = options, ways
        ctx.save_for_backward(
            x,
            topk_weights,
            None if options.recompute else linear1.gate,
            None if options.recompute else linear1.up,
            received if options.keep_received else None,
            *flat(transposed),
            *parameters,
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, topk_weights, gate, up, received, *others = ctx.saved_tensors
        transposed, parameters = others[:NUM_TRANSPOSED], others[NUM_TRANSPOSED:]
        # Every rank sends and receives all of it, whatever gradients it wants itself.
        gradients = experts_of_call(ctx.options, x, tuple(parameters)).backward(
            d_out.contiguous(),
            x,
            received,
            ctx.ways,
            topk_weights,
            None if gate is None else Linear1(gate, up),
            transposed=transposed_of(transposed),
        )
        d_x, d_topk_weights = gradients.x, gradients.topk_weights
        d_parameters = gradients_of_parameters(gradients, tuple(parameters))
        return None, None, d_x, None, d_topk_weights, *d_parameters


def gradients_of_parameters(
    gradients: Gradients, parameters: Parameters
) -> list[torch.Tensor | None]:
    """In the parameters' types."""
    weights, biases = gradients.weights, gradients.biases
    assert weights is not None
    found = [weights.gate, weights.up, weights.down]
    found += [None] * 3 if biases is None else [biases.gate, biases.up, biases.down]
    return [
        None if d is None or value is None else d.to(value.dtype)
        for d, value in zip(found, parameters, strict=True)
    ]
