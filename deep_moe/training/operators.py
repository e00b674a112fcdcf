"""PyTorch's operators: the forward pass, which has the backward pass as its gradient, and what a
compiler has to know of both.

Optional results are empty tensors where there are none: an operator returns the same number always.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from deep_moe.activations import ACTIVATIONS, Activation, GatedActivation, activation_of
from deep_moe.heuristics.products import K_GROUP
from deep_moe.heuristics.training import num_padded_rows
from deep_moe.targets import products_target, target_of
from deep_moe.tensor_memory import check_memory

from .experts import (
    FP8_DATA_GRADIENTS,
    FP8_PRECISIONS,
    Experts,
    Linear1,
    Transposed,
    Weights,
    widened,
)
from .gathered_weights import memory_of, plain_weight
from .kernel_steps import KernelSteps
from .quantized import QuantizedWeights, quantized_width
from .rows import Rows
from .steps import Biases
from .steps_for import steps_for
from .ways import LocalWays

_PARAMETERS = (
    "Tensor w1, Tensor? w3, Tensor w2, Tensor? b1, Tensor? b3, Tensor? b2, "
    "str activation, str precision, str? arch"
)
# `Transposed`: values and scales of each weight.
_TRANSPOSED = "Tensor w1t, Tensor w1t_sf, Tensor w3t, Tensor w3t_sf, Tensor w2t, Tensor w2t_sf"
NUM_TRANSPOSED = 6
torch.library.define(
    "deep_moe::moe",
    f"(Tensor x, Tensor topk_idx, Tensor topk_weights, {_PARAMETERS}, bool recompute, "
    "bool quantize_kept) -> "
    "(Tensor out, Tensor gate, Tensor up, Tensor offs, Tensor row_of_slot, Tensor slot_of_row, "
    f"{_TRANSPOSED})",
)
torch.library.define(
    "deep_moe::moe_backward",
    "(Tensor d_out, Tensor x, Tensor topk_weights, Tensor gate, Tensor up, Tensor offs, "
    f"Tensor row_of_slot, Tensor slot_of_row, {_TRANSPOSED}, {_PARAMETERS}, bool needs_x, "
    "bool needs_weights, "
    "bool needs_biases) -> (Tensor d_x, Tensor d_topk_weights, Tensor d_w1, Tensor d_w3, "
    "Tensor d_w2, Tensor d_b1, Tensor d_b3, Tensor d_b2)",
)
moe_op = torch.ops.deep_moe.moe.default
_moe_backward_op = torch.ops.deep_moe.moe_backward.default


def gated_activation_of(activation: str | Activation, clamp: float | None) -> GatedActivation:
    """As `activation_of`, or a ValueError for one without a gate, which no step here takes."""
    found = activation_of(activation, clamp)
    if not isinstance(found, GatedActivation):
        raise ValueError(
            f"activation must be one with a gate, for the differentiable layer has w1 and w3; got "
            f"{activation!r}"
        )
    return found


def encode_activation(activation: Activation) -> str:
    """For an operator: name and parameters, bit for bit.

    >>> from deep_moe.activations import Swiglu
    >>> encode_activation(Swiglu(clamp=10.0))
    'swiglu 0x1.4000000000000p+3'
    """
    return " ".join([activation.name, *(v.hex() for v in activation.parameters.values())])


@lru_cache(maxsize=256)
def decode_activation(text: str) -> GatedActivation:
    """The inverse."""
    name, *values = text.split()
    activation = ACTIVATIONS[name](*map(float.fromhex, values))
    assert isinstance(activation, GatedActivation)
    return activation


def experts_of(
    x: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor | None,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    precision: Any,
    arch: str | None,
) -> Experts:
    """The operators' parameters as one object. A compiler's operator and a backward pass run long
    after the arguments were checked, and weights may have been freed since."""
    given = {"x": x, "w1": w1, "w3": w3, "w2": w2, "b1": b1, "b3": b3, "b2": b2}
    for name, tensor in given.items():
        if tensor is not None:
            for part in memory_of(tensor):
                check_memory(name, part)
    biases = None
    if b1 is not None:
        assert b3 is not None
        assert b2 is not None
        biases = widened(Biases(b1, b3, b2), x.dtype)
    weights = Weights(plain_weight(w1), None if w3 is None else plain_weight(w3), plain_weight(w2))
    steps = steps_for(x, arch)
    if isinstance(steps, KernelSteps) and precision in FP8_PRECISIONS:
        _require_products(steps.arch, precision)
    return Experts(weights, biases, decode_activation(activation), precision, steps)


def _require_products(arch: str, precision: str) -> None:
    """That there are products of quantized operands for a target."""
    if not target_of(arch).has_grouped_product:
        raise ValueError(
            f"precision must be 'bf16' or 'mxfp8' on {arch}: products of {precision!r} are for "
            f"{products_target().name}; got {precision!r}"
        )


def _moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor | None,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    precision: str,
    arch: str | None,
    recompute: bool,
    quantize_kept: bool,
) -> tuple[torch.Tensor, ...]:
    parameters = (w1, w3, w2, b1, b3, b2)
    if topk_idx.numel() == 0:
        options = (activation, precision, arch, recompute, quantize_kept)
        results = _moe_fake(x, topk_idx, topk_weights, *parameters, *options)
        return tuple(result.zero_() for result in results)
    experts = experts_of(x, *parameters, activation, precision, arch)
    rows = experts.steps.route(topk_idx, w1.shape[0])
    computing = experts.of_forward() if recompute else experts
    out, linear1, transposed = computing.forward(x, LocalWays(rows, experts.steps), topk_weights)
    if quantize_kept:
        linear1 = experts.quantized(linear1)
    gate, up = linear1.gate, linear1.up
    if recompute:
        gate, up = x.new_empty(0), None
    if up is None:
        up = x.new_empty(0)
    return (
        out,
        gate,
        up,
        rows.offs,
        rows.row_of_slot,
        rows.slot_of_row,
        *(x.new_empty(0) if tensor is None else tensor for tensor in flat(transposed)),
    )


def _moe_fake(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor | None,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    precision: str,
    arch: str | None,
    recompute: bool,
    quantize_kept: bool,
) -> tuple[torch.Tensor, ...]:
    num_experts, _hidden, width = w1.shape
    num_rows = num_padded_rows(topk_idx.shape[0] * topk_idx.shape[1], num_experts)
    kept_width = quantized_width(width) if quantize_kept else width

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=x.device)

    return (
        torch.empty_like(x),
        x.new_empty(0) if recompute else x.new_empty(num_rows, kept_width),
        x.new_empty(0) if recompute or w3 is None else x.new_empty(num_rows, kept_width),
        ints(num_experts),
        ints(*topk_idx.shape),
        ints(num_rows),
        *_transposed_fake(x, (w1, w3, w2), precision, recompute),
    )


def _transposed_fake(
    x: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    precision: str,
    recompute: bool,
) -> list[torch.Tensor]:
    found = []
    for weight in weights:
        if weight is None or precision not in FP8_DATA_GRADIENTS or recompute:
            found += [x.new_empty(0), x.new_empty(0)]
            continue
        num_experts, *sizes = weight.shape
        blocks = [size // K_GROUP for size in sizes]
        found.append(x.new_empty(num_experts, *sizes, dtype=torch.float8_e4m3fn))
        found.append(x.new_empty(num_experts, *blocks, dtype=torch.float32))
    return found


def flat(transposed: Transposed | None) -> list[torch.Tensor | None]:
    """Values and scales of each weight, NUM_TRANSPOSED of them."""
    if transposed is None:
        return [None] * NUM_TRANSPOSED
    weights = (transposed.gate, transposed.up, transposed.down)
    return [
        tensor
        for weight in weights
        for tensor in ((None, None) if weight is None else (weight.values, weight.scales))
    ]


def transposed_of(tensors: Sequence[torch.Tensor | None]) -> Transposed | None:
    """The inverse; an empty tensor means the same as None."""
    gate, up, down = (
        None
        if values is None or scales is None or not values.numel()
        else QuantizedWeights(values, scales)
        for values, scales in zip(tensors[::2], tensors[1::2], strict=True)
    )
    return None if gate is None or down is None else Transposed(gate, up, down)


def _moe_backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    offs: torch.Tensor,
    row_of_slot: torch.Tensor,
    slot_of_row: torch.Tensor,
    w1t: torch.Tensor,
    w1t_sf: torch.Tensor,
    w3t: torch.Tensor,
    w3t_sf: torch.Tensor,
    w2t: torch.Tensor,
    w2t_sf: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor | None,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    precision: str,
    arch: str | None,
    needs_x: bool,
    needs_weights: bool,
    needs_biases: bool,
) -> tuple[torch.Tensor, ...]:
    parameters = (w1, w3, w2, b1, b3, b2)
    if row_of_slot.numel() == 0:
        wanted = (needs_x, needs_weights, needs_biases)
        return tuple(t.zero_() for t in _gradient_shapes(x, topk_weights, parameters, wanted))
    experts = experts_of(x, *parameters, activation, precision, arch)
    linear1 = None
    if gate.numel():
        linear1 = Linear1(gate, None if w3 is None else up)
    gradients = experts.backward(
        d_out.contiguous(),
        x,
        x,
        LocalWays(Rows(offs, row_of_slot, slot_of_row), experts.steps),
        topk_weights,
        linear1,
        transposed=transposed_of((w1t, w1t_sf, w3t, w3t_sf, w2t, w2t_sf)),
        needs_x=needs_x,
        needs_weights=needs_weights,
        needs_biases=needs_biases,
    )
    d_weights, d_biases = gradients.weights, gradients.biases
    nothing: tuple[None, ...] = (None, None, None)
    found = (
        gradients.x,
        gradients.topk_weights,
        *(nothing if d_weights is None else (d_weights.gate, d_weights.up, d_weights.down)),
        *(nothing if d_biases is None else (d_biases.gate, d_biases.up, d_biases.down)),
    )
    of = (x, topk_weights, *parameters)
    return tuple(
        x.new_empty(0) if gradient is None or value is None else gradient.to(value.dtype)
        for gradient, value in zip(found, of, strict=True)
    )


def _gradient_shapes(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, ...]:
    """Empty tensors of the gradients' shapes. parameters: three weights, three biases."""
    needs_x, needs_weights, needs_biases = wanted
    needs = (needs_x, True, *[needs_weights] * 3, *[needs_biases] * 3)
    return tuple(
        # Contiguous: a parameter may be anything dense.
        value.new_empty(value.shape) if is_needed and value is not None else x.new_empty(0)
        for value, is_needed in zip((x, topk_weights, *parameters), needs, strict=True)
    )


