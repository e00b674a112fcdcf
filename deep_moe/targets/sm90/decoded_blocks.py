"""Weights as the SM90 kernel reads them that it decodes to BF16 beside BF16 tokens: blocks of 256
rows x 64 k in the order of its math threads, and one factor per row.

A block is two parts for the two math warpgroups, each the values of 128 rows, then what multiplies
them. Rows stand in the order of plain_blocks.py: (g, b, w, h, r), of which warp w's lanes 4*r to
4*r + 3 of warpgroup g have rows (b, h). Lane 4*r + q has of each 16 values along k those at 2*q,
2*q + 1, 2*q + 8 and 2*q + 9, the register operand of a product. Values lie as [b][unit][thread]
[product of the unit], where a unit is the products whose values are 16 bytes of a thread: 4 of
values of 4 bits, 2 of 8 bits. How a product's values of both rows of a thread lie there, each
format says. Multipliers lie as [w][r][b][group][h], factors in the order of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from .rows import BLOCK_N, PART_N, RowsOf, bf16_rows_by_slot

if TYPE_CHECKING:
    from deep_moe.weights.layers import KernelLayer, LayerTensors

BLOCK_K = 64
PRODUCT_K = 16  # values along K of a product
_PRODUCTS = BLOCK_K // PRODUCT_K  # of a row in a block
# k-blocks that a CPU takes at once, of one n-block: so few that they stay in its cache.
_CPU_K_BLOCKS = 28


class Rows(NamedTuple):
    """One expert's rows, in their order. words: int64 [N, products, words of a product's values].
    multipliers: [N, groups]. factors: float32 [N]."""

    words: torch.Tensor
    multipliers: torch.Tensor
    factors: torch.Tensor


class DecodedBlocks(ABC):
    """The layout of a format. value_bits: 4 or 8. group: values along K that share a multiplier.
    multiplier_dtype: of as many bytes as it has."""

    value_bits: ClassVar[int]
    group: ClassVar[int]
    multiplier_dtype: ClassVar[torch.dtype] = torch.uint8

    @abstractmethod
    def split(self, layer: LayerTensors, name: str, *, num_matrices: int) -> Rows:
        """The rows of one expert's checked weights, or a ValueError for those that the kernel
        cannot decode. name: what to call the expert there."""

    @abstractmethod
    def joined(self, rows: Rows, *, num_matrices: int) -> LayerTensors:
        """The inverse."""

    @abstractmethod
    def to_lanes(self, words: torch.Tensor) -> torch.Tensor:
        """Words int64 [.., h, product, word] as those of lanes, [.., q, product], each of as many
        bytes as a product's values of a lane's two rows."""

    @abstractmethod
    def to_words(self, lanes: torch.Tensor) -> torch.Tensor:
        """The inverse."""

    @property
    def value_bytes(self) -> int:
        """Of a part's values."""
        return PART_N * BLOCK_K * self.value_bits // 8

    @property
    def part_bytes(self) -> int:
        return self.value_bytes + PART_N * (BLOCK_K // self.group) * self.multiplier_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return 2 * self.part_bytes

    def lay_out(self, layer: LayerTensors, out: KernelLayer, *, name: str, rows_of: RowsOf) -> None:
        """Checked weights of some experts into (blocks int8 [E, n-blocks, k-blocks, bytes], factors
        float32 [E, n-blocks, 256]), both contiguous.

        One expert at a time, so that little more memory than the result's is needed. `name` stands
        for the layer in an error.
        """
        for expert_idx, (blocks, factors) in enumerate(zip(*out, strict=True)):
            one = tuple(tensor[expert_idx] for tensor in layer)
            rows = self.split(
                one, f"{name}: expert {expert_idx}", num_matrices=rows_of.num_matrices
            )
            if rows.factors.shape[0] % BLOCK_N:
                self._parts(blocks[-1])[:, 1] = 0
                factors[-1, PART_N:] = 0
            for section in self._sections(rows, blocks, factors, rows_of):
                section.factor_slots.copy_(section.factors)
                section.multiplier_slots.copy_(section.multipliers)
                for n, k in section.steps():
                    slots = section.value_slots[n, k]
                    slots.copy_(self.to_lanes(section.words[n, k]).view(slots.shape))

    def read(self, layer: KernelLayer, *, num_rows: int, rows_of: RowsOf) -> list[torch.Tensor]:
        """The inverse: tensors [E, ...]."""
        num_experts, _, num_k_blocks, _ = layer.weight.shape
        num_products, num_words = num_k_blocks * _PRODUCTS, self.value_bits // 4
        made: list[torch.Tensor] = []
        for expert_idx in range(num_experts):
            blocks, factors = layer.weight[expert_idx], layer.sf[expert_idx]
            rows = Rows(
                blocks.new_empty((num_rows, num_products, num_words), dtype=torch.int64),
                blocks.new_empty(
                    (num_rows, num_k_blocks * BLOCK_K // self.group), dtype=self.multiplier_dtype
                ),
                factors.new_empty(num_rows),
            )
            for section in self._sections(rows, blocks, factors, rows_of):
                section.factors.copy_(section.factor_slots)
                section.multipliers.copy_(section.multiplier_slots)
                for n, k in section.steps():
                    lanes = section.value_slots[n, k].flatten(-2)
                    section.words[n, k].copy_(self.to_words(lanes))
            for i, tensor in enumerate(self.joined(rows, num_matrices=rows_of.num_matrices)):
                if expert_idx == 0:
                    made.append(tensor.new_empty((num_experts, *tensor.shape)))
                made[i][expert_idx] = tensor
        return made

    def _parts(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.unflatten(-1, (2, self.part_bytes))

    def _sections(
        self, rows: Rows, blocks: torch.Tensor, factors: torch.Tensor, rows_of: RowsOf
    ) -> Iterator[_Section]:
        num_full, num_rest = divmod(rows.factors.shape[0], BLOCK_N)
        parts = self._parts(blocks)
        num_units, num_groups = self.value_bits // 4, BLOCK_K // self.group
        lane_dtype = torch.int32 if self.value_bits == 4 else torch.int64
        values = parts[..., : self.value_bytes].view(lane_dtype)
        values = values.unflatten(-1, (2, num_units, 4, 8, 4, _PRODUCTS // num_units))
        multipliers = parts[..., self.value_bytes :].view(self.multiplier_dtype)
        multipliers = multipliers.unflatten(-1, (4, 8, 2, num_groups, 2))
        by_row = factors.unflatten(-1, (2, 2, 4, 2, 8))

        def section(of_rows: slice, n: slice, num_parts: int) -> _Section:
            def own(tensor: torch.Tensor) -> torch.Tensor:
                return bf16_rows_by_slot(
                    tensor[of_rows], num_parts, rows_of
                )  # n, g, w, r, b, h, ..

            words = rows.words.unflatten(1, (-1, _PRODUCTS))
            of_groups = rows.multipliers.unflatten(1, (-1, num_groups))
            return _Section(
                own(words).permute(0, 6, 1, 4, 2, 3, 5, 7, 8),
                own(of_groups).permute(0, 6, 1, 2, 3, 4, 7, 5),
                own(rows.factors).permute(0, 1, 4, 2, 5, 3),
                #                             n  k  g  b  w  r  q  unit  product
                values[n, :, :num_parts].permute(0, 1, 2, 3, 5, 6, 7, 4, 8),
                multipliers[n, :, :num_parts],
                by_row[n, :num_parts],
            )

        if num_full:
            yield section(slice(num_full * BLOCK_N), slice(num_full), 2)
        if num_rest:
            yield section(slice(num_full * BLOCK_N, None), slice(num_full, None), 1)


class NibbleBlocks(DecodedBlocks):
    """Of values of 4 bits, two in each byte, the first low. lane_swaps: from two rows' bytes of a
    lane, [h][c] from the highest, to their place in its word; c as below."""

    value_bits = 4
    lane_swaps: ClassVar[tuple[tuple[int, int], ...]]

    # Of two rows the 8 bytes of 16 values each: [h][c][q] bytes of two values, c = 0 or 1 for the
    # first or second 8 along k. First to [q / 2][c][h][q % 2] by an exchange between the two words,
    # then, in each, to [q / 2][q % 2][h][c].
    _ACROSS = 16, 0x0000FFFF0000FFFF
    _TO_LANES = (24, 0x00000000FF00FF00)

    def to_lanes(self, words: torch.Tensor) -> torch.Tensor:
        # [.., product, h], and then of a product's two words q / 2.
        made = words.squeeze(-1).transpose(-1, -2).contiguous()
        _swap_across(made, *self._ACROSS)
        swap_bits(made, (self._TO_LANES, *self.lane_swaps))
        return made.view(torch.int32).transpose(-1, -2)

    def to_words(self, lanes: torch.Tensor) -> torch.Tensor:
        made = lanes.transpose(-1, -2).contiguous().view(torch.int64)
        swap_bits(made, (*reversed(self.lane_swaps), self._TO_LANES))
        _swap_across(made, *self._ACROSS)
        return made.transpose(-1, -2).unsqueeze(-1)


class _Section(NamedTuple):
    """n-blocks of an expert whose rows are those of both warpgroups, or of the first alone: views
    of the rows, and of where they go.

    words: int64 [n, k-block, g, b, w, r, h, product, word]. value_slots: [n, k-block, g, b, w, r,
    q, unit, product]. multipliers, multiplier_slots: [n, k-block, g, w, r, b, group, h]. factors,
    factor_slots: float32 [n, g, b, w, h, r].
    """

    words: torch.Tensor
    multipliers: torch.Tensor
    factors: torch.Tensor
    value_slots: torch.Tensor
    multiplier_slots: torch.Tensor
    factor_slots: torch.Tensor

    def steps(self) -> Iterator[tuple[slice, slice]]:
        """n-blocks and k-blocks to take at once: on a GPU all, to launch little."""
        num_n, num_k = self.words.shape[:2]
        is_cpu = self.words.device.type == "cpu"
        n_step, k_step = (1, _CPU_K_BLOCKS) if is_cpu else (max(num_n, 1), num_k)
        for n in range(0, num_n, n_step):
            for k in range(0, num_k, k_step):
                yield slice(n, n + n_step), slice(k, k + k_step)


def swap_bits(words: torch.Tensor, swaps: Iterable[tuple[int, int]]) -> None:
    """For each (distance, bits), exchange those bits with the ones `distance` higher, in place."""
    differences = torch.empty_like(words)
    for distance, bits in swaps:
        torch.bitwise_right_shift(words, distance, out=differences)
        differences.bitwise_xor_(words).bitwise_and_(bits)
        words.bitwise_xor_(differences)
        words.bitwise_xor_(differences.bitwise_left_shift_(distance))


def _swap_across(pairs: torch.Tensor, distance: int, bits: int) -> None:
    """Exchange the bits of the first of each two words that are `distance` higher than `bits` with
    those `bits` of the second, in place."""
    first, second = pairs[..., 0], pairs[..., 1]
    differences = (first >> distance).bitwise_xor_(second).bitwise_and_(bits)
    second.bitwise_xor_(differences)
    first.bitwise_xor_(differences.bitwise_left_shift_(distance))
