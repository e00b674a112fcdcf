"""What an SM90 kernel is built from."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MegaMoEConfig


@dataclass(frozen=True)
class Sm90Config(MegaMoEConfig):
    """num_mmas_per_group: products between two waits. num_block_slots: blocks whose headers, and
    what the epilogues need of them, are in shared memory at once. num_publish_warps: dispatch warps
    that tell of stored blocks and pull no tokens."""

    num_mmas_per_group: int
    num_block_slots: int
    num_publish_warps: int
