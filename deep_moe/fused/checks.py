"""Checks of arguments. Each error names the argument, what is allowed, and what was given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from deep_moe.activations import has_gate
from deep_moe.biases.per_expert import bias_blocks
from deep_moe.tensor_memory import check_dense, check_memory
from deep_moe.weights.layers import MegaMoEWeights

if TYPE_CHECKING:
    from deep_moe.activations import Activation
    from deep_moe.heuristics.shape import MoEShape

    from .buffer import SymmBuffer

Pair = tuple[torch.Tensor, torch.Tensor]
Biases = tuple[torch.Tensor, torch.Tensor]  # of both layers

Y_ALIGNMENT = BIAS_ALIGNMENT = 16  # bytes, of bulk copies
Y_BYTES = 2  # of a value of y
STATISTICS = "cumulative_local_expert_recv_stats"
WEIGHT_NAMES = ("l1_weights[0]", "l1_weights[1]", "l2_weights[0]", "l2_weights[1]")
BIAS_NAMES = ("l1_bias", "l2_bias")
TOPK_IDX_DTYPES = (torch.int64, torch.int32)
TOPK_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
RECIPE = (1, 1, 32)  # scales per token, per weight row, and per 32 values along K


class LayerMemory(Protocol):
    """Memory of one rank for a layer's calls: a `SymmBuffer`, or a work space."""

    @property
    def shape(self) -> MoEShape: ...
    @property
    def device(self) -> torch.device: ...


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that begin with an argument's name of the function called here begin with the name
    that the caller's caller knows it by."""
    try:
        yield
    except (TypeError, ValueError) as error:
        rename_argument(error, names)
        raise


def rename_argument(error: Exception, names: Mapping[str, str]) -> None:
    """What `named_as` does, where a `with` would take too long."""
    match = re.match(r"[\w.]+", str(error))
    if match is not None and match[0] in names:
        error.args = (names[match[0]] + str(error)[match.end() :],)


def require_type(name: str, value: Any, types: Any, allowed: str) -> None:
    """`types` as in isinstance, but a bool is no number."""
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise TypeError(f"{name} must be {allowed}; got {type(value).__name__}")


WEIGHTS_WORDS = "MegaMoEWeights, as transform_weights_for_mega_moe returns them"
# Of the layers of `MegaMoEWeights`, where an error names them as arguments.
NAMES_OF_LAYERS = {"l1_weights": "weights.l1", "l2_weights": "weights.l2"}