def _moe_backward_fake(
    d_out: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    offs: torch.Tensor,
    row_of_slot: torch.Tensor,
    slot_of_row: torch.Tensor,
    w1t: torch.Tensor,
    w1t_sf: torch.Tensor,
    w3t: torch.Tensor,
    w3t_sf: torch.Tensor,
    w2t: torch.Tensor,
    w2t_sf: torch.Tensor,
    w1: torch.Tensor,
    w3: torch.Tensor | None,
    w2: torch.Tensor,
    b1: torch.Tensor | None,
    b3: torch.Tensor | None,
    b2: torch.Tensor | None,
    activation: str,
    precision: str,
    arch: str | None,
    needs_x: bool,
    needs_weights: bool,
    needs_biases: bool,
) -> tuple[torch.Tensor, ...]:
    wanted = (needs_x, needs_weights, needs_biases)
    return _gradient_shapes(x, topk_weights, (w1, w3, w2, b1, b3, b2), wanted)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, activation, precision, arch, _recompute, _quantize_kept = inputs
    x, _topk_idx, topk_weights, *parameters = tensors
    _out, *kept = output
    ctx.mark_non_differentiable(*kept)
    # Not even zeros for the gradients of what is kept for this pass only.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, topk_weights, *kept, *parameters)
    ctx.options = (activation, precision, arch)


