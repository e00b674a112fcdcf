"""FP8 weights on SM90, with a scale for every 128 x 128 or, beside tokens with one scale each, for
every row."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW
from deep_moe.heuristics.sm90_tiles import LARGE_FITTED_TILE, TILES, UNEVEN_TILE, WeightKind
from deep_moe.targets.sm90.weights import SHARED_OPERAND_FUZZ_TILES, Sm90Weights

from .on_target import Fp8OnTarget

if TYPE_CHECKING:
    from deep_moe.formats.numerics import Numerics
    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.targets.sm90.rows import RowsOf

    from ..layers import KernelLayer, LayerWeights, MegaMoEWeights, TensorForms
    from .requantizing import Moved


def promoted_costs(rows: float) -> tuple[float, float]:
    """Of tiles whose sums are added up in registers, fitted to times of an H200 (2026-11-23,
    benchmarks/LOG.md) with 64 to 1536 tokens per expert of both DeepSeek-V4 shapes. The first tile
    of an expert waits for its weights from HBM, the products of further ones are what they cost.

    >>> [round(cost, 3) for cost in promoted_costs(112)]
    [1.188, 0.739]
    """
    return 1 + (rows + 0.8 * max(0, rows - 64)) / 800, 0.08 + rows / 170


# Of FP8, in the unit of `promoted_costs`: an expert's last m-block in clusters of two, if their
# number is odd. It shares its weights with nobody. It decides where tiles of one size cost about
# the same without it: with 256 tokens per expert 128 rows are 2.2 % faster than three times 96
# (H200, 2026-11-23, benchmarks/LOG.md). What a pair gains is left out: fitted to the same times, it
# takes 72 rows for 128 tokens, which nobody timed, and 88 and 112 rows, which were timed there, are
# slower than 128.
PROMOTED_LONE_M_BLOCK_COST = 0.03

# 120 rows are 3 to 5 % slower than 112 and 128 (H200, 2026-11-23).
PROMOTED_ROWS = (*range(8, 120, 8), 128)


class Sm90Fp8(Fp8OnTarget, Sm90Weights):
    token_format = "mxfp8"
    policy = "Fp8Weights"
    scale_words = "float32 scales per 128 x 128"
    scale_block = (128, 128)
    larger_scale_blocks = (WHOLE_MATRIX,)
    kind = WeightKind(
        32768,
        False,
        True,
        True,
        (*((rows, rows) for rows in PROMOTED_ROWS), LARGE_FITTED_TILE),
        promoted_costs,
        PROMOTED_LONE_M_BLOCK_COST,
        large_fitted_cost=1.04,
        is_decoded=False,
    )
    # Few stages, for a small case never comes round the ring of the default. CTAs by themselves,
    # and in clusters that share weights.
    fuzz_tiles = (
        {"block_m": 16, "num_stages": 4, "cluster_size": 2},
        {"block_m": 88, "num_stages": 3},
        {"block_m": 128, "num_stages": 2},
        {"block_m": 40, "num_stages": 3, "cluster_size": 2},
    )

    def with_own_scales(
        self, name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None
    ) -> LayerWeights:
        from .requantizing import with_block_scales

        return with_block_scales(name, layer, expert_idx, moved)

    def lay_out_expert(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm90.rows import RowsOf

        from ..layers import KernelLayer
        from .sm90_blocks import lay_out_expert

        for layer, to, rows_of in (
            (l1, out.l1, RowsOf.linear1(out.has_gate)),
            (l2, out.l2, RowsOf.OUTPUT),
        ):
            lay_out_expert(layer, KernelLayer(to.weight[0], to.sf[0]), rows_of)

    def read_layer(
        self, layer: KernelLayer, size: tuple[int, int, int], rows_of: RowsOf
    ) -> LayerWeights:
        from ..layers import KernelLayer, LayerWeights
        from .format import BLOCK
        from .sm90_blocks import read_expert

        num_experts, num_rows, num_columns = size
        made = LayerWeights(
            layer.weight.new_empty(size),
            layer.sf.new_empty((num_experts, num_rows // BLOCK, num_columns // BLOCK)),
        )
        for own, out in zip(zip(*layer, strict=True), zip(*made, strict=True), strict=True):
            read_expert(KernelLayer(*own), LayerWeights(*out), rows_of)
        return made

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        from .sm90_blocks import BLOCK_BYTES, NUM_SCALES

        l1, l2 = self.block_dims(shape)
        return {
            "l1_weights[0]": (torch.float8_e4m3fn, (*l1, BLOCK_BYTES)),
            "l1_weights[1]": (torch.float32, (*l1, NUM_SCALES)),
            "l2_weights[0]": (torch.float8_e4m3fn, (*l2, BLOCK_BYTES)),
            "l2_weights[1]": (torch.float32, (*l2, NUM_SCALES)),
        }

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import sm90_numerics

        from .format import FORMAT

        return dataclasses.replace(sm90_numerics(FORMAT.dequantize), sum_block=128)


class Sm90Fp8FloatScaledTokens(Sm90Fp8):
    token_format = "fp8_128"
    policy = "Fp8WeightsFloatScaledTokens"

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import float_scaled_tokens

        return dataclasses.replace(
            super().numerics, tokens=float_scaled_tokens, multiplies_block_scales=True
        )


def row_scaled_costs(rows: float) -> tuple[float, float]:
    """Of tiles whose sums nobody touches before they are complete, by times of an H100 (2026-11-26,
    benchmarks/LOG.md): with 768 tokens per expert a further tile takes as long as 37 rows more of
    it, and those of more than 144 rows, beside which three stages fit, 15 % longer than so.

    >>> [round(cost, 3) for cost in row_scaled_costs(112)]
    [1.14, 0.879]
    """
    further = 0.22 + rows / 170
    return 1 + rows / 800, further * (1.15 if rows > 144 else 1)


# Without two sizes that nobody has timed. By the costs above 136 rows would be chosen with 512 and
# 768 tokens per expert, where fitted tiles were the fastest of those that were timed.
ROW_SCALED_TILES = tuple(tile for tile in TILES if tile not in ((120, 120), (136, 136)))


class Sm90Fp8RowScaled(Fp8OnTarget, Sm90Weights):
    """Scales of whole rows and of whole tokens: factors of complete sums."""

    token_format = "fp8_token"
    policy = "Fp8RowScaledWeights"
    scale_words = "a float32 scale for each row"
    scale_block = WHOLE_ROW
    larger_scale_blocks = (WHOLE_MATRIX,)
    kind = WeightKind(
        32768,
        True,
        False,
        True,
        (*ROW_SCALED_TILES, LARGE_FITTED_TILE),
        row_scaled_costs,
        spared_tiles=(UNEVEN_TILE,),
        large_fitted_cost=1.02,
        is_decoded=False,
    )
    fuzz_tiles = SHARED_OPERAND_FUZZ_TILES

    def with_own_scales(
        self, name: str, layer: LayerWeights, expert_idx: int, moved: Moved | None
    ) -> LayerWeights:
        from .requantizing import with_row_scales

        return with_row_scales(name, layer, expert_idx, moved)

    def lay_out_expert(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        from deep_moe.targets.sm90.plain_blocks import lay_out_expert, lay_out_factors
        from deep_moe.targets.sm90.rows import RowsOf

        for layer, to, rows_of in (
            (l1, out.l1, RowsOf.linear1(out.has_gate)),
            (l2, out.l2, RowsOf.OUTPUT),
        ):
            lay_out_expert(layer.weight, to.weight[0], rows_of)
            lay_out_factors(layer.sf, to.sf[0], rows_of)

    def read_layer(
        self, layer: KernelLayer, size: tuple[int, int, int], rows_of: RowsOf
    ) -> LayerWeights:
        from deep_moe.targets.sm90.plain_blocks import read_expert, read_factors

        from ..layers import LayerWeights

        made = LayerWeights(layer.weight.new_empty(size), layer.sf.new_empty(size[:2]))
        for expert_idx in range(size[0]):
            read_expert(layer.weight[expert_idx], made.weight[expert_idx], rows_of)
            read_factors(layer.sf[expert_idx], made.sf[expert_idx], rows_of)
        return made

    def tensors(self, shape: MoEShape) -> TensorForms:
        import torch

        from deep_moe.targets.sm90.plain_blocks import BLOCK_BYTES

        return self.blocks_and_factors(shape, torch.float8_e4m3fn, BLOCK_BYTES)

    @property
    def numerics(self) -> Numerics:
        from deep_moe.formats.numerics import float_scaled_tokens, sm90_numerics

        from .format import FORMAT

        return dataclasses.replace(sm90_numerics(FORMAT.dequantize), tokens=float_scaled_tokens)


KERNELS = (Sm90Fp8(), Sm90Fp8FloatScaledTokens(), Sm90Fp8RowScaled())
