"""Where kernels round that decode INT4 weights to BF16."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..layers import LayerTensors


def rounded(layer: LayerTensors, num_matrices: int) -> torch.Tensor:
    """The weights: a code times its scale, rounded to BF16."""
    import torch

    from .format import FORMAT

    return FORMAT.dequantize(layer, num_matrices).to(torch.bfloat16).double()
