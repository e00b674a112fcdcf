"""Weights of 4 bits that the SM100 kernel decodes to BF16 beside BF16 tokens, of any format: their
layout, the tensors and what the kernel is told of them.

A block is 128 rows x 64 k, in the rows' order of layout.py: first the codes as [chunk][row][word],
where a chunk is 32 along k and a word 8 of them, then what multiplies groups of them as
[row][group]. Factors lie in the order of rows. What a value's code becomes, what multiplies it and
the row's factor are those of SM90 (deep_moe/targets/sm90/decoded_blocks.py), as is the order of
bits in a word, but for one: the two rows of a word there are here the second and the third bit of a
value's place along k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.emulator.tensor_map import DataType
from deep_moe.heuristics.sm100 import BLOCK_N
from deep_moe.tensor_map import map_of_rows
from deep_moe.weights import folder_module

from ..target import Operands
from .config import Sm100Config
from .weights import Sm100Weights, sm100_tensor_maps

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from deep_moe.heuristics.shape import MoEShape
    from deep_moe.weights.layers import (
        ExpertWeights,
        KernelLayer,
        LayerWeights,
        MegaMoEWeights,
        TensorForms,
    )

    from ..config import MegaMoEConfig
    from ..sm90.decoded_blocks import NibbleBlocks
    from ..target import Pair

BLOCK_K = 64
VALUE_BYTES = BLOCK_N * BLOCK_K // 2
MAP_ROW_BYTES = 256  # of a block in its tensor map
# Of a word from the highest bits [c][h][v], with values 4*c + 2*h + v along k, to [h][c][v].
_TO_HALVES = (8, 0x0000FF000000FF00)


def decoded_block_bytes(multiplier_bytes: int) -> int:
    """multiplier_bytes: of what multiplies a row's groups.

    >>> decoded_block_bytes(4)
    4608
    """
    return VALUE_BYTES + BLOCK_N * multiplier_bytes


class Sm100DecodedWeights(Sm100Weights):
    """decoded_block_bytes: by the function of that name, of what `source` has."""

    token_format = "bf16"
    data_type = DataType.INT32

    @property
    def source(self) -> NibbleBlocks:
        """What becomes of the format's values, and how a word holds them."""
        blocks: NibbleBlocks = folder_module(self.weights, "sm90_bf16_blocks").BLOCKS
        return blocks

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.int8

    def transform(self, l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
        import torch

        from .layout import interleave_l1

        def interleaved(rows: torch.Tensor) -> torch.Tensor:
            return interleave_l1(rows[None], torch.empty_like(rows)[None], out.has_gate)[0]

        num_l1_matrices = 2 if out.has_gate else 1
        self._lay_out(l1, out.l1, "l1_weights", num_l1_matrices, interleaved)
        self._lay_out(l2, out.l2, "l2_weights", 1, lambda rows: rows)

    def _lay_out(
        self,
        layer: LayerWeights,
        out: KernelLayer,
        name: str,
        num_matrices: int,
        in_order: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """in_order: an expert's rows as the kernel has them."""
        from ..sm90.decoded_blocks import swap_bits

        for expert_idx, (blocks, factors) in enumerate(zip(*out, strict=True)):
            one = tuple(tensor[expert_idx] for tensor in layer)
            rows = self.source.split(one, f"{name}: expert {expert_idx}", num_matrices=num_matrices)
            words = in_order(rows.words.squeeze(-1)).clone()
            swap_bits(words, (_TO_HALVES, *self.source.lane_swaps))
            multipliers = in_order(rows.multipliers)
            num_blocks = (-1, BLOCK_N, words.shape[1] * 16 // BLOCK_K)
            values, groups = self._parts(blocks)
            values.copy_(words.view(*num_blocks, 2, 2).permute(0, 2, 3, 1, 4))
            groups.copy_(multipliers.view(*num_blocks, groups.shape[-1]).transpose(1, 2))
            factors.copy_(in_order(rows.factors))

    def _parts(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of an expert's blocks: words int64 [n, k-block, chunk, row, 2], multipliers
        [n, k-block, row, group]."""
        import torch

        values = blocks[..., :VALUE_BYTES].view(torch.int64).unflatten(-1, (2, BLOCK_N, 2))
        groups = blocks[..., VALUE_BYTES:].view(self.source.multiplier_dtype)
        return values, groups.unflatten(-1, (BLOCK_N, -1))

    def inverse(self, l1: KernelLayer, l2: KernelLayer, has_gate: bool) -> ExpertWeights:
        from deep_moe.weights.layers import (
            ExpertWeights,
            WeightSizes,
            axis_sizes,
            check_form,
            shape_of_weights,
        )

        axes = "[E, n-blocks, k-blocks, bytes]"
        num_experts, num_n_blocks, num_k_blocks, _ = axis_sizes("l1_weights[0]", l1.weight, axes)
        intermediate = num_n_blocks * BLOCK_N // (2 if has_gate else 1)
        sizes = WeightSizes(num_experts, num_k_blocks * BLOCK_K, intermediate, has_gate)
        shape = shape_of_weights(sizes, self.weights, self.token_format)
        check_form({"l1_weights": l1, "l2_weights": l2}, self.tensors(shape))
        return ExpertWeights(
            self._read(l1, has_gate, 2 if has_gate else 1), self._read(l2, None, 1)
        )

    def _read(self, layer: KernelLayer, has_gate: bool | None, num_matrices: int) -> LayerWeights:
        """has_gate: of Linear1; None of Linear2."""
        import torch

        from deep_moe.weights.layers import LayerWeights

        from ..sm90.decoded_blocks import Rows, swap_bits
        from .layout import separate_l1

        experts = []
        for blocks, factors in zip(*layer, strict=True):
            values, groups = self._parts(blocks)
            words = values.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1).clone()
            swap_bits(words, (*reversed(self.source.lane_swaps), _TO_HALVES))
            multipliers = groups.transpose(1, 2).flatten(0, 1).flatten(1)
            rows = [words.unsqueeze(-1), multipliers, factors]
            if has_gate is not None:
                rows = [separate_l1(own[None], has_gate)[0] for own in rows]
            experts.append(self.source.joined(Rows(*rows), num_matrices=num_matrices))
        return LayerWeights(*(torch.stack(own) for own in zip(*experts, strict=True)))

    def tensors(self, shape: MoEShape) -> TensorForms:
        """Blocks, and a factor for each row."""
        import torch

        forms: TensorForms = {}
        sizes = {
            "l1_weights": (shape.num_l1_rows, shape.hidden),
            "l2_weights": (shape.hidden, shape.intermediate_hidden),
        }
        for name, (num_rows, num_columns) in sizes.items():
            blocks = (num_rows // BLOCK_N, num_columns // BLOCK_K, self.decoded_block_bytes)
            forms[f"{name}[0]"] = (torch.int8, (shape.num_local_experts, *blocks))
            forms[f"{name}[1]"] = (torch.float32, (shape.num_local_experts, num_rows))
        return forms

    def operands(self, config: MegaMoEConfig, buffer_address: int, l1: Pair, l2: Pair) -> Operands:
        import torch

        assert isinstance(config, Sm100Config)
        row = MAP_ROW_BYTES // 4
        maps = sm100_tensor_maps(config, buffer_address, 1)
        for name, weight in (("l1_weights", l1[0]), ("l2_weights", l2[0])):
            maps[name] = map_of_rows(
                weight.view(torch.int32).unflatten(-1, (-1, row)),
                self.data_type,
                name=f"{name}[0]",
                box=(row, self.decoded_block_bytes // MAP_ROW_BYTES),
            )
        return Operands(
            maps, {"l1_row_factors": l1[1].data_ptr(), "l2_row_factors": l2[1].data_ptr()}
        )
