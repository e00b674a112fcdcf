"""Small layers on awkward inputs under many schedules in the emulator, with all checks on.

A case is one value of each axis (`axes`), and two calls in the same buffers, with other tokens. It
follows from one integer, so that naming it repeats a failure. Cases come in rounds: in each, every
two values of two axes meet at least once, for every architecture. Compiling takes longer than
anything else, so some cases that follow each other share their kernels. For a change of a kernel
there is the grid: every kernel that the axes lead to, and for each of them a round of all that is
not compiled in.

The split path's cases, and their axes, are those of split_fuzzing.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch

from deep_moe.activations import ACTIVATIONS, Activation, Swiglu
from deep_moe.emulator.machine import SCHEDULES
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.segments import align_up, ceil_div
from deep_moe.targets import TARGETS, TargetWeights, target_of

from .bounds import Bounds, reference_bounds
from .calls import (
    RankOutput,
    initial_y,
    model_inputs,
    run_emulated_in_a_row,
    run_emulated_ranks,
)
from .comparison import compare
from .reference import reference_mega_moe
from .synthetic import Layer, Tokens, exact_layer, exact_tokens, name_twice, put_nan, received

if TYPE_CHECKING:
    from typing_extensions import Self

    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

ARCHS = tuple(TARGETS)
CASES_PER_KERNEL = 4  # one after the other, so that a compilation serves several
CASES_PER_GRID_KERNEL = 56
NUM_KERNEL_AXES = 8  # the first ones, which the grid has all combinations of
_MAX_TOKENS = 64
# Ranks, experts, top-k, hidden, intermediate. Few, so that many cases share a compiled kernel.
# One's intermediate size is padded, to 128. One's lists may have several pages.
_SHAPES = (
    (1, 4, 2, 256, 256),
    (2, 4, 3, 256, 96),
    (2, 6, 2, 384, 512),
    (3, 12, 3, 128, 128),
    (1, 3, 3, 128, 1152),
)
# Of each architecture. The longest axes that a kernel is compiled for are formats and shapes: all
# of their pairs, and some kernels by chance.
CASES_PER_ROUND = CASES_PER_KERNEL * (
    len(_SHAPES) * max(len(target.weights) for target in TARGETS.values()) + 8
)
EXACT_ACTIVATIONS = tuple(case for kind in ACTIVATIONS.values() for case in kind.exact_cases())
ALL_ACTIVATIONS = (
    *EXACT_ACTIVATIONS,
    *(case for kind in ACTIVATIONS.values() for case in kind.rounded_cases()),
)
NUMS_SHARED = (0, 1, 3)
# How many tokens ranks have in a call (`counts_of_ranks`).
TOKENS_OF_RANKS = ("any", "few", "many", "one rank has none", "one rank has all", "none, 1 or most")
BESIDE = " x "  # between a format of weights and one of tokens
SMALL_POOL, _MAX_TOKENS_OF_SMALL_POOL = 384, 192
# Of the list of blocks.
_TURNS: dict[str, dict[str, int]] = {"as chosen": {}, "of one m-block": {"num_turn_m_blocks": 1}}


@lru_cache
def axes(arch: str) -> dict[str, tuple[Any, ...]]:
    """What cases of an architecture differ in, each with its values. A tile is the n-th of those
    that go with the weights."""
    weights = target_of(arch).weights
    return {
        # With the tokens beside them.
        "weights": tuple(f"{own.weights}{BESIDE}{own.token_format}" for own in weights),
        "shape": _SHAPES,
        "shared experts": NUMS_SHARED,
        "tile": tuple(range(min(len(own.fuzz_tiles) for own in weights))),
        "turns": tuple(_TURNS),
        "biases": ("none", "both layers"),  # without a gate there are none
        "activation": ALL_ACTIVATIONS,
        "y": ("written", "added to"),
        # Chunks of a token in combine: the last one may be shorter.
        "chunks": ("chosen", "of several sizes"),
        # Rows: one for each token, or so few that calls with many tokens use them again.
        "pool": (None, SMALL_POOL),
        # So far all is compiled in.
        # Of weights: as many as the kernel applies, or fewer, where a checkpoint may have fewer.
        "scales": ("the kernel's", "fewer", "fewest"),
        # By hand, one call after the other; by `prepare_inputs`, with no wait between the calls.
        "inputs": ("filled", "prepared"),
        "tokens": TOKENS_OF_RANKS,
        "slots": (
            "all",
            "unused",
            "named twice",
            "none in the last token",
            "all to one expert",
            "one expert in all",
        ),
        "values": ("numbers", "NaN"),
        "schedule": SCHEDULES,
    }


def grid_size() -> int:
    """The number of cases in the grid, of all architectures."""
    num_kernels = sum(math.prod(_sizes(arch)[:NUM_KERNEL_AXES]) for arch in ARCHS)
    return num_kernels * CASES_PER_GRID_KERNEL


class Case(Protocol):
    """What `deep-moe fuzz` needs of a case."""

    path: ClassVar[str]

    @property
    def number(self) -> int: ...

    @property
    def arch(self) -> str: ...

    @property
    def values(self) -> Mapping[str, Any]: ...

    @staticmethod
    def axes_of(arch: str, /) -> Mapping[str, tuple[Any, ...]]: ...

    @classmethod
    def of(cls, number: int) -> Self: ...

    def run(self) -> str: ...


@dataclass(frozen=True)
class FuzzCase:
    """Two calls of all ranks on inputs whose sums are exact. Of the fused call; for another path,
    derive from it: path, axes_of, num_held and num_calls say which cases there are."""

    path: ClassVar[str] = "fused"
    num_held: ClassVar[int] = 11  # the first axes, which are compiled in
    num_calls: ClassVar[int] = 2

    number: int
    arch: str
    values: Mapping[str, Any]  # of each axis

    @staticmethod
    def axes_of(arch: str) -> dict[str, tuple[Any, ...]]:
        return axes(arch)

    @classmethod
    @cache
    def cases_per_round(cls) -> int:
        """Of each architecture."""
        return max(
            rows_of_a_round(tuple(map(len, cls.axes_of(arch).values())), cls.num_held)
            for arch in ARCHS
        )

    @classmethod
    def of(cls, number: int) -> Self:
        """The case with this number: CASES_PER_KERNEL of one kernel follow each other. With each
        kernel architectures take turns, and each goes through its rounds."""
        kernel_idx, case_idx = divmod(number, CASES_PER_KERNEL)
        idx, arch_idx = divmod(kernel_idx, len(ARCHS))
        arch = ARCHS[arch_idx]
        num_cases = cls.cases_per_round()
        round_idx, row_idx = divmod(idx * CASES_PER_KERNEL + case_idx, num_cases)
        of_arch = cls.axes_of(arch)
        rows = pairwise(
            tuple(map(len, of_arch.values())),
            num_cases,
            seed=round_idx * len(ARCHS) + arch_idx,
            num_held=cls.num_held,
            hold=CASES_PER_KERNEL,
        )
        return cls(number, arch, _values(of_arch, rows[row_idx]))

    @classmethod
    def of_grid(cls, number: int) -> Self:
        """The case with this number in the grid, below `grid_size()`: kernel by kernel."""
        kernel_idx, row_idx = divmod(number, CASES_PER_GRID_KERNEL)
        for arch in ARCHS:
            sizes = _sizes(arch)
            num_kernels = math.prod(sizes[:NUM_KERNEL_AXES])
            if kernel_idx < num_kernels:
                kernels = itertools.product(*map(range, sizes[:NUM_KERNEL_AXES]))
                kernel = next(itertools.islice(kernels, kernel_idx, None))
                rows = pairwise(sizes[NUM_KERNEL_AXES:], CASES_PER_GRID_KERNEL, seed=kernel_idx)
                return cls(number, arch, _values(axes(arch), kernel + rows[row_idx]))
            kernel_idx -= num_kernels
        raise ValueError(f"number must be below {grid_size()}, the size of the grid; got {number}")

    @cached_property
    def shape(self) -> MoEShape:
        num_ranks, num_experts, num_topk, hidden, intermediate_hidden = self.values["shape"]
        pool = self.values.get("pool")
        return MoEShape(
            num_ranks=num_ranks,
            num_experts=num_experts,
            num_topk=num_topk,
            hidden=hidden,
            intermediate_hidden=intermediate_hidden,
            num_max_tokens_per_rank=(_MAX_TOKENS if pool is None else _MAX_TOKENS_OF_SMALL_POOL),
            num_pool_tokens=pool,
            weights=self._formats[0],
            token_format=self._formats[1],
            biases=self.has_gate and self.values.get("biases") == "both layers",
            has_gate=self.has_gate,
            num_shared_experts=self.values.get("shared experts", 0),
        )

    @property
    def has_gate(self) -> bool:
        return self.activation.has_gate

    @property
    def activation(self) -> Activation:
        return cast(Activation, self.values.get("activation", Swiglu()))

    @property
    def target_weights(self) -> TargetWeights:
        """What the target does with the case's weights."""
        return target_of(self.arch).weights_of(*self._formats)

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and values along K that share a scale of the case's weights."""
        weights, scales = self.target_weights, self.values.get("scales", "the kernel's")
        if scales == "the kernel's" or not weights.larger_scale_blocks:
            return weights.scale_block
        return weights.larger_scale_blocks[0 if scales == "fewer" else -1]

    @property
    def _formats(self) -> tuple[WeightsName, TokenFormatName]:
        """Of the weights, and of the tokens."""
        weights, _, tokens = self.values["weights"].partition(BESIDE)
        return cast("WeightsName", weights), cast("TokenFormatName", tokens)

    def inputs(self) -> list[list[Tokens]]:
        """Of each call, each rank's."""
        choose = random.Random(self.number)
        return [
            [
                self._tokens(rank, count, choose.randrange(2**31))
                for rank, count in enumerate(
                    counts_of_ranks(
                        self.values["tokens"],
                        self.shape.num_ranks,
                        self.shape.num_max_tokens_per_rank,
                        choose,
                    )
                )
            ]
            for _ in range(self.num_calls)
        ]

    def run(self) -> str:
        """What went wrong, "" if nothing."""
        layer = exact_layer(self.shape, seed=1, scale_block=self.scale_block)
        calls = self.inputs()
        try:
            outputs = self._outputs(layer, calls)
        except RuntimeError as error:  # the emulator's findings, and waits that ran out
            return str(error)
        for call_idx, (tokens, of_call) in enumerate(zip(calls, outputs, strict=True)):
            expected_stats = self.received(tokens).split(self.shape.num_experts_per_rank)
            for rank, (own, output) in enumerate(zip(tokens, of_call, strict=True)):
                own = self.as_received(own)
                comparison = compare(output.y, self.expected(rank, own, layer))
                if not comparison.is_right:
                    return f"call {call_idx}, rank {rank}: {comparison}"
                if not torch.equal(output.stats, expected_stats[rank]):
                    return (
                        f"call {call_idx}, rank {rank}: received {output.stats.tolist()}, "
                        f"sent were {expected_stats[rank].tolist()}"
                    )
        return ""

    def received(self, tokens: Sequence[Tokens]) -> torch.Tensor:
        """What each expert of all ranks is to get."""
        return received(self.shape, tokens)

    def as_received(self, tokens: Tokens) -> Tokens:
        """A rank's tokens as the experts get them."""
        return model_inputs(tokens)[1] if self.is_prepared else tokens

    @property
    def is_prepared(self) -> bool:
        """Whether the input is in BF16."""
        return bool(self.values["inputs"] == "prepared")

    def expected(self, rank: int, tokens: Tokens, layer: Layer) -> torch.Tensor | Bounds:
        """Its output, or what it may be where the activation leaves no result exact."""
        activation = self.activation
        inputs = layer.operands(tokens)
        numerics = self.target_weights.numerics
        # Prepared, float scales are no powers of two.
        has_odd_scales = self.shape.tokens.has_float_scales and self.is_prepared
        y = initial_y(tokens.num_tokens, self.shape.hidden) if self.accumulates else None
        if activation in EXACT_ACTIVATIONS and not has_odd_scales:
            return reference_mega_moe(
                *inputs,
                activation=activation,
                numerics=numerics,
                num_shared_experts=self.shape.num_shared_experts,
                y=y,
                **layer.biases,
            )
        return reference_bounds(
            *inputs,
            activation=activation,
            numerics=numerics,
            sum_bits=FP32_SUM_BITS,
            **layer.biases,
            num_shared_experts=self.shape.num_shared_experts,
            y=y,
        )

    @property
    def accumulates(self) -> bool:
        return self.values.get("y") == "added to"

    @property
    def overrides(self) -> dict[str, int]:
        """Of the config of the experts' kernel."""
        overrides = {
            **self.target_weights.fuzz_tiles[self.values["tile"]],
            **_TURNS[self.values["turns"]],
        }
        if self.shape.num_shared_experts == max(NUMS_SHARED):
            # Of as many parts as there can be; otherwise small layers' have one.
            overrides |= {"num_experts_per_part": 1, "num_part_m_blocks": 1}
        if self.values.get("chunks") == "of several sizes":
            # Hidden sizes are multiples of 128; chunks of 8 values.
            overrides["num_combine_chunks"] = 5 if self.shape.hidden % 3 == 0 else 3
        return overrides

    def _outputs(self, layer: Layer, calls: Sequence[Sequence[Tokens]]) -> list[list[RankOutput]]:
        options: dict[str, Any] = {
            "arch": self.arch,
            "num_sms": 4,
            "activation": self.activation,
            "overrides": self.overrides,
            "accumulate": self.accumulates,
            "schedule": self.values["schedule"],
            "schedule_seed": self.number,
        }
        if self.values["inputs"] == "prepared":
            return run_emulated_in_a_row(self.shape, layer, calls, **options)
        return run_emulated_ranks(self.shape, layer, calls, **options)

    def _tokens(self, rank: int, count: int, seed: int) -> Tokens:
        slots = self.values["slots"]
        tokens = exact_tokens(
            self.shape, count, seed=seed, num_unused_slots=1 if slots == "unused" else 0
        )
        topk_idx = tokens.topk_idx
        if slots == "named twice":
            tokens = name_twice(tokens)
        elif slots == "none in the last token":
            topk_idx[-1:] = -1
        elif slots == "all to one expert":
            topk_idx[~(topk_idx == 0).any(dim=1), -1] = 0
        elif slots == "one expert in all":
            topk_idx[:] = 0
        return put_nan(tokens, 1, seed=seed) if self.values["values"] == "NaN" else tokens


