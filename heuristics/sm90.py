"""Choices and limits for the SM90 kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from .segments import Layout, align_up, ceil_div
from .shape import MoEShape
from .smem_layout import sm90_smem_layout

SMEM_CAPACITY = 227 * 1024  # what one CTA of sm_90 may opt in to
DEFAULT_NUM_SMS = 132  # H100 and H200
# A cluster's CTAs share copies of weights. Decoded weights do not gain from that: prefill is bound
# by power there, not by copies (H200, 2026-11-20, and the whole kernel again on 2026-11-23).
CLUSTER_SIZES = (1, 2)
BLOCK_N = (
    256  # two math warpgroups of two 64-row products each; 128 rows read tokens twice as often
)
NUM_DISPATCH_WARPS = 2
NUM_LOADER_WARPS = 2  # activations, weights; in one warpgroup with dispatch
NUM_MATH_WARPS = 8

# Tokens per tile, which is the N of wgmma. With more, accumulators leave the main loop too few
# registers, and the compiler no longer overlaps the products with anything else.
BLOCK_MS = tuple(range(8, 184, 8))
# Tiles of different sizes in one kernel, from min_block_m up to block_m in such steps: an expert
# gets what fits its tokens. Each size is a main loop of its own, for which there have to be
# registers: ptxas overlaps the products in four of up to 88 rows, or in 64, 96 and 128.
FITTED_TILES, NUM_FITTED_SIZES = ((64, 8), (72, 8), (80, 8), (88, 8)), 4
UNEVEN_TILE = (128, 32)  # for experts whose counts differ by more than chance makes them
# For experts of several m-blocks whose weights are not decoded. Their main loops need few registers
# and are overlapped in kernels of four sizes, too; and rows that no token fills cost them more:
# nothing else that a tile takes, as decoding, bounds them beside products.
LARGE_FITTED_TILE = (128, 16)
# Of one size as large as fitted ones. None costs 0.12 % less than all others at any number of
# tokens: so they are left to callers and tuning tables, and a deployment compiles fewer kernels.
SPARED_TILES = tuple((block_m, block_m) for block_m, _ in FITTED_TILES)
# block_m and block_m_step of all tiles, those of one size first.
TILES: tuple[tuple[int, int], ...] = (
    *((block_m, block_m) for block_m in BLOCK_MS),
    *FITTED_TILES,
    UNEVEN_TILE,
)
# Registers of a math thread, and what is left for one of the other warps, by the former.
NUM_MATH_REGISTERS, NUM_MORE_MATH_REGISTERS = 216, 224
NUM_OTHER_REGISTERS = {NUM_MATH_REGISTERS: 72, NUM_MORE_MATH_REGISTERS: 56}
# What the main loop needs beside a register for each row of the tile, to start products in pairs.
# One by one it needs 48 (experts/sm90/main_loop.cuh).
PAIRED_LOOP_REGISTERS = 64
# What tiles cost, fitted to times of an H200 (2026-11-21, benchmarks/LOG.md) with 3 to 768 tokens
# per expert of both DeepSeek-V4 shapes. At each of 27 numbers of tokens, 11 of them measured after
# the fit, it takes the fastest of the tiles of one size that were measured, or one at most 0.8 %
# slower; with tiles of 160 rows and more, measured later at 9 numbers of tokens, one at most 1.1 %.
# A tile takes 1 + rows / 150: decoding its weights, and products. A further tile of the same expert
# takes less, because its weights do not come from HBM. Kernels with a main loop for each size are
# longer, and have fewer products in flight; so have those whose products go one by one. Rows that
# no token fills are zeros, which take less power than others: leaving them out gains less than
# their share. Tiles fitted in steps of 8 lead by 1.8 to 3.1 % with 36 to 64 tokens per expert, and
# lag by 1.9 % with 76 (H200, 2026-11-22).
TILE_ROWS_PER_UNIT = 150
FURTHER_TILE_COST = 0.6
MIXED_TILES_COST = 1.04
FITTED_TILES_COST = 1.055
SINGLE_PRODUCTS_COST = 1.03
# Of experts' means, where the last call's counts differed by more than chance makes them.
UNEVEN_VARIATION = 0.5
MAX_COUNTS = 200  # of tokens of an expert, over which a tile's cost is averaged
# Where experts have few tokens, the layers go one after the other in long turns: the links are not
# full, and weights are read one layer at a time (H200, 2026-11-22: benchmarks/LOG.md).
BLOCKS_PER_SM_IN_TURN = 6
# Of a token in combine, with the smallest tiles (H200, 2026-11-22: 7 and 8 are no better, fewer are
# 1 to 3 % slower with one token).
COMBINE_CHUNKS_OF_FEW_TOKENS = 4


@dataclass(frozen=True)
class WeightKind:
    """What choices depend on of a format of weights.

    block_bytes: of 256 rows x a k-block. has_row_factors: whether scales are a factor for each row.
    has_block_scales: whether there is one for every 128 x 128, so that the sums of every k-block
    are added up in registers. shares_weights: whether it is faster where two CTAs share copies of
    weights. tiles: block_m and block_m_step of those that there are registers
    for. costs: what a tile of so many rows takes, an expert's first and a further one, in any unit.
    lone_m_block_cost: on top, for one that shares its weights with no other where others do.
    spared_tiles: those of them that are not chosen unless they are asked for. large_fitted_cost:
    of LARGE_FITTED_TILE, by what its m-blocks would cost as tiles of one size. is_decoded: whether
    math warps decode the weights; else the tensor core takes them as they lie.
    """

    block_bytes: int
    has_row_factors: bool
    has_block_scales: bool
    shares_weights: bool
    tiles: tuple[tuple[int, int], ...]
    costs: Callable[[float], tuple[float, float]]
    lone_m_block_cost: float = 0
    spared_tiles: tuple[tuple[int, int], ...] = ()
    large_fitted_cost: float = 1
    is_decoded: bool = True

    def math_registers(self, block_m: int, step: int) -> int:
        """Of a math thread for a tile. A loop that neither decodes nor promotes needs next to none
        beside the accumulators."""
        if self.is_decoded:
            return num_math_registers(block_m, step)
        return num_promoting_registers(block_m) if self.has_block_scales else NUM_MATH_REGISTERS


# Sums of k-blocks, and one or two sets of products (experts/sm90/promoting_loop.cuh).
MAX_ROWS_OF_TWO_SETS = 88
PROMOTING_LOOP_REGISTERS = 40
MMAS_PER_K_BLOCK = 4

OVERRIDABLE = (
    "num_sms",
    "block_m",
    "block_m_step",
    "num_stages",
    "num_turn_m_blocks",
    "num_lead_m_blocks",
    "num_unit_m_blocks",
    "num_experts_per_part",
    "num_part_m_blocks",
    "num_dispatch_registers",
    "num_epilogue_registers",
    "num_combine_chunks",
    "cluster_size",
)
TUNABLE = ("block_m", "num_stages")
ROLES = ("dispatch", "loaders", "math and epilogue")


def warp_roles(fields: ConfigFields) -> dict[str, range]:
    """Which warps of a CTA do what, as the role table of kernels/sm90_mega_moe.cuh has it."""
    loader = int(fields["num_dispatch_warps"])
    math_warps = loader + NUM_LOADER_WARPS
    return {
        "dispatch": range(loader),
        "activation loader": range(loader, loader + 1),
        "weight loader": range(loader + 1, loader + 2),
        "math": range(math_warps, math_warps + int(fields["num_epilogue_warps"])),
    }


@dataclass(frozen=True)
class SharedWork:
    """What a rank's shared experts have beside its routed ones: each of them num_tokens tokens, cut
    into at most num_parts parts of a multiple of num_part_m_blocks m-blocks."""

    num_experts: int
    num_routed_experts: int
    num_tokens: int
    num_parts: int
    num_part_m_blocks: int

    @classmethod
    def of(cls, shape: MoEShape, num_tokens: int, fields: Mapping[str, int]) -> SharedWork | None:
        """fields: those of `choose_shared_parts`."""
        if not shape.num_shared_experts:
            return None
        return cls(
            shape.num_shared_experts,
            shape.num_experts_per_rank,
            num_tokens,
            ceil_div(shape.num_experts_per_rank, fields["num_experts_per_part"]),
            fields["num_part_m_blocks"],
        )

    def parts(self, block_m: int) -> tuple[tuple[int, int], ...]:
        """Tokens of a part of one expert, and how many parts have as many, with such m-blocks
        (experts/expert_order.cuh).

        >>> SharedWork(1, 48, 300, num_parts=8, num_part_m_blocks=2).parts(32)
        ((64, 4), (44, 1))
        """
        per_part = ceil_div(self.num_tokens, self.num_parts)
        full = max(align_up(per_part, block_m * self.num_part_m_blocks), 1)
        num_full, rest = divmod(self.num_tokens, full)
        return tuple((size, count) for size, count in ((full, num_full), (rest, 1)) if size * count)


def _wide_tiles(kind: WeightKind) -> tuple[tuple[int, int], ...]:
    """Those that leave nothing beside their sums. Without a gate these are as many values, of which
    maxima are looked for: with tiles such as these, registers spill."""
    return tuple(
        tile for tile in kind.tiles if num_math_registers(*tile) == NUM_MORE_MATH_REGISTERS
    )


def choose_tile(
    expected: Fraction,
    kind: WeightKind,
    is_uneven: bool = False,
    shared: SharedWork | None = None,
) -> tuple[int, int]:
    """block_m and block_m_step of the tiles with the least expected cost, if routing scatters the
    tokens of an expert like a Poisson count with this mean, or, if uneven, with means that vary by
    half of it. shared: what is computed beside them.

    Rows that no token fills cost products, tokens beyond a tile cost a second one, which decodes
    the expert's weights again.

    """
    costs = _expected_costs(rounded_mean(expected), is_uneven, kind)
    if shared is None:
        return min(costs, key=lambda tile: costs[tile])
    work = shared
    return min(
        costs,
        key=lambda tile: work.num_routed_experts * costs[tile] + shared_cost(tile, work, kind),
    )


@lru_cache(maxsize=4096)
def _expected_costs(
    expected: Fraction, is_uneven: bool, kind: WeightKind
) -> dict[tuple[int, int], float]:
    """Of a routed expert, by tile."""
    counts = _likely_counts(float(expected), UNEVEN_VARIATION if is_uneven else 0.0)
    tiles = [
        tile
        for tile in kind.tiles
        if tile not in kind.spared_tiles and not _is_of_others(tile, expected, is_uneven)
    ]
    return {
        tile: _expected_cost(tile, counts, kind, _shares_copies(kind, expected, tile[0]))
        for tile in tiles
    }


def _is_of_others(tile: tuple[int, int], expected: Fraction, is_uneven: bool) -> bool:
    """Whether tiles of several sizes are for other numbers of tokens than these. Where experts have
    one m-block, LARGE_FITTED_TILE took 1 to 4 % longer than the best tile of one size (FP8, H200,
    2026-11-24)."""
    if is_uneven:
        return tile in FITTED_TILES
    return tile == LARGE_FITTED_TILE and expected < tile[0]


def _shares_copies(kind: WeightKind, expected: Fraction, block_m: int) -> bool:
    """Whether pairs of CTAs are to share copies of weights: from where about half of the experts
    or more are expected to have two m-blocks."""
    return kind.shares_weights and expected >= block_m


def shared_cost(tile: tuple[int, int], work: SharedWork, kind: WeightKind) -> float:
    """Of all shared experts, in the unit of `_expected_cost`."""
    parts = work.parts(tile[0])
    of_one = sum(count * _tiles_cost(num_tokens, tile, kind) for num_tokens, count in parts)
    return work.num_experts * of_one * _loop_cost(tile, kind)


def _likely_counts(mean: float, variation: float) -> list[tuple[int, float]]:
    """Counts of a Poisson distribution, or of one whose mean is gamma-distributed with this
    coefficient of variation, without their tails, and their probabilities, up to a factor. Of many,
    every second, third, ...: enough to tell tiles apart.

    >>> counts = _likely_counts(5.0, 0.5)
    >>> round(sum(n * p for n, p in counts), 2), round(sum(p for _, p in counts), 2)
    (5.0, 0.96)
    """
    if mean == 0:
        return []
    spread = 6 * math.sqrt(mean + (variation * mean) ** 2)
    first, last = max(1, math.floor(mean - spread)), math.ceil(mean + spread)
    counts = range(first, last + 1, max(1, (last - first) // MAX_COUNTS))
    if variation == 0:
        log_mean = math.log(mean)
        return [(n, math.exp(n * log_mean - mean - math.lgamma(n + 1))) for n in counts]
    size = variation**-2
    log_more, log_rest = math.log(mean / (size + mean)), size * math.log(size / (size + mean))

    def log_probability(n: int) -> float:
        ways = math.lgamma(n + size) - math.lgamma(n + 1) - math.lgamma(size)
        return ways + n * log_more + log_rest

    return [(n, math.exp(log_probability(n))) for n in counts]


def _expected_cost(
    tile: tuple[int, int],
    counts: list[tuple[int, float]],
    kind: WeightKind,
    in_clusters: bool = False,
) -> float:
    costs = _costs_up_to(1 << max(counts, default=(0,))[0].bit_length(), tile, kind)
    cost = sum([probability * costs[n] for n, probability in counts])
    cost *= _loop_cost(tile, kind)
    if not in_clusters or not kind.lone_m_block_cost:
        return cost
    odd = sum(probability for n, probability in counts if ceil_div(n, tile[0]) % 2)
    return cost + kind.lone_m_block_cost * odd


@lru_cache(maxsize=2048)
def _costs_up_to(most: int, tile: tuple[int, int], kind: WeightKind) -> list[float]:
    """`_tiles_cost` by the number of tokens: a deployment's choices ask for each hundreds of times.
    most: a power of two, so that there are few of these lists, each half of the next."""
    if most == 1:
        return [0.0]
    half = most // 2
    return _costs_up_to(half, tile, kind) + [_tiles_cost(n, tile, kind) for n in range(half, most)]


def _loop_cost(tile: tuple[int, int], kind: WeightKind) -> float:
    """Times what a tile of its rows takes."""
    block_m, step = tile
    if tile == LARGE_FITTED_TILE:
        return kind.large_fitted_cost
    if step != block_m:
        return MIXED_TILES_COST if tile == UNEVEN_TILE else FITTED_TILES_COST
    if not kind.is_decoded:
        return 1
    is_paired = num_mmas_per_group(block_m, num_math_registers(block_m, step)) == 2
    return 1 if is_paired else SINGLE_PRODUCTS_COST


def smallest_rows(block_m: int, step: int) -> int:
    """min_block_m of a tile.

    >>> [smallest_rows(*tile) for tile in ((112, 112), (80, 8), (128, 32))]
    [112, 56, 64]
    """
    if step == block_m:
        return block_m
    if (block_m, step) == UNEVEN_TILE:
        return block_m // 2
    return block_m - (NUM_FITTED_SIZES - 1) * step


def num_math_registers(block_m: int, step: int) -> int:
    """Registers of a math thread for a tile whose weights are decoded.

    >>> [num_math_registers(*tile) for tile in ((8, 8), (152, 152), (160, 160), (128, 32))]
    [216, 216, 224, 224]
    """
    widest = NUM_MATH_REGISTERS - PAIRED_LOOP_REGISTERS
    is_enough = block_m <= widest and (block_m, step) != UNEVEN_TILE
    return NUM_MATH_REGISTERS if is_enough else NUM_MORE_MATH_REGISTERS


def num_promoting_registers(block_m: int) -> int:
    """Registers of a math thread for a tile whose sums are added up in registers.

    >>> [num_promoting_registers(rows) for rows in (8, 88, 112, 128)]
    [216, 216, 216, 224]
    """
    num_sets = 2 if block_m <= MAX_ROWS_OF_TWO_SETS else 1
    needed = block_m + num_sets * block_m // 2 + PROMOTING_LOOP_REGISTERS
    return NUM_MATH_REGISTERS if needed <= NUM_MATH_REGISTERS else NUM_MORE_MATH_REGISTERS


def num_mmas_per_group(block_m: int, math_registers: int) -> int:
    """Products that the main loop starts together.

    >>> [num_mmas_per_group(block_m, 224) for block_m in (152, 160, 168)]
    [2, 2, 1]
    """
    return 2 if math_registers >= block_m + PAIRED_LOOP_REGISTERS else 1


def _tiles_cost(num_tokens: int, tile: tuple[int, int], kind: WeightKind) -> float:
    """Of one expert, whose tiles are as few as can be and as equal as the steps allow
    (layout/expert_tiles.cuh).

    """
    block_m, step = tile
    num_tiles = ceil_div(num_tokens, block_m)
    num_steps = max(ceil_div(num_tokens, step), num_tiles * smallest_rows(block_m, step) // step)
    first = ceil_div(num_steps, num_tiles) * step
    cost = kind.costs(first)[0]
    if num_tiles > 1:
        mean_rows = (num_steps * step - first) / (num_tiles - 1)
        cost += (num_tiles - 1) * kind.costs(mean_rows)[1]
    return cost


def _register_words(kind: WeightKind) -> str:
    """What takes most of a math thread's registers."""
    if kind.is_decoded:
        return "accumulators and decoded weights"
    return "sums and products" if kind.has_block_scales else "accumulators"


