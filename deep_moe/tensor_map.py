"""Tensor maps of PyTorch's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.emulator.tensor_map import DataType, Swizzle, TensorMapSpec

if TYPE_CHECKING:
    import torch


def map_of_rows(
    tensor: torch.Tensor,
    data_type: DataType,
    *,
    name: str,
    box: tuple[int, int],
    swizzle: Swizzle = Swizzle.NONE,
) -> TensorMapSpec:
    """A map of `tensor` as a matrix: its last dim is a row, all others together count rows.

    Address and strides are the tensor's own. Its rows must be contiguous, and evenly spaced
    over all dims. `name` stands for the tensor in an error.
    """
    if tensor.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dims; got shape {tuple(tensor.shape)}")
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must have contiguous rows (last stride 1); got strides {tensor.stride()}"
        )
    num_rows = tensor.shape[-2]
    for dim in range(tensor.ndim - 3, -1, -1):
        if tensor.stride(dim) != num_rows * tensor.stride(-2) and tensor.shape[dim] > 1:
            raise ValueError(
                f"{name} must have evenly spaced rows; got shape {tuple(tensor.shape)} with "
                f"strides {tensor.stride()}"
            )
        num_rows *= tensor.shape[dim]
    row_bytes = tensor.shape[-1] * tensor.element_size()
    try:
        return TensorMapSpec(
            data_type=data_type,
            address=tensor.data_ptr(),
            dims=(row_bytes * 8 // data_type.bits, num_rows),
            strides=(tensor.stride(-2) * tensor.element_size(),),
            box=box,
            swizzle=swizzle,
        )
    except ValueError as error:
        raise ValueError(f"{name} does not fit its tensor map: {error}") from None
