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
include/deep_moe/sm90/fp4_decode.cuh). Shifts lie as [thread][b][h], factors as [g][b][w][h][r].

For Linear1, rows of gate and up alternate, so that (b, 0) is the gate of (b, 1), and each block's
128 values are ordered so that a warp's 16 stand together where Linear2 reads them (see
include/deep_moe/sm90/l1_epilogue.cuh): value 32*q + 4*c + s is the (16*c + 4*q + s)-th. For
Linear2, rows of zeros fill the last block where hidden is an odd multiple of 128.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK_N = 256
BLOCK_K = 128
BLOCK_BYTES = 17408
NIBBLE_BYTES = 8192  # of a warpgroup's part
PART_BYTES = BLOCK_BYTES // 2
MAX_SHIFT = 26
DECODE_EXPONENT = 13  # a decoded weight is 2^(shift - 13) times its E2M1 value; the factor makes up

_MAX_BASE = 254 - DECODE_EXPONENT  # so that the factor is a float32
_NAN_BYTE = 255
# Bit of a value's sign in 8 packed E2M1 values, and how far left it goes. The decoder masks the
# first four as they are and the others after a shift by 4.
_SIGN_MOVES = ((3, 4), (7, 8), (11, 12), (15, 16), (19, -16), (23, -12), (27, -8), (31, -4))
_MAGNITUDES = 0x77777777

Tensors = tuple[torch.Tensor, torch.Tensor]
Rows = Callable[[torch.Tensor], torch.Tensor]


