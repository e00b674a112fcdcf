"""`PrepareInputsConfig`: everything that the kernel which prepares inputs is built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

VALUES_PER_CHUNK = 8  # what a lane loads at once, 16 bytes of BF16


@dataclass(frozen=True)
class PrepareInputsConfig:
    """One kernel; equal configs give equal kernels. Sizes are arguments of the launch.

    quantizes: whether tokens become E4M3; else they stay BF16. has_float_scales: with a float32
    scale for 128 values; else with a UE8M0 scale for 32. has_int32_topk_idx: else int64.
    has_bf16_topk_weights: else float32. num_expert_copies: columns of the expert map, 0 for none.
    num_chunks_per_lane: loads of 16 bytes that each lane has under way at once. num_row_chunks: of
    8 values in a row of x, if the buffer's rows do not follow each other without gaps;
    num_buffer_row_chunks, num_buffer_row_scales: from one of its rows to the next.

    >>> config = PrepareInputsConfig(num_threads=128, num_chunks_per_lane=4, arch="sm_90a")
    >>> [config.num_ctas(config.num_chunks(n * 7168)) for n in (1, 2, 8192)]
    [2, 4, 14336]
    """

    quantizes: bool = True
    has_float_scales: bool = False
    has_int32_topk_idx: bool = False
    has_bf16_topk_weights: bool = False
    has_token_mask: bool = False
    num_expert_copies: int = 0
    has_int64_expert_map: bool = False
    has_expert_load: bool = False
    num_row_chunks: int = 0
    num_buffer_row_chunks: int = 0
    num_buffer_row_scales: int = 0
    num_threads: int = 128
    num_chunks_per_lane: int = 4
    arch: str = field(kw_only=True)

    def kernel_fields(self) -> dict[str, int | float | bool]:
        """The fields that the kernel's `Config` struct has, in declaration order."""
        return {name: value for name, value in asdict(self).items() if name != "arch"}

    def num_chunks(self, num_values: int) -> int:
        """What lanes load at once, for `num_values` values of x."""
        return num_values // VALUES_PER_CHUNK

    def num_ctas(self, num_chunks: int) -> int:
        """The grid: a lane for each chunk."""
        return -(-num_chunks // (self.num_chunks_per_lane * self.num_threads))
