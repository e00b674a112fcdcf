"""Choices that the kernels of all architectures make alike, and the limits that they keep."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from math import ceil, floor

from .segments import Layout, align_up, ceil_div
from .shape import MoEShape
from .smem_layout import NUM_COMBINE_SLOTS, num_combine_bytes

MIN_STAGES = 2
MAX_STAGES = 32
MAX_REGISTERS_PER_CTA = 64512
REGISTERS_PER_SM = 65536
MAX_EXPERTS_PER_RANK = 512  # 16 registers of each lane that follows the list of blocks
# Of a shared expert. Each part has its weights read again, from memory unless they are still in L2:
# with one m-block each, 256 tokens of deepseek-v4-pro would cost as many reads as 11 experts.
MIN_PART_M_BLOCKS = 2
MAX_PART_M_BLOCKS = 64
MAX_PARTS = 32  # of all shared experts: one register more of each lane that follows the list
# Linear1 is ahead of Linear2 (experts/block_walk.cuh) by a turn, by half as many m-blocks again as
# the grid has Linear1 of at once, and by so many more. Then Linear2 need not wait.
NUM_SPARE_M_BLOCKS = 6
# Tiles of so many rows and more have the shortest turns. On one GPU these take 0.5 to 0.8 % less
# time than long turns, with 48 to 128 tokens per expert. With 6 tokens per expert they take 0.5 %
# more (H100, 2026-11-26: benchmarks/LOG.md). Where long turns would fill the links says
# heuristics/links.py.
ROWS_OF_SHORT_TURNS = 64
# Of up to so many m-blocks of an expert, the blocks with the same weights stand together. One by
# one, with Linear2 in between, L2 loses the weights before they are read again: pro at 4096 tokens
# takes 3.4 % longer (H100, 2026-11-26, benchmarks/LOG.md).
NUM_UNIT_M_BLOCKS = 8
MAX_TURN_M_BLOCKS = 2**16
# A mean of so many tokens per expert and more is compared with rows of tiles only, which are
# multiples of ROWS_UNIT up to MAX_TILE_ROWS.
FIRST_ROUNDED_MEAN = 32
ROWS_UNIT = 8
MAX_TILE_ROWS = 192
MAX_INDEX = 2**31 - 1  # TMA coordinates are signed 32-bit

ConfigFields = Mapping[str, int | float | bool | str]
SmemLayout = Callable[[ConfigFields], Layout]


class FieldChoices:
    """The fields chosen so far and the reason of each; what the caller overrides wins."""

    def __init__(self, overrides: Mapping[str, int]) -> None:
        self.overrides = overrides
        self.fields: dict[str, int] = {}
        self.reasons: dict[str, str] = {}

    def choose(self, name: str, value: int, reason: str) -> int:
        """The value in force: the override, or else `value`."""
        self.fields[name] = self.overrides.get(name, value)
        self.reasons[name] = reason
        return self.fields[name]


def choose_num_experts_per_turn(
    expected: Fraction,
    *,
    num_experts_per_rank: int,
    num_l1_n_blocks: int,
    num_sms: int,
    blocks_per_sm: int,
) -> int:
    """Experts of one m-block each, whose Linear1 blocks together offer so many blocks per SM, as a
    divisor of the local experts.

    10 experts of 32 blocks would do for 148 SMs; 16 is the next divisor of 32:

    >>> choose_num_experts_per_turn(Fraction(16), num_experts_per_rank=32, num_l1_n_blocks=32,
    ...                             num_sms=148, blocks_per_sm=2)
    16
    """
    if expected < 1:
        return num_experts_per_rank
    wanted = ceil_div(blocks_per_sm * num_sms, num_l1_n_blocks)
    return next(
        divisor
        for divisor in range(min(wanted, num_experts_per_rank), num_experts_per_rank + 1)
        if num_experts_per_rank % divisor == 0
    )


def rounded_mean(expected: Fraction) -> Fraction:
    """Tokens per expert for which tiles' costs are worked out: those that differ by less than 1/64
    count as one, so that a deployment asks for few.

    >>> [float(rounded_mean(Fraction(n, 8))) for n in (255, 260, 1023, 1025)]
    [31.875, 32.0, 128.0, 128.0]
    """
    if expected < FIRST_ROUNDED_MEAN:
        return expected
    unit = 2 ** max(0, int(expected).bit_length() - 7)
    return Fraction(round(expected / unit) * unit)


def load_key(shape: MoEShape, num_tokens: int) -> Hashable:
    """Numbers of tokens with equal keys get equal fields: tiles' costs are those of the rounded
    mean, and whatever else compares a large mean compares it to tiles' rows. Shared experts get
    every token."""
    if shape.num_shared_experts:
        return num_tokens
    expected = shape.expected_tokens_per_expert(num_tokens)
    rounded = rounded_mean(expected)
    if expected < FIRST_ROUNDED_MEAN or expected > MAX_TILE_ROWS:
        return rounded
    rows = expected / ROWS_UNIT
    return floor(rows), ceil(rows), rounded


def neighbours(values: Sequence[int], chosen: int, reach: int) -> tuple[int, ...]:
    """The `reach` values on either side of `chosen` among ascending ones, the nearest first.

    >>> neighbours((8, 16, 32, 64, 96), 32, 2)
    (64, 16, 96, 8)
    """
    above = [value for value in values if value > chosen][:reach]
    below = [value for value in reversed(values) if value < chosen][:reach]
    return tuple(value for pair in zip_longest(above, below) for value in pair if value is not None)


def choose_num_combine_chunks(
    hidden: int,
    *,
    num_epilogue_warps: int,
    num_epilogue_registers: int,
    num_free_bytes: int,
    num_min_chunks: int = 1,
) -> int:
    """The smallest number of chunks of a token, from `num_min_chunks` on, that combine can hold.

    Three BF16 chunks per warp lie in shared memory, one chunk of FP32 sums in a warp's registers.

    >>> choose_num_combine_chunks(7168, num_epilogue_warps=8, num_epilogue_registers=208,
    ...                           num_free_bytes=200_000)
    2
    """
    max_chunk = 32 * max_sums_per_lane(num_epilogue_registers)
    return next(
        num_chunks
        for num_chunks in range(num_min_chunks, hidden // 8 + 1)
        if combine_chunk_elements(hidden, num_chunks) <= max_chunk
        and num_combine_bytes(num_epilogue_warps, combine_chunk_elements(hidden, num_chunks))
        <= num_free_bytes
    )


def combine_chunk_elements(hidden: int, num_chunks: int) -> int:
    """Elements of a chunk, a multiple of the 16 bytes that a bulk copy moves at least. The last
    chunk of a token may be shorter."""
    return align_up(ceil_div(hidden, num_chunks), 8)


def max_sums_per_lane(num_epilogue_registers: int) -> int:
    """FP32 sums that a lane of an epilogue warp keeps during combine: 80 registers are left for
    everything else."""
    return min(128, max(8, num_epilogue_registers - 80))


def check_index_ranges(shape: MoEShape, *, l2_rows_per_expert: int) -> None:
    """Experts whose counts a warp keeps in registers, and rows and columns that the kernel counts
    in 32 bits, as its tensor copies do."""
    if shape.num_local_experts > MAX_EXPERTS_PER_RANK:
        most = MAX_EXPERTS_PER_RANK - shape.num_shared_experts
        beside = f" beside {shape.num_shared_experts} shared" if shape.num_shared_experts else ""
        raise ValueError(
            f"num_experts must be at most {most} per rank{beside}, "
            f"{most * shape.num_ranks} on {shape.num_ranks}; got {shape.num_experts}"
        )
    sizes = {
        "the pool's padded scale columns": shape.num_padded_sf_pool_tokens,
        "rows that a rank may receive, with their padding": shape.most_pool_tokens,
        "num_max_tokens_per_rank * num_topk": shape.num_max_tokens_per_rank * shape.num_topk,
        "rows of the Linear1 weights": shape.num_local_experts * shape.num_l1_rows,
        "rows of the Linear2 weights": shape.num_local_experts * l2_rows_per_expert,
    }
    for what, size in sizes.items():
        if size > MAX_INDEX:
            raise ValueError(f"index limit: {what} must be at most {MAX_INDEX}; got {size}")


def check_registers(counts: Mapping[str, int], warps: Sequence[int]) -> None:
    """counts: registers per thread by field name, of groups of so many warps."""
    for name, count in counts.items():
        if not 24 <= count <= 256 or count % 8:
            raise ValueError(f"{name} must be a multiple of 8 from 24 to 256; got {count}")
    total = sum(32 * warp * count for warp, count in zip(warps, counts.values(), strict=True))
    # A CTA is launched with as many for each thread, in steps of 8, as an SM has for all.
    num_threads = 32 * sum(warps)
    most = min(MAX_REGISTERS_PER_CTA, REGISTERS_PER_SM // num_threads // 8 * 8 * num_threads)
    if total > most:
        raise ValueError(
            f"register limit: {', '.join(counts)} = {', '.join(map(str, counts.values()))} need "
            f"{total} registers; a CTA has at most {most}"
        )


def choose_blocks(
    shape: MoEShape, choices: FieldChoices, *, block_n: int, block_n_reason: str
) -> None:
    """Tile sides but block_m, and the numbers of blocks that follow."""
    choose = choices.choose
    choose("block_n", block_n, block_n_reason)
    tokens = shape.tokens
    num_words = tokens.num_scale_words(tokens.block_k)
    scale_words = {0: "", 1: ", one word of scales"}.get(
        num_words, f", {num_words} words of scales"
    )
    block_k = choose(
        "block_k",
        tokens.block_k,
        f"one 128-byte swizzled row of {tokens.values}" + scale_words,
    )
    num_l1_n_blocks = choose(
        "num_l1_n_blocks",
        ceil_div(shape.num_l1_rows, block_n),
        "2 * intermediate / block_n"
        if shape.has_gate
        else "intermediate / block_n, rounded up: there is no gate",
    )
    choose("num_l2_n_blocks", ceil_div(shape.hidden, block_n), "hidden / block_n, rounded up")
    choose("num_l1_k_blocks", ceil_div(shape.hidden, block_k), "hidden / block_k, rounded up")
    choose(
        "num_l2_k_blocks",
        ceil_div(shape.intermediate_hidden, block_k),
        "intermediate / block_k, rounded up",
    )
    choose("num_l2_mask_words", ceil_div(num_l1_n_blocks, 64), "one bit per Linear1 n-block")


def choose_shared_parts(shape: MoEShape, choices: FieldChoices) -> None:
    """How shared experts stand among the routed ones (experts/expert_order.cuh)."""
    num_shared, num_routed = shape.num_shared_experts, shape.num_experts_per_rank
    if not num_shared:
        for name in ("num_experts_per_part", "num_part_m_blocks"):
            if choices.choose(name, 0, "no shared experts"):
                raise ValueError(
                    f"{name} must be 0 without shared experts; got {choices.fields[name]}"
                )
        return
    # Entries of the list, experts and parts, are kept as experts are.
    least = ceil_div(num_routed, (MAX_EXPERTS_PER_RANK - num_routed) // num_shared)
    num_experts_per_part = choices.choose(
        "num_experts_per_part",
        min(num_routed, max(shape.num_topk, least, ceil_div(num_routed, MAX_PARTS // num_shared))),
        "a part of a shared expert has as many tokens then as a routed expert expects; at most "
        f"{MAX_PARTS} parts",
    )
    if not least <= num_experts_per_part <= num_routed:
        raise ValueError(
            f"num_experts_per_part must be {least} to {num_routed}; got {num_experts_per_part}"
        )
    num_part_m_blocks = choices.choose(
        "num_part_m_blocks",
        MIN_PART_M_BLOCKS,
        "m-blocks of a part at least, which take its weights from memory once",
    )
    if not 1 <= num_part_m_blocks <= MAX_PART_M_BLOCKS:
        raise ValueError(
            f"num_part_m_blocks must be 1 to {MAX_PART_M_BLOCKS}; got {num_part_m_blocks}"
        )


def choose_ring(shape: MoEShape, choices: FieldChoices, *, sf_columns_per_block: int) -> None:
    """How the pool's rows are used again within a call (layout/pool_ring.cuh); needs all fields of
    the tile and the schedule. sf_columns_per_block: of the scale arrays, for each pool block.

    A place of the ring is as long as a pool block. An m-block that begins in one of the last places
    runs on into rows behind them, which belong to no other place, for its rows have to be in one
    piece.
    """
    fields = choices.fields
    step = fields["block_m_step"]
    num_places = choices.choose(
        "num_ring_blocks",
        min(
            (shape.num_pool_rows - (fields["block_m"] - step)) // step,
            shape.num_padded_sf_pool_tokens // sf_columns_per_block,
        ),
        f"places of {step} rows, {sf_columns_per_block} scale columns each",
    )
    max_padding = shape.num_local_experts * (fields["min_block_m"] - 1)
    num_max_blocks = (shape.num_max_received + max_padding) // step
    choices.choose(
        "pool_wraps",
        num_places < num_max_blocks,
        f"a call may have {num_max_blocks} pool blocks",
    )


def ring_m_blocks(fields: Mapping[str, int]) -> int | None:
    """M-blocks that certainly fit into the ring at once; None where every row has its own. Needs
    the fields of `choose_ring`."""
    if not fields["pool_wraps"]:
        return None
    return fields["num_ring_blocks"] // (fields["block_m"] // fields["block_m_step"])


def choose_turns(
    shape: MoEShape,
    expected: Fraction,
    choices: FieldChoices,
    *,
    blocks_per_sm: int,
) -> None:
    """In which order the list of blocks has Linear1 and Linear2 (experts/block_walk.cuh); needs the
    tile, the cluster and the ring. blocks_per_sm: of each layer in a turn, where experts have few
    tokens."""
    fields = choices.fields
    num_clusters = fields["num_sms"] // fields["cluster_size"]
    l1_pairs, l2_pairs = (
        ceil_div(fields[name], fields["cluster_size"])
        for name in ("num_l1_n_blocks", "num_l2_n_blocks")
    )
    fitting = ring_m_blocks(fields)
    unit = _choose_unit(choices, fitting)
    # Of a unit, the last m-block's Linear1 begins so many m-blocks earlier than by itself, and the
    # first one's Linear2 ends so many later.
    num_late = unit - 1
    # Some places are left to pull tokens into.
    most_lead = (
        MAX_INDEX if fitting is None else max(1 + num_late, (fitting - 2 * num_late) * 3 // 4)
    )
    if fields["block_m"] >= ROWS_OF_SHORT_TURNS:
        wanted = 1
        reason = "so many tokens that rows should leave for other ranks at a steady rate"
    else:
        wanted = choose_num_experts_per_turn(
            expected,
            num_experts_per_rank=shape.num_experts_per_rank,
            num_l1_n_blocks=fields["num_l1_n_blocks"],
            num_sms=fields["num_sms"],
            blocks_per_sm=blocks_per_sm,
        )
        reason = (
            "less than one token per expert expected: all local experts"
            if expected < 1
            else f"an m-block of as few experts as have {blocks_per_sm} * {fields['num_sms']} "
            f"Linear1 blocks, raised to a divisor of {shape.num_experts_per_rank}"
        )
    turn = choices.choose(
        "num_turn_m_blocks", max(1, min(wanted, most_lead // 2)), reason + _of_ring(fitting)
    )
    if not 1 <= turn <= MAX_TURN_M_BLOCKS:
        raise ValueError(f"num_turn_m_blocks must be 1 to {MAX_TURN_M_BLOCKS}; got {turn}")
    num_pairs = shape.most_pool_tokens // fields["min_block_m"] * (l1_pairs + l2_pairs)
    if num_pairs > MAX_INDEX:
        raise ValueError(
            f"index limit: blocks of a call must be at most {MAX_INDEX}; got {num_pairs}"
        )
    num_ahead = 3 * ceil_div(num_clusters, l1_pairs) // 2 + NUM_SPARE_M_BLOCKS
    lead = choices.choose(
        "num_lead_m_blocks",
        max(turn + num_late, min(turn + num_ahead, most_lead)),
        f"a turn, and {num_ahead} more: half as many again as the grid has Linear1 of at once, and "
        f"{NUM_SPARE_M_BLOCKS}" + _of_ring(fitting),
    )
    if lead < turn + num_late:
        raise ValueError(
            f"num_lead_m_blocks must be at least {turn + num_late} with num_turn_m_blocks {turn} "
            f"and num_unit_m_blocks {unit}; got {lead}"
        )
    if fitting is not None and lead > fitting - 2 * num_late:
        raise ValueError(
            f"num_lead_m_blocks must be at most {fitting - 2 * num_late} with num_unit_m_blocks "
            f"{unit}, of the {fitting} m-blocks that the pool certainly holds; got {lead}"
        )


def _choose_unit(choices: FieldChoices, fitting: int | None) -> int:
    """M-blocks of an expert whose blocks with the same weights stand together. fitting: as
    `ring_m_blocks` has it."""
    least = choices.fields["num_cluster_m_blocks"]  # that a cluster has together
    if fitting is not None and fitting < 4:
        least = 1
    most = NUM_UNIT_M_BLOCKS if fitting is None else min(NUM_UNIT_M_BLOCKS, fitting // 8)
    unit = choices.choose(
        "num_unit_m_blocks",
        max(least, most - most % least),
        f"at most {NUM_UNIT_M_BLOCKS} m-blocks of an expert, whose weights L2 then has"
        + _of_ring(fitting),
    )
    if not 1 <= unit <= MAX_TURN_M_BLOCKS or unit % least:
        rule = f"1 to {MAX_TURN_M_BLOCKS}{', and even in clusters of two' if least > 1 else ''}"
        raise ValueError(f"num_unit_m_blocks must be {rule}; got {unit}")
    return unit


def _of_ring(fitting: int | None) -> str:
    return "" if fitting is None else f"; the ring holds {fitting} m-blocks"


def choose_stages(
    shape: MoEShape, smem_capacity: int, smem_layout: SmemLayout, choices: FieldChoices
) -> None:
    """As many stages as shared memory holds; needs everything else that lies there."""
    fields = choices.fields

    def num_bytes(num_stages: int) -> int:
        return smem_layout({**fields, **_problem(shape), "num_stages": num_stages}).num_bytes

    # Alignment makes stages differ by a few bytes, so the number that fits is looked for, from one
    # that is at most a few off.
    least_bytes = num_bytes(MIN_STAGES)
    stage_bytes = num_bytes(MIN_STAGES + 1) - least_bytes
    num_fitting = MIN_STAGES + max(0, smem_capacity - least_bytes) // stage_bytes
    num_fitting = min(num_fitting, MAX_STAGES)
    while num_fitting < MAX_STAGES and num_bytes(num_fitting + 1) <= smem_capacity:
        num_fitting += 1
    while num_fitting > MIN_STAGES and num_bytes(num_fitting) > smem_capacity:
        num_fitting -= 1
    num_stages = choices.choose(
        "num_stages",
        num_fitting,
        f"as many as fit: {stage_bytes} bytes each, {smem_capacity} bytes in all",
    )
    if not MIN_STAGES <= num_stages <= MAX_STAGES:
        raise ValueError(f"num_stages must be {MIN_STAGES} to {MAX_STAGES}; got {num_stages}")
    smem_bytes = choices.choose("smem_bytes", num_bytes(num_stages), "end of the shared-memory map")
    if smem_bytes > smem_capacity:
        raise ValueError(
            f"shared memory limit: num_stages {num_stages} with hidden {shape.hidden}, "
            f"{shape.num_experts} experts and block_m {fields['block_m']} needs {smem_bytes} "
            f"bytes; a CTA has at most {smem_capacity}"
        )


def _problem(shape: MoEShape) -> dict[str, int | str | bool]:
    """What shared memory depends on beside the chosen fields."""
    names = ("num_experts", "hidden", "weights", "biases", "token_format", "has_gate")
    return {name: getattr(shape, name) for name in names}


def choose_combine_chunks(
    shape: MoEShape, smem_layout: SmemLayout, choices: FieldChoices, *, num_min_chunks: int = 1
) -> None:
    """Chunks of a token in combine; needs num_stages. num_min_chunks: more than one where tokens
    may be so few that a chunk each is enough for the warps; hidden / num_min_chunks must be a
    multiple of 8."""
    fields = choices.fields
    num_free_bytes = smem_layout({**fields, **_problem(shape)}).mark("barriers_offset")
    num_epilogue_warps = fields["num_epilogue_warps"]
    num_epilogue_registers = fields["num_epilogue_registers"]
    # A chunk of 16 bytes always fits: the free bytes hold two stages at least.
    num_chunks = choices.choose(
        "num_combine_chunks",
        choose_num_combine_chunks(
            shape.hidden,
            num_epilogue_warps=num_epilogue_warps,
            num_epilogue_registers=num_epilogue_registers,
            num_free_bytes=num_free_bytes,
            num_min_chunks=num_min_chunks,
        ),
        (
            ""
            if num_min_chunks == 1
            else f"at least {num_min_chunks}, so that more warps share few tokens; "
        )
        + f"fewest with {NUM_COMBINE_SLOTS} BF16 chunks per epilogue warp in the {num_free_bytes} "
        f"bytes before the barriers and at most {max_sums_per_lane(num_epilogue_registers)} sums "
        "per lane",
    )
    chunk = combine_chunk_elements(shape.hidden, num_chunks) if num_chunks > 0 else shape.hidden
    if num_chunks < 1 or ceil_div(shape.hidden, chunk) != num_chunks:
        raise ValueError(
            f"num_combine_chunks must cut hidden ({shape.hidden}) into chunks of a multiple of 8 "
            f"elements; got {num_chunks}"
        )
    num_bytes = num_combine_bytes(num_epilogue_warps, chunk)
    if num_bytes > num_free_bytes:
        raise ValueError(
            f"shared memory limit: num_combine_chunks {num_chunks} needs {num_bytes} bytes; "
            f"{num_free_bytes} lie before the barriers"
        )
    max_sums = max_sums_per_lane(num_epilogue_registers)
    if chunk > 32 * max_sums:
        raise ValueError(
            f"register limit: num_combine_chunks {num_chunks} needs {ceil_div(chunk, 32)} sums per "
            f"lane; {num_epilogue_registers} epilogue registers hold at most {max_sums}"
        )
