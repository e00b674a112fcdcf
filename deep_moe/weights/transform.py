"""Expert weights, from the layout of checkpoints to the layout that a kernel loads.

A layer's weights are E local experts' values and scales. Their format has a folder of its own. The
folder's file for a kernel says how that kernel reads them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.devices import named_device
from deep_moe.heuristics.shape import MoEShape
from deep_moe.targets import Target, TargetWeights, target_for
from deep_moe.tensor_memory import refuse_shared_memory

from . import DEFAULT_WEIGHTS, weight_format
from .layers import (
    ExpertWeights,
    KernelLayer,
    LayerTensors,
    LayerWeights,
    MegaMoEWeights,
    Pair,
    WeightSizes,
    check_form,
    check_memory_of,
    detached,
    kernel_layer,
    layer_weights,
    shape_of_weights,
)

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

_ALIGNMENT = 16  # bytes, of tensors that kernels load


def transform_weights_for_mega_moe(
    l1_weights: LayerTensors | torch.Tensor,
    l2_weights: LayerTensors | torch.Tensor,
    arch: str | None = None,
    *,
    weights: WeightsName = DEFAULT_WEIGHTS,
    token_format: TokenFormatName | None = None,
    requantize: bool = False,
    out: MegaMoEWeights | None = None,
) -> MegaMoEWeights:
    """Lay out weights for the kernel, once, after loading. The sources may then be freed.

    Args:
        l1_weights: (values [E, 2*I, H], scales), rows of gate, then rows of up. With "nvfp4" a
            third tensor has the scales of the matrices. For an activation without a gate, values
            are [E, I, H].
        l2_weights: (values [E, H, I], scales), likewise.
        arch: the target; by default that of the tensors' device, sm_100a for tensors on the CPU.
        weights: their format. Below, a matrix is [N, K]; K/128 and the like are rounded up.

            - "mxfp4": int8 [E, N, K/2], two E2M1 values in each. Scales are int32 [E, N, K/128],
              four UE8M0 bytes in each, one byte per 32 values.
            - "fp8": float8_e4m3fn [E, N, K]. Scales per 32 values are int32 as above, or
              float8_e8m0fnu, uint8 or float32 [E, N, K/32]. Scales per 128 x 128 values have these
              types, too, [E, N/128, K/128]; in Linear1 those of gate stand before those of up,
              [E, 2*ceil(I/128), H/128]. On sm_100a and sm_103a all of these must be powers of two.
              On sm_90a they must be equal within 128 x 128 values, and may be any positive numbers.
              With token_format "fp8_token", scales per row are float32 [E, N], and scales per
              matrix float32 [E, 2] of gate and up and [E, 1]: any positive numbers.
            - "bf16": one bfloat16 tensor [E, N, K] per layer in place of a pair.
            - "nvfp4": int8 or uint8 [E, N, K/2]. Scales are float8_e4m3fn [E, N, K/16]. Scales of
              matrices, which multiply, are float32 [E, 2] of gate and up, and [E, 1].
            - "int4": int8 or uint8 [E, N, K/2], two codes in each. Scales are bfloat16 [E, N, K/32]
              or [E, N, K/128].
            - "mxfp8": float8_e4m3fn [E, N, K]. Scales are int32 [E, N, K/128], or uint8 or
              float8_e8m0fnu [E, N, K/32].
        token_format: format of the tokens that the weights are multiplied with, with the defaults
            of `get_symm_buffer_for_mega_moe` on such a target.
        requantize: with "fp8", take other scales, too: the weights are then rounded again, and a
            `RequantizationWarning` says how far they moved.
        out: where to put the result: tensors of `empty_weights_for_mega_moe` for the same E; by
            default new tensors. After an error its contents are undefined.

    H and I are multiples of 32. Weights are padded with zeros to multiples of 128.

    Returns `out`, which unpacks into the pairs of both layers: `l1, l2 = ...`. A "bf16" pair has an
    empty tensor in place of scales. Every weight keeps its exact value, unless requantized; INT4
    weights are rounded in the kernel. ValueError names expert and row of a scale that is NaN or
    that the target cannot apply, and, on sm_90a, of a row whose MXFP4 scales differ by a factor of
    more than 2^26, or beside bf16 tokens of more than 2^125.

    Examples:
        Expert by expert, so that a layer and its transformed copy never exist at the same time:

        >>> from deep_moe import quantize_mxfp4
        >>> weights = empty_weights_for_mega_moe(4, hidden=256, intermediate_hidden=128)
        >>> for i in range(4):
        ...     l1 = quantize_mxfp4(torch.randn(1, 2 * 128, 256))
        ...     l2 = quantize_mxfp4(torch.randn(1, 256, 128))
        ...     _ = transform_weights_for_mega_moe(l1, l2, out=weights.expert(i))

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    source = weight_format(weights)
    l1 = detached(layer_weights("l1_weights", l1_weights, source))
    l2 = detached(layer_weights("l2_weights", l2_weights, source))
    if not isinstance(requantize, bool):
        raise TypeError(f"requantize must be a bool; got {requantize!r}")
    sizes = source.check(l1, l2)
    check_memory_of({"l1_weights": l1, "l2_weights": l2})
    device = l1.weight.device
    target, on_target = _target_weights(arch, device, weights, token_format)
    shape = shape_of_weights(sizes, weights, on_target.token_format)
    if out is None:
        out = _empty_weights(target, on_target, shape, device)
    else:
        _check_out(out, (l1, l2), target, on_target, shape)
    source.check_values("l1_weights", l1)
    source.check_values("l2_weights", l2)
    if shape.padded is not shape:
        l1, l2 = source.padded(l1, l2, shape)
    if not requantize:
        on_target.transform(l1, l2, out)
        return out
    for warning in on_target.requantize(l1, l2, out):
        warnings.warn(warning, stacklevel=2)
    return out


