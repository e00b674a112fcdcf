"""NVFP4 weights as the SM90 kernel reads them where tokens are BF16
(deep_moe/targets/sm90/decoded_blocks.py, e2m1_blocks.py).

The kernel decodes E2M1 to BF16 in registers, where it stands 2^126 times too low, and multiplies it
by its group's scale: 2 + 4 significant bits, which BF16 holds. A multiplier is a byte of 5 bits of
exponent and 3 of mantissa, for scales from 2^-9 to 448 with all of them normalized: byte x stands
for the BF16 whose bits are 0x7000 + 16*x, which is the scale times 2^119. So a decoded value is
2^-7 of its code times its scale, and the row's factor is 2^7 times the scale of its matrix.

A group whose scale is zero has byte 0, and codes of zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_moe.formats.nvfp4 import GROUP_SIZE
from deep_moe.targets.sm90.decoded_blocks import Rows
from deep_moe.targets.sm90.e2m1_blocks import E2m1Blocks

from ..layers import in_words

if TYPE_CHECKING:
    from ..layers import LayerTensors

ROW_FACTOR = 2.0**7  # in units of the matrix's scale
MAX_GLOBAL_SCALE = 2.0**120  # so that a row's factor is a float32

# Of the smallest scale, 2^-9: of its multiplier the exponent's lower 5 bits.
_LOWEST_EXPONENT = 13
_SIGNS = -0x7777777777777778  # of 16 codes: 0x8888888888888888


class Nvfp4Blocks(E2m1Blocks):
    group = GROUP_SIZE

    def split(self, layer: LayerTensors, name: str, *, num_matrices: int) -> Rows:
        weight, sf, global_sf = layer
        if bool((global_sf > MAX_GLOBAL_SCALE).any()):
            raise ValueError(
                f"{name} must have scales of matrices of at most 2^120 with tokens in BF16; got "
                f"{global_sf.max().item():.6g}"
            )
        words = in_words(weight, torch.int64)
        scales = sf.contiguous().view(torch.uint8)
        is_zero = scales == 0
        if bool(is_zero.any()):
            words = words.where(~is_zero, words & _SIGNS)
        factors = (global_sf * ROW_FACTOR).repeat_interleave(words.shape[0] // num_matrices)
        return Rows(words.unsqueeze(-1), _multipliers(scales), factors)

    def joined(self, rows: Rows, *, num_matrices: int) -> LayerTensors:
        of_matrices = rows.factors.unflatten(0, (num_matrices, -1))[:, 0]
        return (
            rows.words.flatten(1).view(torch.int8),
            _scales(rows.multipliers).view(torch.float8_e4m3fn),
            of_matrices / ROW_FACTOR,
        )


BLOCKS = Nvfp4Blocks()


def _multipliers(scales: torch.Tensor) -> torch.Tensor:
    """Of E4M3 bytes without a sign, uint8."""
    return _table(scales.device)[scales.int()]


def _scales(multipliers: torch.Tensor) -> torch.Tensor:
    """The inverse: the E4M3 bytes, which are in the order of their multipliers."""
    return torch.bucketize(multipliers, _table(multipliers.device)).to(torch.uint8)


def _table(device: torch.device) -> torch.Tensor:
    """The multiplier of each E4M3 byte up to 0x7e, uint8."""
    scales = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    mantissas, exponents = torch.frexp(scales.float())  # from 1/2 to 1, of which the first bit is 1
    made = (exponents - 1 + 9 + _LOWEST_EXPONENT) * 8 + (mantissas * 16 - 8)
    return made.where(scales.float() > 0, 0).to(torch.uint8)
