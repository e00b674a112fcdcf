"""The low-latency all-to-all: its sizes, its memory, and what its kernels are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from deep_moe.formats.sizes import K_BLOCK
from deep_moe.tokens import ALL_TO_ALL_FORMATS, TokenFormat, token_format

from .segments import Layout, LayoutBuilder, align_up
from .shape import MAX_RANKS, MAX_TOPK, require_int

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName

MAX_TOKENS_PER_RANK = 1024
MAX_RELAYED_TOKENS = 4096  # of one rank, own ones and those that it was sent to pass on
MAX_EXPERTS = 4096  # for which every CTA has counters in shared memory
NUM_HALVES = 2  # calls use them in turn
SEGMENT_ALIGNMENT = 128
DATA_ALIGNMENT = 1024
CHUNK_BYTES = 16  # of a token, per thread
MAX_THREADS = 512

CONTROL_BYTES = 16  # of a message

Step = Literal["dispatch", "combine"]
GROUP_SIZES = (16, 32, 64, 128, 256, 512)  # that lanes of a warp share, 16 values each
_GROUPED_FORMATS = tuple(
    name
    for name in ALL_TO_ALL_FORMATS
    if token_format(name).values_per_word == K_BLOCK
    and token_format(name).values_per_scale == K_BLOCK
)
ROW_DTYPES = ("bf16", "fp16")
# Where a token goes: once to each rank of its experts, into staging [source rank][slot]; or to each
# of its experts, into [local expert][source rank][slot].
Placement = Literal["ranks", "experts"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)


def check_split_sizes(shape: Any, limits: Mapping[str, tuple[int, int | None, int]]) -> None:
    """Raise unless a shape's sizes are within limits (least, most, step), its ranks own equally
    many experts, and there are as many of these as slots."""
    for name, (least, most, step) in limits.items():
        allowed = f"a positive multiple of {step}" if most is None else f"{least} to {most}"
        value = require_int(name, getattr(shape, name), allowed)
        if value < least or (most is not None and value > most) or value % step:
            raise ValueError(f"{name} must be {allowed}; got {value}")
    if shape.num_experts % shape.num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of num_ranks ({shape.num_ranks}); "
            f"got {shape.num_experts}"
        )
    if shape.num_topk > shape.num_experts:
        raise ValueError(
            f"num_topk must be at most num_experts ({shape.num_experts}); got {shape.num_topk}"
        )


def grouped_format(name: str, group_size: int) -> TokenFormat:
    """The format of this name with its scales, where they are floats, for groups of this size."""
    tokens = token_format(name)
    if group_size == K_BLOCK or not tokens.has_scales:
        return tokens
    return replace(tokens, values_per_scale=group_size, values_per_word=group_size)


def travelling_words(tokens: TokenFormat) -> int:
    """Values whose scales are one word between ranks: those of packed scales travel apart."""
    return K_BLOCK if tokens.packs_scales else tokens.values_per_word


def check_row_format(shape: Any, name: str | None) -> None:
    """Raise unless a shape's group_size goes with the format of this name and with its hidden, and
    its dtype is one that rows have. name: None of rows without scales."""
    sizes = ", ".join(map(str, GROUP_SIZES))
    size = require_int("group_size", shape.group_size, f"one of {sizes}")
    if size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {sizes}; got {size}")
    if size != K_BLOCK and name is not None and name not in _GROUPED_FORMATS:
        raise ValueError(
            f"group_size must be {K_BLOCK} but for token_format {' and '.join(_GROUPED_FORMATS)}; "
            f"got {size} for {name!r}"
        )
    if shape.hidden % size:
        raise ValueError(f"hidden must be a multiple of group_size ({size}); got {shape.hidden}")
    allowed = f"one of {', '.join(ROW_DTYPES)}"
    if not isinstance(shape.dtype, str):
        raise TypeError(f"dtype must be {allowed}; got {shape.dtype!r}")
    if shape.dtype not in ROW_DTYPES:
        raise ValueError(f"dtype must be {allowed}; got {shape.dtype!r}")


@dataclass(frozen=True)
class LowLatencyShape:
    """Sizes of a low-latency all-to-all, equal on every rank.

    num_ranks: 1 to 72. num_experts: of all ranks together, a multiple of num_ranks, at most 4096.
    num_topk: 1 to 32, at most num_experts. hidden: a multiple of 128. num_max_tokens_per_rank: most
    tokens of one call, 1 to 1024, or to 4096 if they are relayed. token_format: one of
    ALL_TO_ALL_FORMATS. has_shared_rows: experts may write their rows into the buffer. any_format:
    there is room for each format, so that calls may have others. placement: one of PLACEMENTS.
    relays_tokens: tokens come as they travel, each with a number that travels along. group_size:
    values per scale, one of GROUP_SIZES and a divisor of hidden; other than 128 for "fp8_128" and
    "fp8_128_pow2" only. dtype: of rows that are not quantized, one of ROW_DTYPES.

    >>> shape = LowLatencyShape(8, 256, 8, 7168, 128, "fp8_128")
    >>> shape.num_experts_per_rank, shape.num_rows_per_expert, shape.row_bytes
    (32, 1024, 7168)
    """

    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    num_max_tokens_per_rank: int
    token_format: TokenFormatName
    has_shared_rows: bool = False
    any_format: bool = False
    placement: Placement = "ranks"
    relays_tokens: bool = False
    group_size: int = K_BLOCK
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        most_tokens = MAX_RELAYED_TOKENS if self.relays_tokens else MAX_TOKENS_PER_RANK
        limits = {
            "num_ranks": (1, MAX_RANKS, 1),
            "num_experts": (1, MAX_EXPERTS, 1),
            "num_topk": (1, MAX_TOPK, 1),
            "hidden": (K_BLOCK, None, K_BLOCK),
            "num_max_tokens_per_rank": (1, most_tokens, 1),
        }
        check_split_sizes(self, limits)
        token_format(self.token_format, ALL_TO_ALL_FORMATS)  # or an error
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"placement must be one of {', '.join(PLACEMENTS)}; got {self.placement!r}"
            )
        check_row_format(self, self.token_format)
        if self.group_size != K_BLOCK and self.any_format:
            raise ValueError(
                f"group_size must be {K_BLOCK} with any_format=True; got {self.group_size}"
            )
        if self.tokens.packs_scales and self.hidden % (4 * K_BLOCK):
            raise ValueError(
                f"hidden must be a multiple of {4 * K_BLOCK} for token_format "
                f"{self.token_format!r}, which has four scales in a word; got {self.hidden}"
            )

    @property
    def buffer_layout(self) -> Layout:
        """Of one rank's symmetric buffer."""
        return low_latency_buffer_layout(self)

    @property
    def num_experts_per_rank(self) -> int:
        """Experts that live on one rank; rank r owns r*this .. (r+1)*this - 1."""
        return self.num_experts // self.num_ranks

    @property
    def num_rows_per_expert(self) -> int:
        """Most rows that an expert gets: every token of every rank, once."""
        return self.num_ranks * self.num_max_tokens_per_rank

    @property
    def tokens(self) -> TokenFormat:
        """How tokens travel."""
        return grouped_format(self.token_format, self.group_size)

    @property
    def values_per_scale(self) -> int:
        return self.tokens.values_per_scale

    @property
    def row_bytes(self) -> int:
        """Of a token on its way, without scales."""
        return self.tokens.num_bytes(self.hidden)

    @property
    def num_scale_words(self) -> int:
        """32-bit words of a token's scales on its way: an FP32 number per group, or four UE8M0
        bytes per 128 values."""
        return self.hidden // travelling_words(self.tokens) if self.values_per_scale else 0

    @property
    def stages_by_expert(self) -> bool:
        return self.placement == "experts"

    @property
    def num_count_words(self) -> int:
        """Counts that a rank tells another one: of each expert there, and, where a token goes there
        once for all of them, of tokens."""
        return self.num_experts_per_rank + (0 if self.stages_by_expert else 1)

    @property
    def num_received_scale_words(self) -> int:
        """The same as it is given to the experts."""
        return self.num_scale_words // (4 if self.tokens.packs_scales else 1)