def empty_weights_for_mega_moe(
    num_experts: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    arch: str | None = None,
    device: torch.device | str = "cpu",
    weights: WeightsName = DEFAULT_WEIGHTS,
    token_format: TokenFormatName | None = None,
    has_gate: bool = True,
) -> MegaMoEWeights:
    """Uninitialized tensors of the form that `transform_weights_for_mega_moe` gives `num_experts`
    local experts, for its `out`.

    Args:
        num_experts: local experts.
        hidden: H, a multiple of 32.
        intermediate_hidden: I, a multiple of 32.
        arch: the target; by default that of `device`.
        device: where the tensors are put.
        weights: the format of the weights.
        token_format: that of the tokens; by default the one that goes with the weights.
        has_gate: whether Linear1 has rows of gate above those of up, 2*I in all.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    device = named_device(device)
    target, on_target = _target_weights(arch, device, weights, token_format)
    sizes = WeightSizes(num_experts, hidden, intermediate_hidden, has_gate)
    shape = shape_of_weights(sizes, weights, on_target.token_format)
    return _empty_weights(target, on_target, shape, device)


def inverse_transform_weights(
    l1_weights: Pair,
    l2_weights: Pair,
    arch: str | None = None,
    *,
    weights: WeightsName = DEFAULT_WEIGHTS,
    token_format: TokenFormatName | None = None,
    hidden: int | None = None,
    intermediate_hidden: int | None = None,
    has_gate: bool = True,
) -> ExpertWeights:
    """Give back what `transform_weights_for_mega_moe` was given, as new tensors: of fp8, with int32
    scales, four UE8M0 bytes in each, or for sm_90a with float32 scales for 128 x 128 values. Of
    MXFP4 for sm_90a, groups of zeros may have got another scale.

    Args:
        l1_weights: transformed weights of Linear1.
        l2_weights: transformed weights of Linear2.
        arch: the target that the weights were transformed for; by default that of their device.
        weights: the format of the weights.
        token_format: that of the tokens; by default the one that goes with the weights.
        hidden: H, where it is no multiple of 128 and so was padded.
        intermediate_hidden: I, where it is no multiple of 128 and so was padded.
        has_gate: whether Linear1 has rows of gate above those of up.

    Raises TypeError or ValueError if they have not the form that it makes.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    source = weight_format(weights)
    l1 = detached(kernel_layer("l1_weights", l1_weights))
    l2 = detached(kernel_layer("l2_weights", l2_weights))
    _, on_target = _target_weights(arch, l1.weight.device, weights, token_format)
    padded = on_target.inverse(l1, l2, has_gate)
    if hidden is None and intermediate_hidden is None:
        return padded
    sizes = source.check(*padded)
    given = {"hidden": hidden, "intermediate_hidden": intermediate_hidden}
    own: dict[str, Any] = {name: size for name, size in given.items() if size is not None}
    shape = shape_of_weights(sizes._replace(**own), weights, on_target.token_format)
    for name in given:
        allowed = getattr(sizes, name)
        if getattr(shape.padded, name) != allowed:
            raise ValueError(
                f"{name} must become {allowed} when it is padded, as the weights were; "
                f"got {getattr(shape, name)}"
            )
    if shape.padded is shape:
        return padded
    return ExpertWeights(*source.without_padding(*padded, shape))


def _target_weights(
    arch: str | None,
    device: torch.device,
    weights: WeightsName,
    token_format: TokenFormatName | None,
) -> tuple[Target, TargetWeights]:
    target = target_for(arch, device)
    return target, target.weights_of(weights, token_format)


def _empty_weights(
    target: Target, on_target: TargetWeights, shape: MoEShape, device: torch.device
) -> MegaMoEWeights:
    w1, sf1, w2, sf2 = (
        torch.empty(size, dtype=dtype, device=device)
        for dtype, size in on_target.tensors(shape.padded).values()
    )
    return MegaMoEWeights(
        KernelLayer(w1, sf1),
        KernelLayer(w2, sf2),
        on_target.weights,
        on_target.token_format,
        target.kernel,
        shape.has_gate,
    )


def _check_out(
    out: MegaMoEWeights,
    sources: tuple[LayerWeights, LayerWeights],
    target: Target,
    on_target: TargetWeights,
    shape: MoEShape,
) -> None:
    """Raise unless `out` is what `on_target` makes, in memory of its own."""
    if not isinstance(out, MegaMoEWeights):
        raise TypeError(
            "out must be MegaMoEWeights, as empty_weights_for_mega_moe makes them; "
            f"got {type(out).__name__}"
        )
    form = (on_target.weights, on_target.token_format, target.kernel, shape.has_gate)
    if (out.weights, out.token_format, out.kernel, out.has_gate) != form:
        gate = "" if shape.has_gate else ", without a gate"
        raise ValueError(
            f"out must be for {form[0]} x {form[1]} on {form[2]}{gate}; got {out.words}"
        )
    check_form({"out.l1": out.l1, "out.l2": out.l2}, on_target.tensors(shape.padded))
    device = sources[0][0].device
    written = {
        f"out.{name}[{i}]": tensor
        for name, own in (("l1", out.l1), ("l2", out.l2))
        for i, tensor in enumerate(own)
    }
    for name, tensor in written.items():
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on {device}, as l1_weights[0] is; got {tensor.device}"
            )
        if tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {_ALIGNMENT} bytes; got {tensor.data_ptr():#x}"
            )
    names = ("l1_weights", "l2_weights")
    read = {
        f"{name}[{i}]": tensor
        for name, layer in zip(names, sources, strict=True)
        for i, tensor in enumerate(layer)
    }
    refuse_shared_memory(written, read)
