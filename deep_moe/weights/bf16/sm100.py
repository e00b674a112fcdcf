"""BF16 weights on SM100: `tcgen05.mma` of kind f16, without scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.emulator.tensor_map import DataType
from deep_moe.targets.sm100.weights import Sm100Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape

    from ..layers import ExpertWeights, KernelLayer, LayerWeights, MegaMoEWeights, TensorForms


class Sm100Bf16(Sm100Weights):
    weights = "bf16"
    token_format = "bf16"
    policy = "Bf16Weights"
    data_type = DataType.BFLOAT16

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm100.layout import interleave_l1

        interleave_l1(l1.weight, out.l1.weight, out.has_gate)
        out.l2.weight.copy_(l2.weight)

    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        from deep_moe.targets.sm100.layout import separate_l1, transformed_shape

        from ..layers import ExpertWeights, LayerWeights, check_form, contiguous_copy
        from .format import no_scales

        shape = transformed_shape(l1, has_gate, self, values_per_byte=1)
        check_form({"l1_weights": l1, "l2_weights": l2}, self.tensors(shape))
        w1, w2 = separate_l1(l1.weight, has_gate), contiguous_copy(l2.weight)
        return ExpertWeights(LayerWeights(w1, no_scales(w1)), LayerWeights(w2, no_scales(w2)))

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        num_experts, hidden = shape.num_local_experts, shape.hidden
        intermediate = shape.intermediate_hidden
        none = (torch.float32, (num_experts, 0))
        return {
            "l1_weights[0]": (torch.bfloat16, (num_experts, shape.num_l1_rows, hidden)),
            "l1_weights[1]": none,
            "l2_weights[0]": (torch.bfloat16, (num_experts, hidden, intermediate)),
            "l2_weights[1]": none,
        }

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize)


KERNELS = (Sm100Bf16(),)