def _backward(ctx: Any, d_out: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    num_inputs = 14
    if d_out is None:
        return (None,) * num_inputs
    needs_x, _idx, needs_topk_weights, *needs_parameters = ctx.needs_input_grad[:9]
    needs_weights, needs_biases = any(needs_parameters[:3]), any(needs_parameters[3:])
    d_x, d_topk_weights, *d_parameters = _moe_backward_op(
        d_out, *ctx.saved_tensors, *ctx.options, needs_x, needs_weights, needs_biases
    )
    return (
        d_x if needs_x else None,
        None,
        d_topk_weights if needs_topk_weights else None,
        *(d if n else None for d, n in zip(d_parameters, needs_parameters, strict=True)),
        *(None,) * 5,
    )


torch.library.impl("deep_moe::moe", "CompositeExplicitAutograd", _moe)
torch.library.impl("deep_moe::moe_backward", "CompositeExplicitAutograd", _moe_backward)
torch.library.register_fake("deep_moe::moe", _moe_fake)
torch.library.register_fake("deep_moe::moe_backward", _moe_backward_fake)
torch.library.register_autograd("deep_moe::moe", _backward, setup_context=_setup_context)


def _no_second_derivative(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
    raise RuntimeError("deep_moe.moe has no second derivative: its backward pass has no gradient")


torch.library.register_autograd("deep_moe::moe_backward", _no_second_derivative)
