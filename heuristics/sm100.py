"""Choices and limits for the SM100 kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from .segments import Layout, align_up, ceil_div
from .shape import MoEShape
from .smem_layout import NUM_COMBINE_SLOTS, num_combine_bytes, sm100_smem_layout
from .tmem_layout import sm100_tmem_layout

SMEM_CAPACITY = 227 * 1024  # what one CTA of sm_100 may opt in to
CLUSTER_SIZE = 2  # tcgen05 with cta_group::2
BLOCK_N = 128
BLOCK_K = 128
NUM_DISPATCH_WARPS = 4
NUM_TENSOR_WARPS = 4  # activation loader, weight loader, MMA, idle
NUM_TMEM_STAGES = 2
IMBALANCE_FACTOR = 2  # a wave should offer this many Linear1 blocks per SM
MIN_STAGES = 2
MAX_STAGES = 32
MAX_REGISTERS_PER_CTA = 64512
MAX_INDEX = 2**31 - 1  # TMA coordinates are signed 32-bit
MANY_LOCAL_EXPERTS = 64

Choose = Callable[[str, int, str], int]  # name, heuristic's value, reason -> value in force


@dataclass(frozen=True)
class Tile:
    """A row of the tile table: the largest expected number of tokens per expert it serves."""

    max_tokens_per_expert: float
    block_m: int
    store_block_m: int
    num_epilogue_warps: int


TILES = (
    Tile(8.5, 16, 8, 8),
    Tile(16.5, 32, 16, 8),
    Tile(32.5, 64, 32, 4),
    Tile(64.5, 96, 16, 8),
    Tile(96.5, 128, 32, 8),
    Tile(float("inf"), 192, 32, 8),
)
STORE_BLOCK_MS = (8, 16, 32)
EPILOGUE_WARPS = (4, 8)

OVERRIDABLE = (
    "num_sms",
    "block_m",
    "store_block_m",
    "num_epilogue_warps",
    "num_stages",
    "num_experts_per_wave",
    "num_dispatch_registers",
    "num_loader_registers",
    "num_epilogue_registers",
    "num_combine_chunks",
)


def choose_tile(expected: Fraction) -> Tile:
    """The first row of the table that serves `expected` tokens per expert.

    >>> [choose_tile(Fraction(m)).block_m for m in (8, 9, 17, 33, 65, 97)]
    [16, 32, 64, 96, 128, 192]
    """
    return next(tile for tile in TILES if expected <= tile.max_tokens_per_expert)


def choose_num_experts_per_wave(
    expected: Fraction,
    *,
    num_experts_per_rank: int,
    block_m: int,
    num_l1_n_blocks: int,
    num_sms: int,
) -> int:
    """Experts whose Linear1 blocks together offer two blocks per SM, as a divisor of the local
    experts.

    5 experts of 2 x 32 blocks would do for 148 SMs; 8 is the next divisor of 32:

    >>> choose_num_experts_per_wave(Fraction(256), num_experts_per_rank=32, block_m=128,
    ...                             num_l1_n_blocks=32, num_sms=148)
    8
    """
    if expected < 1:
        return num_experts_per_rank
    blocks_per_expert = ceil_div(ceil(expected), block_m) * num_l1_n_blocks
    wanted = ceil_div(IMBALANCE_FACTOR * num_sms, blocks_per_expert)
    return next(
        divisor
        for divisor in range(min(wanted, num_experts_per_rank), num_experts_per_rank + 1)
        if num_experts_per_rank % divisor == 0
    )


def choose_num_combine_chunks(
    hidden: int, *, num_epilogue_warps: int, num_epilogue_registers: int, num_free_bytes: int
) -> int:
    """The smallest number of chunks of a token that combine can hold.

    Three BF16 chunks per warp lie in shared memory, one chunk of FP32 sums in a warp's registers.

    >>> choose_num_combine_chunks(7168, num_epilogue_warps=8, num_epilogue_registers=208,
    ...                           num_free_bytes=200_000)
    2
    """
    max_chunk = 32 * max_sums_per_lane(num_epilogue_registers)
    return next(
        num_chunks
        for num_chunks in range(1, hidden // 8 + 1)
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


def smem_layout(config: Mapping[str, int | float | bool]) -> Layout:
    """Shared memory of a config, given by its fields."""
    names = (
        "num_experts",
        "hidden",
        "num_dispatch_warps",
        "num_epilogue_warps",
        "block_m",
        "block_n",
        "block_k",
        "store_block_m",
        "num_stages",
        "num_tmem_stages",
    )
    return sm100_smem_layout(**{name: int(config[name]) for name in names})


def tmem_layout(config: Mapping[str, int | float | bool]) -> Layout:
    """Tensor memory of a config, given by its fields."""
    names = ("block_m", "block_n", "num_tmem_stages")
    return sm100_tmem_layout(**{name: int(config[name]) for name in names})


def choose_fields(
    shape: MoEShape,
    num_tokens: int,
    *,
    num_sms: int,
    smem_capacity: int,
    overrides: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, str]]:
    """All fields that are not given by the problem, and the reason of each."""
    reasons: dict[str, str] = {}
    chosen: dict[str, int] = {}

    def choose(name: str, value: int, reason: str) -> int:
        chosen[name] = overrides.get(name, value)
        reasons[name] = reason
        return chosen[name]

    _check_index_ranges(shape)
    choose("num_sms", num_sms, "one CTA per SM of the device, all resident at once")
    if num_sms < 2 or num_sms % 2:
        raise ValueError(f"num_sms must be even and at least 2 (clusters of 2); got {num_sms}")
    choose("cluster_size", CLUSTER_SIZE, "two CTAs share one tensor-core operation")

    expected = shape.expected_tokens_per_expert(num_tokens)
    tile = choose_tile(expected)
    tile_reason = f"{float(expected):.4g} tokens per expert expected"
    if "block_m" in overrides:
        tile = _tile_of(overrides["block_m"])
        tile_reason = f"goes with block_m {tile.block_m}"
    block_m = choose("block_m", tile.block_m, tile_reason)
    choose("block_n", BLOCK_N, "weight rows per CTA of one tensor-core operation")
    choose("block_k", BLOCK_K, "one 128-byte swizzled row of e4m3, one word of scales")
    store_block_m = choose("store_block_m", tile.store_block_m, tile_reason)
    num_epilogue_warps = choose("num_epilogue_warps", tile.num_epilogue_warps, tile_reason)
    _check_epilogue(block_m, store_block_m, num_epilogue_warps)

    choose("num_dispatch_warps", NUM_DISPATCH_WARPS, "fixed")
    num_threads = 32 * (NUM_DISPATCH_WARPS + NUM_TENSOR_WARPS + num_epilogue_warps)
    choose(
        "num_threads",
        num_threads,
        f"{NUM_DISPATCH_WARPS} dispatch + {NUM_TENSOR_WARPS} loader, MMA and idle + "
        f"{num_epilogue_warps} epilogue warps",
    )
    _choose_registers(shape, num_epilogue_warps, choose)

    choose("num_tmem_stages", NUM_TMEM_STAGES, "an epilogue overlaps the next block's MMA")
    tmem = tmem_layout(chosen)
    choose("num_tmem_columns", tmem.num_bytes, "accumulators and scales, up to a power of two")

    num_l1_n_blocks = choose(
        "num_l1_n_blocks", 2 * shape.intermediate_hidden // BLOCK_N, "2 * intermediate / block_n"
    )
    choose("num_l2_n_blocks", shape.hidden // BLOCK_N, "hidden / block_n")
    choose("num_l1_k_blocks", shape.hidden // BLOCK_K, "hidden / block_k")
    choose("num_l2_k_blocks", shape.intermediate_hidden // BLOCK_K, "intermediate / block_k")

    num_experts_per_wave = choose(
        "num_experts_per_wave",
        choose_num_experts_per_wave(
            expected,
            num_experts_per_rank=shape.num_experts_per_rank,
            block_m=block_m,
            num_l1_n_blocks=num_l1_n_blocks,
            num_sms=num_sms,
        ),
        _wave_reason(shape, expected, num_sms),
    )
    if num_experts_per_wave < 1 or shape.num_experts_per_rank % num_experts_per_wave:
        raise ValueError(
            "num_experts_per_wave must divide num_experts_per_rank "
            f"({shape.num_experts_per_rank}); got {num_experts_per_wave}"
        )

    _choose_stages(shape, chosen, smem_capacity, choose)
    _choose_combine_chunks(shape, chosen, choose)
    return chosen, reasons


def _check_index_ranges(shape: MoEShape) -> None:
    sizes = {
        "the pool's padded scale columns": shape.num_padded_sf_pool_tokens,
        "num_max_tokens_per_rank * num_topk": shape.num_max_tokens_per_rank * shape.num_topk,
        "rows of the Linear1 weights": shape.num_experts_per_rank * 2 * shape.intermediate_hidden,
        "rows of the Linear2 weights": shape.num_experts_per_rank * shape.hidden,
    }
    for what, size in sizes.items():
        if size > MAX_INDEX:
            raise ValueError(f"index limit: {what} must be at most {MAX_INDEX}; got {size}")


def _tile_of(block_m: int) -> Tile:
    for tile in TILES:
        if tile.block_m == block_m:
            return tile
    allowed = ", ".join(str(tile.block_m) for tile in TILES)
    raise ValueError(f"block_m must be one of {allowed}; got {block_m}")


def _check_epilogue(block_m: int, store_block_m: int, num_epilogue_warps: int) -> None:
    if num_epilogue_warps not in EPILOGUE_WARPS:
        raise ValueError(f"num_epilogue_warps must be one of 4, 8; got {num_epilogue_warps}")
    if store_block_m not in STORE_BLOCK_MS:
        raise ValueError(f"store_block_m must be one of 8, 16, 32; got {store_block_m}")
    tokens_per_warpgroup = block_m // (num_epilogue_warps // 4)
    if tokens_per_warpgroup % store_block_m:
        raise ValueError(
            f"store_block_m must divide the {tokens_per_warpgroup} tokens that each of "
            f"{num_epilogue_warps // 4} epilogue warpgroups has of block_m {block_m}; "
            f"got {store_block_m}"
        )


def _choose_registers(shape: MoEShape, num_epilogue_warps: int, choose: Choose) -> None:
    if shape.num_experts_per_rank > MANY_LOCAL_EXPERTS:
        registers = (96, 88, 160)
        reason = f"more than {MANY_LOCAL_EXPERTS} local experts: counts take dispatch registers"
    else:
        registers = (48, 40, 208)
        reason = f"at most {MANY_LOCAL_EXPERTS} local experts: the epilogue gets the most"
    names = ("num_dispatch_registers", "num_loader_registers", "num_epilogue_registers")
    counts = [choose(name, value, reason) for name, value in zip(names, registers, strict=True)]
    for name, count in zip(names, counts, strict=True):
        if not 24 <= count <= 256 or count % 8:
            raise ValueError(f"{name} must be a multiple of 8 from 24 to 256; got {count}")
    warps = (NUM_DISPATCH_WARPS, NUM_TENSOR_WARPS, num_epilogue_warps)
    total = sum(32 * warp * count for warp, count in zip(warps, counts, strict=True))
    if total > MAX_REGISTERS_PER_CTA:
        raise ValueError(
            f"register limit: {', '.join(names)} = {', '.join(map(str, counts))} need {total} "
            f"registers; a CTA has at most {MAX_REGISTERS_PER_CTA}"
        )


def _wave_reason(shape: MoEShape, expected: Fraction, num_sms: int) -> str:
    if expected < 1:
        return "less than one token per expert expected: all local experts in one wave"
    return (
        f"fewest experts with {IMBALANCE_FACTOR} * {num_sms} Linear1 blocks, raised to a divisor "
        f"of {shape.num_experts_per_rank}"
    )


def _choose_stages(
    shape: MoEShape, chosen: dict[str, int], smem_capacity: int, choose: Choose
) -> None:
    def num_bytes(num_stages: int) -> int:
        problem = {"num_experts": shape.num_experts, "hidden": shape.hidden}
        return smem_layout({**chosen, **problem, "num_stages": num_stages}).num_bytes

    stage_bytes = num_bytes(MIN_STAGES + 1) - num_bytes(MIN_STAGES)
    num_fitting = MIN_STAGES + (smem_capacity - num_bytes(MIN_STAGES)) // stage_bytes
    num_stages = choose(
        "num_stages",
        max(MIN_STAGES, min(num_fitting, MAX_STAGES)),
        f"as many as fit: {stage_bytes} bytes each, {smem_capacity} bytes in all",
    )
    if not MIN_STAGES <= num_stages <= MAX_STAGES:
        raise ValueError(f"num_stages must be {MIN_STAGES} to {MAX_STAGES}; got {num_stages}")
    smem_bytes = choose("smem_bytes", num_bytes(num_stages), "end of the shared-memory map")
    if smem_bytes > smem_capacity:
        raise ValueError(
            f"shared memory limit: num_stages {num_stages} with hidden {shape.hidden}, "
            f"{shape.num_experts} experts and block_m {chosen['block_m']} needs {smem_bytes} "
            f"bytes; a CTA has at most {smem_capacity}"
        )


def _choose_combine_chunks(shape: MoEShape, chosen: dict[str, int], choose: Choose) -> None:
    problem = {"num_experts": shape.num_experts, "hidden": shape.hidden}
    num_free_bytes = smem_layout({**chosen, **problem}).mark("barriers_offset")
    num_epilogue_warps = chosen["num_epilogue_warps"]
    num_epilogue_registers = chosen["num_epilogue_registers"]
    # A chunk of 16 bytes always fits: the free bytes hold two stages at least.
    num_chunks = choose(
        "num_combine_chunks",
        choose_num_combine_chunks(
            shape.hidden,
            num_epilogue_warps=num_epilogue_warps,
            num_epilogue_registers=num_epilogue_registers,
            num_free_bytes=num_free_bytes,
        ),
        f"fewest with {NUM_COMBINE_SLOTS} BF16 chunks per epilogue warp in the {num_free_bytes} "
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
