"""BF16 weights on SM100: `tcgen05.mma` of kind f16, without scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.jit.tensor_map import DataType

from .sm100_weights import Sm100Weights

if TYPE_CHECKING:
    import torch

    from deep_moe.formats.weights import LayerWeights, MegaMoEWeights
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.trial.reference import Numerics


class Sm100Bf16(Sm100Weights):
    format = "bf16"
    policy = "Bf16Weights"
    data_type = DataType.BFLOAT16

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.formats.weights import interleave_gate_up

        interleave_gate_up(l1.weight, out.l1.weight)
        out.l2.weight.copy_(l2.weight)

    def inverse(self, l1: LayerWeights, l2: LayerWeights) -> MegaMoEWeights:
        from deep_moe.formats.weights import sm100_bf16_inverse

        return sm100_bf16_inverse(l1, l2)

    def tensors(self, shape: MoEShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        from deep_moe.formats.weights import sm100_bf16_tensors

        return sm100_bf16_tensors(shape)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.trial.reference import BF16

        return BF16
