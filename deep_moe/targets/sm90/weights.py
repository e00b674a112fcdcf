"""What all weight formats have in common on SM90. The kernel has tensor maps of the token pools,
and plain addresses of the weights, which are contiguous blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from deep_moe.emulator.tensor_map import Swizzle, TensorMapSpec
from deep_moe.heuristics.segments import ceil_div
from deep_moe.heuristics.sm90 import BLOCK_N

from ..target import Operands, TargetWeights, token_data_type

if TYPE_CHECKING:
    import torch

    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.heuristics.sm90_tiles import WeightKind
    from deep_moe.weights.layers import ExpertWeights, KernelLayer, LayerWeights, TensorForms

    from ..config import MegaMoEConfig
    from ..target import Pair
    from .rows import RowsOf

BULK_COPY_ALIGNMENT = 16

# Cases of fuzz for products that take both operands from shared memory. Few stages, for a small
# case never comes round the ring of the default. One loop for all sizes of m-block, and one for
# each. CTAs by themselves, and in clusters that share weights.
SHARED_OPERAND_FUZZ_TILES = (
    {"block_m": 16, "num_stages": 5, "cluster_size": 2},
    {"block_m": 168, "num_stages": 3},
    {"block_m": 128, "block_m_step": 32, "num_stages": 2, "cluster_size": 2},
    {"block_m": 64, "block_m_step": 8, "num_stages": 3},
)


class Sm90Weights(TargetWeights):
    """kind: what choices depend on. keeps_k_order: whether k keeps its order in the pool, or the
    words of each 128 are permuted (dispatch/sm90_pull_policy.cuh). block_k: values along K of a
    block of weights. block_unit: what blocks consist of, in errors."""

    kind: WeightKind
    block_unit: ClassVar[str] = "bytes"

    @property
    def block_k(self) -> int:
        return self.tokens.block_k

    @property
    def keeps_k_order(self) -> bool:
        return self.tokens.values == "bf16" or self.tokens.scales_whole_tokens

    def operands(self, config: MegaMoEConfig, buffer_address: int, l1: Pair, l2: Pair) -> Operands:
        maps = sm90_tensor_maps(config, buffer_address)
        return Operands(maps, sm90_weight_pointers(l1, l2))

    def bias_order(self, num_rows: int, *, is_l1: bool) -> torch.Tensor:
        from .rows import RowsOf, bf16_slot_order, e4m3_slot_order

        slot_order = bf16_slot_order if self.keeps_k_order else e4m3_slot_order
        return slot_order(num_rows, RowsOf.GATE_AND_UP if is_l1 else RowsOf.OUTPUT)

    def block_dims(self, shape: MoEShape) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Experts, n-blocks and k-blocks of both layers."""
        num_experts = shape.num_local_experts
        num_l1_n_blocks = ceil_div(shape.num_l1_rows, BLOCK_N)
        num_l2_n_blocks = ceil_div(shape.hidden, BLOCK_N)
        return (
            (num_experts, num_l1_n_blocks, shape.hidden // self.block_k),
            (num_experts, num_l2_n_blocks, shape.intermediate_hidden // self.block_k),
        )

    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        from deep_moe.weights.layers import ExpertWeights

        from .rows import RowsOf

        shape = self._checked_shape(l1, l2, has_gate=has_gate)
        hidden, intermediate = shape.hidden, shape.intermediate_hidden
        l1_size = (shape.num_experts, shape.num_l1_rows, hidden)
        l2_size = (shape.num_experts, hidden, intermediate)
        return ExpertWeights(
            self.read_layer(l1, l1_size, RowsOf.linear1(has_gate)),
            self.read_layer(l2, l2_size, RowsOf.OUTPUT),
        )

    @abstractmethod
    def read_layer(
        self, layer: KernelLayer, size: tuple[int, int, int], rows_of: RowsOf
    ) -> LayerWeights:
        """A checked layer as it was before `transform`. size: experts, rows and values of a row."""

    def blocks_and_factors(
        self, shape: MoEShape, dtype: torch.dtype, block_size: int
    ) -> TensorForms:
        """`tensors` of blocks of so many elements, and a factor for each row."""
        import torch

        l1, l2 = self.block_dims(shape)
        return {
            "l1_weights[0]": (dtype, (*l1, block_size)),
            "l1_weights[1]": (torch.float32, (*l1[:2], BLOCK_N)),
            "l2_weights[0]": (dtype, (*l2, block_size)),
            "l2_weights[1]": (torch.float32, (*l2[:2], BLOCK_N)),
        }

    def _checked_shape(self, l1: KernelLayer, l2: KernelLayer, *, has_gate: bool) -> MoEShape:
        """Whose weights these are, once `transform` has laid them out, or an error."""
        from deep_moe.weights.layers import (
            WeightSizes,
            axis_sizes,
            check_form,
            shape_of_weights,
        )

        axes = f"[E, n-blocks, k-blocks, {self.block_unit}]"
        num_experts, num_n_blocks, num_k_blocks, _ = axis_sizes("l1_weights[0]", l1.weight, axes)
        intermediate = num_n_blocks * BLOCK_N // 2
        if not has_gate:  # the last block may be half full
            *_, num_l2_k_blocks, _ = axis_sizes("l2_weights[0]", l2.weight, axes)
            intermediate = num_l2_k_blocks * self.block_k
        shape = shape_of_weights(
            WeightSizes(num_experts, num_k_blocks * self.block_k, intermediate, has_gate),
            self.weights,
            self.token_format,
        )
        check_form({"l1_weights": l1, "l2_weights": l2}, self.tensors(shape))
        return shape


def sm90_tensor_maps(config: MegaMoEConfig, buffer_address: int) -> dict[str, TensorMapSpec]:
    """A spec for each tensor map of KernelArgs that SM90 uses.

    A map's coordinates are (column, row, end), and stand for row `end - block_m + row` of the pool.
    So `row` counts towards `block_m`, which is out of bounds: a box that begins with the n-th row
    before `end`, at row `block_m - n`, takes n rows from the pool, and zeros fill the rest of it.
    The address is the one that `row` and `end` of 0 would have, before the pool and never read.
    """

    data_type = token_data_type(config.tokens)

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
        "l1_weight_blocks": ("l1_weights[0]", l1_weights[0]),
        "l2_weight_blocks": ("l2_weights[0]", l2_weights[0]),
        "l1_row_factors": ("l1_weights[1]", l1_weights[1]),
        "l2_row_factors": ("l2_weights[1]", l2_weights[1]),
    }
    for name, tensor in tensors.values():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}")
        if tensor.data_ptr() % BULK_COPY_ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {BULK_COPY_ALIGNMENT} bytes; "
                f"got {tensor.data_ptr():#x}"
            )
    return {member: tensor.data_ptr() for member, (_, tensor) in tensors.items()}
