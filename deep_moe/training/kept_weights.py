"""Quantized weights that passes share in a context of `frozen_weights`.

Nothing cheap tells that a weight has changed: fused optimizers, `.data`, and whoever swaps storages
count no version. So nobody guesses here. The caller says where weights stay as they are, what can
be seen of a change is heeded in each pass, and the end compares bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rounding:
    """make: what is made of a weight. num_differences: of a weight and of what was made of it, a
    number on the device, zero where `make` would have the same bits again."""

    make: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    num_differences: Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]


class KeptWeight:
    """A weight and what was made of it. It holds the weight, so that the id stays the weight's."""

    def __init__(self, name: str, weight: torch.Tensor) -> None:
        self.name, self.weight = name, weight
        self._seen: Hashable = None
        self._form: Hashable = None
        self._copies: dict[Hashable, tuple[Rounding, tuple[torch.Tensor, ...]]] = {}

    def copy(self, kind: Hashable, rounding: Rounding) -> tuple[torch.Tensor, ...]:
        seen = _visible_state(self.weight)
        if seen != self._seen:
            self._copies.clear()
            self._seen, self._form = seen, _form(self.weight)
        if kind not in self._copies:
            self._copies[kind] = rounding, rounding.make(self.weight)
        return self._copies[kind][1]

    def num_differences(self) -> list[torch.Tensor]:
        """Numbers on the device, all zero where what was made of the weight would have the same
        bits again. The host does not wait."""
        if self._copies and _form(self.weight) != self._form:
            return [torch.ones(1)]
        return [
            rounding.num_differences(self.weight, copies)
            for rounding, copies in self._copies.values()
        ]


# Of all threads: a backward pass runs in one of autograd's.
_kept: dict[int, KeptWeight] = {}
_lock = threading.RLock()


def quantized_once(
    weight: torch.Tensor, kind: Hashable, rounding: Rounding
) -> tuple[torch.Tensor, ...]:
    """rounding.make(weight), or what an earlier call of this kind has made of a frozen weight."""
    if not _kept:
        return rounding.make(weight)
    stream = None
    if weight.is_cuda:
        if torch.cuda.is_current_stream_capturing():  # a graph outlives the context
            return rounding.make(weight)
        stream = torch.cuda.current_stream(weight.device).cuda_stream
    with _lock:
        found = _kept.get(id(weight))
        return rounding.make(weight) if found is None else found.copy((kind, stream), rounding)


@contextmanager
def keep(weights: list[KeptWeight]) -> Iterator[None]:
    """Within it `quantized_once` keeps what it makes of these; ValueError where one is kept already
    by an outer context."""
    with _lock:
        for weight in weights:
            if id(weight.weight) in _kept:
                raise ValueError(f"{weight.name} must not be frozen already; it is")
        _kept.update((id(weight.weight), weight) for weight in weights)
    try:
        yield
    finally:
        with _lock:
            for weight in weights:
                del _kept[id(weight.weight)]


def _visible_state(weight: torch.Tensor) -> Hashable:
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, _form(weight)


def _form(weight: torch.Tensor) -> Hashable:
    return weight.shape, weight.stride(), weight.dtype, weight.device
