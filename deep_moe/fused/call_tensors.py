"""Tensors that a call may be given beside y, weights and biases: what they have to look like, and
where they may lie. The kernel gets the address of each, in the member of its arguments that has the
tensor's name; 0 where a call has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep_moe.tensor_memory import OccupiedMemory, check_memory

from .checks import STATISTICS, check_contiguous, check_tensor, require_type

if TYPE_CHECKING:
    from deep_moe.heuristics.shape import MoEShape

    from .buffer import SymmBuffer


@dataclass(frozen=True)
class CallTensor:
    """What one of them has to look like: contiguous, in no other memory of the call.

    shape: by the layer's sizes and the tokens of the call. is_written: whether the kernel writes
    it.
    """

    dtype: torch.dtype
    shape: Callable[[MoEShape, int], Sequence[int]]
    is_written: bool = False


# As an option of a call: one tensor, or for `EmulatedRanks.call` a list with one for each rank.
OptionTensor = torch.Tensor | Sequence[torch.Tensor | None] | None
# Those of one call, by name.
CallTensors = Mapping[str, torch.Tensor]
NO_TENSORS: CallTensors = {}

STATISTICS_TENSOR = CallTensor(
    torch.int32, lambda shape, num_tokens: (shape.num_experts_per_rank,), is_written=True
)


# Tensors whose storage was looked at, and where they were: most calls have those of the last one.
KnownMemory = dict[str, tuple[Callable[[], Any], int]]
_UNKNOWN: tuple[Callable[[], Any], int] = (lambda: None, -1)


def with_statistics(stats: Any) -> CallTensors:
    """The argument of that name, if it is given."""
    return NO_TENSORS if stats is None else {STATISTICS: stats}


def check_types(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        require_type(name, tensor, torch.Tensor, "a tensor or None")


def check_form(
    name: str, tensor: torch.Tensor, expected: CallTensor, buffer: SymmBuffer, num_tokens: int
) -> None:
    shape = expected.shape(buffer.shape, num_tokens)
    check_tensor(name, tensor, expected.dtype, shape, buffer.device)
    check_contiguous(name, tensor)


def addresses_of(
    tensors: CallTensors,
    num_bytes: Mapping[str, int],
    y_begin: int,
    y_end: int,
    known: KnownMemory,
    occupied: OccupiedMemory,
) -> dict[str, int]:
    """Raise ValueError for one that lies in other memory of the call.

    num_bytes: of each. occupied: by buffers, weights and biases.
    """
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        address = tensor.data_ptr()
        size = num_bytes[name]
        end = address + size
        reference, known_address = known.get(name, _UNKNOWN)
        # A freed storage has another address.
        if known_address != address or reference() is not tensor:
            check_memory(name, tensor)
            known[name] = weakref.ref(tensor), address
        occupied.refuse(name, address, size)
        if y_begin < end and address < y_end:
            raise ValueError(f"{name} must not share memory with y; got a view of it")
        for other, begin in found.items():
            if begin < end and address < begin + num_bytes[other]:
                raise ValueError(f"{name} must not share memory with {other}; got a view of it")
        found[name] = address
    return found
