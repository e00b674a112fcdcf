"""The symmetric buffer: one layout, equal on every rank and for every architecture.

Control words come first. A call expects everything up to the mark `zeroed_end` to be zero, except
for the barrier words, whose phase survives from call to call, and leaves it so.
"""

from __future__ import annotations

from .segments import Layout, LayoutBuilder
from .shape import MoEShape

SEGMENT_ALIGNMENT = 128
TMA_ALIGNMENT = 1024


def symm_buffer_layout(shape: MoEShape) -> Layout:
    """Every segment of one rank's buffer, of padded sizes.

    Marks: `zeroed_begin` and `zeroed_end` enclose the words that each call leaves zero,
    `control_bytes` is the end of the control part.

    >>> layout = symm_buffer_layout(MoEShape(1, 8, 2, 256, 128, 16))
    >>> layout["input_x"].shape, layout["combine"].shape
    ((16, 256), (2, 16, 256))
    """
    shape = shape.padded
    num_ranks, num_topk = shape.num_ranks, shape.num_topk
    num_experts_per_rank = shape.num_experts_per_rank
    max_tokens, hidden = shape.num_max_tokens_per_rank, shape.hidden
    num_further_pages = shape.num_further_list_pages  # of one source rank's lists

    parts = _Parts(shape)
    control, data = parts.control, parts.data
    control("grid_gather_counter", "u32", (1,), "CTAs that have come; bit 31: the rank gave up")
    control("rank_barrier_counter", "u32", (1,), "low two bits: phase and sign of the barrier")
    control("rank_barrier_signals", "i32", (2,), "one signal per phase: 0, ranks, 0, ...")
    parts.mark("zeroed_begin", alignment=SEGMENT_ALIGNMENT)
    control(
        "expert_send_count",
        "u64",
        (shape.num_experts,),
        "high word: CTAs that reported; low word: this rank's tokens for the expert",
    )
    control(
        "expert_recv_count",
        "u64",
        (num_ranks, num_experts_per_rank),
        "tokens from one source rank for one local expert",
    )
    control(
        "expert_recv_sum",
        "u64",
        (num_experts_per_rank,),
        "high word: CTAs of all ranks that reported; low word: tokens",
    )
    parts.add_block_words()
    if num_further_pages:
        control(
            "num_taken_pages",
            "u32",
            (num_ranks,),
            "pages on that rank that this rank's lists have taken beyond their first",
        )
        control(
            "taken_pages",
            "u32",
            (shape.num_experts, num_further_pages),
            "this rank's list for the expert: page of its next slots; 0: not taken",
        )
    parts.mark("zeroed_end", alignment=SEGMENT_ALIGNMENT)
    if num_further_pages:
        control(
            "src_list_pages",
            "u32",
            (num_experts_per_rank, num_ranks, num_further_pages),
            "the list of one source rank for one local expert: page of its next slots",
        )
    control(
        "src_token_topk_idx",
        "u32",
        (shape.num_experts + num_ranks * num_further_pages, shape.num_list_page_slots),
        "token * num_topk + slot on the source rank, by page: the first of each list by expert and "
        "source, then further ones by source",
    )
    parts.add_sources("rank, token, slot: the way back")
    parts.mark("control_bytes", alignment=TMA_ALIGNMENT)

    tokens = shape.tokens
    row_bytes = tokens.num_bytes(hidden)
    data("input_x", "u8", (max_tokens, row_bytes), f"the caller's tokens, {tokens.values}")
    if tokens.scale_dtype is not None:
        purpose = "their scales" + (", 4 UE8M0 per word" if tokens.rounds_scales else "")
        if tokens.has_token_scale:
            purpose = "their float32 scales, then 4 E4M3 per word"
        num_words = tokens.num_row_words(hidden)
        data("input_x_sf", tokens.scale_dtype, (max_tokens, num_words), purpose)
    data("input_topk_idx", "i64", (max_tokens, num_topk), "global expert of each slot; -1: unused")
    data("input_topk_weights", "f32", (max_tokens, num_topk), "routing weight of each slot")
    parts.add_pools()
    data(
        "combine",
        "bf16",
        (shape.num_slots, max_tokens, hidden),
        "contributions of each slot, then of each shared expert",
    )
    return parts.build(alignment=TMA_ALIGNMENT)