def check_weights(
    weights: MegaMoEWeights, shape: MoEShape, kernel: str, activation: str | Activation
) -> None:
    """Raise unless weights are laid out for calls of a shape with the kernel and the activation."""
    if type(weights) is not MegaMoEWeights:
        require_type("weights", weights, MegaMoEWeights, WEIGHTS_WORDS)
    if (
        weights.weights != shape.weights
        or weights.token_format != shape.token_format
        or weights.kernel != kernel
    ):
        raise ValueError(
            f"weights must be {shape.weights} weights beside {shape.token_format} tokens for "
            f"{kernel}, as the call's sizes and arch say; got {weights.words}"
        )
    if weights.has_gate is not has_gate(activation):
        rows = "no rows of gate" if weights.has_gate else "rows of gate above those of up"
        raise ValueError(
            f"weights must have {rows} in l1 for activation {activation!r}; got {weights.words}"
        )


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int],
    device: torch.device,
) -> None:
    """Of (one of) these dtypes, of this shape, on this device, in a storage that is there."""
    require_type(name, tensor, torch.Tensor, "a tensor")
    check_dense(name, tensor)
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(map(str, allowed))}; got {tensor.dtype}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} must have shape {tuple(shape)} for this buffer; got {tuple(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, as the buffer is; got {tensor.device}")
    check_memory(name, tensor)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")


def check_start(name: str, tensor: torch.Tensor, alignment: int) -> None:
    """Starts at a multiple of `alignment` bytes."""
    if tensor.data_ptr() % alignment:
        raise ValueError(
            f"{name} must start at a multiple of {alignment} bytes; got {tensor.data_ptr():#x}"
        )


def form(tensor: torch.Tensor) -> tuple[object, ...]:
    """What the checks of a tensor look at, beside where it starts. Hashable."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def transformed_pair(name: str, value: Any) -> Pair:
    """One layer of what `transform_weights_for_mega_moe` returned."""
    if isinstance(value, tuple) and len(value) == 2:
        weight, sf = value
        if isinstance(weight, torch.Tensor) and isinstance(sf, torch.Tensor):
            return weight, sf
    allowed = "a pair (weight, scales) of tensors"
    require_type(name, value, (tuple, list), allowed)
    if len(value) != 2:
        raise ValueError(f"{name} must be {allowed}; got {len(value)} values")
    for i in range(2):
        require_type(f"{name}[{i}]", value[i], torch.Tensor, "a tensor")
    return value[0], value[1]


def check_biases_given(l1_bias: Any, l2_bias: Any, buffer: LayerMemory) -> Biases | None:
    """Both layers' biases, if the buffer is for calls with some."""
    given = dict(zip(BIAS_NAMES, (l1_bias, l2_bias), strict=True))
    if not buffer.shape.biases:
        for name, bias in given.items():
            if bias is not None:
                raise ValueError(
                    f"{name} must be None with a buffer made without biases=True; got "
                    f"{type(bias).__name__}"
                )
        return None
    for name, bias in given.items():
        allowed = "a tensor of transform_biases_for_mega_moe with a buffer made with biases=True"
        require_type(name, bias, torch.Tensor, allowed)
    return l1_bias, l2_bias


def check_biases_form(biases: Biases, buffer: LayerMemory) -> None:
    """As the kernel reads them."""
    shape = buffer.shape.padded
    num_rows = (2 * shape.intermediate_hidden, shape.hidden)
    for name, bias, number in zip(BIAS_NAMES, biases, num_rows, strict=True):
        expected = (shape.num_local_experts, *bias_blocks(number))
        check_tensor(name, bias, torch.float32, expected, buffer.device)
        check_contiguous(name, bias)
        check_start(name, bias, BIAS_ALIGNMENT)


def check_recipe(recipe: Any) -> None:
    """Only one is there."""
    require_type("recipe", recipe, (tuple, list), "a tuple of 3 ints")
    if tuple(recipe) != RECIPE:
        raise ValueError(
            f"recipe must be {RECIPE}, one scale per 32 values along K; got {tuple(recipe)}"
        )


def refuse_gradients(**tensors: torch.Tensor) -> None:
    """There is no backward pass, so a gradient that is asked for would silently be none. To be
    called where gradients are enabled."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise ValueError(
                f"{name} must not require a gradient: the layer has no backward pass; call it "
                f"under torch.no_grad(), or detach what {name} is made of"
            )


def check_output(y: torch.Tensor, buffer: SymmBuffer) -> None:
    shape = buffer.shape
    if y.ndim != 2:
        raise ValueError(f"y must be 2-dimensional [tokens, hidden]; got shape {tuple(y.shape)}")
    check_tensor("y", y, torch.bfloat16, (y.shape[0], shape.hidden), buffer.device)
    if y.shape[0] > shape.num_max_tokens_per_rank:
        raise ValueError(
            "y must have at most num_max_tokens_per_rank "
            f"({shape.num_max_tokens_per_rank}) tokens; got {y.shape[0]}"
        )
    check_contiguous("y", y)
    check_start("y", y, Y_ALIGNMENT)


def check_expert_ids(buffer: SymmBuffer, num_tokens: int) -> None:
    """Waits for what fills the buffer."""
    check_ids(buffer.topk_idx[:num_tokens], buffer.shape.num_experts)


def check_own_rank(name: str, masked_ranks: torch.Tensor, rank: int) -> None:
    """Waits for what fills the tensor."""
    value = int(masked_ranks[rank])
    if value != 0:
        raise ValueError(
            f"{name} must leave out other ranks, and not {rank}, which calls; got {value} for it"
        )


def check_ids(topk_idx: torch.Tensor, num_experts: int) -> None:
    """Waits for what fills the tensor."""
    wrong = ((topk_idx < -1) | (topk_idx >= num_experts)).nonzero()
    if wrong.numel():
        token, slot = wrong[0].tolist()
        raise ValueError(
            f"topk_idx must hold expert ids 0 to {num_experts - 1}, or -1 for an unused slot; "
            f"got {int(topk_idx[token, slot])} for token {token}, slot {slot}"
        )