@dataclass
class Coverage:
    """What cases have covered so far."""

    num_cases: int = 0
    num_failed: int = 0
    # Of each axis, and of "path" and "arch", how many cases had each value, in words.
    values: dict[str, Counter[str]] = field(default_factory=dict)
    # By path and architecture: how many pairs of values there are, and those that have met.
    _num_pairs: dict[tuple[str, str], int] = field(default_factory=dict)
    _pairs: set[tuple[str, str, int, str, int, str]] = field(default_factory=set)

    def add(self, case: Case, failure: str) -> None:
        """A case that has run, and what `run` said."""
        self.num_cases += 1
        self.num_failed += bool(failure)
        words = [_word(value) for value in case.values.values()]
        kind = (case.path, case.arch)
        for axis, word in zip(("path", "arch", *case.values), (*kind, *words), strict=True):
            self.values.setdefault(axis, Counter())[word] += 1
        for (i, one), (j, other) in itertools.combinations(enumerate(words), 2):
            self._pairs.add((*kind, i, one, j, other))
        self._num_pairs[kind] = sum(
            len(one) * len(other)
            for one, other in itertools.combinations(case.axes_of(case.arch).values(), 2)
        )

    @property
    def num_pairs(self) -> int:
        """Of values of two axes that have met."""
        return len(self._pairs)

    @property
    def num_all_pairs(self) -> int:
        """That there are, for the paths and architectures that had a case."""
        return sum(self._num_pairs.values())


