"""The memory of tensors: whether a tensor's storage still holds its values, and whether tensors
share memory. Every public call checks this before it launches, because a kernel gets only
addresses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch


def num_bytes_reached(tensor: torch.Tensor) -> int:
    """From the tensor's first value to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.element_size()


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the tensor has a shape, strides and a storage."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense tensor; got {kind}")


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """Raise unless the storage of a dense tensor holds all its values. A storage that was freed or
    resized does not: FSDP resizes those of gathered parameters to 0."""
    if torch.compiler.is_compiling():  # there is no storage yet; operators ask when they run
        return
    if tensor.is_meta:
        raise ValueError(f"{name} must hold values; got a tensor on the device meta")
    needed = tensor.storage_offset() * tensor.element_size() + num_bytes_reached(tensor)
    available = tensor.untyped_storage().nbytes()
    if available < needed and tensor.numel():
        raise ValueError(
            f"{name} must have a storage that holds its values, {needed} bytes; got one of "
            f"{available} bytes, as after untyped_storage().resize_(), or where FSDP has freed it"
        )


class Extent(NamedTuple):
    """Addresses begin to end - 1, and what lies there."""

    name: str
    begin: int
    end: int

    @classmethod
    def of_tensor(cls, name: str, tensor: torch.Tensor) -> Extent:
        begin = tensor.data_ptr()
        return cls(name, begin, begin + num_bytes_reached(tensor))


class OccupiedMemory:
    """Memory that a call reads or writes, and in which no further output of it may lie."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.extents = [extent for extent in extents if extent.begin < extent.end]
        # Beginnings and ends in turn, of extents that do not touch.
        self.bounds: list[int] = []
        for _, begin, end in sorted(self.extents, key=lambda extent: extent.begin):
            if self.bounds and begin <= self.bounds[-1]:
                self.bounds[-1] = max(end, self.bounds[-1])
            else:
                self.bounds += [begin, end]

    def refuse(self, name: str, begin: int, num_bytes: int) -> None:
        """Raise if an output of that name lies here. Every call asks."""
        bounds = self.bounds
        i = bisect_right(bounds, begin)
        if i & 1 or (i < len(bounds) and bounds[i] < begin + num_bytes):
            self._raise(name, begin, begin + num_bytes)

    def refuse_tensor(self, name: str, tensor: torch.Tensor) -> None:
        self.refuse(name, tensor.data_ptr(), num_bytes_reached(tensor))

    def _raise(self, name: str, begin: int, end: int) -> None:
        for extent in self.extents:
            if begin < extent.end and extent.begin < end:
                raise ValueError(
                    f"{name} must not share memory with {extent.name}; got {name} at {begin:#x} to "
                    f"{end:#x} and {extent.name} at {extent.begin:#x} to {extent.end:#x}"
                )


def refuse_shared_memory(
    written: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]
) -> None:
    """Raise if what is written shares memory with what is read, or with what else is written. None
    is nowhere."""
    occupied = [Extent.of_tensor(name, t) for name, t in read.items() if t is not None]
    for name, tensor in written.items():
        if tensor is not None:
            OccupiedMemory(occupied).refuse_tensor(name, tensor)
            occupied.append(Extent.of_tensor(name, tensor))
