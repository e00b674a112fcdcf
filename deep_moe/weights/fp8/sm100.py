"""FP8 weights on SM100: the kernel of MXFP4, with E4M3 on both sides of the product; and beside
tokens with one scale each, with factors of rows behind it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from deep_moe.emulator.tensor_map import DataType
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW
from deep_moe.targets.sm100.weights import Sm100Weights

from .on_target import Fp8OnTarget

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.targets.config import MegaMoEConfig
    from deep_moe.targets.target import Operands, Pair

    from ..layers import ExpertWeights, KernelLayer, LayerWeights, MegaMoEWeights, TensorForms
    from .requantizing import Moved


class Sm100Fp8(Fp8OnTarget, Sm100Weights):
    token_format = "mxfp8"
    policy = "Fp8Weights"
    scale_words = "UE8M0 scales per 32"
    larger_scale_blocks: ClassVar[tuple[tuple[int, int], ...]] = (
        WHOLE_ROW,
        (128, 128),
        WHOLE_MATRIX,
    )
    data_type = DataType.UINT8

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float8_e4m3fn

    def with_own_scales(
        self, name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None
    ) -> LayerWeights:
        from .requantizing import with_ue8m0_scales

        return with_ue8m0_scales(name, layer, expert_idx, moved)

    def lay_out_expert(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm100.layout import transform_scaled

        transform_scaled(l1, l2, out)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import mxfp8_numerics

        from .format import FORMAT

        return mxfp8_numerics(FORMAT.dequantize)


class Sm100Fp8RowScaled(Fp8OnTarget, Sm100Weights):
    """Scales of whole rows and of whole tokens: factors of complete sums. Linear1's output has
    scales per 32, as beside other E4M3 tokens."""

    token_format = "fp8_token"
    policy = "Fp8RowScaledWeights"
    scale_words = "a float32 scale for each row"
    scale_block = WHOLE_ROW
    larger_scale_blocks = (WHOLE_MATRIX,)
    data_type = DataType.UINT8

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float8_e4m3fn

    def with_own_scales(
        self, name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None
    ) -> LayerWeights:
        from .requantizing import with_row_scales

        return with_row_scales(name, layer, expert_idx, moved)

    def lay_out_expert(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm100.layout import interleave_l1

        for rows, place in zip(l1, out.l1, strict=True):
            interleave_l1(rows.unsqueeze(0), place, out.has_gate)
        for rows, place in zip(l2, out.l2, strict=True):
            place.copy_(rows)

    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        from deep_moe.targets.sm100.layout import separate_l1, transformed_shape

        from ..layers import ExpertWeights, LayerWeights, check_form

        shape = transformed_shape(l1, has_gate, self, values_per_byte=1)
        check_form({"l1_weights": l1, "l2_weights": l2}, self.tensors(shape))
        return ExpertWeights(
            LayerWeights(*(separate_l1(own, has_gate) for own in l1)),
            LayerWeights(*(own.clone() for own in l2)),
        )

    def tensors(self, shape: MoEShape) -> TensorForms:
        """Values, and a factor for each row."""
        import torch

        num_experts = shape.num_local_experts
        l1 = (num_experts, shape.num_l1_rows, shape.hidden)
        l2 = (num_experts, shape.hidden, shape.intermediate_hidden)
        return {
            "l1_weights[0]": (torch.float8_e4m3fn, l1),
            "l1_weights[1]": (torch.float32, l1[:2]),
            "l2_weights[0]": (torch.float8_e4m3fn, l2),
            "l2_weights[1]": (torch.float32, l2[:2]),
        }

    def operands(self, config: MegaMoEConfig, buffer_address: int, l1: Pair, l2: Pair) -> Operands:
        from deep_moe.targets.target import Operands

        maps = super().operands(config, buffer_address, l1, l2).tensor_maps
        factors = {"l1_row_factors": l1[1], "l2_row_factors": l2[1]}
        return Operands(maps, {name: rows.data_ptr() for name, rows in factors.items()})

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import float_scaled_tokens, mxfp8_numerics

        from .format import FORMAT

        return dataclasses.replace(mxfp8_numerics(FORMAT.dequantize), tokens=float_scaled_tokens)


KERNELS = (Sm100Fp8(), Sm100Fp8RowScaled())
