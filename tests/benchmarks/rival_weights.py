"""Weights in the order in which the rival's kernel reads them (benchmarks/sm100_rival.py)."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.sm100_rival import RivalWeights
from deep_moe.formats.nvfp4 import LINEAR2_SCALE
from deep_moe.weights.layers import LayerWeights

_SCALE_ROWS = 128  # rows whose scales tensor memory takes at once, in lanes of 32


def rival_weights(l1: LayerWeights, l2: LayerWeights) -> RivalWeights:
    """Of a rank's weights, as checkpoints have them, MXFP4 or NVFP4.

    NVFP4's Linear1 output is multiplied by what ours is divided by before it is quantized, and
    Linear2's matrices by its inverse.
    """
    rows = _linear1_rows(l1.weight.shape[1], by_pairs=l1.global_sf is not None)
    layers = (
        *(l1.weight[:, rows], _scale_words(l1)[:, rows]),
        *(l2.weight, _scale_words(l2)),
    )
    values1, scales1, values2, scales2 = layers
    floats: tuple[torch.Tensor, ...] = ()
    if l1.global_sf is not None and l2.global_sf is not None:
        before = torch.full_like(l2.global_sf, 1 / LINEAR2_SCALE)
        floats = (l1.global_sf, l2.global_sf / before, before)
    return RivalWeights(
        tuple(map(_aligned, (values1, _by_lanes(scales1), values2, _by_lanes(scales2)))),
        tuple(scale.contiguous().numpy() for scale in floats),
    )


def _linear1_rows(num_rows: int, *, by_pairs: bool) -> torch.Tensor:
    """Rows of gate and of up in turn: 8 of each or, by_pairs, of every 16 the even ones of both and
    then the odd ones."""
    gate, up = torch.arange(num_rows).view(2, -1)
    if not by_pairs:
        return torch.stack([gate.view(-1, 8), up.view(-1, 8)], dim=1).flatten()
    both = torch.stack([half.view(-1, 8, 2).transpose(1, 2) for half in (gate, up)], dim=2)
    return both.flatten()


def _scale_words(layer: LayerWeights) -> torch.Tensor:
    """int32 [experts, rows, words]: four scales each."""
    return layer.sf.contiguous().view(torch.int32)


def _by_lanes(words: torch.Tensor) -> torch.Tensor:
    """[experts, words, rows], of every 128 rows the first of each 32, then the second."""
    return words.unflatten(1, (-1, _SCALE_ROWS // 32, 32)).transpose(2, 3).flatten(1, 3).mT


def _aligned(values: torch.Tensor) -> np.ndarray:
    """The same bytes at a multiple of 1024."""
    flat = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    storage = np.zeros(flat.size + 1024, np.uint8)
    begin = -storage.ctypes.data % 1024
    storage[begin : begin + flat.size] = flat
    return storage[begin : begin + flat.size]
