"""Weights of both linear layers, as checkpoints or as kernels have them, and checks of their forms
that targets' layouts share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch
import torch.utils._pytree

from deep_moe.heuristics.shape import MoEShape
from deep_moe.tensor_memory import check_dense, check_memory

from .format import WeightFormat

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

Pair = tuple[torch.Tensor, torch.Tensor]
LayerTensors = tuple[torch.Tensor, ...]  # what stands for `LayerWeights` where users give weights
TensorForms = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class LayerWeights(tuple[torch.Tensor, ...]):
    """Weights of one linear layer of all local experts, or of one, as checkpoints have them: a
    tuple of values, their scales and, of formats that have some, scales of whole matrices.

    >>> layer = LayerWeights(torch.zeros(4, 256, 64).char(), torch.zeros(4, 256, 1).int())
    >>> len(layer), layer.global_sf is None
    (2, True)
    """

    __slots__ = ()

    def __new__(
        cls, weight: torch.Tensor, sf: torch.Tensor, global_sf: torch.Tensor | None = None
    ) -> LayerWeights:
        return super().__new__(cls, (weight, sf) if global_sf is None else (weight, sf, global_sf))

    def __getnewargs__(self) -> LayerTensors:
        return tuple(self)

    @property
    def weight(self) -> torch.Tensor:
        return self[0]

    @property
    def sf(self) -> torch.Tensor:
        return self[1]

    @property
    def global_sf(self) -> torch.Tensor | None:
        """float32 [E, matrices], which multiply: of Linear1 those of gate and up, of Linear2 one.
        None where the format has none."""
        return self[2] if len(self) > 2 else None


class KernelLayer(NamedTuple):
    """Weights of one linear layer of all local experts as a kernel reads them. What the tensors
    hold depends on the architecture."""

    weight: torch.Tensor
    sf: torch.Tensor


class WeightSizes(NamedTuple):
    """Of the weights of both layers: local experts, H, I, and whether Linear1 has rows of gate."""

    num_experts: int
    hidden: int
    intermediate_hidden: int
    has_gate: bool = True


class ExpertWeights(NamedTuple):
    """Both linear layers of the local experts, l1 and l2, as checkpoints have them."""

    l1: LayerWeights
    l2: LayerWeights

    def expert(self, expert_idx: int) -> ExpertWeights:
        """One local expert's weights, tensors [1, ...] in the same memory."""
        one = _expert_slice(expert_idx, self.l1.weight.shape[0])
        return ExpertWeights(*(LayerWeights(*(own[one] for own in layer)) for layer in self))


@dataclass(frozen=True, eq=False)
class MegaMoEWeights:
    """Weights of the local experts as a kernel reads them: what `transform_weights_for_mega_moe`
    makes, and `mega_moe` takes.

    Args:
        l1: (weight, sf) of Linear1: contiguous tensors, whose first dimension is the expert. They
            may be permuted in place.
        l2: (weight, sf) of Linear2, likewise.
        weights: name of the weights' format.
        token_format: name of the tokens' format.
        kernel: the kernel that reads this layout, "sm90" or "sm100".
        has_gate: whether l1 has rows of gate above those of up.

    Examples:
        >>> from deep_moe import empty_weights_for_mega_moe
        >>> weights = empty_weights_for_mega_moe(4, hidden=256, intermediate_hidden=128)
        >>> weights.weights, weights.token_format, weights.kernel, len(weights.tensors)
        ('mxfp4', 'mxfp8', 'sm100', 4)
    """

    l1: KernelLayer
    l2: KernelLayer
    weights: str
    token_format: str
    kernel: str
    has_gate: bool = True

    def __iter__(self) -> Iterator[KernelLayer]:
        """Both layers: `l1, l2 = weights`."""
        return iter((self.l1, self.l2))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in the order in which operators take them."""
        return (*self.l1, *self.l2)

    @cached_property
    def are_plain(self) -> bool:
        """Whether both layers are pairs of tensors of PyTorch's own types. Every call asks."""
        plain = (torch.Tensor, torch.nn.Parameter)
        layers = (self.l1, self.l2)
        return all(isinstance(own, tuple) and len(own) == 2 for own in layers) and all(
            type(tensor) in plain for tensor in self.tensors
        )

    @property
    def words(self) -> str:
        """What they are, for errors."""
        return (
            f"{self.weights} weights beside {self.token_format} tokens, laid out for {self.kernel}"
            f"{'' if self.has_gate else ', without a gate'}"
        )

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> MegaMoEWeights:
        """The same form with other tensors, in the order of `tensors`.

        Args:
            tensors: as many as `tensors` has, in that order.
        """
        num_of_l1 = len(self.l1)
        l1, l2 = KernelLayer(*tensors[:num_of_l1]), KernelLayer(*tensors[num_of_l1:])
        return replace(self, l1=l1, l2=l2)

    def expert(self, expert_idx: int) -> MegaMoEWeights:
        """One local expert's weights, tensors [1, ...] in the same memory.

        Args:
            expert_idx: 0 to the number of local experts - 1.
        """
        one = _expert_slice(expert_idx, self.l1.weight.shape[0])
        return self.with_tensors([tensor[one] for tensor in self.tensors])


