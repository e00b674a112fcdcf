"""Weights as MXFP8 holds them, made once for each version of the weights.

PyTorch counts a tensor's changes in place, an optimizer's step among them. What was made from a
version is found again until the weights change or are gone. A call that is captured in a CUDA graph
makes its own: the graph's replays have to see weights that changed since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Entry:
    weights: weakref.ref[torch.Tensor]
    version: int
    rounded: torch.Tensor


class WeightCache:
    """By the tensor itself. An entry goes when its weights do."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def rounded(
        self, weights: torch.Tensor, round_weights: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What round_weights makes of this version of the weights. Not to be written to."""
        if weights.is_inference() or (weights.is_cuda and torch.cuda.is_current_stream_capturing()):
            return round_weights(weights)  # no versions; or a graph's own
        key = id(weights)
        entry = self._entries.get(key)
        is_same = entry is not None and entry.weights() is weights
        if entry is not None and is_same and entry.version == weights._version:
            return entry.rounded
        self._entries.pop(key, None)  # freed before the next is made
        del entry
        version = weights._version
        rounded = round_weights(weights)
        gone = weakref.ref(weights, lambda _: self._entries.pop(key, None))
        self._entries[key] = _Entry(gone, version, rounded)
        return rounded

    def __len__(self) -> int:
        return len(self._entries)


ROUNDED_WEIGHTS = WeightCache()
