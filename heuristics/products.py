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

    cluster_size: CTAs that share copies of weights. sums_rows: K are the rows of each expert, as
    gradients of weights have it. adds: to what y holds, in place of writing it. y_bytes: of a
    value, 2 for BF16, 4 for float32 that is added to.

    >>> config = GroupedProductConfig(arch="sm_90a")
    >>> config.num_threads, config.smem_bytes
    (384, 224368)
    """

    step: ClassVar[str] = "grouped_product"
    num_threads: int = 12 * WARP_SIZE  # the math warps, the loader and the scales' warps
    num_math_warps: int = 8
    num_scale_warps: int = 3
    num_math_registers: int = 232
    num_loader_registers: int = 40
    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    num_stages: int = 3
    cluster_size: int = 2
    sums_rows: bool = False
    adds: bool = False
    y_bytes: int = 2

    @property
    def smem_bytes(self) -> int:
        """Stages, the factors of rows and two mbarriers for each, results of 16 rows for each math
        warp, in BF16 or half of them in float32, and headers of tiles."""
        operands = (self.block_m + self.block_n) * self.block_k
        factors = self.block_n // K_GROUP * self.block_m * 4
        results = self.num_math_warps * 16 * (self.block_n * 2 + 64)
        return self.num_stages * (operands + factors + 16) + results + (self.num_stages + 1) * 16

    def kernel_fields(self) -> dict[str, int | float | bool]:
        return {**super().kernel_fields(), "smem_bytes": self.smem_bytes}

    def max_ctas(self, num_rows: int, num_experts: int, num_columns: int) -> int:
        """CTAs that have a tile at most, in whole clusters, however the rows fall on the experts.
        num_rows: of all experts, or of each matrix where sums go over rows.

        >>> GroupedProductConfig(arch="sm_90a").max_ctas(200, num_experts=4, num_columns=300)
        10
        """
        num_m_blocks = num_rows // self.block_m + min(num_experts, num_rows)
        if self.sums_rows:
            num_m_blocks = num_experts * (num_rows // self.block_m)
        num_tiles = num_m_blocks * -(-num_columns // self.block_n)
        return -(-num_tiles // self.cluster_size) * self.cluster_size