def counts_of_ranks(kind: str, num_ranks: int, most: int, choose: random.Random) -> list[int]:
    """Tokens of each rank. kind: of TOKENS_OF_RANKS."""
    if kind == "none, 1 or most":
        return [choose.choice((0, 1, most)) for _ in range(num_ranks)]
    lowest, highest = {"few": (1, 3), "many": (most - 3, most)}.get(kind, (0, most))
    counts = [choose.randint(lowest, highest) for _ in range(num_ranks)]
    chosen = choose.randrange(num_ranks)
    if kind == "one rank has none":
        counts[chosen] = 0
    elif kind == "one rank has all":
        counts = [choose.randint(1, most) * (rank == chosen) for rank in range(num_ranks)]
    return counts


def rows_of_a_round(sizes: Sequence[int], num_held: int) -> int:
    """So many that every two values meet, and some by chance: half as many again as the largest
    two axes need whose values stay for CASES_PER_KERNEL rows, or those of which only one does.

    >>> rows_of_a_round((5, 2, 7, 3, 6), num_held=3)
    212
    """
    *_, second, first = sorted(sizes[:num_held])
    least = max(CASES_PER_KERNEL * second * first, first * max(sizes[num_held:]))
    return align_up(ceil_div(3 * least, 2), CASES_PER_KERNEL)


