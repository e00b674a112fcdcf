"""BF16 weights on SM90, which `wgmma` takes from shared memory as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.heuristics.sm90_tiles import LARGE_FITTED_TILE, TILES, UNEVEN_TILE, WeightKind
from deep_moe.targets.sm90.weights import SHARED_OPERAND_FUZZ_TILES, Sm90Weights

if TYPE_CHECKING:
    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.targets.sm90.rows import RowsOf

    from ..layers import KernelLayer, LayerWeights, MegaMoEWeights, TensorForms


def bf16_costs(rows: float) -> tuple[float, float]:
    """Of tiles of BF16. Of as many weights twice the bytes of FP8 are loaded, and the products take
    twice as long: so the ratios are those of FP8, without what adding up in registers takes. With
    more than 128 rows three stages fit beside tokens of hidden 7168, with 128 four: taken for 8 %,
    with which 128 rows are chosen where they were faster (H200, 2026-11-24, benchmarks/LOG.md).

    >>> [round(cost, 3) for cost in bf16_costs(112)]
    [1.14, 0.739]
    """
    further = 0.08 + rows / 170
    return 1 + rows / 800, further * (1.08 if rows > 128 else 1)


class Sm90Bf16(Sm90Weights):
    weights = "bf16"
    token_format = "bf16"
    policy = "Bf16Weights"
    block_unit = "values"
    kind = WeightKind(
        32768,
        False,
        False,
        True,
        (*TILES, LARGE_FITTED_TILE),
        bf16_costs,
        spared_tiles=(UNEVEN_TILE,),
        large_fitted_cost=1.02,
        is_decoded=False,
    )
    fuzz_tiles = SHARED_OPERAND_FUZZ_TILES

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm90.plain_blocks import lay_out_expert
        from deep_moe.targets.sm90.rows import RowsOf

        rows_of_l1 = RowsOf.linear1(out.has_gate)
        for layer, to, rows_of in ((l1, out.l1, rows_of_l1), (l2, out.l2, RowsOf.OUTPUT)):
            for own, place in zip(layer.weight, to.weight, strict=True):
                lay_out_expert(own, place, rows_of)

    def read_layer(
        self, layer: KernelLayer, size: tuple[int, int, int], rows_of: RowsOf
    ) -> LayerWeights:
        from deep_moe.targets.sm90.plain_blocks import read_expert

        from ..layers import LayerWeights
        from .format import no_scales

        weight = layer.weight.new_empty(size)
        for own, out in zip(layer.weight, weight, strict=True):
            read_expert(own, out, rows_of)
        return LayerWeights(weight, no_scales(weight))

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        from deep_moe.targets.sm90.plain_blocks import BLOCK_BYTES

        l1, l2 = self.block_dims(shape)
        none = (torch.float32, (shape.num_local_experts, 0))
        return {
            "l1_weights[0]": (torch.bfloat16, (*l1, BLOCK_BYTES // 2)),
            "l1_weights[1]": none,
            "l2_weights[0]": (torch.bfloat16, (*l2, BLOCK_BYTES // 2)),
            "l2_weights[1]": none,
        }

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import bf16_numerics

        from .format import FORMAT

        return bf16_numerics(FORMAT.dequantize)


KERNELS = (Sm90Bf16(),)
