"""The layer whose forward pass is the call that serves it, so that training and serving have the
same bits.

Weights are quantized and laid out in every forward pass, expert by expert, and freed afterwards: an
optimizer need not increment a tensor's version, so an earlier copy could be out of date. The
backward pass is BF16's, with unrounded tokens and weights: gradients pass through every rounding of
the forward pass as if it did not exist. It routes the tokens and computes Linear1 itself, because
the call keeps nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from deep_moe.biases.per_expert import transform_biases_for_mega_moe
from deep_moe.fused.buffer import SymmBuffer
from deep_moe.fused.checks import require_type
from deep_moe.fused.input_preparation import prepare_inputs
from deep_moe.fused.mega_moe import mega_moe
from deep_moe.targets import Target, TargetWeights, target_of
from deep_moe.weights import weight_format
from deep_moe.weights.layers import ExpertWeights, LayerWeights, MegaMoEWeights
from deep_moe.weights.transform import empty_weights_for_mega_moe, transform_weights_for_mega_moe

from .expert_parallel import Options, Parameters, experts_of_call, gradients_of_parameters
from .operators import decode_activation

if TYPE_CHECKING:
    from .ways import Exchange

# Values of float32 copies that quantizing makes at a time: 256 MiB.
_MAX_WIDE_VALUES = 2**26


@torch.compiler.disable
def serving_moe(
    sym_buffer: SymmBuffer,
    exchange: Exchange,
    options: Options,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: Parameters,
) -> torch.Tensor:
    """The layer's output [tokens, hidden]. exchange: how the backward pass gets to the experts. A
    compiler's graph breaks here."""
    out: torch.Tensor = _ServingMoE.apply(
        sym_buffer, exchange, options, x, topk_idx, topk_weights, *parameters
    )
    return out


def check_serving(
    sym_buffer: SymmBuffer | None,
    num_ranks: int,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    biases: bool,
) -> SymmBuffer:
    """The buffer, if a call of these checked tensors can go through it. num_ranks: of the group."""
    if not isinstance(sym_buffer, SymmBuffer):
        require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer with forward='serving'")
    assert sym_buffer is not None
    sym_buffer.raise_if_closed()
    shape = sym_buffer.shape
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x must be torch.bfloat16 with forward='serving'; got {x.dtype}")
    if shape.num_ranks != num_ranks:
        raise ValueError(
            f"group must have the {shape.num_ranks} ranks of sym_buffer, which gradients travel "
            f"between; got {num_ranks}"
        )
    if shape.num_shared_experts:
        raise ValueError(
            "sym_buffer must have no shared experts, which the differentiable layer does not have; "
            f"got {shape.num_shared_experts}"
        )
    given = {
        "num_experts": w1.shape[0] * num_ranks,
        "num_topk": topk_idx.shape[1],
        "hidden": x.shape[1],
        "intermediate_hidden": w2.shape[1],
        "biases": biases,
    }
    for name, value in given.items():
        if getattr(shape, name) != value:
            raise ValueError(
                f"sym_buffer must be made with {name}={value}, as the layer is; "
                f"got {getattr(shape, name)}"
            )
    if x.shape[0] > shape.num_max_tokens_per_rank:
        raise ValueError(
            f"x must have at most the {shape.num_max_tokens_per_rank} tokens that sym_buffer takes "
            f"with forward='serving'; got {x.shape[0]}"
        )
    if x.device != sym_buffer.device:
        raise ValueError(f"x must be on {sym_buffer.device}, as sym_buffer is; got {x.device}")
    return sym_buffer


def serving_weights(
    w1: torch.Tensor, w3: torch.Tensor | None, w2: torch.Tensor, on_target: TargetWeights
) -> ExpertWeights:
    """The nearest weights of the target's format, as checkpoints have them."""
    source = weight_format(on_target.weights)
    gate_up = w1 if w3 is None else torch.cat([w1, w3], dim=2)
    layers = [
        source.quantize(layer.transpose(1, 2).float().contiguous(), on_target.scale_block, number)
        for layer, number in ((gate_up, 2), (w2, 1))
    ]
    return ExpertWeights(*layers)