def low_latency_buffer_layout(shape: LowLatencyShape) -> Layout:
    """Every segment of one rank's symmetric buffer. Mark: `control_bytes`, which are zero before
    the first call.

    >>> layout = low_latency_buffer_layout(LowLatencyShape(2, 8, 2, 256, 16, "mxfp8"))
    >>> layout["staged_values"].shape, layout["combine"].shape
    ((2, 2, 16, 256), (2, 2, 16, 256))
    >>> shape = LowLatencyShape(2, 8, 2, 256, 16, "mxfp8", placement="experts")
    >>> low_latency_buffer_layout(shape)["messages"].shape
    (2, 4, 2, 16, 288)
    """
    num_ranks, num_topk = shape.num_ranks, shape.num_topk
    max_tokens = shape.num_max_tokens_per_rank
    builder = LayoutBuilder()

    def control(name: str, dtype: str, dims: tuple[int, ...], purpose: str) -> None:
        builder.add(name, dtype, dims, purpose, alignment=SEGMENT_ALIGNMENT)

    def data(name: str, dtype: str, dims: tuple[int, ...], purpose: str) -> None:
        dims = (NUM_HALVES, *dims)
        builder.add(name, dtype, dims, purpose, alignment=DATA_ALIGNMENT)

    control("num_calls", "u32", (1,), "dispatches that this rank has sent")
    control("gave_up", "u32", (1,), "not zero after a failed call")
    control("gather_counter", "u32", (1,), "CTAs that have ended their sending")
    control("masked_ranks", "u32", (num_ranks,), "not zero for ranks that take no part")
    control(
        "recv_counts",
        "u32",
        (NUM_HALVES, num_ranks, shape.num_count_words),
        "tokens of a source rank for each local expert, and for all that go there; -n-1",
    )
    control(
        "dispatch_arrivals",
        "i32",
        (NUM_HALVES, num_ranks),
        "tokens of a source rank that are here, and one more when it has come to the call",
    )
    if shape.stages_by_expert:
        control(
            "message_arrivals",
            "i32",
            (NUM_HALVES, shape.num_experts_per_rank, num_ranks),
            "messages of a source rank for a local expert that are here",
        )
    control(
        "combine_arrivals",
        "i32",
        (NUM_HALVES, num_ranks),
        "parts of an experts' rank's rows that are here",
    )
    builder.mark("control_bytes", alignment=DATA_ALIGNMENT)
    names = ALL_TO_ALL_FORMATS if shape.any_format else (shape.token_format,)
    formats = [token_format(name) for name in names]
    num_words = max(shape.num_scale_words, shape.hidden // K_BLOCK)
    if shape.stages_by_expert:
        token_bytes = max(
            format.num_bytes(shape.hidden) + (4 * num_words if format.values_per_scale else 0)
            for format in formats
        )
        data(
            "messages",
            "u8",
            (
                *(shape.num_experts_per_rank, num_ranks, max_tokens),
                align_up(CONTROL_BYTES + token_bytes, CHUNK_BYTES),
            ),
            "by expert and source rank: a token's index there and its slot, values, scales",
        )
    else:
        data(
            "staged_headers",
            "u32",
            (num_ranks, max_tokens, 1 + shape.relays_tokens + num_topk),
            "a token's index on its source rank, its origin where it is relayed; local expert and "
            "row of each slot",
        )
        row_bytes = max(format.num_bytes(shape.hidden) for format in formats)
        data("staged_values", "u8", (num_ranks, max_tokens, row_bytes), "tokens, by source rank")
        if any(format.values_per_scale for format in formats):
            data("staged_scales", "u32", (num_ranks, max_tokens, num_words), "their scales")
    data("combine", "bf16", (num_topk, max_tokens, shape.hidden), "rows of each slot")
    if shape.has_shared_rows:
        data("row_of_slot", "u32", (max_tokens * num_topk,), "its expert's row, on that one's rank")
        num_rows = shape.num_experts_per_rank * shape.num_rows_per_expert
        rows = (num_rows, shape.hidden)
        purpose = "rows of the local experts"
        builder.add("shared_rows", "bf16", rows, purpose, alignment=DATA_ALIGNMENT)
    return builder.build(alignment=DATA_ALIGNMENT)


@dataclass(frozen=True)
class LowLatencyConfig:
    """One kernel; equal configs give equal kernels.

    step: which of the two. sends, receives: its parts; both in one kernel, or one in each of two.
    has_int32_topk_idx: else int64. fetches_rows: a combine of rows that experts have written into
    the buffer. repeats: a combine of a call that has been combined before. trace: CTAs stamp their
    phases. num_ctas: of each rank.

    >>> shape = LowLatencyShape(8, 256, 8, 7168, 128, "fp8_128")
    >>> config = LowLatencyConfig(shape, "dispatch", num_ctas=132, arch="sm_90a")
    >>> config.num_threads, config.smem_bytes
    (448, 2240)
    """

    is_cooperative: ClassVar[bool] = True  # those that receive wait for all CTAs
    activation: ClassVar[None] = None

    shape: LowLatencyShape
    step: Step
    num_ctas: int
    arch: str
    sends: bool = True
    receives: bool = True
    has_int32_topk_idx: bool = False
    fetches_rows: bool = False
    repeats: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        require_int("num_ctas", self.num_ctas, "at least 1")
        if self.num_ctas < 1:
            raise ValueError(f"num_ctas must be at least 1; got {self.num_ctas}")
        if self.fetches_rows and not self.shape.has_shared_rows:
            raise ValueError(
                "fetches_rows must be False for a buffer without shared rows; got True"
            )

    @property
    def kernel_name(self) -> str:
        return f"low_latency_{self.step}_kernel"

    @property
    def num_threads(self) -> int:
        """One per chunk of a token, where so many can be."""
        num_chunks = align_up(self.shape.row_bytes // CHUNK_BYTES, 32)
        return min(MAX_THREADS, max(num_chunks, 64))

    @cached_property
    def buffer_layout(self) -> Layout:
        return low_latency_buffer_layout(self.shape)

    @cached_property
    def smem_layout(self) -> Layout:
        """Shared memory of a CTA."""
        shape = self.shape
        builder = LayoutBuilder()

        def add(name: str, dims: tuple[int, ...], purpose: str) -> None:
            builder.add(name, "u32", dims, purpose, alignment=16)

        if self.step == "combine":
            num_words = shape.num_experts_per_rank + 1
            add("expert_rows", (num_words,), "rows before each local expert")
            add("sent_messages", (shape.num_ranks,), "parts of rows from this CTA, to each rank")
            add("expected_parts", (shape.num_ranks,), "of rows, from each rank")
        else:
            if self.sends:
                num_words = shape.num_experts + shape.num_ranks
                add("token_counts", (num_words,), "tokens before one, by expert and by rank")
                add("destinations", (1 + shape.num_topk,), "how many ranks, and where there")
                num_words = shape.num_experts if shape.stages_by_expert else shape.num_ranks
                add("sent_messages", (num_words,), "this CTA's, to each expert or rank")
            if self.receives:
                # By expert: with the end of the last rank's.
                num_words = shape.num_ranks + shape.stages_by_expert
                dims = (shape.num_experts_per_rank, num_words)
                add("first_rows", dims, "first row of a rank's tokens")
                if not shape.stages_by_expert:
                    dims = (2, shape.num_ranks + 1)
                    add("rank_tokens", dims, "tokens of each rank, and of the ranks before")
        return builder.build(alignment=16)

    @property
    def smem_bytes(self) -> int:
        return self.smem_layout.num_bytes

    def kernel_fields(self) -> dict[str, int | float | bool]:
        """The fields that the kernel's `Config` struct has, in declaration order."""
        shape = asdict(self.shape)
        del shape["token_format"], shape["any_format"], shape["placement"]  # which the layout tells
        del shape["group_size"], shape["dtype"]
        tokens = self.shape.tokens
        return {
            **shape,
            "num_experts_per_rank": self.shape.num_experts_per_rank,
            "is_fp16": self.shape.dtype == "fp16",
            "values_per_scale": tokens.values_per_scale,
            "values_per_word": travelling_words(tokens),
            "rounds_scales": tokens.rounds_scales,
            "packs_scales": tokens.packs_scales,
            "stages_by_expert": self.shape.stages_by_expert,
            "num_ctas": self.num_ctas,
            "num_threads": self.num_threads,
            "sends": self.sends,
            "receives": self.receives,
            "has_int32_topk_idx": self.has_int32_topk_idx,
            "fetches_rows": self.fetches_rows,
            "repeats": self.repeats,
            "trace": self.trace,
        }
