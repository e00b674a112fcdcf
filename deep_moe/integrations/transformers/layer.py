"""From a module of experts to what the kernel takes, and back.

A module keeps its weights in its own form until its first call. Then they are laid out for the
kernel, expert by expert, and the module's own tensors are given up: a model's experts are not held
twice. `restore` brings them back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from deep_moe.activations import Activation, Situ, Swiglu, SwigluOai
from deep_moe.compat.deep_gemm.operands import packed_weights
from deep_moe.formats.biases import MegaMoEBiases, transform_biases_for_mega_moe
from deep_moe.formats.block_scaled import (
    GROUP_SIZE,
    ue8m0_of_floats,
    ue8m0_to_float,
    unpack_ue8m0,
)
from deep_moe.formats.mx import dequantize_mxfp4, quantize_mxfp4
from deep_moe.formats.weight_formats import weight_format
from deep_moe.formats.weights import (
    LayerWeights,
    MegaMoEWeights,
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)

from ..mxfp4_tokens import served_format
from ..served_experts import check_sizes, gate_before_up
from ..shared_buffers import LayerSizes
from ..unsupported import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle

_LINEARS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
_SCALES = "_scale_inv"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PACKED = (torch.int8, torch.uint8)


@dataclass(frozen=True)
class ExpertsLayer:
    """Experts in the kernel's form. group: of the ranks that they are spread over. given: the form
    of each tensor that was given up, by the name that the module has for it; the module keeps its
    biases. guard: what keeps the module's state_dict from being read without them, if there are
    any."""

    weights: MegaMoEWeights
    biases: MegaMoEBiases | None
    sizes: LayerSizes
    activation: Activation
    group: ProcessGroup | None
    given: dict[str, _Given]
    guard: RemovableHandle | None


def take_over(
    module: torch.nn.Module,
    group: ProcessGroup | None,
    num_topk: int,
    *,
    quantize: bool,
    num_pool_tokens: int | None,
    mxfp4_tokens: str | None,
    arch: str | None,
    agree: Callable[[str | None], str | None],
) -> ExpertsLayer:
    """Lay out a module's experts for the kernel and give up the module's tensors.

    quantize: round floats that are not MXFP4 to it, and FP8 to scales that the target applies.
    num_pool_tokens: of the buffer. mxfp4_tokens: beside experts in MXFP4, None for the default.
    agree: is told why this rank cannot take its experts over, or None, and gives back the reason of
    the first rank that cannot.

    Raises UnsupportedError, on all ranks and before anything has changed.
    """
    num_ranks = 1 if group is None else group.size()
    reason = None
    try:
        activation = _activation(module)
        source = _source(module, quantize)
        chosen = served_format(source.format, mxfp4_tokens, arch, source.device)
        source = replace(source, format=chosen)
        sizes = LayerSizes(
            num_ranks * source.num_experts,
            num_topk,
            source.hidden,
            source.intermediate_hidden,
            source.format,
            source.biases is not None,
            num_pool_tokens,
        )
        check_sizes(sizes, num_ranks, 1, arch, source.device)
        weights, is_requantized = _laid_out(source, arch, quantize)
        biases = _laid_out_biases(source, arch)
    except UnsupportedError as error:
        reason = str(error)
    reason = agree(reason)
    if reason is not None:
        raise UnsupportedError(reason)
    # FSDP keeps count of the parameters that it shards, so they stay; and scales that are not the
    # module's own have no place in it.
    given = {} if isinstance(module, FSDPModule) or is_requantized else source.given
    for name in given:
        module._parameters[name] = None
    guard = module.register_state_dict_pre_hook(_refuse_state_dict) if given else None
    return ExpertsLayer(weights, biases, sizes, activation, group, given, guard)


def restore(module: torch.nn.Module, layer: ExpertsLayer, arch: str | None) -> None:
    """Give a module the tensors back that `take_over` took."""
    if layer.guard is None:
        return
    layer.guard.remove()
    sizes = layer.sizes
    inverse = inverse_transform_weights(
        *layer.weights,
        arch,
        weights=sizes.weights,
        hidden=sizes.hidden,
        intermediate_hidden=sizes.intermediate_hidden,
    )
    for name, (weight, sf) in zip(_LINEARS, inverse, strict=True):
        own = layer.given[name]
        if own.dtype in _FLOATS:
            if weight_format(sizes.weights).in_checkpoints == "mxfp4":
                weight = dequantize_mxfp4(weight, sf, torch.float32)
            tensors = {name: _Form.of(module).of_module(name, weight).to(own.dtype)}
        else:
            scales = layer.given[name + _SCALES]
            if sf.dtype == torch.int32:
                num_columns = weight.shape[2] * (2 if own.dtype in _PACKED else 1)
                sf = unpack_ue8m0(sf)[..., : num_columns // GROUP_SIZE]
                sf = ue8m0_to_float(sf, torch.float32)
            tensors = {
                name: weight.view(own.dtype),
                name + _SCALES: _scales_as(sf, scales.dtype, scales.shape),
            }
        for key, tensor in tensors.items():
            module._parameters[key] = torch.nn.Parameter(tensor, requires_grad=False)


def _scales_as(sf: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Scales float32 for 32 values or 128 x 128, in the form that the module had: one for each
    block of equal scales."""
    for axis in (1, 2):
        have, want = sf.shape[axis], shape[axis]
        if have > want:
            sf = sf[:, :: have // want] if axis == 1 else sf[:, :, :: have // want]
        else:
            sf = sf.repeat_interleave(want // have, axis)
    if dtype == torch.float32:
        return sf.contiguous()
    return ue8m0_of_floats(sf)[0].view(dtype)


def _refuse_state_dict(*_: object) -> NoReturn:
    raise RuntimeError(
        "the experts of this model are laid out for deep_moe's kernel; call "
        "deep_moe.integrations.transformers.release(model) before its state_dict is read"
    )


class _Given(NamedTuple):
    """The form of a tensor that a module gave up."""

    dtype: torch.dtype
    shape: torch.Size


class _Form(NamedTuple):
    """How a module's matrices lie, beside [E, N, K] with rows of gate before those of up."""

    is_transposed: bool
    is_concatenated: bool

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Form:
        return cls(
            bool(getattr(module, "is_transposed", False)),
            bool(getattr(module, "is_concatenated", True)),
        )

    def of_kernel(self, name: str, matrices: torch.Tensor) -> torch.Tensor:
        """The module's [E, ...] as the kernel's weights are transformed from."""
        rows = matrices.transpose(1, 2) if self.is_transposed else matrices
        if name == _LINEARS[0] and not self.is_concatenated:
            rows = gate_before_up(rows)
        return rows.contiguous()

    def of_module(self, name: str, matrices: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        rows = matrices
        if name == _LINEARS[0] and not self.is_concatenated:
            rows = torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)
        return (rows.transpose(1, 2) if self.is_transposed else rows).contiguous()


@dataclass(frozen=True)
class _Source:
    """A module's own weights, and the format in which the kernel gets them. expert: of one expert,
    [1, ...], rows of gate before those of up, as the biases."""

    num_experts: int
    hidden: int
    intermediate_hidden: int
    device: torch.device
    format: str
    given: dict[str, _Given]
    biases: tuple[torch.Tensor, torch.Tensor] | None
    expert: Callable[[int], tuple[LayerWeights, LayerWeights]]


def _source(module: torch.nn.Module, quantize: bool) -> _Source:
    for name, allowed in (("has_gate", True), ("has_post_expert_norm", False)):
        value = getattr(module, name, allowed)
        if value is not allowed:
            raise UnsupportedError(f"experts with {name}={value} are not supported")
    tensors = {name: _local(getattr(module, name, None)) for name in _LINEARS}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            raise UnsupportedError(f"{name} is no stack of matrices")
    form = _Form.of(module)
    l1, l2 = tensors.values()
    if l1.dtype not in _FLOATS and form != _Form(False, True):
        raise UnsupportedError(
            f"experts of {l1.dtype} with is_transposed={form.is_transposed}, "
            f"is_concatenated={form.is_concatenated} are not supported"
        )
    if l1.dtype != l2.dtype or l1.dtype not in (*_FLOATS, *_PACKED, torch.float8_e4m3fn):
        raise UnsupportedError(f"weights of {l1.dtype} and {l2.dtype} are not supported")
    factor = 2 if l1.dtype in _PACKED else 1
    num_experts = l1.shape[0]
    num_rows, hidden = l1.shape[1:] if not form.is_transposed else (l1.shape[2], l1.shape[1])
    hidden *= factor
    down = (hidden, num_rows // 2 // factor)
    if form.is_transposed:
        down = down[::-1]
    if num_rows % 2 or tuple(l2.shape) != (num_experts, *down):
        raise UnsupportedError(
            f"gate_up_proj {tuple(l1.shape)} and down_proj {tuple(l2.shape)} do not fit each other"
        )
    if l1.dtype in _FLOATS:
        layers = dict(zip(_LINEARS, (l1, l2), strict=True))
        weights = _format_of_floats(layers, form, quantize=quantize)
        make = quantize_mxfp4 if weights == "mxfp4" else weight_format(weights).quantize

        def expert(i: int) -> tuple[LayerWeights, LayerWeights]:
            first, second = (
                make(form.of_kernel(name, layer[i : i + 1])) for name, layer in layers.items()
            )
            return first, second

    else:
        weights = "fp8" if l1.dtype == torch.float8_e4m3fn else "mxfp4"
        scales = [_local(getattr(module, name + _SCALES)) for name in _LINEARS]
        if any(sf.dim() != 3 for sf in scales):
            raise UnsupportedError("weights with one scale for a whole expert are not supported")
        tensors |= {name + _SCALES: sf for name, sf in zip(_LINEARS, scales, strict=True)}
        pairs = list(zip((l1, l2), scales, strict=True))
        if l1.dtype in _PACKED:
            pairs = _packed(pairs)

        def expert(i: int) -> tuple[LayerWeights, LayerWeights]:
            one = slice(i, i + 1)
            first, second = (LayerWeights(weight[one], sf[one]) for weight, sf in pairs)
            return first, second

    return _Source(
        num_experts,
        hidden,
        num_rows // 2,
        l1.device,
        weights,
        {name: _Given(tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
        _biases(module, form),
        expert,
    )


def _biases(module: Any, form: _Form) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not getattr(module, "has_bias", False):
        return None
    found = [_local(getattr(module, name, None)) for name in _BIASES]
    for name, bias in zip(_BIASES, found, strict=True):
        if not isinstance(bias, torch.Tensor) or bias.dim() != 2:
            raise UnsupportedError(f"{name} is no row for each expert")
    first, second = found
    if not form.is_concatenated:
        first = gate_before_up(first)
    return first.float(), second.float()


def _laid_out_biases(source: _Source, arch: str | None) -> MegaMoEBiases | None:
    if source.biases is None:
        return None
    try:
        return transform_biases_for_mega_moe(*source.biases, arch, weights=source.format)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(str(error)) from None


def _packed(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    try:
        return [packed_weights(name, pair) for name, pair in zip(_LINEARS, pairs, strict=True)]
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"weights are not MXFP4: {error}") from None


def _laid_out(source: _Source, arch: str | None, quantize: bool) -> tuple[MegaMoEWeights, bool]:
    """Expert by expert; and whether FP8 weights had to be rounded to other scales."""
    is_requantized = False
    weights = empty_weights_for_mega_moe(
        source.num_experts,
        source.hidden,
        source.intermediate_hidden,
        arch=arch,
        device=source.device,
        weights=source.format,
    )
    for i in range(source.num_experts):
        try:
            transform = partial(
                transform_weights_for_mega_moe,
                *source.expert(i),
                arch,
                weights=source.format,
                out=weights.expert(i),
            )
            try:
                transform()
            except ValueError:
                if not quantize or source.format != "fp8":
                    raise
                transform(requantize=True)
                is_requantized = True
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"expert {i}: {error}") from None
    return weights, is_requantized


def _local(tensor: Any) -> Any:
    """This rank's part of a parameter, without its history."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach() if isinstance(tensor, torch.Tensor) else tensor


def _format_of_floats(layers: dict[str, torch.Tensor], form: _Form, *, quantize: bool) -> str:
    """In which format the kernel gets experts of floats: MXFP4 if they are told to be rounded to
    it, or need no rounding, as where a checkpoint was dequantized when it was loaded; otherwise
    BF16 as they are."""
    if quantize:
        return "mxfp4"
    inexact = _first_inexact(layers, form)
    if inexact is None:
        return "mxfp4"
    name, idx, reason = inexact
    (dtype,) = {layer.dtype for layer in layers.values()}
    if dtype == torch.bfloat16 and reason is None:
        return "bf16"
    if reason is not None:
        raise UnsupportedError(f"{name} of expert {idx} does not become MXFP4: {reason}")
    raise UnsupportedError(
        f"{name} of expert {idx} is {dtype} and would be rounded to MXFP4; "
        "register(quantize=True) allows that"
    )


def _first_inexact(
    layers: dict[str, torch.Tensor], form: _Form
) -> tuple[str, int, str | None] | None:
    """Layer and expert that MXFP4 does not hold, if there are some, and why none could: weights
    that were MXFP4 before they were loaded as floats are the same when quantized."""
    for name, stack in layers.items():
        for i in range(stack.shape[0]):
            matrix = form.of_kernel(name, stack[i : i + 1])
            try:
                exact = torch.equal(dequantize_mxfp4(*quantize_mxfp4(matrix)), matrix.float())
            except ValueError as error:
                return name, i, str(error)
            if not exact:
                return name, i, None
    return None


def _activation(module: Any) -> Activation:
    """A module's activation, or an UnsupportedError if the kernel has none like it.

    Models write theirs in many ways, so that names say little: it is tried out, with the parameters
    that the module or its config have.
    """
    probe = torch.cat([torch.linspace(-24, 24, 193), torch.tensor([-3e3, -40.0, 40.0, 3e3])])
    gate, up = (each.flatten() for each in torch.meshgrid(probe, probe.roll(7), indexing="ij"))
    pairs = torch.stack([gate, up], dim=1).to(module.gate_up_proj.device)
    result = module._apply_gate(pairs).flatten().float().cpu()
    for kind, names in _PARAMETERS.items():
        for values in itertools.product(*(_values(module, each) for each in names)):
            try:
                activation = kind(*values)
            except (TypeError, ValueError):
                continue
            if torch.allclose(result, activation(gate, up), rtol=1e-5, atol=1e-6):
                return activation
    raise UnsupportedError(f"the activation of {type(module).__name__} is none that the kernel has")


# Attributes of modules and configs that hold an activation's parameters, in order.
_LIMITS = ("limit", "swiglu_limit")
_PARAMETERS: dict[type[Activation], tuple[tuple[str, ...], ...]] = {
    Swiglu: (_LIMITS,),
    SwigluOai: (("alpha", "swiglu_alpha"), _LIMITS),
    Situ: (("gate_softcap", "mlp_gate_softcap"), ("up_softcap", "mlp_up_softcap")),
}


def _values(module: Any, names: tuple[str, ...]) -> list[Any]:
    """Those that are there, and infinity, which for a clamp means none."""
    found = [getattr(owner, name, None) for owner in (module, module.config) for name in names]
    return [*dict.fromkeys(value for value in found if value is not None), math.inf]
