"""From a module of experts to what the kernel takes, and back.

A module keeps its weights in its own form until its first call. Then they are laid out for the
kernel, expert by expert, and the module's own tensors are taken (taken.py): a model's experts are
not held twice on the GPU. Values that the kernel's form cannot give back bit for bit wait in host
memory.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from deep_moe.activations import ACTIVATIONS, Activation, GatedActivation
from deep_moe.biases.per_expert import MegaMoEBiases, transform_biases_for_mega_moe
from deep_moe.compat.deep_gemm.operands import packed_weights
from deep_moe.formats.block_scaled import (
    GROUP_SIZE,
    ue8m0_of_floats,
    ue8m0_to_float,
    unpack_ue8m0,
)
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights, MegaMoEWeights
from deep_moe.weights.mxfp4.quantizing import dequantize_mxfp4, quantize_mxfp4
from deep_moe.weights.transform import (
    empty_weights_for_mega_moe,
    inverse_transform_weights,
    transform_weights_for_mega_moe,
)

from ..served_experts import check_sizes, gate_before_up
from ..shared_buffers import LayerSizes
from ..token_format import served_token_format
from ..unsupported import UnsupportedError
from .taken import reason_not_to_take

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

_LINEARS = ("gate_up_proj", "down_proj")
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
_SCALES = "_scale_inv"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PACKED = (torch.int8, torch.uint8)
_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu, torch.uint8)
_WHOLE_TOKENS: TokenFormatName = "fp8_token"  # beside FP8 weights with a scale for each matrix


@dataclass(frozen=True)
class Options:
    """Of `register`."""

    quantize: bool = False
    num_pool_tokens: int | None = None
    max_tokens_per_rank: int | None = None
    token_format: str | None = None
    arch: str | None = None


@dataclass(frozen=True)
class ExpertsLayer:
    """Experts in the kernel's form. group: of the ranks that they are spread over. given: the form
    of each tensor of the module that is laid out, by the module's name for it. kept: those that
    cannot be made from the kernel's form again. modules: that the weights were found to be right
    for, known_topk: the numbers of slots."""

    weights: MegaMoEWeights
    biases: MegaMoEBiases | None
    sizes: LayerSizes
    activation: Activation
    group: ProcessGroup | None
    options: Options
    form: _Form
    given: dict[str, _Given]
    kept: dict[str, torch.Tensor]
    modules: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    known_topk: set[int] = field(default_factory=set)

    def has_form_of(self, module: torch.nn.Module) -> bool:
        return self.form == _Form.of(module)

    def check(self, num_topk: int) -> None:
        """Raise UnsupportedError unless there is a kernel for so many slots for each token."""
        num_ranks = 1 if self.group is None else self.group.size()
        device = self.weights.l1.weight.device
        check_sizes(self.sizes_for(num_topk), num_ranks, 1, self.options.arch, device)

    def sizes_for(self, num_topk: int) -> LayerSizes:
        """Of calls with so many slots for each token."""
        return self.sizes._replace(num_topk=num_topk)

    def originals(self) -> dict[str, torch.Tensor]:
        """The module's tensors as they were."""
        device = self.weights.l1.weight.device
        found = {name: tensor.to(device) for name, tensor in self.kept.items()}
        if found.keys() >= self.given.keys():
            return found
        sizes = self.sizes
        inverse = inverse_transform_weights(
            self.weights.l1,
            self.weights.l2,
            self.options.arch,
            weights=sizes.weights,
            token_format=sizes.token_format,
            hidden=sizes.hidden,
            intermediate_hidden=sizes.intermediate_hidden,
        )
        for name, (weight, sf) in zip(_LINEARS, inverse, strict=True):
            own = self.given[name]
            if own.dtype in _FLOATS:
                if sizes.weights == "mxfp4":
                    weight = dequantize_mxfp4(weight, sf, torch.float32)
                found[name] = self.form.of_module(name, weight).to(own.dtype)
                continue
            scales = self.given[name + _SCALES]
            if sf.dtype == torch.int32:
                num_columns = weight.shape[2] * (2 if own.dtype in _PACKED else 1)
                sf = unpack_ue8m0(sf)[..., : num_columns // GROUP_SIZE]
                sf = ue8m0_to_float(sf, torch.float32)
            elif sf.element_size() == 1:
                sf = ue8m0_to_float(sf.view(torch.uint8), torch.float32)
            if sf.dim() == 2:  # of rows, or of matrices
                sf = sf.unsqueeze(2)
            found[name] = weight.view(own.dtype)
            found[name + _SCALES] = _scales_as(sf, scales.dtype, scales.shape)
        return found


def own_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module that the kernel's form is made of, and holds."""
    names = [*_LINEARS, *(name + _SCALES for name in _LINEARS)]
    if getattr(module, "has_bias", False):
        names += _BIASES
    found = ((name, module._parameters.get(name)) for name in names)
    tensors = {name: tensor for name, tensor in found if tensor is not None}
    buffers = ((name, module._buffers.get(name)) for name in names)
    return tensors | {name: tensor for name, tensor in buffers if tensor is not None}


def reason_not_to_take_from(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> str | None:
    """Why the module's tensors may not be taken now; does not wait for a GPU."""
    if isinstance(module, FSDPModule):
        return "FSDP gathers its weights anew for each call"
    hook: Any = getattr(module, "_hf_hook", None)
    if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
        return "accelerate brings its weights anew for each call"
    for name in (*_LINEARS, *_BIASES):
        if is_parametrized(module, name) or isinstance(module.__dict__.get(name), torch.Tensor):
            return f"{name} is computed in each call, by a parametrization or an adapter"
    num_experts = getattr(module, "num_experts", None)
    for name, tensor in tensors.items():
        reason = reason_not_to_take(tensor)
        if reason is not None:
            return f"{name} {reason}"
        is_handed_in = name in module._parameters and type(tensor) is torch.Tensor
        if is_handed_in:
            return f"{name} is no parameter, but handed in for a call"
        num_local = _local(tensor).shape[:1]
        if isinstance(tensor, DTensor) and num_experts is not None and num_local != (num_experts,):
            return f"{name} holds {[*num_local]} of the module's {num_experts} experts"
    return None


def lay_out(
    module: torch.nn.Module,
    group: ProcessGroup | None,
    options: Options,
    *,
    num_topk: int,
    weights: WeightsName | None = None,
) -> ExpertsLayer:
    """Lay out a module's experts for the kernel; the module stays as it is.

    weights: a format that they have to be in, None for the one that suits them. Raises
    UnsupportedError.
    """
    num_ranks = 1 if group is None else group.size()
    source = _source(module, options.quantize)
    if weights not in (None, source.weights):
        raise UnsupportedError(f"weights became {source.weights}, and were {weights} before")
    token_format = source.token_format or served_token_format(
        source.weights, options.token_format, options.arch, source.device
    )
    source = replace(source, token_format=token_format)
    sizes = LayerSizes(
        num_ranks * source.num_experts,
        num_topk,
        source.hidden,
        source.intermediate_hidden,
        source.weights,
        token_format,
        source.biases is not None,
        options.num_pool_tokens,
    )
    check_sizes(sizes, num_ranks, 1, options.arch, source.device)
    activation = activation_of(module, source.device)
    made, is_requantized = _laid_out(source, options.arch, options.quantize)
    biases = _laid_out_biases(source, options.arch)
    tensors = own_tensors(module)
    lost = {name for name in tensors if name in _BIASES or is_requantized or not source.is_exact}
    kept = {name: _local(tensors[name]).detach() for name in lost}
    if made.l1.weight.is_cuda:
        kept = {name: tensor.cpu() for name, tensor in kept.items()}
    form = _Form.of(module)
    return ExpertsLayer(made, biases, sizes, activation, group, options, form, source.given, kept)


def _scales_as(sf: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Scales float32 for 32 values, 128 x 128, a row or a matrix, in the form that the module had:
    one for each block of equal scales."""
    for axis in (1, 2):
        have, want = sf.shape[axis], shape[axis]
        if have > want:
            sf = sf[:, :: have // want] if axis == 1 else sf[:, :, :: have // want]
        else:
            sf = sf.repeat_interleave(want // have, axis)
    if dtype == torch.float32:
        return sf.contiguous()
    return ue8m0_of_floats(sf)[0].view(dtype)


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
    """A module's own weights, and the formats in which the kernel gets them and tokens, None for
    those that go with the weights. expert: of one expert, [1, ...], rows of gate before those of
    up, as the biases. is_exact: whether the format holds floats as they are."""

    num_experts: int
    hidden: int
    intermediate_hidden: int
    device: torch.device
    weights: WeightsName
    given: dict[str, _Given]
    biases: tuple[torch.Tensor, torch.Tensor] | None
    is_exact: bool
    expert: Callable[[int], tuple[LayerWeights, LayerWeights]]
    token_format: TokenFormatName | None = None


def _source(module: torch.nn.Module, quantize: bool) -> _Source:
    for name, allowed in (("has_gate", True), ("has_post_expert_norm", False)):
        value = getattr(module, name, allowed)
        if value is not allowed:
            raise UnsupportedError(f"experts with {name}={value} are not supported")
    for name in _further_tensors(module):
        raise UnsupportedError(f"{name} is a tensor that the kernel knows nothing of")
    tensors = {name: _local(getattr(module, name, None)) for name in _LINEARS}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 3:
            raise UnsupportedError(f"{name} is no stack of matrices")
    form = _Form.of(module)
    token_format: TokenFormatName | None = None
    l1, l2 = tensors.values()
    if l1.dtype not in _FLOATS and form != _Form(False, True):
        raise UnsupportedError(
            f"gate_up_proj of {l1.dtype} with is_transposed={form.is_transposed}, "
            f"is_concatenated={form.is_concatenated} is not supported"
        )
    if l1.dtype != l2.dtype or l1.dtype not in (*_FLOATS, *_PACKED, torch.float8_e4m3fn):
        raise UnsupportedError(f"weights of {l1.dtype} and {l2.dtype} are not supported")
    factor = 2 if l1.dtype in _PACKED else 1
    num_experts = l1.shape[0]
    said = getattr(module, "num_experts", num_experts)
    if said != num_experts:
        raise UnsupportedError(
            f"gate_up_proj holds {num_experts} experts, but the module's num_experts is {said!r}"
        )
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
        for name in (linear + _SCALES for linear in _LINEARS):
            if getattr(module, name, None) is not None:
                raise UnsupportedError(f"{name} is there, but weights of {l1.dtype} have no scales")
        layers = dict(zip(_LINEARS, (l1, l2), strict=True))
        weights: WeightsName
        weights, is_exact = _format_of_floats(layers, form, quantize=quantize)
        make = quantize_mxfp4 if weights == "mxfp4" else weight_format(weights).quantize

        def expert(i: int) -> tuple[LayerWeights, LayerWeights]:
            first, second = (
                make(form.of_kernel(name, layer[i : i + 1])) for name, layer in layers.items()
            )
            return first, second

    else:
        is_exact = True
        weights = "fp8" if l1.dtype == torch.float8_e4m3fn else "mxfp4"
        scales = [_scales(module, name + _SCALES, num_experts) for name in _LINEARS]
        tensors |= {name + _SCALES: sf for name, sf in zip(_LINEARS, scales, strict=True)}
        pairs = list(zip((l1, l2), scales, strict=True))
        if l1.dtype in _PACKED:
            pairs = _packed(pairs)
        elif getattr(module, "block_size", None) is None:
            pairs, token_format = _with_whole_scales(pairs), _WHOLE_TOKENS
        elif all(sf.shape[1] == weight.shape[1] for weight, sf in pairs):
            mxfp8 = _with_ue8m0(pairs)
            weights, pairs = ("fp8", pairs) if mxfp8 is None else ("mxfp8", mxfp8)

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
        _biases(
            module, form, {_BIASES[0]: (num_experts, num_rows), _BIASES[1]: (num_experts, hidden)}
        ),
        is_exact,
        expert,
        token_format,
    )


def _further_tensors(module: torch.nn.Module) -> list[str]:
    """Of those that belong to a linear layer by their names, what would change its meaning if it
    were ignored. Not scales of activations: tokens get scales of their own."""
    known = {
        *(*_LINEARS, *_BIASES),
        *(name + suffix for name in _LINEARS for suffix in (_SCALES, "_activation_scale")),
    }
    held = {**module._parameters, **module._buffers}
    return [
        name
        for name, tensor in held.items()
        if tensor is not None and name.startswith(_LINEARS) and name not in known
    ]


def _scales(module: Any, name: str, num_experts: int) -> torch.Tensor:
    sf = _local(getattr(module, name, None))
    if not isinstance(sf, torch.Tensor) or sf.dtype not in _SCALE_DTYPES:
        found = sf.dtype if isinstance(sf, torch.Tensor) else sf
        allowed = ", ".join(map(str, _SCALE_DTYPES))
        raise UnsupportedError(f"{name} must be a tensor of {allowed}; got {found}")
    if sf.dim() != 3 or sf.shape[0] != num_experts:
        raise UnsupportedError(
            f"{name} must hold scales of the rows and columns of {num_experts} experts; got shape "
            f"{[*sf.shape]}"
        )
    return sf


def _biases(
    module: Any, form: _Form, shapes: dict[str, tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not getattr(module, "has_bias", False):
        for name in _BIASES:
            if isinstance(getattr(module, name, None), torch.Tensor):
                raise UnsupportedError(f"{name} is there, but has_bias is not set")
        return None
    found = []
    for name, shape in shapes.items():
        bias = _local(getattr(module, name, None))
        if not isinstance(bias, torch.Tensor):
            raise UnsupportedError(f"{name} is no row for each expert")
        if tuple(bias.shape) != shape or bias.dtype not in _FLOATS:
            raise UnsupportedError(
                f"{name} must be [{shape[0]}, {shape[1]}] of floats; got {bias.dtype} "
                f"{[*bias.shape]}"
            )
        found.append(bias)
    first, second = found
    if not form.is_concatenated:
        first = gate_before_up(first)
    return first.float(), second.float()


def _laid_out_biases(source: _Source, arch: str | None) -> MegaMoEBiases | None:
    if source.biases is None:
        return None
    try:
        return transform_biases_for_mega_moe(
            *source.biases, arch, weights=source.weights, token_format=source.token_format
        )
    except (TypeError, ValueError) as error:
        raise UnsupportedError(str(error)) from None


def _packed(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    try:
        return [packed_weights(name, pair) for name, pair in zip(_LINEARS, pairs, strict=True)]
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"weights are not MXFP4: {error}") from None


def _with_whole_scales(pairs: list[Any]) -> list[Any]:
    """FP8 with a scale for each matrix, as `transform_weights_for_mega_moe` takes it."""
    (l1, l1_sf), (l2, l2_sf) = pairs
    if tuple(l1_sf.shape[1:]) not in ((1, 1), (2, 1)) or tuple(l2_sf.shape[1:]) != (1, 1):
        raise UnsupportedError(
            f"scales {list(l1_sf.shape)} and {list(l2_sf.shape)} of matrices are not supported"
        )
    return [
        (l1, l1_sf.float().expand(-1, 2, -1).squeeze(2)),  # one for gate and up, or for each
        (l2, l2_sf.float().squeeze(2)),
    ]


def _with_ue8m0(pairs: list[Any]) -> list[Any] | None:
    """FP8 with a scale for 32 values as MXFP8, None if one is no power of two."""
    made = []
    for weight, sf in pairs:
        if sf.dtype == torch.float32:
            sf, is_other = ue8m0_of_floats(sf)
            if is_other.any():
                return None
        made.append((weight, sf.view(torch.uint8)))
    return made


def _laid_out(source: _Source, arch: str | None, quantize: bool) -> tuple[MegaMoEWeights, bool]:
    """Expert by expert; and whether FP8 weights had to be rounded to other scales."""
    is_requantized = False
    weights = empty_weights_for_mega_moe(
        source.num_experts,
        source.hidden,
        source.intermediate_hidden,
        arch=arch,
        device=source.device,
        weights=source.weights,
        token_format=source.token_format,
    )
    for i in range(source.num_experts):
        try:
            transform = partial(
                transform_weights_for_mega_moe,
                *source.expert(i),
                arch,
                weights=source.weights,
                token_format=source.token_format,
                out=weights.expert(i),
            )
            try:
                transform()
            except ValueError:
                if not quantize or source.weights != "fp8":
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


def _format_of_floats(
    layers: dict[str, torch.Tensor], form: _Form, *, quantize: bool
) -> tuple[WeightsName, bool]:
    """In which format the kernel gets experts of floats, and whether it holds them as they are:
    MXFP4 if they are told to be rounded to it, or need no rounding, as where a checkpoint was
    dequantized when it was loaded; otherwise BF16."""
    inexact = _first_inexact(layers, form)
    if quantize or inexact is None:
        return "mxfp4", inexact is None
    name, idx, reason = inexact
    (dtype,) = {layer.dtype for layer in layers.values()}
    if dtype == torch.bfloat16 and reason is None:
        return "bf16", True
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


def activation_of(module: Any, device: torch.device) -> Activation:
    """A module's activation, or an UnsupportedError if the kernel has none like it.

    Models write theirs in many ways, so that names say little: it is tried out, with the parameters
    that the module or its config have.
    """
    # A default dtype or device of the caller's is none of the probe's.
    own: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    ends = torch.tensor([-3e3, -40.0, 40.0, 3e3], **own)
    probe = torch.cat([torch.linspace(-24, 24, 193, **own), ends])
    gate, up = (each.flatten() for each in torch.meshgrid(probe, probe.roll(7), indexing="ij"))
    pairs = torch.stack([gate, up], dim=1)
    result = _result_of_gate(module, pairs.to(device))
    for kind in ACTIVATIONS.values():
        if not issubclass(kind, GatedActivation):
            continue
        names = kind.attributes.values()
        for values in itertools.product(*(_values(module, each) for each in names)):
            try:
                activation = kind(**dict(zip(kind.attributes, values, strict=True)))
            except (TypeError, ValueError):
                continue
            if torch.allclose(result, activation(gate, up), rtol=1e-5, atol=1e-6):
                return activation
    raise UnsupportedError(f"the activation of {type(module).__name__} is none that the kernel has")


def _result_of_gate(module: Any, pairs: torch.Tensor) -> torch.Tensor:
    """What the module's function makes of pairs [number, 2], or an UnsupportedError if it makes
    anything else than a number of each: it is the model's own code."""
    words = f"the activation of {type(module).__name__}"
    try:
        with torch.no_grad():
            result = module._apply_gate(pairs)
    except Exception as error:
        raise UnsupportedError(f"{words} raises {type(error).__name__}: {error}") from error
    if not isinstance(result, torch.Tensor) or result.numel() != len(pairs):
        raise UnsupportedError(f"{words} does not make one number of gate and up")
    return result.flatten().float().cpu()


def _values(module: Any, names: tuple[str, ...]) -> list[Any]:
    """Those that are there, and infinity, which for a clamp means none."""
    found = [getattr(owner, name, None) for owner in (module, module.config) for name in names]
    return [*dict.fromkeys(value for value in found if value is not None), math.inf]