def values_of(
    axes: Mapping[str, Sequence[Any]], number: int, num_rows: int, **options: int
) -> dict[str, Any]:
    """Of each axis, for the case with this number: num_rows of them are a round in which every two
    values meet. options: of `pairwise`, but seed."""
    round_idx, row_idx = divmod(number, num_rows)
    rows = pairwise(tuple(map(len, axes.values())), num_rows, seed=round_idx, **options)
    return _values(axes, rows[row_idx])


@lru_cache(maxsize=64)
def pairwise(
    sizes: tuple[int, ...], num_rows: int, *, seed: int, num_held: int = 0, hold: int = 1
) -> list[tuple[int, ...]]:
    """num_rows rows of one value of each axis, below its size, in which every two values of two
    axes meet. Other seeds give other rows. The first num_held axes have the same values in `hold`
    rows one after the other.

    Each row begins with a pair that has not met yet; then every other axis, in a random order,
    takes the value that makes most new pairs. When all have met, rows are drawn at random.

    >>> rows = pairwise((2, 3, 2), 6, seed=0)
    >>> len({(row[0], row[1]) for row in rows}), len({(row[1], row[2]) for row in rows})
    (6, 6)
    >>> [row[0] for row in pairwise((2, 3), 8, seed=0, num_held=1, hold=4)]
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    choose = random.Random(seed)
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    rows: list[tuple[int, ...]] = []
    held: dict[int, int] = {}
    while len(rows) < num_rows:
        if len(rows) % hold == 0:
            held = {}
            _fill(held, range(num_held), sizes, missing, choose)
        row = dict(held)
        _fill(row, range(num_held, len(sizes)), sizes, missing, choose)
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
        missing -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(sizes)), 2)}
    if missing:
        raise ValueError(f"num_rows must be larger than {num_rows} for all pairs of {sizes}")
    return rows


def _fill(
    row: dict[int, int],
    axes_left: Iterable[int],
    sizes: Sequence[int],
    missing: set[tuple[int, int, int, int]],
    choose: random.Random,
) -> None:
    """Give these axes their values in the row."""
    rest = list(axes_left)
    new = sorted(
        (i, a, j, b)
        for i, a, j, b in missing
        if (i in rest or row.get(i) == a) and (j in rest or row.get(j) == b)
    )
    if new:
        i, a, j, b = choose.choice(new)
        row |= {i: a, j: b}
        rest = [axis for axis in rest if axis not in row]
    choose.shuffle(rest)
    for axis in rest:
        values = list(range(sizes[axis]))
        choose.shuffle(values)
        row[axis] = max(values, key=lambda value: len(_met(row, axis, value, missing)))


def _met(
    row: Mapping[int, int], axis: int, value: int, missing: set[tuple[int, int, int, int]]
) -> set[tuple[int, int, int, int]]:
    """The missing pairs of that value with those of the row; of a row's first value all."""
    if not row:
        return {pair for pair in missing if (axis, value) in (pair[:2], pair[2:])}
    return missing & {
        (other, row[other], axis, value) if other < axis else (axis, value, other, row[other])
        for other in row
    }


def _sizes(arch: str) -> tuple[int, ...]:
    return tuple(map(len, axes(arch).values()))


def _values(of_arch: Mapping[str, Sequence[Any]], row: Sequence[int]) -> dict[str, Any]:
    return {axis: values[i] for (axis, values), i in zip(of_arch.items(), row, strict=True)}


def _word(value: Any) -> str:
    """A value of an axis for people."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
