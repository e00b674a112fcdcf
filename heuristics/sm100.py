"""Choices and limits for the SM100 kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

from deep_moe.tokens import token_format

from .choices import (
    MIN_STAGES,
    ConfigFields,
    FieldChoices,
    check_index_ranges,
    check_registers,
    choose_blocks,
    choose_combine_chunks,
    choose_ring,
    choose_shared_parts,
    choose_stages,
    choose_turns,
    neighbours,
    rounded_mean,
)
from .segments import Layout, align_up
from .shape import MoEShape
from .sm90_tiles import likely_counts
from .smem_layout import sm100_smem_layout
from .tmem_layout import sm100_tmem_layout

SMEM_CAPACITY = 227 * 1024  # what one CTA of sm_100 may opt in to
DEFAULT_NUM_SMS = 148  # B200
CLUSTER_SIZE = 2  # tcgen05 with cta_group::2
BLOCK_N = 128
NUM_DISPATCH_WARPS = 4
NUM_TENSOR_WARPS = 4  # activation loader, weight loader, MMA, idle
NUM_TMEM_STAGES = 2
# Of weights that are decoded: warpgroups that take k-blocks in turn, and blocks of them that tensor
# memory has beside the widest accumulators.
NUM_DECODE_WARPS = 8
NUM_DECODED_SLOTS = 4
MANY_LOCAL_EXPERTS = 64
BLOCKS_PER_SM_IN_TURN = 2  # of each layer, where experts have few tokens


@dataclass(frozen=True)
class Tile:
    """Tokens of a tile, and how its epilogue is cut."""

    block_m: int
    store_block_m: int
    num_epilogue_warps: int


TILES = (
    Tile(16, 8, 8),
    Tile(32, 16, 8),
    Tile(64, 32, 4),
    Tile(96, 16, 8),
    Tile(128, 32, 8),
    Tile(192, 32, 8),
)
# Its blocks need more rows of padding than a pool without bound has, and tensor memory that not all
# formats leave.
WIDE_TILE = Tile(240, 24, 8)
WIDE_TILE_PLACES = 8  # of a ring, and more
TMEM_COLUMNS = 512
STORE_BLOCK_MS = (8, 16, 24, 32)
# What a block costs, in rows of products: so many by itself; a row for each of its tokens, but
# hardly fewer for few of them, because the tensor core then waits for weights; and something for
# rows that no token fills, in a tile of more than 128 the most: such tiles leave fewer stages, and
# their scales are copied in two parts. Fitted to simulated times, none measured (B200, EP8, flash,
# benchmarks/LOG.md, 2026-11-27).
BLOCK_COST = 90.0
FEW_TOKENS_COST, TOKEN_COST_OF_FEW = 64.0, 0.25
EMPTY_ROW_COST, EMPTY_ROW_COST_OF_LARGE = 0.03, 0.25
EPILOGUE_WARPS = (4, 8)

OVERRIDABLE = (
    "num_sms",
    "block_m",
    "store_block_m",
    "num_epilogue_warps",
    "num_stages",
    "num_turn_m_blocks",
    "num_lead_m_blocks",
    "num_unit_m_blocks",
    "num_experts_per_part",
    "num_part_m_blocks",
    "num_dispatch_registers",
    "num_loader_registers",
    "num_decode_registers",
    "num_epilogue_registers",
    "num_combine_chunks",
)
TUNABLE = ("block_m", "num_stages")
USUAL_REGISTERS = (48, 40, 208)  # per thread of each of ROLES
ROLES = ("dispatch", "loaders and MMA", "epilogue")


def warp_roles(fields: ConfigFields) -> dict[str, range]:
    """Which warps of a CTA do what, as the role table of kernels/sm100_mega_moe.cuh has it."""
    loader = int(fields["num_dispatch_warps"])
    decoder = loader + NUM_TENSOR_WARPS
    epilogue = decoder + int(fields["num_decode_warps"])
    roles = {
        "dispatch": range(loader),
        "activation loader": range(loader, loader + 1),
        "weight loader": range(loader + 1, loader + 2),
        "MMA": range(loader + 2, loader + 3),
        "weight decoder": range(decoder, epilogue),
        "epilogue": range(epilogue, epilogue + int(fields["num_epilogue_warps"])),
    }
    return {name: warps for name, warps in roles.items() if warps}


def tiles_of(shape: MoEShape, has_decoded_weights: bool) -> tuple[Tile, ...]:
    """Tiles for which the layer's pool and tensor memory have room."""
    tmem = sm100_tmem_layout(
        block_m=WIDE_TILE.block_m,
        block_n=BLOCK_N,
        num_tmem_stages=NUM_TMEM_STAGES,
        num_scale_words=shape.tokens.num_scale_words(shape.tokens.block_k),
        num_decoded_slots=NUM_DECODED_SLOTS if has_decoded_weights else 0,
    )
    has_room = (
        shape.is_bounded
        and shape.num_pool_rows >= WIDE_TILE_PLACES * WIDE_TILE.block_m
        and tmem.num_bytes <= TMEM_COLUMNS
    )
    return (*TILES, WIDE_TILE) if has_room else TILES