_Form = tuple[str, str, str, bool]


def _flattened(weights: MegaMoEWeights) -> tuple[list[torch.Tensor], _Form]:
    form = (weights.weights, weights.token_format, weights.kernel, weights.has_gate)
    return list(weights.tensors), form


def _unflattened(tensors: Iterable[torch.Tensor], form: _Form) -> MegaMoEWeights:
    w1, sf1, w2, sf2 = tensors
    return MegaMoEWeights(KernelLayer(w1, sf1), KernelLayer(w2, sf2), *form)


# So that a compiler and an exporter see the tensors.
torch.utils._pytree.register_pytree_node(
    MegaMoEWeights, _flattened, _unflattened, serialized_type_name="deep_moe.MegaMoEWeights"
)


def _expert_slice(expert_idx: int, num_experts: int) -> slice:
    if not 0 <= expert_idx < num_experts:
        raise IndexError(f"expert_idx must be 0 to {num_experts - 1}; got {expert_idx}")
    return slice(expert_idx, expert_idx + 1)


def layer_weights(name: str, value: object, source: WeightFormat) -> LayerWeights:
    """`value` as weights with their scales, or a TypeError that says what it should be."""
    if isinstance(value, torch.Tensor):
        layer = source.layer_of(value)
        if layer is not None:
            check_dense(name, value)
            return layer
    return LayerWeights(*_tensors(name, value, source.num_tensors, source.words))


def kernel_layer(name: str, value: object) -> KernelLayer:
    """`value` as a pair that `transform_weights_for_mega_moe` made, or a TypeError."""
    allowed = "a pair of tensors, as transform_weights_for_mega_moe makes it"
    return KernelLayer(*_tensors(name, value, 2, allowed))


def _tensors(name: str, value: object, number: int, allowed: str) -> Sequence[torch.Tensor]:
    if not isinstance(value, (tuple, list)):
        got = type(value).__name__
        if isinstance(value, torch.Tensor):
            got = f"one tensor of {value.dtype}"
        raise TypeError(f"{name} must be {allowed}; got {got}")
    if len(value) != number or not all(isinstance(tensor, torch.Tensor) for tensor in value):
        got = ", ".join(type(tensor).__name__ for tensor in value)
        raise TypeError(f"{name} must be {allowed}; got ({got})")
    for i, tensor in enumerate(value):
        check_dense(f"{name}[{i}]", tensor)
    return value


def one_expert(layer: LayerTensors, expert_idx: int) -> LayerWeights:
    """One expert's, without the dimension of experts."""
    return LayerWeights(*(tensor[expert_idx] for tensor in layer))


_Layer = TypeVar("_Layer", LayerWeights, KernelLayer)


def detached(layer: _Layer) -> _Layer:
    """Without a history: what is made of a Parameter would else keep its memory."""
    return type(layer)(*(tensor.detach() for tensor in layer))


def shape_of_weights(sizes: WeightSizes, weights: str, token_format: str) -> MoEShape:
    """A shape whose one rank has these weights."""
    return MoEShape(
        num_ranks=1,
        num_topk=1,
        num_max_tokens_per_rank=1,
        weights=cast("WeightsName", weights),
        token_format=cast("TokenFormatName", token_format),
        **sizes._asdict(),
    )


def in_words(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a tensor [.., N] as larger values, in its memory if that may be read so: an
    expert may begin at any byte of a buffer that holds other things, too."""
    whole = tensor.contiguous()
    if whole.storage_offset() * whole.element_size() % dtype.itemsize:
        whole = contiguous_copy(whole)
    return whole.view(dtype)


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def check_form(layers: Mapping[str, KernelLayer], expected: TensorForms) -> None:
    """Raise unless tensors are contiguous and of these dtypes and shapes, in this order."""
    tensors = [
        (f"{name}[{i}]", own) for name, layer in layers.items() for i, own in enumerate(layer)
    ]
    for (name, tensor), (dtype, size) in zip(tensors, expected.values(), strict=True):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}; got {tensor.dtype}")
        if tuple(tensor.shape) != size or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, of shape {size}; got shape {tuple(tensor.shape)} with "
                f"strides {tensor.stride()}"
            )
    check_memory_of(layers)


def check_memory_of(layers: Mapping[str, LayerTensors]) -> None:
    """Raise unless the storages of all tensors hold their values."""
    for name, layer in layers.items():
        for i, tensor in enumerate(layer):
            check_memory(f"{name}[{i}]", tensor)


def axis_sizes(name: str, tensor: torch.Tensor, axes: str) -> tuple[int, ...]:
    """The tensor's shape, or an error if it has not these axes."""
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(f"{name} must have shape {axes}; got {tuple(tensor.shape)}")
    return tuple(tensor.shape)