def shuffle_layer(weight: torch.Tensor, sf: torch.Tensor, *, name: str, is_l1: bool) -> Tensors:
    """(blocks int8 [E, n-blocks, k-blocks, 17408], factors float32 [E, n-blocks, 256]) of packed
    E2M1 [E, N, K/2] with scales [E, N, K/128].

    One expert at a time, so that little more memory than the result's is needed. `name` stands for
    the layer in an error.
    """
    num_experts, num_rows, num_packed = weight.shape
    num_n_blocks = -(-num_rows // BLOCK_N)
    shape = (num_experts, num_n_blocks, 2 * num_packed // BLOCK_K, BLOCK_BYTES)
    blocks = torch.empty(shape, dtype=torch.int8, device=weight.device)
    factors = torch.empty((*shape[:2], BLOCK_N), dtype=torch.float32, device=weight.device)
    order = _interleave if is_l1 else _pad
    for expert_idx in range(num_experts):
        packed = weight[expert_idx].contiguous().view(torch.int32)
        scales = sf[expert_idx].contiguous().view(torch.uint8)
        base, shifts = _split_scales(packed, scales, f"{name}: expert {expert_idx}")
        row_factors = ((base + DECODE_EXPONENT) << 23).view(torch.float32)
        _fill_expert(
            blocks[expert_idx],
            factors[expert_idx],
            order(_move_signs(packed, back=False)),
            order(shifts),
            order(row_factors),
        )
    return blocks, factors


def unshuffle_layer(
    blocks: torch.Tensor, factors: torch.Tensor, *, num_rows: int, is_l1: bool
) -> Tensors:
    """The inverse: packed E2M1 [E, N, K/2] and scales int32 [E, N, K/128]. The scale of a group of
    zeros may have changed."""
    num_experts, _, num_k_blocks, _ = blocks.shape
    weight = torch.empty(
        (num_experts, num_rows, num_k_blocks * BLOCK_K // 2), dtype=torch.int8, device=blocks.device
    )
    sf = torch.empty((num_experts, num_rows, num_k_blocks), dtype=torch.int32, device=blocks.device)
    order = _separate if is_l1 else _copy
    for expert_idx in range(num_experts):
        words, shifts, row_factors = _read_expert(blocks[expert_idx], factors[expert_idx])
        base = (row_factors.view(torch.int32) >> 23) - DECODE_EXPONENT
        scales = (shifts.int() + base.unsqueeze(-1)).to(torch.uint8)
        weight[expert_idx] = order(_move_signs(words, back=True)[:num_rows]).view(torch.int8)
        sf[expert_idx] = order(scales[:num_rows]).view(torch.int32)
    return weight, sf


def _split_scales(packed: torch.Tensor, scales: torch.Tensor, name: str) -> Tensors:
    """UE8M0 bytes [N, K/32] as base bytes int32 [N] and shifts uint8 [N, K/32]: their sum is the
    scale, but of groups of zeros."""
    scales = scales.int()
    is_zero = ((packed & _MAGNITUDES) == 0).unflatten(-1, (scales.shape[-1], 4)).all(dim=-1)
    lowest = scales.amin(dim=-1)
    fits = scales.amax(dim=-1) - lowest <= MAX_SHIFT
    lowest_in_use = scales.masked_fill(is_zero, _NAN_BYTE).amin(dim=-1)
    # Scales of zeros are kept too where they fit.
    base = lowest.where(fits, lowest_in_use).clamp(max=_MAX_BASE)
    highest_in_use = scales.masked_fill(is_zero, 0).amax(dim=-1)
    spreads = (highest_in_use - base > MAX_SHIFT).nonzero()
    if spreads.numel():
        row = int(spreads[0])
        low, high = int(base[row]) - 127, int(highest_in_use[row]) - 127
        raise ValueError(
            f"{name}, row {row} must have scales within a factor of 2^{MAX_SHIFT} of each other "
            f"for sm_90a; got 2^{low} to 2^{high}"
        )
    nans = (scales == _NAN_BYTE).any(dim=-1).nonzero()
    if nans.numel():
        raise ValueError(f"{name}, row {int(nans[0])} must have scales that are numbers; got NaN")
    return base, (scales - base.unsqueeze(-1)).clamp(0, MAX_SHIFT).to(torch.uint8)


def _move_signs(words: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Words of 8 E2M1 codes with each sign where the decoder wants it, or back in its nibble."""
    moved = words & _MAGNITUDES
    for bit, distance in _SIGN_MOVES:
        if back:
            bit, distance = bit + distance, -distance
        shifted = words << distance if distance > 0 else words >> -distance
        target = 1 << (bit + distance)
        moved |= shifted & (target - (1 << 32) if target == 1 << 31 else target)
    return moved


def _fill_expert(
    blocks: torch.Tensor,
    factors: torch.Tensor,
    words: torch.Tensor,
    shifts: torch.Tensor,
    row_factors: torch.Tensor,
) -> None:
    """Rows in kernel order: words int32 [N, K/8], shifts uint8 [N, K/32], factors float32 [N]."""
    nibbles, shift_bytes = _parts(blocks)
    # [n, g, w, r, b, h, k-block, q, k half, k quarter]
    rows = (blocks.shape[0], 2, 4, 8, 2, 2)
    words = words.view(*rows, blocks.shape[1], 4, 2, 2)
    nibbles.copy_(words.permute(0, 6, 1, 4, 8, 2, 3, 7, 9, 5))
    shifts = shifts.view(*rows, blocks.shape[1], 4)
    shift_bytes.copy_(shifts.permute(0, 6, 1, 2, 3, 7, 4, 5))
    factors.view(*rows[:2], 2, 4, 2, 8).copy_(row_factors.view(rows).permute(0, 1, 4, 2, 5, 3))


def _read_expert(
    blocks: torch.Tensor, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `_fill_expert`: copies."""
    nibbles, shift_bytes = _parts(blocks)
    num_rows = blocks.shape[0] * BLOCK_N
    words = nibbles.permute(0, 2, 5, 6, 3, 9, 1, 7, 4, 8).reshape(num_rows, -1)
    shifts = shift_bytes.permute(0, 2, 3, 4, 6, 7, 1, 5).reshape(num_rows, -1)
    slots = factors.view(blocks.shape[0], 2, 2, 4, 2, 8)
    return words, shifts, slots.permute(0, 1, 3, 5, 2, 4).reshape(num_rows)


def _parts(blocks: torch.Tensor) -> Tensors:
    """Views of an expert's blocks: nibbles int32 [n, k-block, g, b, k half, w, r, q, k quarter, h]
    and shifts uint8 [n, k-block, g, w, r, q, b, h]."""
    num_n_blocks, num_k_blocks, _ = blocks.shape
    parts = blocks.view(num_n_blocks, num_k_blocks, 2, PART_BYTES)
    nibbles = parts[..., :NIBBLE_BYTES].view(torch.int32)
    shifts = parts[..., NIBBLE_BYTES:].view(torch.uint8)
    return nibbles.unflatten(-1, (2, 2, 4, 8, 4, 2, 2)), shifts.unflatten(-1, (4, 8, 4, 2, 2))


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """Rows [gate | up], of values v = 32*q + 4*c + s in each 128, to [c][q][s][gate, up]."""
    parts = rows.unflatten(0, (2, rows.shape[0] // BLOCK_N, 4, 8, 4))
    return parts.movedim((1, 3, 2, 4, 0), (0, 1, 2, 3, 4)).reshape(rows.shape)


def _separate(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `_interleave`."""
    parts = rows.unflatten(0, (rows.shape[0] // BLOCK_N, 8, 4, 4, 2))
    return parts.movedim((4, 0, 2, 1, 3), (0, 1, 2, 3, 4)).reshape(rows.shape)


def _pad(rows: torch.Tensor) -> torch.Tensor:
    """With rows of zeros up to whole blocks."""
    num_missing = -rows.shape[0] % BLOCK_N
    return torch.cat([rows, rows.new_zeros((num_missing, *rows.shape[1:]))])


def _copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone(memory_format=torch.contiguous_format)
