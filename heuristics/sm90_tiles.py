"""Tiles of the SM90 kernel: which there are, what each takes, and which a layer's tokens get."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from .choices import rounded_mean
from .segments import align_up, ceil_div
from .shape import MoEShape

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


def wide_tiles(kind: WeightKind) -> tuple[tuple[int, int], ...]:
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
    costs = expected_costs(rounded_mean(expected), is_uneven, kind)
    if shared is None:
        return min(costs, key=lambda tile: costs[tile])
    work = shared
    return min(
        costs,
        key=lambda tile: work.num_routed_experts * costs[tile] + shared_cost(tile, work, kind),
    )


@lru_cache(maxsize=4096)
def expected_costs(
    expected: Fraction, is_uneven: bool, kind: WeightKind
) -> dict[tuple[int, int], float]:
    """Of a routed expert, by tile."""
    counts = likely_counts(float(expected), UNEVEN_VARIATION if is_uneven else 0.0)
    tiles = [
        tile
        for tile in kind.tiles
        if tile not in kind.spared_tiles and not _is_of_others(tile, expected, is_uneven)
    ]
    return {
        tile: expected_cost(tile, counts, kind, shares_copies(kind, expected, tile[0]))
        for tile in tiles
    }


def _is_of_others(tile: tuple[int, int], expected: Fraction, is_uneven: bool) -> bool:
    """Whether tiles of several sizes are for other numbers of tokens than these. Where experts have
    one m-block, LARGE_FITTED_TILE took 1 to 4 % longer than the best tile of one size (FP8, H200,
    2026-11-24)."""
    if is_uneven:
        return tile in FITTED_TILES
    return tile == LARGE_FITTED_TILE and expected < tile[0]


def shares_copies(kind: WeightKind, expected: Fraction, block_m: int) -> bool:
    """Whether pairs of CTAs are to share copies of weights: from where about half of the experts
    or more are expected to have two m-blocks."""
    return kind.shares_weights and expected >= block_m


def shared_cost(tile: tuple[int, int], work: SharedWork, kind: WeightKind) -> float:
    """Of all shared experts, in the unit of `expected_cost`."""
    parts = work.parts(tile[0])
    of_one = sum(count * _tiles_cost(num_tokens, tile, kind) for num_tokens, count in parts)
    return work.num_experts * of_one * _loop_cost(tile, kind)


def likely_counts(mean: float, variation: float) -> list[tuple[int, float]]:
    """Counts of a Poisson distribution, or of one whose mean is gamma-distributed with this
    coefficient of variation, without their tails, and their probabilities, up to a factor. Of many,
    every second, third, ...: enough to tell tiles apart.

    >>> counts = likely_counts(5.0, 0.5)
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


def expected_cost(
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
