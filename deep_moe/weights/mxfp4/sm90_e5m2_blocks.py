"""Expert weights as the SM90 kernel reads them: blocks of 256 rows x 128 k in the order of its math
threads, and one factor per row.

The kernel decodes E2M1 to E5M2 in registers, its scale included: a row of 32-value groups with
scales 2^b is split into the row's factor and a shift of 0 to 26 per group, which is added to the
exponent of each E5M2 value. 26 is all that E5M2 leaves: 0.5 at shift 0 is 2^-14, its smallest
normal number, and 6 at shift 26 is 1.5 * 2^15, its largest exponent. So every product of a decoded
weight and its row's factor is the original weight exactly; a row whose scales spread further is
refused. Groups of zeros fit any scale.

A block is 17408 bytes, two parts for the two math warpgroups, each 8192 bytes of nibbles and 512
of shifts. Row 256*n + 128*g + 32*w + 4*r + 2*b + h of n-block n belongs to warpgroup g, there to
the four lanes 4*r + q of warp w, as row (b, h) of their own. Lane q has the values 32*q to
32*q + 31 of each 128 along k, one scale group. Nibbles lie as [b][k half][thread][k quarter][h],
words of 8 values: magnitudes in bits 0..2 of each nibble, signs where the decoder wants them (see
include/deep_moe/weights/mxfp4/sm90_e5m2_decode.cuh). Shifts lie as [thread][b][h], factors as
[g][b][w][h][r].

For Linear1, rows of gate and up alternate, so that (b, 0) is the gate of (b, 1), and each block's
128 values are ordered so that a warp's 16 stand together where Linear2 reads them (see
include/deep_moe/experts/sm90/l1_epilogue.cuh): value 32*q + 4*c + s is the (16*c + 4*q + s)-th. For
Linear2, rows of zeros fill the last block where hidden is an odd multiple of 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from deep_moe.targets.sm90.decoded_blocks import swap_bits
from deep_moe.targets.sm90.rows import BLOCK_N, PART_N, RowsOf, by_slot, e4m3_rows_by_slot

from ..layers import in_words

BLOCK_K = 128
BLOCK_BYTES = 17408
NIBBLE_BYTES = 8192  # of a warpgroup's part
PART_BYTES = BLOCK_BYTES // 2
MAX_SHIFT = 26
DECODE_EXPONENT = 13  # a decoded weight is 2^(shift - 13) times its E2M1 value; the factor makes up

_MAX_BASE = 254 - DECODE_EXPONENT  # so that the factor is a float32
_NAN_BYTE = 255
_MAGNITUDES = 0x77777777
_WORDS_PER_K = BLOCK_K // 8  # of a row
# The decoder masks the signs of a word's first four values as they are and the others after a shift
# by 4: nibbles 0 to 7 hold the signs of values 4, 0, 5, 1, 6, 2, 7, 3. Three exchanges of bits at a
# distance bring them there, and, in reverse, back; here for two words at once.
_SIGN_SWAPS = tuple(
    (distance, bits << 32 | bits) for distance, bits in ((16, 0x8888), (8, 0x8800), (4, 0x800080))
)
# k-blocks that a CPU takes at once, of one n-block: so few that they stay in its cache, and that
# PyTorch does not wake its other threads, as it does from 32,768 elements on, for microseconds.
_CPU_K_BLOCKS = 14

Tensors = tuple[torch.Tensor, torch.Tensor]


def shuffle_layer(
    weight: torch.Tensor, sf: torch.Tensor, out: Tensors, *, name: str, rows_of: RowsOf
) -> None:
    """Packed E2M1 [E, N, K/2] with scales [E, N, K/128], none of them NaN, into `out`: (blocks int8
    [E, n-blocks, k-blocks, 17408], factors float32 [E, n-blocks, 256]), both contiguous.

    One expert at a time, so that little more memory than the result's is needed. `name` stands for
    the layer in an error.
    """
    for expert_idx, (blocks, factors) in enumerate(zip(*out, strict=True)):
        words = in_words(weight[expert_idx], torch.int32)
        scales = sf[expert_idx].contiguous().view(torch.uint8)
        base, shifts = _split_scales(words, scales, f"{name}: expert {expert_idx}")
        row_factors = (base.int() + DECODE_EXPONENT << 23).view(torch.float32)
        if weight.shape[1] % BLOCK_N:
            _parts(blocks[-1])[:, 1] = 0
            factors[-1, PART_N:] = 0
        for section in _sections((words, shifts, row_factors), blocks, factors, rows_of=rows_of):
            section.factor_slots.copy_(section.factors)
            for n in section.n_steps():
                _fill_shifts(section.shift_units[n], section.shifts[n])
                for k in section.k_steps():
                    _fill_nibbles(section.nibble_units[n, k], section.words[n][..., _words_of(k)])


def unshuffle_layer(
    blocks: torch.Tensor, factors: torch.Tensor, *, num_rows: int, rows_of: RowsOf
) -> Tensors:
    """The inverse: packed E2M1 [E, N, K/2] and scales int32 [E, N, K/128]. The scale of a group of
    zeros may have changed."""
    num_experts, _, num_k_blocks, _ = blocks.shape
    sf = torch.empty((num_experts, num_rows, num_k_blocks), dtype=torch.int32, device=blocks.device)
    weight = sf.new_empty((*sf.shape[:2], num_k_blocks * BLOCK_K // 2), dtype=torch.int8)
    for expert_idx in range(num_experts):
        words = weight[expert_idx].view(torch.int32)
        scales = sf[expert_idx].view(torch.uint8)
        row_factors = factors.new_empty(num_rows)
        for section in _sections(
            (words, scales, row_factors), blocks[expert_idx], factors[expert_idx], rows_of=rows_of
        ):
            section.factors.copy_(section.factor_slots)
            for n in section.n_steps():
                _read_shifts(section.shifts[n], section.shift_units[n])
                for k in section.k_steps():
                    _read_nibbles(section.words[n][..., _words_of(k)], section.nibble_units[n, k])
        base = (row_factors.view(torch.int32) >> 23) - DECODE_EXPONENT
        scales += base.to(torch.uint8).unsqueeze(-1)
    return weight, sf


def _split_scales(words: torch.Tensor, scales: torch.Tensor, name: str) -> Tensors:
    """UE8M0 bytes [N, K/32] as base bytes uint8 [N] and shifts uint8 [N, K/32]: their sum is the
    scale, but of groups of zeros where the others need the room."""
    lowest, highest = scales.amin(dim=-1), scales.amax(dim=-1)
    base = lowest.clamp(max=_MAX_BASE)
    shifts = scales - base.unsqueeze(-1)
    wide = (highest - lowest > MAX_SHIFT).nonzero().flatten()
    if wide.numel():
        base[wide], shifts[wide] = _split_wide_scales(words[wide], scales[wide], wide, name)
    return base, shifts


def _split_wide_scales(
    words: torch.Tensor, scales: torch.Tensor, row_idx: torch.Tensor, name: str
) -> Tensors:
    """The same for rows that fit only if the scales of zeros are let go. row_idx: which rows."""
    is_zero = is_zero_group(words, scales.shape[-1])
    scales = scales.int()
    base = scales.masked_fill(is_zero, _NAN_BYTE).amin(dim=-1).clamp(max=_MAX_BASE)
    highest = scales.masked_fill(is_zero, 0).amax(dim=-1)
    spreads = (highest - base > MAX_SHIFT).nonzero()
    if spreads.numel():
        first = int(spreads[0])
        low, high = int(base[first]) - 127, int(highest[first]) - 127
        raise ValueError(
            f"{name}, row {int(row_idx[first])} must have scales within a factor of 2^{MAX_SHIFT} "
            f"of each other for sm_90a; got 2^{low} to 2^{high}"
        )
    shifts = (scales - base.unsqueeze(-1)).clamp(0, MAX_SHIFT)
    return base.to(torch.uint8), shifts.to(torch.uint8)


def is_zero_group(words: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Whether all values are zero, [N, groups], of groups of 32 in E2M1 words int32 [N, K/8]."""
    return ((words & _MAGNITUDES) == 0).unflatten(-1, (num_groups, 4)).all(dim=-1)


