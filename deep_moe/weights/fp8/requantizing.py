"""FP8 weights with the scales that a kernel applies: unchanged if they have such scales, otherwise
rounded anew, with a report of how far they moved.
"""

from __future__ import annotations

import math

import torch

from deep_moe.errors import RequantizationWarning
from deep_moe.formats.block_scaled import GROUP_SIZE, pack_ue8m0, ue8m0_of_floats, ue8m0_to_float
from deep_moe.formats.sizes import SCALE_GROUP, WHOLE_ROW

from ..layers import LayerWeights
from .format import BLOCK, FORMAT, scale_bytes_of


class Moved:
    """How far those of one layer's values moved that were rounded anew."""

    def __init__(self) -> None:
        self._num_values = self._num_moved = 0
        self._squares = self._moved_squares = self._largest = 0.0

    def __bool__(self) -> bool:
        """Whether any were rounded anew."""
        return self._num_values > 0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Values of an expert, float64."""
        distances = (after - before).abs()
        self._num_values += distances.numel()
        self._num_moved += int((distances > 0).sum())
        self._squares += float(before.square().sum())
        self._moved_squares += float(distances.square().sum())
        self._largest = max(self._largest, float(distances.max()))

    def warning(self, layer: str, scales: str) -> RequantizationWarning:
        """For people. scales: what the values have now, in words."""
        return RequantizationWarning(
            layer,
            scales,
            share_moved=self._num_moved / self._num_values,
            relative_error=math.sqrt(self._moved_squares / self._squares) if self._squares else 0.0,
            largest_change=self._largest,
        )


def with_ue8m0_scales(
    name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None = None
) -> LayerWeights:
    """One expert of checked weights as E4M3 [1, N, K] with UE8M0 scales per 32, int32 [1, N,
    K/128]. moved: where the weights may be rounded anew, if their scales are no powers of two; else
    that is a ValueError."""
    weight, sf = (tensor[expert_idx : expert_idx + 1] for tensor in layer)
    if sf.dtype == torch.int32:
        return LayerWeights(weight, sf)
    if sf.dtype == torch.float32:
        scale_bytes, is_other = ue8m0_of_floats(_per_group(weight[0], sf[0])[None])
        if bool(is_other.any()):
            if moved is None:
                _, row, column = is_other.nonzero()[0].tolist()
                raise ValueError(
                    f"{name}: expert {expert_idx}, scale [{row}, {column}] must be a power of two, "
                    f"2^-127 to 2^127, for a kernel whose scales are UE8M0, or requantize must be "
                    f"True; got {_per_group(weight[0], sf[0])[row, column].item()}"
                )
            new = _rounded_anew(name, weight[0], sf[0], expert_idx, moved, SCALE_GROUP)
            return LayerWeights(new.weight[None], new.sf[None])
    else:
        scale_bytes = scale_bytes_of(sf)
    if scale_bytes.shape[1] != weight.shape[1]:
        groups_per_block = BLOCK // GROUP_SIZE
        scale_bytes = scale_bytes.repeat_interleave(BLOCK, 1).repeat_interleave(groups_per_block, 2)
    return LayerWeights(weight, pack_ue8m0(scale_bytes))


def with_block_scales(
    name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None = None
) -> LayerWeights:
    """One expert of checked weights as E4M3 [N, K] with float32 scales [N/128, K/128]. moved: where
    the weights may be rounded anew, if a block has several scales; else that is a ValueError."""
    weight, sf = (tensor[expert_idx] for tensor in layer)
    scales = _per_group(weight, sf)
    if scales.shape[0] != weight.shape[0]:
        return LayerWeights(weight, scales)
    groups = BLOCK // GROUP_SIZE
    in_blocks = scales.unflatten(1, (-1, groups)).unflatten(0, (-1, BLOCK)).transpose(1, 2)
    first = in_blocks[..., :1, :1]
    is_other = (in_blocks != first).flatten(2).any(dim=2)
    if not bool(is_other.any()):
        return LayerWeights(weight, first.flatten(1).contiguous())
    if moved is None:
        row, column = is_other.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expert {expert_idx}, block [{row}, {column}] of 128 x 128 values must have "
            "one scale for a kernel that applies no others, or requantize must be True; got several"
        )
    return _rounded_anew(name, weight, sf, expert_idx, moved, (BLOCK, BLOCK))


def with_row_scales(
    name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None = None
) -> LayerWeights:
    """One expert of checked weights as E4M3 [N, K] with float32 scales [N]. moved: where the
    weights may be rounded anew, if a row has several scales; else that is a ValueError."""
    weight, sf = (tensor[expert_idx] for tensor in layer)
    scales = _per_group(weight, sf)
    is_other = scales != scales[:, :1]
    if not bool(is_other.any()):
        rows = scales[:, 0].repeat_interleave(weight.shape[0] // scales.shape[0])
        return LayerWeights(weight, rows)
    if moved is None:
        row = int(is_other.any(dim=1).nonzero()[0]) * (weight.shape[0] // scales.shape[0])
        raise ValueError(
            f"{name}: expert {expert_idx}, row {row} must have one scale for a kernel that applies "
            "it to whole sums, or requantize must be True; got several"
        )
    return _rounded_anew(name, weight, sf, expert_idx, moved, WHOLE_ROW)


def _per_group(weight: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """An expert's scales as float32: [N/128, K/128], if there are so many, or [N, K/32]."""
    if sf.ndim == 1:
        num_rows, num_columns = weight.shape
        of_rows = sf.repeat_interleave(num_rows // len(sf))
        return of_rows.unsqueeze(1).expand(-1, num_columns // GROUP_SIZE)
    return sf if sf.dtype == torch.float32 else ue8m0_to_float(scale_bytes_of(sf), torch.float32)


def _rounded_anew(
    name: str,
    weight: torch.Tensor,
    sf: torch.Tensor,
    expert_idx: int,
    moved: Moved,
    scale_block: tuple[int, int],
) -> LayerWeights:
    """An expert [N, K] with other scales."""
    before = FORMAT.dequantize((weight, sf))
    values = before.float()
    if not bool(values.isfinite().all()):
        raise ValueError(
            f"{name}: expert {expert_idx} must hold numbers that float32 does to be rounded anew; "
            f"got {float(before.abs().max()):.3g}"
        )
    new = FORMAT.quantize(values, scale_block)
    moved.add(before, FORMAT.dequantize(new))
    return new
