"""Where two runs of a case differ, step by step, so that no difference is blamed on a later step.

1. Linear1's output, E4M3. On the way there, the activation uses ex2.approx and rcp.approx, whose
   last bits the emulator does not know (2 and 1 ulp by PTX): a value that close to the middle
   between two E4M3 numbers may go to the other one. All else up to here is exact or ordered.
2. Contributions, BF16: Linear2 of equal inputs is equal. A slot that differs in 1 is left out.
3. y, BF16: sums of equal contributions are equal. A token that differs in 2 is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.hardware_layer.record import Arrays

# Values of Linear1's output are about 2^-21 of their size away from what other last bits of the
# activation make of them, and E4M3 numbers 2^-3 to 2^-4 of theirs from each other: one in a hundred
# thousand values crosses over.
FLIPS_PER_VALUE = 1e-5
ALWAYS_ALLOWED_FLIPS = 1


@dataclass(frozen=True)
class Agreement:
    """Of one case. Numbers of values that differ for no reason, and of those that do for step 1."""

    num_l1_values: int
    num_flips: int  # bytes of Linear1's output that are a neighbouring E4M3 number
    num_l1_jumps: int  # bytes of it that differ by more
    num_scales: int  # scales of it
    num_contributions: int  # in slots with equal Linear1 output
    num_ys: int  # in tokens with equal contributions

    @property
    def max_flips(self) -> int:
        return ALWAYS_ALLOWED_FLIPS + round(FLIPS_PER_VALUE * self.num_l1_values)

    @property
    def is_good(self) -> bool:
        unexplained = self.num_l1_jumps + self.num_scales + self.num_contributions + self.num_ys
        return unexplained == 0 and self.num_flips <= self.max_flips


def agreement(one: Arrays, other: Arrays, num_ranks: int) -> Agreement:
    counts = np.zeros(6, np.int64)
    for rank in range(num_ranks):
        l1, other_l1 = (arrays[f"l1_output{rank}"] for arrays in (one, other))
        distances = np.abs(_e4m3_order(l1) - _e4m3_order(other_l1))
        is_scale_equal = one[f"l1_scales{rank}"] == other[f"l1_scales{rank}"]
        is_slot_equal = (distances == 0).all(axis=2) & is_scale_equal.all(axis=2)
        differs = one[f"contributions{rank}"] != other[f"contributions{rank}"]
        is_token_equal = is_slot_equal.all(axis=1) & ~differs.any(axis=(1, 2))
        y_differs = one[f"y{rank}"] != other[f"y{rank}"]
        counts += [
            l1.size,
            (distances == 1).sum(),
            (distances > 1).sum(),
            (~is_scale_equal).sum(),
            differs[is_slot_equal].sum(),
            y_differs[is_token_equal].sum(),
        ]
    return Agreement(*counts.tolist())


def _e4m3_order(codes: np.ndarray) -> np.ndarray:
    """Integers in the order of the E4M3 numbers, neighbours one apart, both zeros at 0."""
    magnitudes = (codes & 0x7F).astype(np.int32)
    return np.where(codes & 0x80, -magnitudes, magnitudes)
