"""The layer over ranks, each of which owns a part of the experts. It is the layer of one rank,
except that gather and scatter travel (ways.py). A layer of one rank whose backward pass adds up
gradients itself comes here, too: an operator must not change what it is not given.

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

from .experts import Experts, Gradients, Linear1, WeightSums
from .operators import NUM_TRANSPOSED, experts_of, flat, transposed_of
from .ways import LocalExchange, LocalWays
from .wgrad_accumulation import Owners, owners_of, refuse_second_derivatives, sums_of

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
    fuse_wgrad_accumulation: bool


@torch.compiler.disable
def expert_parallel_moe(
    group: ProcessGroup | AllToAll | None,
    max_recv_slots: int | None,
    options: Options,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: Parameters,
) -> torch.Tensor:
    """The layer's output [tokens, hidden]. A compiler's graph breaks here."""
    owners = None
    if options.fuse_wgrad_accumulation and torch.is_grad_enabled():
        owners = owners_of(dict(zip(("w1", "w3", "w2"), parameters[:3], strict=True)))
    exchange = exchange_over(group, max_recv_slots)
    out: torch.Tensor = _ExpertParallelMoE.apply(
        exchange, options, owners, x, topk_idx, topk_weights, *parameters
    )
    return out


def exchange_over(group: ProcessGroup | AllToAll | None, max_recv_slots: int | None) -> Exchange:
    """Who carries rows between the ranks of this group. None: of one rank."""
    from deep_moe.split.throughput import AllToAll

    from .all_to_all import AllToAllExchange
    from .process_group import ProcessGroupExchange

    if group is None:
        return LocalExchange()
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
        owners: Owners | None,
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
        ctx.options, ctx.ways, ctx.owners = options, ways, owners
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
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.owners is not None:
            refuse_second_derivatives()
        gradients: tuple[torch.Tensor | None, ...] = _backward(ctx, d_out)
        return gradients


@once_differentiable
def _backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, topk_weights, gate, up, received, *others = ctx.saved_tensors
    transposed, parameters = others[:NUM_TRANSPOSED], tuple(others[NUM_TRANSPOSED:])
    sums = None if ctx.owners is None else sums_of(ctx.owners)
    needs_weights = any(ctx.needs_input_grad[6:9]) if sums is None else sums.is_wanted
    is_local = isinstance(ctx.ways, LocalWays)
    if received is None and not is_local:
        # Every rank sends and receives tokens, whatever gradients it wants itself.
        received = ctx.ways.receive(x)
    of_weights = None if sums is None else sums.of_weights
    gradients = experts_of_call(ctx.options, x, parameters).backward(
        d_out.contiguous(),
        x,
        received,
        ctx.ways,
        topk_weights,
        None if gate is None else Linear1(gate, up),
        transposed=transposed_of(transposed),
        sums=of_weights,
        needs_x=ctx.needs_input_grad[3] or not is_local,
        needs_weights=needs_weights,
        needs_biases=any(ctx.needs_input_grad[9:]),
    )
    d_parameters = gradients_of_parameters(gradients, parameters, of_weights)
    return None, None, None, gradients.x, None, gradients.topk_weights, *d_parameters


def gradients_of_parameters(
    gradients: Gradients, parameters: Parameters, sums: WeightSums | None = None
) -> list[torch.Tensor | None]:
    """In the parameters' types. sums: what gradients of weights were added to, which have none to
    return."""
    weights, biases = gradients.weights, gradients.biases
    sums = WeightSums() if sums is None else sums
    found: list[torch.Tensor | None] = [None] * 3
    if weights is not None:
        found = [
            gradient if added is None else None
            for gradient, added in (
                (weights.gate, sums.gate),
                (weights.up, sums.up),
                (weights.down, sums.down),
            )
        ]
    found += [None] * 3 if biases is None else [biases.gate, biases.up, biases.down]
    return [
        None if d is None or value is None else d.to(value.dtype)
        for d, value in zip(found, parameters, strict=True)
    ]
