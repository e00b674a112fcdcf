"""What the products of quantized rows and weights are built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .training import WARP_SIZE, TrainingConfig

K_GROUP = 128
"""Values along K, and rows of weights, that share a scale."""
COLUMN_ALIGNMENT = 8  # BF16 values that a thread stores at once


@dataclass(frozen=True)
class GroupedProductConfig(TrainingConfig):
    """Products of E4M3 on SM90, in tiles of block_m rows and block_n columns.

    >>> config = GroupedProductConfig(arch="sm_90a")
    >>> config.num_threads, config.smem_bytes
    (288, 196704)
    """

    step: ClassVar[str] = "grouped_product"
    num_threads: int = 9 * WARP_SIZE  # the math warps and the loader
    num_math_warps: int = 8
    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    num_stages: int = 6
    cluster_size: int = 1

    @property
    def smem_bytes(self) -> int:
        """Stages, and two mbarriers for each."""
        return self.num_stages * ((self.block_m + self.block_n) * self.block_k + 16)

    def kernel_fields(self) -> dict[str, int | float | bool]:
        return {**super().kernel_fields(), "smem_bytes": self.smem_bytes}

    def max_tiles(self, num_rows: int, num_experts: int, num_columns: int) -> int:
        """Tiles that there are at most, however the rows fall on the experts.

        >>> GroupedProductConfig(arch="sm_90a").max_tiles(200, num_experts=4, num_columns=300)
        15
        """
        num_m_blocks = num_rows // self.block_m + min(num_experts, num_rows)
        return num_m_blocks * -(-num_columns // self.block_n)
