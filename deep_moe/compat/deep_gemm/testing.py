"""How callers of DeepGEMM compare results."""

from __future__ import annotations

import torch

__all__ = ["calc_diff"]


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """How far two tensors are apart, |x - y|^2 / (|x|^2 + |y|^2): 0 if they are equal, zeros too,
    2 if they are opposite.

    Args:
        x: a tensor.
        y: a tensor of the same shape.
    """
    x, y = x.double(), y.double()
    size = (x.square() + y.square()).sum()
    return float((x - y).square().sum() / size) if size else 0.0
