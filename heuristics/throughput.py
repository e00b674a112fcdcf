"""The throughput all-to-all: its sizes, its memory, and what its kernels are built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

from deep_moe.formats.sizes import K_BLOCK
from deep_moe.tokens import ALL_TO_ALL_FORMATS, TokenFormat, token_format

from .low_latency import (
    CHUNK_BYTES,
    DATA_ALIGNMENT,
    MAX_THREADS,
    SEGMENT_ALIGNMENT,
    check_row_format,
    check_split_sizes,
    grouped_format,
    travelling_words,
)
from .segments import Layout, LayoutBuilder, align_up
from .shape import MAX_RANKS, MAX_TOPK, require_int

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName

# A slot's expert and its place among its rank's slots share a word: 11 and 20 bits and a mark. So
# do the rank of an expert and a row there: 7 and 24.
MAX_EXPERTS = 2048
MAX_TOKENS_PER_RANK = 32_768
MAX_RECV_ROWS = 1 << 24
MAX_ALIGNMENT = 4096
MAX_CTAS = 512  # of a kernel; each has words for every rank
MAX_SHARING_WARPS = 8  # of a CTA, half of its warps; each tells for itself

Step = Literal["dispatch", "combine", "scalars"]


@dataclass(frozen=True)
class ThroughputShape:
    """Sizes of a throughput all-to-all, equal on every rank.

    num_ranks: 1 to 72. num_experts: of all ranks together, a multiple of num_ranks, at most 2048.
    num_topk: 1 to 32, at most num_experts. hidden: a multiple of 128. max_tokens_per_rank: most
    tokens of one call, 1 to 32,768. max_recv_rows: most rows that a rank's experts get in one call,
    padding included, 1 to 2^24. expert_alignment: experts begin at a multiple of this, a power of
    two, 1 to 4096. group_size, dtype: as of LowLatencyShape.

    >>> shape = ThroughputShape(8, 256, 8, 7168, 4096, 40_960)
    >>> shape.num_experts_per_rank, throughput_buffer_layout(shape).num_bytes >> 20
    (32, 617)
    """

    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    max_tokens_per_rank: int
    max_recv_rows: int
    expert_alignment: int = 128
    group_size: int = K_BLOCK
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        limits = {
            "num_ranks": (1, MAX_RANKS, 1),
            "num_experts": (1, MAX_EXPERTS, 1),
            "num_topk": (1, MAX_TOPK, 1),
            "hidden": (K_BLOCK, None, K_BLOCK),
            "max_tokens_per_rank": (1, MAX_TOKENS_PER_RANK, 1),
            "max_recv_rows": (1, MAX_RECV_ROWS, 1),
            "expert_alignment": (1, MAX_ALIGNMENT, 1),
        }
        check_split_sizes(self, limits)
        if self.expert_alignment & (self.expert_alignment - 1):
            raise ValueError(
                f"expert_alignment must be a power of two; got {self.expert_alignment}"
            )

    @property
    def buffer_layout(self) -> Layout:
        """Of one rank's symmetric buffer."""
        return throughput_buffer_layout(self)

    @property
    def num_experts_per_rank(self) -> int:
        """Experts that live on one rank; rank r owns r*this .. (r+1)*this - 1."""
        return self.num_experts // self.num_ranks


def throughput_buffer_layout(shape: ThroughputShape) -> Layout:
    """Every segment of one rank's symmetric buffer. Mark: `control_bytes`, which are zero before
    the first call. Tokens have room for every format.

    >>> layout = throughput_buffer_layout(ThroughputShape(2, 8, 2, 256, 16, 1024))
    >>> layout["tokens"].num_bytes, layout["rows"].shape
    (8192, (1024, 256))
    """
    max_tokens, max_rows = shape.max_tokens_per_rank, shape.max_recv_rows
    builder = LayoutBuilder()

    def control(name: str, dtype: str, dims: tuple[int, ...], purpose: str) -> None:
        builder.add(name, dtype, dims, purpose, alignment=SEGMENT_ALIGNMENT)

    def data(name: str, dtype: str, dims: tuple[int, ...], purpose: str) -> None:
        builder.add(name, dtype, dims, purpose, alignment=DATA_ALIGNMENT)

    control("units_told", "u32", (1,), "what each of a rank's words of arrivals has by now")
    control("num_counts", "u32", (1,), "dispatches in which ranks have told counts")
    control("last_step", "u32", (1,), "what the step before took over the links")
    control("gave_up", "u32", (1,), "not zero after a failed call")
    control("gather_counter", "u32", (1,), "CTAs that have ended a step")
    words = (MAX_CTAS, shape.num_ranks, MAX_SHARING_WARPS)
    control("arrivals", "i32", words, "what a rank's CTA has told the one of its number")
    control("count_arrivals", "i32", (shape.num_ranks,), "dispatches whose counts have come")
    control("left_out", "u32", (shape.num_ranks,), "not zero for ranks that were masked")
    builder.mark("control_bytes", alignment=DATA_ALIGNMENT)
    data("num_tokens", "u32", (shape.num_ranks,), "of each source rank")
    dims = (shape.num_ranks, shape.num_experts)
    data("expert_totals", "u32", dims, "slots of a source rank that name an expert")
    data("slot_words", "u32", (max_tokens * shape.num_topk,), "an expert and a place, or a row")
    data("slot_weights", "f32", (max_tokens * shape.num_topk,), "routing weights")
    row_bytes = max(token_format(name).num_bytes(shape.hidden) for name in ALL_TO_ALL_FORMATS)
    data("tokens", "u8", (max_tokens * row_bytes,), "this rank's tokens, as they travel")
    num_words = shape.hidden // min(K_BLOCK, shape.group_size)
    data("token_scales", "u32", (max_tokens, num_words), "their scales")
    # The local experts' rows, which others fetch; or what others send to this rank's slots.
    num_rows = max(max_rows, max_tokens * shape.num_topk)
    data("rows", "bf16", (num_rows, shape.hidden), "what experts made")
    data("scalars", "f32", (max_rows,), "a number for each of their rows")
    return builder.build(alignment=DATA_ALIGNMENT)


