"""`PrepareInputsConfig`: everything that the kernel which prepares inputs is built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import ClassVar

from .segments import align_up, ceil_div

VALUES_PER_CHUNK = 8  # what a lane loads at once, 16 bytes of BF16
CHUNKS_PER_LANE = 4
MAX_THREADS = 1024  # of a CTA


def whole_token_fields(hidden: int) -> dict[str, int]:
    """The fields that differ where a token of so many values has one scale: its CTA has as many
    threads as load it with `CHUNKS_PER_LANE` loads each, or with more where it is very wide.

    >>> [list(whole_token_fields(hidden).values()) for hidden in (128, 7168, 65536)]
    [[16, 32, 1], [896, 224, 4], [8192, 1024, 8]]
    """
    num_chunks = hidden // VALUES_PER_CHUNK
    num_threads = min(align_up(ceil_div(num_chunks, CHUNKS_PER_LANE), 32), MAX_THREADS)
    return {
        "num_token_chunks": num_chunks,
        "num_threads": num_threads,
        "num_chunks_per_lane": ceil_div(num_chunks, num_threads),
    }


@dataclass(frozen=True)
class PrepareInputsConfig:
    """One kernel; equal configs give equal kernels. Sizes are arguments of the launch.

    quantizes: whether tokens become E4M3 or E2M1; else they stay BF16. has_float_scales: with a
    float32 scale for 128 values; else with a UE8M0 scale for 32. has_int32_topk_idx: else int64.
    has_bf16_topk_weights: else float32. masks_padding: True in the mask is padding; else False is.
    num_expert_copies: columns of the expert map, 0 for none.
    num_chunks_per_lane: loads of 16 bytes that each lane has under way at once. num_row_chunks: of
    8 values in a row of x, if the buffer's rows do not follow each other without gaps;
    num_buffer_row_chunks, num_buffer_row_scales: from one of its rows to the next.
    num_token_chunks: of 8 values in a token, where one scale is for all of them: each CTA has one;
    0 where scales are for fewer. packs_e2m1: tokens become E2M1, with an E4M3 scale for 16 values
    beside that one. has_token_scale: the caller gives that scale, the same for all tokens.
    num_router_experts: of the logits that stand in place of a router's output, 0 for none; the
    fields behind it say what `Router` does, and which types there are.

    >>> config = PrepareInputsConfig(num_threads=128, num_chunks_per_lane=4, arch="sm_90a")
    >>> [config.num_ctas(config.num_chunks(n * 7168)) for n in (1, 2, 8192)]
    [2, 4, 14336]
    """

    kernel_name: ClassVar[str] = "prepare_inputs_kernel"
    is_cooperative: ClassVar[bool] = False
    smem_bytes: ClassVar[int] = 0
    activation: ClassVar[None] = None

    quantizes: bool = True
    has_float_scales: bool = False
    has_int32_topk_idx: bool = False
    has_bf16_topk_weights: bool = False
    has_token_mask: bool = False
    masks_padding: bool = False
    num_expert_copies: int = 0
    has_int64_expert_map: bool = False
    has_expert_load: bool = False
    num_row_chunks: int = 0
    num_buffer_row_chunks: int = 0
    num_buffer_row_scales: int = 0
    num_token_chunks: int = 0
    packs_e2m1: bool = False
    has_token_scale: bool = False
    num_router_experts: int = 0
    has_bf16_logits: bool = False
    router_scoring: int = 0
    has_correction_bias: bool = False
    num_expert_groups: int = 1
    num_chosen_groups: int = 1
    renormalizes: bool = False
    num_threads: int = 128
    num_chunks_per_lane: int = CHUNKS_PER_LANE
    arch: str = field(kw_only=True)

    def kernel_fields(self) -> dict[str, int | float | bool]:
        """The fields that the kernel's `Config` struct has, in declaration order."""
        return {name: value for name, value in asdict(self).items() if name != "arch"}

    def num_chunks(self, num_values: int) -> int:
        """What lanes load at once, for `num_values` values of x."""
        return num_values // VALUES_PER_CHUNK

    def num_router_ctas(self, num_tokens: int) -> int:
        """CTAs that choose experts, a warp for each token."""
        return ceil_div(num_tokens, self.num_threads // 32) if self.num_router_experts else 0

    def num_ctas(self, num_chunks: int) -> int:
        """The grid: a lane for each chunk, or a CTA for each token."""
        if self.num_token_chunks:
            return num_chunks // self.num_token_chunks
        return -(-num_chunks // (self.num_chunks_per_lane * self.num_threads))