@lru_cache(maxsize=4096)
def choose_tile(expected: Fraction, tiles: tuple[Tile, ...] = TILES) -> Tile:
    """The tile with the least expected cost, if an expert's tokens scatter like a Poisson count
    with this mean.

    >>> [choose_tile(Fraction(m)).block_m for m in (7, 17, 33, 65, 97, 113, 1536)]
    [16, 32, 64, 96, 128, 128, 192]
    >>> choose_tile(Fraction(1536), (*TILES, WIDE_TILE)).block_m
    240
    """
    return min(tiles, key=lambda tile: expected_cost(expected, tile.block_m))


def expected_cost(expected: Fraction, block_m: int) -> float:
    """Of an expert's blocks with such tiles, in rows of products, if its tokens scatter so."""
    counts = likely_counts(float(expected), 0.0)
    return sum(probability * expert_cost(n, block_m) for n, probability in counts)


def expert_cost(num_tokens: int, block_m: int) -> float:
    """Of an expert's blocks with such tiles, in rows of products.

    >>> expert_cost(128, 128), expert_cost(129, 192)
    (218.0, 246.0)
    """
    num_full, rest = divmod(num_tokens, block_m)
    cost = num_full * (BLOCK_COST + max(block_m, FEW_TOKENS_COST + TOKEN_COST_OF_FEW * block_m))
    if rest:
        rows = align_up(rest, 16)  # N of the products
        products = max(rows, FEW_TOKENS_COST + TOKEN_COST_OF_FEW * rows)
        of_empty = EMPTY_ROW_COST if block_m <= 128 else EMPTY_ROW_COST_OF_LARGE
        cost += BLOCK_COST + products + of_empty * (block_m - rows)
    return cost


def smem_layout(config: ConfigFields, decoded_block_bytes: int) -> Layout:
    """Shared memory of a config, given by its fields. decoded_block_bytes: as in
    `choose_fields`."""
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
    tokens = token_format(str(config["token_format"]))
    return sm100_smem_layout(
        **{name: int(config[name]) for name in names},
        tokens=tokens,
        decoded_block_bytes=decoded_block_bytes,
    )


def tmem_layout(config: ConfigFields) -> Layout:
    """Tensor memory of a config, given by its fields."""
    names = ("block_m", "block_n", "num_tmem_stages")
    tokens = token_format(str(config["token_format"]))
    return sm100_tmem_layout(
        **{name: int(config[name]) for name in names},
        num_scale_words=tokens.num_scale_words(tokens.block_k),
        num_decoded_slots=NUM_DECODED_SLOTS if config["num_decode_warps"] else 0,
    )


def choose_fields(
    shape: MoEShape,
    num_tokens: int,
    *,
    num_sms: int,
    smem_capacity: int,
    overrides: Mapping[str, int],
    registers: tuple[int, int, int] = USUAL_REGISTERS,
    decoded_block_bytes: int = 0,
) -> tuple[dict[str, int], dict[str, str]]:
    """All fields that are not given by the problem, and the reason of each.

    registers: per thread of dispatch, of loaders and MMA, and of the epilogue, where there are not
    too many experts for that. decoded_block_bytes: of 128 rows x a k-block of weights that the
    kernel decodes, what multiplies them included; 0 for weights that it takes as they are.
    """
    choices = FieldChoices(overrides)
    choose = choices.choose

    check_index_ranges(shape, l2_rows_per_expert=shape.hidden)
    choose("num_sms", num_sms, "one CTA per SM of the device, all resident at once")
    if num_sms < 2 or num_sms % 2:
        raise ValueError(f"num_sms must be even and at least 2 (clusters of 2); got {num_sms}")
    choose("cluster_size", CLUSTER_SIZE, "two CTAs share one tensor-core operation")
    choose("num_cluster_m_blocks", 1, "both CTAs multiply the same tokens")

    expected = shape.expected_tokens_per_expert(num_tokens)
    per_local_expert = shape.expected_tokens_per_local_expert(num_tokens)
    tiles = tiles_of(shape, decoded_block_bytes > 0)
    tile = choose_tile(rounded_mean(per_local_expert), tiles)
    tile_reason = f"{float(per_local_expert):.4g} tokens per expert expected"
    if shape.num_shared_experts:
        tile_reason += f", those of shared experts, {num_tokens} each, among them"
    tile_reason += ": the least cost, as fitted to a simulated B200"
    if "block_m" in overrides:
        tile = _tile_of(overrides["block_m"], tiles)
        tile_reason = f"goes with block_m {tile.block_m}"
    block_m = choose("block_m", tile.block_m, tile_reason)
    store_block_m = choose("store_block_m", tile.store_block_m, tile_reason)
    num_decode_warps = choose(
        "num_decode_warps",
        NUM_DECODE_WARPS if decoded_block_bytes else 0,
        "two warpgroups take k-blocks in turn"
        if decoded_block_bytes
        else "the tensor core takes weights as they are",
    )
    num_epilogue_warps = choose(
        "num_epilogue_warps",
        *(
            (4, f"those of the {num_decode_warps} warps that decode would have no registers")
            if num_decode_warps
            else (tile.num_epilogue_warps, tile_reason)
        ),
    )
    _check_epilogue(block_m, store_block_m, num_epilogue_warps)
    choose_blocks(
        shape,
        choices,
        block_n=BLOCK_N,
        block_n_reason="weight rows per CTA of one tensor-core operation",
    )

    choose("num_dispatch_warps", NUM_DISPATCH_WARPS, "fixed")
    num_threads = 32 * (
        NUM_DISPATCH_WARPS + NUM_TENSOR_WARPS + num_decode_warps + num_epilogue_warps
    )
    choose(
        "num_threads",
        num_threads,
        f"{NUM_DISPATCH_WARPS} dispatch + {NUM_TENSOR_WARPS} loader, MMA and idle + "
        + (f"{num_decode_warps} decode + " if num_decode_warps else "")
        + f"{num_epilogue_warps} epilogue warps",
    )
    _choose_registers(shape, num_decode_warps, num_epilogue_warps, choices, registers)

    choose("block_m_step", block_m, "all m-blocks have the same size")
    choose("min_block_m", block_m, "all m-blocks have the same size")
    choose("num_tmem_stages", NUM_TMEM_STAGES, "an epilogue overlaps the next block's MMA")
    tmem = tmem_layout({**choices.fields, "token_format": shape.token_format})
    choose(
        "num_tmem_columns",
        tmem.num_bytes,
        "accumulators"
        + (" and scales" if shape.tokens.has_scales else "")
        + (" and decoded weights" if num_decode_warps else "")
        + ", up to a power of two",
    )

    choose_shared_parts(shape, choices)
    choose_ring(shape, choices, sf_columns_per_block=align_up(block_m, BLOCK_N))
    choose_turns(shape, expected, choices, blocks_per_sm=BLOCKS_PER_SM_IN_TURN)
    smem = partial(smem_layout, decoded_block_bytes=decoded_block_bytes)
    choose_stages(shape, smem_capacity, smem, choices)
    choose_combine_chunks(shape, smem, choices)
    return choices.fields, choices.reasons


