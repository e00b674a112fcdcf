"""What an SM100 kernel is built from."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MegaMoEConfig


@dataclass(frozen=True)
class Sm100Config(MegaMoEConfig):
    """store_block_m: tokens that an epilogue warpgroup stores at once. num_tmem_stages:
    accumulators. num_tmem_columns: of tensor memory, that a CTA allocates."""

    store_block_m: int
    num_tmem_stages: int
    num_tmem_columns: int