class _Section(NamedTuple):
    """n-blocks of an expert whose rows are those of both warpgroups, or of the first alone: views
    of the rows, and of where they go. `r % 2` and b are one dimension where both are named.

    words: int32 [n, g, w, r / 2, (r % 2, b), h, word]. shifts: uint8, the same with [.., group].
    factors: float32 [n, g, w, r / 2, r % 2, b, h].
    nibble_units, shift_units: of 16 bytes, [n, k-block, g, b, k half, thread / 4, q] and
    [n, k-block, g, thread / 4]. factor_slots: in the order of `factors`.
    """

    words: torch.Tensor
    shifts: torch.Tensor
    factors: torch.Tensor
    nibble_units: torch.Tensor
    shift_units: torch.Tensor
    factor_slots: torch.Tensor

    def n_steps(self) -> Iterator[slice]:
        """n-blocks to take at once: on a GPU all, to launch little."""
        num_blocks = self.words.shape[0]
        return _steps(num_blocks, 1 if self.words.device.type == "cpu" else num_blocks)

    def k_steps(self) -> Iterator[slice]:
        """k-blocks to take at once."""
        num_blocks = self.words.shape[-1] // _WORDS_PER_K
        is_cpu = self.words.device.type == "cpu"
        return _steps(num_blocks, _CPU_K_BLOCKS if is_cpu else num_blocks)


