"""UE8M0 scales of weights that the SM90 kernel decodes to BF16 (decoded_blocks.py): a row's factor
is the largest of its groups' scales, and each group has what its own is below that, as a power of
two that decoded values are multiplied by. A multiplier is a byte x for 2^(x - 127).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_NAN_BYTE = 255


@dataclass(frozen=True)
class PowersOfTwo:
    """top_multiplier: byte of what brings a decoded value to what the row's largest scale gives.
    max_spread: log2 of a row's largest scale over its smallest, of groups that are not zero."""

    top_multiplier: int
    max_spread: int

    def split(
        self, scales: torch.Tensor, is_zero: Callable[[torch.Tensor], torch.Tensor], name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """UE8M0 bytes [N, K/32], none of them NaN, as the rows' factors, float32 [N], and the
        groups' multipliers, uint8 [N, K/32]. Or a ValueError that names the row, of what `name`
        stands for. is_zero: whether all values are zero, bool [n, K/32], of n rows by number;
        groups of zeros fit any scale."""
        lowest, highest = scales.amin(dim=-1), scales.amax(dim=-1)
        top = highest.clamp(min=1)  # its factor is a normal number
        wide = (top - lowest > self.max_spread).nonzero().flatten()
        if wide.numel():
            top[wide] = self._top_of_wide_rows(scales[wide], is_zero(wide), wide, name)
        distances = (top.unsqueeze(-1).int() - scales.int()).clamp(0, self.max_spread)
        factors = (top.int() << 23).view(torch.float32)
        return factors, (self.top_multiplier - distances).to(torch.uint8)

    def joined(self, factors: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
        """The inverse: UE8M0 bytes."""
        top = (factors.view(torch.int32) >> 23).to(torch.uint8)
        return multipliers + (top - self.top_multiplier).unsqueeze(-1)  # of bytes, which wrap

    def _top_of_wide_rows(
        self, scales: torch.Tensor, is_zero: torch.Tensor, row_idx: torch.Tensor, name: str
    ) -> torch.Tensor:
        """For rows that fit only if the scales of zeros are let go."""
        lowest = scales.masked_fill(is_zero, _NAN_BYTE).amin(dim=-1).int()
        top = scales.masked_fill(is_zero, 0).amax(dim=-1).clamp(min=1)
        spreads = (top.int() - lowest > self.max_spread).nonzero()
        if spreads.numel():
            first = int(spreads[0])
            low, high = int(lowest[first]) - 127, int(top[first]) - 127
            raise ValueError(
                f"{name}, row {int(row_idx[first])} must have scales within a factor of "
                f"2^{self.max_spread} of each other with tokens in BF16; got 2^{low} to "
                f"2^{high}"
            )
        return top