def num_block_slots(config: ConfigFields) -> int:
    """Blocks whose headers and factors lie in shared memory: the one that math is at, and those
    that the loaders may have begun while their stages are not given back."""
    num_k_blocks = min(int(config["num_l1_k_blocks"]), int(config["num_l2_k_blocks"]))
    # One stage more, because a slot may be written before its block's first stage is waited for.
    return 1 + ceil_div(int(config["num_stages"]) + 1, num_k_blocks)


def smem_layout(config: ConfigFields, kind: WeightKind) -> Layout:
    """Shared memory of a config, given by its fields."""
    names = (
        "num_experts",
        "hidden",
        "num_dispatch_warps",
        "num_epilogue_warps",
        "block_m",
        "block_n",
        "block_k",
        "num_stages",
    )
    return sm90_smem_layout(
        **{name: int(config[name]) for name in names},
        num_block_slots=num_block_slots(config),
        weight_block_bytes=kind.block_bytes,
        has_row_factors=kind.has_row_factors,
        has_biases=bool(config["biases"]),
        has_gate=bool(config["has_gate"]),
        cluster_size=int(config["cluster_size"]),
        has_block_scales=kind.has_block_scales,
        tokens=token_format(str(config["token_format"])),
    )


def tmem_layout(config: ConfigFields) -> None:
    """SM90 has no tensor memory."""


