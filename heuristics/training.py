"""What the kernels around the products of the differentiable layer are built from, and the sizes of
its rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar

from deep_moe.activations import Activation, activation_of

from .segments import align_up

ROW_ALIGNMENT = 8
"""Rows of each expert are a multiple of this. PyTorch's grouped GEMM asserts on the device that a
group's extent is a multiple of 16 bytes wherever its address follows from it; with 8 BF16 it holds
for either order of either operand."""
VALUES_PER_CHUNK = 8
WARP_SIZE = 32
MAX_EXPERTS = 1024  # a thread each; PyTorch's grouped GEMM has the same bound
MAX_TOPK = 32  # a lane each


def num_padded_rows(num_slots: int, num_experts: int) -> int:
    """Rows that hold all slots, however they fall on the experts.

    >>> num_padded_rows(16, 4)
    48
    """
    most_padding = num_experts * (ROW_ALIGNMENT - 1)
    return (num_slots + most_padding + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT


@dataclass(frozen=True)
class TrainingConfig:
    """One kernel; equal configs give equal kernels. Sizes are arguments of the launch.

    step: which kernel; the name of its header in include/deep_moe/kernels.
    """

    step: ClassVar[str]
    is_cooperative: ClassVar[bool] = False
    num_threads: int = 128
    arch: str = field(kw_only=True)

    @property
    def kernel_name(self) -> str:
        return f"{self.step}_kernel"

    @property
    def activation(self) -> Activation | None:
        """What is compiled in, if any is."""
        return None

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return 0

    def kernel_fields(self) -> dict[str, int | float | bool]:
        """The fields that the kernel's `Config` struct has, in declaration order."""
        others = ("arch", "applied")
        return {name: value for name, value in asdict(self).items() if name not in others}

    def num_ctas(self, num_warps: int) -> int:
        """The grid, if so many warps have work."""
        return -(-num_warps * WARP_SIZE // self.num_threads)


@dataclass(frozen=True)
class RouteSlotsConfig(TrainingConfig):
    """Sorting slots by expert. num_rounds: slots that each thread has."""

    num_threads: int = 256
    num_experts: int = field(kw_only=True)
    num_rounds: int = 8
    alignment: int = ROW_ALIGNMENT
    has_int32_topk_idx: bool = False

    def num_segments(self, num_slots: int) -> int:
        """Each one is a CTA of count_slots and place_slots."""
        return -(-num_slots // (self.num_threads * self.num_rounds))


@dataclass(frozen=True)
class CountSlotsConfig(RouteSlotsConfig):
    step: ClassVar[str] = "count_slots"


@dataclass(frozen=True)
class PlaceSlotsConfig(RouteSlotsConfig):
    step: ClassVar[str] = "place_slots"


@dataclass(frozen=True)
class ScanCountsConfig(TrainingConfig):
    """Where rows begin. num_threads: one per expert."""

    step: ClassVar[str] = "scan_counts"
    num_experts: int = field(kw_only=True)
    alignment: int = ROW_ALIGNMENT

    @classmethod
    def of_experts(cls, num_experts: int, arch: str) -> ScanCountsConfig:
        num_threads = align_up(num_experts, WARP_SIZE)
        return cls(num_threads=num_threads, num_experts=num_experts, arch=arch)


@dataclass(frozen=True)
class GatherRowsConfig(TrainingConfig):
    """chunks_per_lane: of a token, that a lane has on their way at once."""

    step: ClassVar[str] = "gather_rows"
    rounds_to_mxfp8: bool = False
    chunks_per_lane: int = 4

    def num_ctas_of(self, num_tokens: int, num_chunks: int, num_rows: int) -> int:
        """A warp for so many chunks of a token, and one for 32 rows.

        >>> GatherRowsConfig(arch="sm_90a").num_ctas_of(100, num_chunks=192, num_rows=848)
        57
        """
        num_parts = -(-num_chunks // (self.chunks_per_lane * WARP_SIZE))
        return self.num_ctas(num_tokens * num_parts + -(-num_rows // WARP_SIZE))


@dataclass(frozen=True)
class ActivateRowsConfig(TrainingConfig):
    step: ClassVar[str] = "activate_rows"
    applied: Activation = field(default_factory=activation_of)
    has_biases: bool = False
    rounds_to_mxfp8: bool = False
    quantizes: bool = False

    @property
    def activation(self) -> Activation:
        return self.applied


@dataclass(frozen=True)
class ActivateRowsBackwardConfig(TrainingConfig):
    step: ClassVar[str] = "activate_rows_backward"
    applied: Activation = field(default_factory=activation_of)
    has_biases: bool = False

    @property
    def activation(self) -> Activation:
        return self.applied


@dataclass(frozen=True)
class ScatterRowsConfig(TrainingConfig):
    """num_sources: 2 where two rows are added up first."""

    step: ClassVar[str] = "scatter_rows"
    num_sources: int = 1
    has_topk_weights: bool = True
    has_biases: bool = False


@dataclass(frozen=True)
class QuantizeRowsConfig(TrainingConfig):
    step: ClassVar[str] = "quantize_rows"


@dataclass(frozen=True)
class DequantizeRowsConfig(TrainingConfig):
    step: ClassVar[str] = "dequantize_rows"


@dataclass(frozen=True)
class QuantizeWeightsConfig(TrainingConfig):
    """has_same, has_transposed: the layouts that are written, or with compares those that are
    compared with what would be written."""

    step: ClassVar[str] = "quantize_weights"
    num_threads: int = 256
    has_same: bool = True
    has_transposed: bool = False
    compares: bool = False


@dataclass(frozen=True)
class QuantizeColumnsConfig(TrainingConfig):
    """gathers: rows are those of their slots' tokens. stores_rows: as quantized rows, too."""

    step: ClassVar[str] = "quantize_columns"
    num_threads: int = 256
    gathers: bool = False
    stores_rows: bool = False


@dataclass(frozen=True)
class RoundWeightsConfig(TrainingConfig):
    step: ClassVar[str] = "round_weights"