def _steps(length: int, step: int) -> Iterator[slice]:
    for first in range(0, length, step):
        yield slice(first, min(first + step, length))


def _words_of(k_blocks: slice) -> slice:
    return slice(k_blocks.start * _WORDS_PER_K, k_blocks.stop * _WORDS_PER_K)


def _sections(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: torch.Tensor,
    factors: torch.Tensor,
    *,
    rows_of: RowsOf,
) -> Iterator[_Section]:
    """rows: int32 words [N, K/8], uint8 shifts [N, K/32], float32 factors [N] of an expert."""
    num_full, num_rest = divmod(rows[0].shape[0], BLOCK_N)
    parts = _parts(blocks)
    nibble_units = parts[..., :NIBBLE_BYTES].view(torch.complex128).unflatten(-1, (2, 2, 32, 4))
    shift_units = parts[..., NIBBLE_BYTES:].view(torch.complex128)
    factor_slots = by_slot(factors)

    def section(of_rows: slice, n: slice, num_parts: int) -> _Section:
        words, shifts, row_factors = (
            e4m3_rows_by_slot(own[of_rows], num_parts, rows_of) for own in rows
        )
        return _Section(
            words,
            shifts,
            row_factors.unflatten(4, (2, 2)),
            nibble_units[n, :, :num_parts],
            shift_units[n, :, :num_parts],
            factor_slots[n, :num_parts],
        )

    if num_full:
        yield section(slice(num_full * BLOCK_N), slice(num_full), 2)
    if num_rest:
        yield section(slice(num_full * BLOCK_N, None), slice(num_full, None), 1)


def _parts(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.unflatten(-1, (2, PART_BYTES))


def _fill_nibbles(units: torch.Tensor, words: torch.Tensor) -> None:
    pairs = _empty_pairs(words)
    # Four copies with a long inner loop each: one of all would go two words by two.
    for quarter in range(2):
        for h in range(2):
            pairs[..., quarter, h] = words[..., h, quarter::2]
    swap_bits(pairs.view(torch.int64), _SIGN_SWAPS)
    units.copy_(_pair_units(pairs))


def _read_nibbles(words: torch.Tensor, units: torch.Tensor) -> None:
    """The inverse of `_fill_nibbles`."""
    pairs = _empty_pairs(words)
    _pair_units(pairs).copy_(units)
    swap_bits(pairs.view(torch.int64), reversed(_SIGN_SWAPS))
    for quarter in range(2):
        for h in range(2):
            words[..., h, quarter::2] = pairs[..., quarter, h]


def _empty_pairs(words: torch.Tensor) -> torch.Tensor:
    """For a section's words: [n, g, w, r / 2, (r % 2, b), (k-block, q, k half), k quarter, h]."""
    return words.new_empty((*words.shape[:5], words.shape[-1] // 2, 2, 2))


def _pair_units(pairs: torch.Tensor) -> torch.Tensor:
    """A view of them as a section's nibble_units."""
    num_blocks, num_parts = pairs.shape[:2]
    units = pairs.flatten(-2).view(torch.complex128).view(num_blocks, num_parts, 32, 2, -1, 4, 2)
    return units.permute(0, 4, 1, 3, 6, 2, 5)


def _fill_shifts(units: torch.Tensor, shifts: torch.Tensor) -> None:
    quads = _empty_quads(shifts)
    for b in range(2):
        for h in range(2):
            quads[..., b, h] = shifts[:, :, :, :, b::2, h]
    units.copy_(_quad_units(quads))


def _read_shifts(shifts: torch.Tensor, units: torch.Tensor) -> None:
    """The inverse of `_fill_shifts`."""
    quads = _empty_quads(shifts)
    _quad_units(quads).copy_(units)
    for b in range(2):
        for h in range(2):
            shifts[:, :, :, :, b::2, h] = quads[..., b, h]


def _empty_quads(shifts: torch.Tensor) -> torch.Tensor:
    """For a section's shifts: [n, g, w, r / 2, r % 2, (k-block, q), b, h]."""
    return shifts.new_empty((*shifts.shape[:4], 2, shifts.shape[-1], 2, 2))


def _quad_units(quads: torch.Tensor) -> torch.Tensor:
    """A view of them as a section's shift_units."""
    units = quads.view(*quads.shape[:2], 32, -1).view(torch.complex128)
    return units.permute(0, 3, 1, 2)