def entries_by_source(shape: MoEShape) -> list[tuple[int, int, int]]:
    """Where each source rank writes entries of its own into a rank's buffer: offset, entries, and
    bytes of an entry; entry i is of rank i % ranks. Further pages of lists are not among them,
    since what is written there names them.

    >>> entries_by_source(MoEShape(2, 8, 2, 256, 128, 16))[0][1:]
    (2, 32)
    """
    layout, padded = symm_buffer_layout(shape), shape.padded
    lists = padded.num_experts
    counts, pages = layout["expert_recv_count"], layout["src_token_topk_idx"]
    found = [(counts.offset, padded.num_ranks, counts.stride), (pages.offset, lists, pages.stride)]
    if padded.num_further_list_pages:
        of_list = layout["src_list_pages"]
        found.append((of_list.offset, lists, of_list.num_bytes // lists))
    return found


def work_space_layout(shape: MoEShape) -> Layout:
    """What of it is left where the tokens are here when a kernel starts, and their results stay: as
    much of the pool, in the same words. shape: of one rank and one slot, with as many tokens as
    there may be rows.

    >>> [s.name for s in work_space_layout(MoEShape(1, 8, 1, 256, 128, 16)).segments][-3:]
    ['l1_topk_weights', 'l2_tokens', 'l2_token_sf']
    """
    shape = shape.padded
    parts = _Parts(shape)
    parts.control("grid_gather_counter", "u32", (1,), "CTAs that have come; bit 31: a call gave up")
    parts.mark("zeroed_begin", alignment=SEGMENT_ALIGNMENT)
    parts.add_block_words()
    parts.mark("zeroed_end", alignment=SEGMENT_ALIGNMENT)
    parts.add_sources("0, row of x and y, 0")
    parts.mark("control_bytes", alignment=TMA_ALIGNMENT)
    parts.add_pools()
    return parts.build(alignment=TMA_ALIGNMENT)


class _Parts(LayoutBuilder):
    """What both have in common."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self._shape = shape

    def control(self, name: str, dtype: str, dims: tuple[int, ...], purpose: str) -> None:
        self.add(name, dtype, dims, purpose, alignment=SEGMENT_ALIGNMENT)

    def data(self, name: str, dtype: str, dims: tuple[int, ...], purpose: str) -> None:
        self.add(name, dtype, dims, purpose, alignment=TMA_ALIGNMENT)

    def add_block_words(self) -> None:
        """What blocks are waited for, claimed and released with."""
        shape, control = self._shape, self.control
        pool_blocks = shape.num_max_pool_blocks
        control(
            "l1_arrival_count", "u32", (pool_blocks,), "tokens of the block already in the pool"
        )
        control(
            "l2_arrival_mask",
            "u64",
            (pool_blocks, shape.num_l2_mask_words),
            "one bit per finished Linear1 n-block",
        )
        control("num_claimed_blocks", "u32", (1,), "blocks, or pairs, taken beyond the first")
        if shape.is_bounded:
            control(
                "release_count", "u32", (pool_blocks,), "Linear2 blocks that have read the rows"
            )

    def add_sources(self, words: str) -> None:
        """Where the pool's tokens came from."""
        self.control("token_src_metadata", "u32", (self._shape.num_pool_rows, 3), words)

    def add_pools(self) -> None:
        """The inputs of both linear layers."""
        shape, data = self._shape, self.data
        tokens = shape.tokens
        pool_tokens, sf_pool_tokens = shape.num_pool_rows, shape.num_padded_sf_pool_tokens
        hidden, intermediate = shape.hidden, shape.intermediate_hidden
        data(
            "l1_tokens",
            "u8",
            (pool_tokens, tokens.num_bytes(hidden)),
            f"tokens of local experts, {tokens.values}",
        )
        if tokens.has_scales:
            dims = (tokens.num_scale_words(hidden), sf_pool_tokens)
            data("l1_token_sf", "u32", dims, "their scales, MN-major")
        if tokens.has_token_scale:
            data("l1_token_factors", "f32", (pool_tokens,), "their float32 scales")
        data("l1_topk_weights", "f32", (pool_tokens,), "their routing weights")
        data(
            "l2_tokens",
            "u8",
            (pool_tokens, tokens.num_bytes(intermediate)),
            f"Linear1's output after the activation, {tokens.values}",
        )
        if tokens.has_scales:
            dims = (tokens.num_output_scale_words(intermediate), sf_pool_tokens)
            data("l2_token_sf", "u32", dims, "its scales, MN-major")