@dataclass(frozen=True)
class ThroughputConfig:
    """One kernel; equal configs give equal kernels.

    step: which of the three. num_ctas: of each rank. has_weights: a dispatch sends the slots'
    weights, or multiplies rows by them if it knows_rows; a combine weighs with them.

    Of a dispatch: token_format: one of ALL_TO_ALL_FORMATS. is_quantized_input: they come as they
    travel. knows_rows: rows go where an earlier dispatch sent others. has_int32_topk_idx: else
    int64.
    Of a combine: sends_rows: the rows do not lie in the symmetric buffer, and are sent.
    trace: CTAs stamp their phases. masks_ranks: the step is given `masked_ranks`.

    >>> shape = ThroughputShape(8, 256, 8, 7168, 8192, 81_920)
    >>> config = ThroughputConfig(shape, "dispatch", num_ctas=132, arch="sm_90a")
    >>> config.num_threads, config.smem_bytes
    (512, 4240)
    """

    is_cooperative: ClassVar[bool] = True  # those that receive wait for all CTAs
    activation: ClassVar[None] = None

    shape: ThroughputShape
    step: Step
    num_ctas: int
    arch: str
    has_weights: bool = False
    token_format: TokenFormatName = "bf16"
    is_quantized_input: bool = False
    knows_rows: bool = False
    has_int32_topk_idx: bool = False
    sends_rows: bool = False
    trace: bool = False
    masks_ranks: bool = False

    def __post_init__(self) -> None:
        token_format(self.token_format, ALL_TO_ALL_FORMATS)  # or an error
        allowed = f"1 to {MAX_CTAS}"
        if not 1 <= require_int("num_ctas", self.num_ctas, allowed) <= MAX_CTAS:
            raise ValueError(f"num_ctas must be {allowed}; got {self.num_ctas}")
        check_row_format(self.shape, self.token_format if self.tokens.has_scales else None)
        if self.tokens.packs_scales and self.shape.hidden % (4 * K_BLOCK):
            raise ValueError(
                f"hidden must be a multiple of {4 * K_BLOCK} for token_format "
                f"{self.token_format!r}, which has four scales in a word; got {self.shape.hidden}"
            )

    @property
    def tokens(self) -> TokenFormat:
        """How tokens travel."""
        return grouped_format(self.token_format, self.shape.group_size)

    @property
    def num_scale_words(self) -> int:
        """32-bit words of a token's scales as the experts get them."""
        if not self.tokens.values_per_scale:
            return 0
        words = self.shape.hidden // travelling_words(self.tokens)
        return words // (4 if self.tokens.packs_scales else 1)

    @property
    def kernel_name(self) -> str:
        return f"throughput_{self.step}_kernel"

    @property
    def num_threads(self) -> int:
        """One per chunk of a row of BF16, where so many can be."""
        num_chunks = align_up(2 * self.shape.hidden // CHUNK_BYTES, 32)
        return min(MAX_THREADS, max(num_chunks, 64))

    @cached_property
    def buffer_layout(self) -> Layout:
        return throughput_buffer_layout(self.shape)

    @cached_property
    def smem_layout(self) -> Layout:
        """Shared memory of a CTA."""
        shape = self.shape
        builder = LayoutBuilder()

        def add(name: str, dims: tuple[int, ...], purpose: str) -> None:
            builder.add(name, "u32", dims, purpose, alignment=16)

        if self.step == "dispatch":
            add("claims", (2,), "tokens that are shared first, and what is fetched")
        if self.step == "combine":
            add("claims", (1,), "pieces of tokens that are added")
        if self.step == "dispatch" and not self.knows_rows:
            add("slot_counts", (shape.num_experts,), "slots up to the CTA's that name an expert")
            add("expert_begins", (shape.num_experts,), "first row of an expert, on its rank")
            add("own_rows", (shape.num_experts,), "rows there before those of this rank")
            dims = (shape.num_experts_per_rank, shape.num_ranks + 1)
            add("first_rows", dims, "rows of a local expert before those of a rank, and all")
        return builder.build(alignment=16)

    @property
    def smem_bytes(self) -> int:
        return self.smem_layout.num_bytes

    def kernel_fields(self) -> dict[str, int | float | bool]:
        """The fields that the kernel's `Config` struct has, in declaration order."""
        tokens = self.tokens
        shape = asdict(self.shape)
        del shape["group_size"], shape["dtype"]
        return {
            **shape,
            "is_fp16": self.shape.dtype == "fp16",
            "num_experts_per_rank": self.shape.num_experts_per_rank,
            "values_per_scale": tokens.values_per_scale,
            "values_per_word": travelling_words(tokens),
            "rounds_scales": tokens.rounds_scales,
            "packs_scales": tokens.packs_scales,
            "num_ctas": self.num_ctas,
            "num_threads": self.num_threads,
            "has_weights": self.has_weights,
            "is_quantized_input": self.is_quantized_input,
            "knows_rows": self.knows_rows,
            "has_int32_topk_idx": self.has_int32_topk_idx,
            "sends_rows": self.sends_rows,
            "trace": self.trace,
            "masks_ranks": self.masks_ranks,
        }