def _tile_of(block_m: int, tiles: tuple[Tile, ...]) -> Tile:
    for tile in tiles:
        if tile.block_m == block_m:
            return tile
    allowed = ", ".join(str(tile.block_m) for tile in tiles)
    raise ValueError(f"block_m must be one of {allowed}; got {block_m}")


def _check_epilogue(block_m: int, store_block_m: int, num_epilogue_warps: int) -> None:
    if num_epilogue_warps not in EPILOGUE_WARPS:
        raise ValueError(f"num_epilogue_warps must be one of 4, 8; got {num_epilogue_warps}")
    if store_block_m not in STORE_BLOCK_MS:
        raise ValueError(f"store_block_m must be one of 8, 16, 24, 32; got {store_block_m}")
    if block_m % store_block_m:
        raise ValueError(f"store_block_m must divide block_m {block_m}; got {store_block_m}")


def _choose_registers(
    shape: MoEShape,
    num_decode_warps: int,
    num_epilogue_warps: int,
    choices: FieldChoices,
    registers: tuple[int, int, int],
) -> None:
    num_decode_registers = 80 if num_decode_warps else 0
    if shape.num_experts_per_rank > MANY_LOCAL_EXPERTS:
        registers = (96, 88, 136 if num_decode_warps else 160)
        reason = f"more than {MANY_LOCAL_EXPERTS} local experts: counts take dispatch registers"
    else:
        reason = f"at most {MANY_LOCAL_EXPERTS} local experts: the epilogue gets the most"
    groups = (
        ("num_dispatch_registers", registers[0], NUM_DISPATCH_WARPS),
        ("num_loader_registers", registers[1], NUM_TENSOR_WARPS),
        ("num_decode_registers", num_decode_registers, num_decode_warps),
        ("num_epilogue_registers", registers[2], num_epilogue_warps),
    )
    chosen = [
        (name, choices.choose(name, count, reason if num_warps else "no warp decodes"), num_warps)
        for name, count, num_warps in groups
    ]
    present = [group for group in chosen if group[2]]
    check_registers(
        {name: count for name, count, _ in present}, [num_warps for *_, num_warps in present]
    )


def candidates(shape: MoEShape, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Other values of each tunable field that are worth measuring beside the `chosen` ones.

    >>> shape = MoEShape(8, 256, 8, 7168, 2048, 64)
    >>> candidates(shape, {"block_m": 16, "num_stages": 9})["block_m"]
    (32, 64)
    """
    num_stages = chosen["num_stages"]
    return {
        "block_m": neighbours([tile.block_m for tile in TILES], chosen["block_m"], 2),
        # More do not fit. Fewer leave combine larger chunks and less to fill at first.
        "num_stages": neighbours(range(MIN_STAGES, num_stages + 1), num_stages, 2),
    }
