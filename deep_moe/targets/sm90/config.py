"""What an SM90 kernel is built from."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MegaMoEConfig


@dataclass(frozen=True)
class Sm90Config(MegaMoEConfig):
    """num_mmas_per_group: products between two waits. num_block_slots: blocks whose headers, and
    what the epilogues need of them, are in shared memory at once."""

    num_mmas_per_group: int
    num_block_slots: int
