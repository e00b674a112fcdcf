"""How the SM90 kernel reaches its operands: tensor maps of the token pools, plain addresses of the
weights, which are contiguous blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kernel_args import WEIGHT_POINTER_NAMES
from .tensor_map import DataType, Swizzle, TensorMapSpec

BULK_COPY_ALIGNMENT = 16

if TYPE_CHECKING:
    import torch

    from deep_moe.heuristics.config import MegaMoEConfig

    Pair = tuple[torch.Tensor, torch.Tensor]


def sm90_tensor_maps(config: MegaMoEConfig, buffer_address: int) -> dict[str, TensorMapSpec]:
    """A spec for each tensor map of KernelArgs that SM90 uses.

    A map's coordinates are (column, row, end), and stand for row `end - block_m + row` of the pool.
    So `row` counts towards `block_m`, which is out of bounds: a box that begins with the n-th row
    before `end`, at row `block_m - n`, takes n rows from the pool, and zeros fill the rest of it.
    The address is the one that `row` and `end` of 0 would have, before the pool and never read.
    """
    is_halved = config.block_m_step != config.block_m
    num_box_rows = config.block_m // 2 if is_halved else config.block_m

    def pool(segment_name: str) -> TensorMapSpec:
        segment = config.symm_buffer_layout[segment_name]
        num_rows, num_columns = segment.shape
        return TensorMapSpec(
            data_type=DataType.UINT8,
            address=buffer_address + segment.offset - config.block_m * num_columns,
            dims=(num_columns, config.block_m, num_rows + 1),
            strides=(num_columns, num_columns),
            box=(config.block_k, num_box_rows, 1),
            swizzle=Swizzle.B128,
        )

    return {
        "l1_activations": pool("l1_tokens"),
        "l2_activations": pool("l2_tokens"),
    }


def sm90_weight_pointers(l1_weights: Pair, l2_weights: Pair) -> dict[str, int]:
    """The addresses in KernelArgs of what `transform_weights_for_mega_moe` returns."""
    tensors = {
        "l1_weights[0]": l1_weights[0],
        "l2_weights[0]": l2_weights[0],
        "l1_weights[1]": l1_weights[1],
        "l2_weights[1]": l2_weights[1],
    }
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")
        if tensor.data_ptr() % BULK_COPY_ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {BULK_COPY_ALIGNMENT} bytes; "
                f"got {tensor.data_ptr():#x}"
            )
    addresses = (tensor.data_ptr() for tensor in tensors.values())
    return dict(zip(WEIGHT_POINTER_NAMES, addresses, strict=True))