def serving_weights_in_parts(
    w1: torch.Tensor, w3: torch.Tensor | None, w2: torch.Tensor, on_target: TargetWeights
) -> ExpertWeights:
    """`serving_weights`, with few experts in float32 at a time."""
    parts = [
        serving_weights(w1[own], None if w3 is None else w3[own], w2[own], on_target)
        for own in _parts(w1, w2)
    ]

    def whole(layers: list[LayerWeights]) -> LayerWeights:
        return LayerWeights(*(torch.cat(tensors) for tensors in zip(*layers, strict=True)))

    return ExpertWeights(whole([part.l1 for part in parts]), whole([part.l2 for part in parts]))


def _parts(w1: torch.Tensor, w2: torch.Tensor) -> list[slice]:
    num_values = 3 * w2.shape[1] * w2.shape[2]
    step = max(1, _MAX_WIDE_VALUES // num_values)
    return [slice(begin, begin + step) for begin in range(0, w1.shape[0], step)]


def _laid_out(parameters: Parameters, target: Target, on_target: TargetWeights) -> MegaMoEWeights:
    """What the call is given."""
    w1, w3, w2, *_ = parameters
    assert w1 is not None
    assert w2 is not None
    form: dict[str, Any] = {"weights": on_target.weights, "token_format": on_target.token_format}
    laid_out = empty_weights_for_mega_moe(
        w1.shape[0], w1.shape[1], w2.shape[1], arch=target.name, device=w1.device, **form
    )
    for own in _parts(w1, w2):
        l1, l2 = serving_weights(w1[own], None if w3 is None else w3[own], w2[own], on_target)
        out = laid_out.with_tensors([tensor[own] for tensor in laid_out.tensors])
        transform_weights_for_mega_moe(l1, l2, target.name, **form, out=out)
    return laid_out


def _serve(
    sym_buffer: SymmBuffer,
    options: Options,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: Parameters,
) -> torch.Tensor:
    """The call as an engine makes it."""
    shape = sym_buffer.shape
    target = sym_buffer.target if options.arch is None else target_of(options.arch)
    on_target = target.weights_of(shape.weights, shape.token_format)
    l1_bias, l2_bias = None, None
    if shape.biases:
        b1, b3, b2 = parameters[3:]
        assert b1 is not None
        assert b3 is not None
        assert b2 is not None
        l1_bias, l2_bias = transform_biases_for_mega_moe(
            torch.cat([b1, b3], dim=1),
            b2,
            target.name,
            weights=shape.weights,
            token_format=shape.token_format,
        )
    weights = _laid_out(parameters, target, on_target)
    # Ids that name no expert are unused slots here, and an error there.
    is_used = (topk_idx >= 0) & (topk_idx < shape.num_experts)
    prepare_inputs(x, topk_idx.where(is_used, -1), topk_weights, sym_buffer, arch=target.name)
    y = torch.empty_like(x)
    mega_moe(
        y,
        weights,
        sym_buffer,
        activation=decode_activation(options.activation),
        l1_bias=l1_bias,
        l2_bias=l2_bias,
        arch=target.name,
    )
    return y


class _ServingMoE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sym_buffer: SymmBuffer,
        exchange: Exchange,
        options: Options,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.options, ctx.exchange = options, exchange
        ctx.save_for_backward(x, topk_idx, topk_weights, *parameters)
        detached = tuple(None if value is None else value.detach() for value in parameters)
        return _serve(sym_buffer, options, x, topk_idx, topk_weights, detached)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, topk_idx, topk_weights, *saved = ctx.saved_tensors
        parameters: Parameters = tuple(saved)
        experts = experts_of_call(ctx.options, x, parameters)
        num_local_experts = experts.weights.gate.shape[0]
        ways, received = ctx.exchange.dispatch(
            x, topk_idx, topk_weights, num_local_experts, experts.steps
        )
        gradients = experts.backward(d_out.contiguous(), x, received, ways, topk_weights, None)
        d_parameters = gradients_of_parameters(gradients, parameters)
        return None, None, None, gradients.x, None, gradients.topk_weights, *d_parameters
