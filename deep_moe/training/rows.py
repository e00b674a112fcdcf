"""Tokens, slots, rows.

    tokens  [num_tokens, ...]   as the caller has them
    slots   [num_tokens, topk]  slot = token * topk + k: who goes to which expert
    rows    [num_rows, ...]     what experts read and write: an expert's side by side, in the order
                                of their slots, padded to a multiple of ROW_ALIGNMENT with zeros

The number of rows follows from shapes alone: every slot, and the most padding there can be. So no
host has to wait for a count; what lies behind the last expert's end is neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """As kernels load it, 16 bytes at once: a copy of a view that begins elsewhere."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@dataclass(frozen=True)
class Rows:
    """How slots and rows belong together; all int32, on the tokens' device.

    offs [experts]: where each expert's rows end. row_of_slot [tokens, topk]: -1 for a slot that
    names no expert. slot_of_row [rows]: -1 for padding.
    """

    offs: torch.Tensor
    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.slot_of_row.shape[0]

    @property
    def num_topk(self) -> int:
        return self.row_of_slot.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.row_of_slot.shape[0]