def choose_fields(
    shape: MoEShape,
    num_tokens: int,
    kind: WeightKind,
    *,
    is_uneven: bool,
    num_sms: int,
    smem_capacity: int,
    overrides: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, str]]:
    """All fields that are not given by the problem, and the reason of each."""
    choices = FieldChoices(overrides)
    choose = choices.choose

    check_index_ranges(shape, l2_rows_per_expert=align_up(shape.hidden, BLOCK_N))
    choose("num_sms", num_sms, "one CTA per SM of the device, all resident at once")
    if num_sms < 1:
        raise ValueError(f"num_sms must be at least 1; got {num_sms}")
    expected = shape.expected_tokens_per_expert(num_tokens)
    allowed_rows = sorted({rows for rows, _ in kind.tiles})
    choose_shared_parts(shape, choices)
    shared = SharedWork.of(shape, num_tokens, choices.fields)
    chooses_from = kind
    if not shape.has_gate and shape.tokens.has_scales:
        chooses_from = replace(kind, spared_tiles=(*kind.spared_tiles, *_wide_tiles(kind)))
    chosen_block_m, chosen_step = choose_tile(expected, chooses_from, is_uneven, shared)
    block_m = choose(
        "block_m",
        chosen_block_m,
        f"least expected cost with {float(expected):.4g} tokens per expert"
        + (", unevenly" if is_uneven else "")
        + (f", and {num_tokens} per shared expert" if shared else ""),
    )
    if block_m not in allowed_rows:
        raise ValueError(
            f"block_m must be one of {', '.join(map(str, allowed_rows))}; got {block_m}"
        )
    _choose_clusters(choices, kind, has_two_m_blocks=_shares_copies(kind, expected, block_m))
    default_step = chosen_step if block_m == chosen_block_m else block_m
    block_m_step = choose(
        "block_m_step",
        default_step,
        "all m-blocks have the same size"
        if default_step == block_m
        else "m-blocks are fitted to each expert's tokens",
    )
    steps = [step for tile, step in kind.tiles if tile == block_m]
    if block_m_step not in steps:
        raise ValueError(
            f"block_m_step must be {' or '.join(map(str, steps))} with block_m {block_m}; "
            f"got {block_m_step}"
        )
    min_block_m = choose(
        "min_block_m",
        smallest_rows(block_m, block_m_step),
        "all m-blocks have the same size"
        if block_m_step == block_m
        else "as many sizes as one kernel has registers for",
    )
    is_mixed = min_block_m != block_m
    choose_blocks(
        shape,
        choices,
        block_n=BLOCK_N,
        block_n_reason="weight rows of two math warpgroups, 128 each",
    )

    choose("num_dispatch_warps", NUM_DISPATCH_WARPS, "half of a warpgroup, beside the loaders")
    choose("num_epilogue_warps", NUM_MATH_WARPS, "two math warpgroups, which also do the epilogue")
    choose(
        "num_threads",
        32 * (NUM_DISPATCH_WARPS + NUM_LOADER_WARPS + NUM_MATH_WARPS),
        f"{NUM_DISPATCH_WARPS} dispatch + {NUM_LOADER_WARPS} loader + {NUM_MATH_WARPS} math warps",
    )
    needed_registers = kind.math_registers(block_m, block_m_step)
    num_registers = choose(
        "num_dispatch_registers",
        NUM_OTHER_REGISTERS[needed_registers],
        "what the math warps leave of a CTA's registers",
    )
    choose("num_loader_registers", num_registers, "of dispatch: one warpgroup, one budget")
    math_registers = choose(
        "num_epilogue_registers",
        needed_registers,
        f"{_register_words(kind)} of the math warps"
        + (", with a main loop for each size of m-block" if is_mixed else ""),
    )
    mmas_per_group = choose(
        "num_mmas_per_group",
        num_mmas_per_group(block_m, math_registers) if kind.is_decoded else MMAS_PER_K_BLOCK,
        f"{math_registers - block_m} registers beside the accumulators; pairs of products need "
        f"{PAIRED_LOOP_REGISTERS}"
        if kind.is_decoded
        else "all of a k-block"
        + (", whose sums are added up in registers" if kind.has_block_scales else ""),
    )
    if is_mixed and mmas_per_group == 1:
        raise ValueError(
            f"num_epilogue_registers must be at least {block_m + PAIRED_LOOP_REGISTERS} with "
            f"block_m_step {block_m_step}; got {math_registers}"
        )
    names = ("num_dispatch_registers", "num_loader_registers", "num_epilogue_registers")
    check_registers(
        {name: choices.fields[name] for name in names},
        (NUM_DISPATCH_WARPS, NUM_LOADER_WARPS, NUM_MATH_WARPS),
    )

    choose_ring(shape, choices, sf_columns_per_block=block_m_step)
    choose_turns(shape, expected, choices, blocks_per_sm=BLOCKS_PER_SM_IN_TURN, is_dealt_out=False)
    layout = partial(smem_layout, kind=kind)
    choose_stages(shape, smem_capacity, layout, choices)
    choose(
        "num_block_slots",
        num_block_slots(choices.fields),
        "the block that math is at, and those that the stages may belong to",
    )
    choose_combine_chunks(
        shape,
        layout,
        choices,
        num_min_chunks=COMBINE_CHUNKS_OF_FEW_TOKENS if block_m == min(BLOCK_MS) else 1,
    )
    return choices.fields, choices.reasons


