"""What weights of all formats have in common on SM90: the kernel has tensor maps of the token
pools, and plain addresses of the weights, which are contiguous blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.jit.kernel_args import WEIGHT_POINTER_NAMES
from deep_moe.jit.tensor_map import Swizzle, TensorMapSpec

from .target import Operands, TargetWeights, token_data_type

if TYPE_CHECKING:
    import torch

    from deep_moe.heuristics.config import MegaMoEConfig

    from .target import Pair

BULK_COPY_ALIGNMENT = 16


class Sm90Weights(TargetWeights):
    def operands(self, config: MegaMoEConfig, buffer_address: int, l1: Pair, l2: Pair) -> Operands:
        maps = sm90_tensor_maps(config, buffer_address)
        return Operands(maps, sm90_weight_pointers(l1, l2))

    def bias_order(self, num_rows: int, *, is_l1: bool) -> torch.Tensor:
        from deep_moe.formats.sm90_weights import slot_order

        return slot_order(num_rows, is_l1=is_l1)


def sm90_tensor_maps(config: MegaMoEConfig, buffer_address: int) -> dict[str, TensorMapSpec]:
    """A spec for each tensor map of KernelArgs that SM90 uses.

    A map's coordinates are (column, row, end), and stand for row `end - block_m + row` of the pool.
    So `row` counts towards `block_m`, which is out of bounds: a box that begins with the n-th row
    before `end`, at row `block_m - n`, takes n rows from the pool, and zeros fill the rest of it.
    The address is the one that `row` and `end` of 0 would have, before the pool and never read.
    """

    data_type = token_data_type(config.token_format)

    def pool(segment_name: str) -> TensorMapSpec:
        segment = config.symm_buffer_layout[segment_name]
        num_rows, row_bytes = segment.shape
        return TensorMapSpec(
            data_type=data_type,
            address=buffer_address + segment.offset - config.block_m * row_bytes,
            dims=(row_bytes // (data_type.bits // 8), config.block_m, num_rows + 1),
            strides=(row_bytes, row_bytes),
            box=(config.block_k, config.block_m, 1),
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
