"""MXFP4 weights as the SM90 kernel reads them where tokens are BF16: blocks of 256 rows x 64 k in
the order of its math threads, and one factor per row.

The kernel decodes E2M1 to BF16 in registers, its scale included. A row's factor is the largest of
the scales of its 32-value groups, and each group has what its own is below that, as a power of two
that a decoded value is multiplied by. BF16 holds the product exactly while the group's scale is no
less than 2^-125 of the row's largest: 0.5 becomes 2^-126 there, the smallest normal number. A row
whose scales spread further is refused. Groups of zeros fit any scale.

A block is 8704 bytes, two parts for the two math warpgroups, each 4096 bytes of nibbles and 256 of
multipliers. Rows stand in the order of targets/sm90/plain_blocks.py: (g, b, w, h, r), of
which warp w's lanes 4*r to 4*r + 3 of warpgroup g have rows (b, h). Lane 4*r + q has of each 16
values along k those at 2*q, 2*q + 1, 2*q + 8 and 2*q + 9, the register operand of a product. Its
words lie as [b][thread][product], and in a word the values of both its rows, each value cut in two
pairs of bits: sign and upper exponent bit, lower exponent bit and mantissa. With v = 0 or 1 for the
first or second of two neighbours along k, and c = 0 or 1 for the first or second two of them, pairs
lie as [h][v][upper][c] from the highest bits, so that the kernel makes byte selectors of both
pairs of a c at once (include/deep_moe/weights/mxfp4/sm90_bf16_decode.cuh). Multipliers lie as
[w][r][group][b][h], a byte x for 2^(x - 127), factors in the order of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from deep_moe.targets.sm90.rows import BLOCK_N, PART_N, RowsOf, bf16_rows_by_slot

from .sm90_e5m2_blocks import Tensors, is_zero_group, swap_bits

BLOCK_K = 64
BLOCK_BYTES = 8704
NIBBLE_BYTES = 4096  # of a warpgroup's part
PART_BYTES = BLOCK_BYTES // 2
MAX_SPREAD = 125  # log2 of a row's largest scale over its smallest
# Of E2M1 as it stands in the lowest bits of BF16's exponent, which makes it 2^-126 times as large,
# to what the row's largest scale gives.
TOP_MULTIPLIER = 127 + 126

_NAN_BYTE = 255
_WORDS_PER_K = BLOCK_K // 16  # of 8 bytes, of a row
_GROUPS_PER_K = BLOCK_K // 32
# Of two rows the 8 bytes of 16 values each: [h][c][q] bytes of two values. First to [q / 2][c]
# [h][q % 2] by an exchange between the two words, then, in each, to [q / 2][q % 2][h][c].
_ACROSS, _ACROSS_BITS = 16, 0x0000FFFF0000FFFF
_TO_LANES = (24, 0x00000000FF00FF00)
# Of a row's 16 bits pairs of bits [c][v][upper], to [v][upper][c].
_TO_SELECTORS = ((6, 0x00CC00CC00CC00CC), (4, 0x00F000F000F000F0))
_SWAPS = (_TO_LANES, *_TO_SELECTORS)
# k-blocks that a CPU takes at once, of one n-block: so few that they stay in its cache.
_CPU_K_BLOCKS = 28


def shuffle_layer(
    weight: torch.Tensor, sf: torch.Tensor, out: Tensors, *, name: str, rows_of: RowsOf
) -> None:
    """Packed E2M1 [E, N, K/2] with scales [E, N, K/128], none of them NaN, into `out`: (blocks int8
    [E, n-blocks, k-blocks, 8704], factors float32 [E, n-blocks, 256]), both contiguous.

    One expert at a time, so that little more memory than the result's is needed. `name` stands for
    the layer in an error.
    """
    for expert_idx, (blocks, factors) in enumerate(zip(*out, strict=True)):
        words = weight[expert_idx].contiguous().view(torch.int64)
        scales = sf[expert_idx].contiguous().view(torch.uint8)
        top, multipliers = _split_scales(words, scales, f"{name}: expert {expert_idx}")
        row_factors = (top.int() << 23).view(torch.float32)
        if weight.shape[1] % BLOCK_N:
            _parts(blocks[-1])[:, 1] = 0
            factors[-1, PART_N:] = 0
        for section in _sections(
            (words, multipliers, row_factors), blocks, factors, rows_of=rows_of
        ):
            section.factor_slots.copy_(section.factors)
            section.multiplier_slots.copy_(section.multipliers)
            for n, k in section.steps():
                section.nibble_slots[n, k].copy_(_selectors(section.words[n, k]))


def unshuffle_layer(
    blocks: torch.Tensor, factors: torch.Tensor, *, num_rows: int, rows_of: RowsOf
) -> Tensors:
    """The inverse: packed E2M1 [E, N, K/2] and scales int32 [E, N, K/128]. The scale of a group of
    zeros may have changed."""
    num_experts, _, num_k_blocks, _ = blocks.shape
    num_values = num_k_blocks * BLOCK_K
    weight = blocks.new_empty((num_experts, num_rows, num_values // 2))
    sf = torch.empty(
        (num_experts, num_rows, num_values // 128), dtype=torch.int32, device=blocks.device
    )
    for expert_idx in range(num_experts):
        words = weight[expert_idx].view(torch.int64)
        scales = sf[expert_idx].view(torch.uint8)
        row_factors = factors.new_empty(num_rows)
        for section in _sections(
            (words, scales, row_factors), blocks[expert_idx], factors[expert_idx], rows_of=rows_of
        ):
            section.factors.copy_(section.factor_slots)
            section.multipliers.copy_(section.multiplier_slots)
            for n, k in section.steps():
                section.words[n, k].copy_(_words_of(section.nibble_slots[n, k]))
        top = (row_factors.view(torch.int32) >> 23).to(torch.uint8)
        scales += (top - TOP_MULTIPLIER).unsqueeze(-1)  # of bytes, which wrap around
    return weight, sf


def _split_scales(words: torch.Tensor, scales: torch.Tensor, name: str) -> Tensors:
    """UE8M0 bytes [N, K/32] as those of the rows' factors, uint8 [N], and of what groups are
    multiplied by, uint8 [N, K/32]."""
    lowest, highest = scales.amin(dim=-1), scales.amax(dim=-1)
    top = highest.clamp(min=1)  # its factor is a normal number
    wide = (top - lowest > MAX_SPREAD).nonzero().flatten()
    if wide.numel():
        top[wide] = _top_of_wide_rows(words[wide], scales[wide], wide, name)
    distances = top.unsqueeze(-1).int() - scales.int()
    return top, (TOP_MULTIPLIER - distances.clamp(0, MAX_SPREAD)).to(torch.uint8)


def _top_of_wide_rows(
    words: torch.Tensor, scales: torch.Tensor, row_idx: torch.Tensor, name: str
) -> torch.Tensor:
    """For rows that fit only if the scales of zeros are let go. row_idx: which rows."""
    is_zero = is_zero_group(words.view(torch.int32), scales.shape[-1])
    lowest = scales.masked_fill(is_zero, _NAN_BYTE).amin(dim=-1).int()
    top = scales.masked_fill(is_zero, 0).amax(dim=-1).clamp(min=1)
    spreads = (top.int() - lowest > MAX_SPREAD).nonzero()
    if spreads.numel():
        first = int(spreads[0])
        low, high = int(lowest[first]) - 127, int(top[first]) - 127
        raise ValueError(
            f"{name}, row {int(row_idx[first])} must have scales within a factor of "
            f"2^{MAX_SPREAD} of each other for sm_90a and tokens in BF16; got 2^{low} to 2^{high}"
        )
    return top


class _Section(NamedTuple):
    """n-blocks of an expert whose rows are those of both warpgroups, or of the first alone: views
    of the rows, and of where they go.

    words: int64 [n, k-block, g, b, w, r, h, product]. nibble_slots: int32 [n, k-block, g, b, w, r,
    q, product]. multipliers, multiplier_slots: uint8 [n, k-block, g, w, r, group, b, h]. factors,
    factor_slots: float32 [n, g, b, w, h, r].
    """

    words: torch.Tensor
    multipliers: torch.Tensor
    factors: torch.Tensor
    nibble_slots: torch.Tensor
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


def _sections(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: torch.Tensor,
    factors: torch.Tensor,
    *,
    rows_of: RowsOf,
) -> Iterator[_Section]:
    """rows: int64 words [N, K/16], uint8 multipliers [N, K/32], float32 factors [N] of an
    expert."""
    words, multipliers, row_factors = rows
    num_full, num_rest = divmod(words.shape[0], BLOCK_N)
    parts = _parts(blocks)
    nibbles = parts[..., :NIBBLE_BYTES].view(torch.int32).unflatten(-1, (2, 4, 8, 4, 4))
    of_groups = parts[..., NIBBLE_BYTES:].view(torch.uint8).unflatten(-1, (4, 8, 2, 2, 2))
    by_row = factors.unflatten(-1, (2, 2, 4, 2, 8))

    def section(of_rows: slice, n: slice, num_parts: int) -> _Section:
        def own(tensor: torch.Tensor) -> torch.Tensor:
            return bf16_rows_by_slot(tensor[of_rows], num_parts, rows_of)  # [n, g, w, r, b, h, ...]

        return _Section(
            own(words.unflatten(-1, (-1, _WORDS_PER_K))).permute(0, 6, 1, 4, 2, 3, 5, 7),
            own(multipliers.unflatten(-1, (-1, _GROUPS_PER_K))).permute(0, 6, 1, 2, 3, 7, 4, 5),
            own(row_factors).permute(0, 1, 4, 2, 5, 3),
            nibbles[n, :, :num_parts],
            of_groups[n, :, :num_parts],
            by_row[n, :num_parts],
        )

    if num_full:
        yield section(slice(num_full * BLOCK_N), slice(num_full), 2)
    if num_rest:
        yield section(slice(num_full * BLOCK_N, None), slice(num_full, None), 1)


def _parts(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.unflatten(-1, (2, PART_BYTES))


def _selectors(words: torch.Tensor) -> torch.Tensor:
    """int64 [.., h, product] as int32 [.., q, product], each lane's words."""
    # [.., product, h], and then of a product's two words q / 2.
    made = words.transpose(-1, -2).contiguous()
    _swap_across(made, _ACROSS, _ACROSS_BITS)
    swap_bits(made, _SWAPS)
    return made.view(torch.int32).transpose(-1, -2)


def _words_of(selectors: torch.Tensor) -> torch.Tensor:
    """The inverse of `_selectors`."""
    made = selectors.transpose(-1, -2).contiguous().view(torch.int64)
    swap_bits(made, reversed(_SWAPS))
    _swap_across(made, _ACROSS, _ACROSS_BITS)
    return made.transpose(-1, -2)


def _swap_across(pairs: torch.Tensor, distance: int, bits: int) -> None:
    """Exchange the bits of the first of each two words that are `distance` higher than `bits` with
    those `bits` of the second, in place."""
    first, second = pairs[..., 0], pairs[..., 1]
    differences = (first >> distance).bitwise_xor_(second).bitwise_and_(bits)
    second.bitwise_xor_(differences)
    first.bitwise_xor_(differences.bitwise_left_shift_(distance))