def _choose_clusters(choices: FieldChoices, kind: WeightKind, *, has_two_m_blocks: bool) -> None:
    """Needs num_sms. has_two_m_blocks: whether about half of the experts or more are expected to.

    On an H200 (2026-11-23, benchmarks/LOG.md) clusters take 1 to 9 % less time from there on with
    weights that come as they are, up to 1 % more below, and with decoded weights next to nothing.
    """
    num_sms = choices.fields["num_sms"]
    if not kind.shares_weights:
        chosen, reason = 1, "sharing decoded weights among CTAs measured no faster"
    elif not has_two_m_blocks:
        chosen, reason = 1, "most experts have one m-block, with nobody to share weights"
    elif num_sms % 2:
        chosen, reason = 1, "an odd number of SMs"
    else:
        chosen, reason = 2, "experts have two m-blocks and more, which share copies of weights"
    cluster_size = choices.choose("cluster_size", chosen, reason)
    if cluster_size not in CLUSTER_SIZES:
        raise ValueError(f"cluster_size must be 1 or 2; got {cluster_size}")
    if num_sms % cluster_size != 0:
        raise ValueError(f"num_sms must be even with cluster_size 2; got {num_sms}")
    choices.choose(
        "num_cluster_m_blocks",
        cluster_size,
        "CTAs share nothing"
        if cluster_size == 1
        else "CTAs of a cluster share an n-block's weights",
    )


def candidates(
    shape: MoEShape, chosen: Mapping[str, int], kind: WeightKind
) -> dict[str, tuple[int, ...]]:
    """Other values of each tunable field that are worth measuring beside the `chosen` ones."""
    num_stages = chosen["num_stages"]
    block_ms = sorted({rows for rows, _ in kind.tiles})
    return {
        "block_m": neighbours(block_ms, chosen["block_m"], 3),
        # More do not fit. Fewer leave combine larger chunks and less to fill at first.
        "num_stages": neighbours(range(MIN_STAGES, num_stages + 1), num_stages, 2),
    }
