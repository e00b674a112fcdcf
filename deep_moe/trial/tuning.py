"""Measures candidates against the formula's kernel, for `deep-moe tune`; docs/tuning.md says how.

Every rank runs this and sees the times of all, so all come to the same decisions.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deep_moe.activations import Activation
from deep_moe.fused.buffer import require_equal
from deep_moe.fused.deployment import build_deployment
from deep_moe.fused.tuning_tables import add_to_table
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.tuning import TunedEntry, TunedLayer, TunedLayerKey
from deep_moe.targets import MegaMoEConfig, choose_config, target_of

from .rank_processes import run_on_ranks
from .real_size import rank_layer, rank_tokens
from .timing import TimedLayer, machine, timed

MIN_GAIN = 0.02
# Of the gain that is measured; with fewer the noise of the chip's clock makes entries.
MIN_STANDARD_ERRORS = 3.0
SEARCH_ROUNDS = (2, 6)  # at least, at most
CONFIRM_ROUNDS = (8, 24)
SEARCH_SHARE = 0.6  # of a size's time; the rest is left to confirm
WORTH_COMBINING = 0.005  # a gain in the search that makes a value take part in combinations
WORTH_CONFIRMING = 0.01
CALLS_PER_ROUND = 5

Overrides = Mapping[str, int]
# One round: seconds of a call with each of some kernels.
Measure = Callable[[Sequence[Overrides]], list[float]]


@dataclass(frozen=True)
class TuningPlan:
    """What to measure, and where the results go."""

    shape: MoEShape
    tokens: tuple[int, ...]  # per rank
    ends: float  # time.time(); a size that has not begun by then is left out
    table: Path
    results: Path  # a JSON list, an object per size
    arch: str
    num_sms: int
    activation: Activation
    seed: int = 0
    commit: str | None = None

    def formula(self, num_tokens: int) -> MegaMoEConfig:
        """What calls run without tables."""
        return self.config(num_tokens, {})

    def config(self, num_tokens: int, overrides: Overrides) -> MegaMoEConfig:
        """What calls with these overrides run."""
        return choose_config(
            self.shape,
            num_tokens,
            arch=self.arch,
            num_sms=self.num_sms,
            activation=self.activation,
            overrides=overrides,
        )

    def accepts(self, num_tokens: int, overrides: Overrides) -> bool:
        """Whether the limits do."""
        try:
            self.config(num_tokens, overrides)
        except ValueError:
            return False
        return True


@dataclass(frozen=True)
class Gain:
    """How much longer one kernel takes than another, measured in turn, round by round."""

    median: float
    standard_error: float

    @classmethod
    def of(cls, seconds: Sequence[float], faster: Sequence[float]) -> Gain:
        """seconds, faster: of each round.

        >>> Gain.of([1.25, 1.5, 1.25], [1.0, 1.0, 1.0])
        Gain(median=0.25, standard_error=0.0)
        """
        ratios = [slow / fast - 1 for slow, fast in zip(seconds, faster, strict=True)]
        median = statistics.median(ratios)
        deviation = statistics.median(abs(ratio - median) for ratio in ratios)
        # Of a median of normal numbers: 1.2533 s / sqrt(n), where s is 1.4826 median deviations.
        error = 1.2533 * 1.4826 * deviation / len(ratios) ** 0.5
        return cls(median, error)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether it is worth an entry."""
        return self.median >= max(MIN_GAIN, MIN_STANDARD_ERRORS * self.standard_error)


@dataclass(frozen=True)
class Finalist:
    """The fastest candidate of the search, alone against the formula's kernel."""

    overrides: dict[str, int]
    us: float
    gain: Gain
    num_rounds: int
    is_entry: bool


@dataclass(frozen=True)
class SizeResult:
    """One number of tokens per rank. No finalist: nothing looked faster than the formula's kernel,
    whose fields and time these are."""

    num_tokens: int
    num_candidates: int
    formula: dict[str, int]
    formula_us: float
    finalist: Finalist | None = None

    def words(self) -> str:
        """A line for people."""
        text = f"{self.num_tokens} tokens/rank: {self.formula_us:.1f} us by formula"
        if self.finalist is None:
            return f"{text}, nothing faster among {self.num_candidates} others"
        other = ", ".join(f"{name} {value}" for name, value in self.finalist.overrides.items())
        gain = self.finalist.gain
        verdict = "an entry" if self.finalist.is_entry else "not beyond noise"
        return (
            f"{text}, {self.finalist.us:.1f} with {other}: {gain.median:+.1%} (standard error "
            f"{gain.standard_error:.1%}, {self.finalist.num_rounds} rounds), {verdict}"
        )


def candidates(plan: TuningPlan, num_tokens: int) -> list[dict[str, int]]:
    """Every tunable field changed by itself."""
    return [
        {name: value}
        for name, values in plan.formula(num_tokens).candidates.items()
        for value in values
        if plan.accepts(num_tokens, {name: value})
    ]


def combined(
    gains: Sequence[tuple[dict[str, int], float]], accepts: Callable[[Overrides], bool]
) -> list[dict[str, int]]:
    """Candidates of several fields, from the best values of each by itself.

    gains: of candidates that change one field each.

    >>> gains = [({"a": 1}, 0.01), ({"a": 2}, 0.03), ({"b": 7}, 0.02), ({"c": 9}, -0.01)]
    >>> combined(gains, lambda overrides: True)
    [{'a': 2, 'b': 7}]
    """
    best: dict[str, int] = {}
    for overrides, gain in sorted(gains, key=lambda pair: pair[1], reverse=True):
        ((name, value),) = overrides.items()
        if gain > WORTH_COMBINING:
            best.setdefault(name, value)
    sets = (names for size in range(2, len(best) + 1) for names in combinations(sorted(best), size))
    found = ({name: best[name] for name in names} for names in sets)
    return [overrides for overrides in found if accepts(overrides)]


def tune_size(
    plan: TuningPlan, num_tokens: int, measure: Measure, is_time_left: Callable[[float], bool]
) -> SizeResult:
    """Search and confirm. is_time_left: whether less than a share of this size's time is used."""
    formula = plan.formula(num_tokens).tunable

    def rounds(
        kernels: Sequence[Overrides], limits: tuple[int, int], share: float
    ) -> list[list[float]]:
        """As many as there is time for, within the limits."""
        times: list[list[float]] = [[] for _ in kernels]
        while len(times[0]) < limits[1] and (len(times[0]) < limits[0] or is_time_left(share)):
            for known, seconds in zip(times, measure(kernels), strict=True):
                known.append(seconds)
        return times

    formula_times: list[float] = []
    gains: list[tuple[dict[str, int], float]] = []

    def search(kernels: Sequence[dict[str, int]], share: float) -> None:
        own, *others = rounds([formula, *kernels], SEARCH_ROUNDS, share)
        formula_times.extend(own)
        for overrides, seconds in zip(kernels, others, strict=True):
            gains.append((overrides, Gain.of(own, seconds).median))

    search(candidates(plan, num_tokens), SEARCH_SHARE / 2)
    several = combined(gains, lambda overrides: plan.accepts(num_tokens, overrides))
    if several:
        search(several, SEARCH_SHARE)
    best, gain_seen = max(gains, key=lambda pair: pair[1], default=({}, 0.0))
    if gain_seen < WORTH_CONFIRMING:
        formula_us = 1e6 * statistics.median(formula_times)
        return SizeResult(num_tokens, len(gains), formula, formula_us)
    own, other = rounds([formula, best], CONFIRM_ROUNDS, 1.0)
    gain = Gain.of(own, other)
    return SizeResult(
        num_tokens,
        len(gains),
        formula,
        1e6 * statistics.median(own),
        Finalist(best, 1e6 * statistics.median(other), gain, len(own), gain.is_beyond_noise),
    )


def tuned_layer(plan: TuningPlan, result: SizeResult, facts: Mapping[str, Any]) -> TunedLayer:
    """A result as tables hold it. facts: of the machine."""
    key = TunedLayerKey.of(plan.shape, device=facts["gpu"], arch=plan.arch, num_sms=plan.num_sms)
    finalist = result.finalist
    if finalist is None or not finalist.is_entry:
        return TunedLayer(key, (result.num_tokens,), ())
    entry = TunedEntry(
        num_tokens=result.num_tokens,
        overrides=tuple(finalist.overrides.items()),
        formula=tuple(result.formula.items()),
        # By the gain that decided, the median over rounds of the ratio.
        us=round(result.formula_us / (1 + finalist.gain.median), 2),
        formula_us=round(result.formula_us, 2),
        date=facts["date"][:10],
        commit=facts["commit"] or f"deep_moe {facts['deep_moe']}",
    )
    return TunedLayer(key, (result.num_tokens,), (entry,))


class RankMeasure:
    """One rank's part of the measurements at one number of tokens."""

    def __init__(self, layer: TimedLayer, activation: Activation) -> None:
        self._layer = layer
        self._activation = activation
        self._expected: torch.Tensor | None = None
        self._checked: set[tuple[tuple[str, int], ...]] = set()
        self._round = 0

    def __call__(self, kernels: Sequence[Overrides]) -> list[float]:
        """One round. The first kernel of the first round is the one that others must agree with."""
        for overrides in kernels:
            self._check(overrides)
        # Two rounds make a pair, of which one goes the other way. Seeded: equal on all ranks.
        order = list(range(len(kernels)))
        random.Random(self._round // 2).shuffle(order)
        if self._round % 2:
            order.reverse()
        self._round += 1
        seconds = [0.0] * len(kernels)
        for i in order:
            call = partial(self._layer, self._activation, kernels[i])
            ranks, _ = timed(call, 1, CALLS_PER_ROUND, self._layer.buffer.device)
            seconds[i] = max(map(statistics.median, ranks))
        return seconds

    def _check(self, overrides: Overrides) -> None:
        """Call once, before the kernel is timed, and compare."""
        key = tuple(overrides.items())
        if key in self._checked:
            return
        self._checked.add(key)
        layer = self._layer
        layer.y.fill_(torch.nan)
        layer(self._activation, overrides)
        layer.buffer.memory.synchronize()
        layer.buffer.raise_if_failed()
        if self._expected is None:
            self._expected = layer.y.clone()
        num_different = int((layer.y != self._expected).sum())  # NaN differs from itself, too
        if num_different:
            raise RuntimeError(
                f"the kernel with {dict(overrides)} and the formula's differ in {num_different} of "
                f"{layer.y.numel()} values, at {layer.y.shape[0]} tokens: one of them computes "
                "wrong results"
            )


def tune(plan: TuningPlan) -> list[dict[str, Any]]:
    """Measure on as many GPUs as the layer has ranks; an object per size, as in plan.results."""
    plan.results.write_text("[]")
    run_on_ranks(tune_on_rank, plan.shape.num_ranks, "cuda", plan)
    results: list[dict[str, Any]] = json.loads(plan.results.read_text())
    return results


def tune_on_rank(device: torch.device, plan: TuningPlan) -> None:
    """One process: all sizes there is time for. Rank 0 puts each into the table at once."""
    rank = dist.get_rank()
    facts = machine(device, plan.commit)
    require_equal({"the GPU": facts["gpu"], "its SMs": facts["num_sms"]}, _world())
    scale_block = (
        target_of(plan.arch).weights_of(plan.shape.weights, plan.shape.token_format).scale_block
    )
    weights = rank_layer(plan.shape, rank, plan.seed, device, scale_block)
    layer = TimedLayer(plan.shape, weights, device, arch=plan.arch)
    del weights
    results: list[SizeResult] = []
    for i, num_tokens in enumerate(plan.tokens):
        begins = _time_of_rank_0(device)
        if begins >= plan.ends:
            break
        slice_s = (plan.ends - begins) / (len(plan.tokens) - i)
        layer.fill(rank_tokens(plan.shape, num_tokens, rank, plan.seed, device))

        def is_time_left(share: float, begins: float = begins, slice_s: float = slice_s) -> bool:
            return _time_of_rank_0(device) < begins + share * slice_s

        measure = RankMeasure(layer, plan.activation)
        results.append(tune_size(plan, num_tokens, measure, is_time_left))
        if rank == 0:
            add_to_table(plan.table, tuned_layer(plan, results[-1], facts))
            plan.results.write_text(json.dumps([asdict(result) for result in results], indent=1))
            print(results[-1].words(), file=sys.stderr, flush=True)
    layer.close()


def _time_of_rank_0(device: torch.device) -> float:
    """Ranks that measure different numbers of rounds would wait for each other for ever."""
    now = torch.tensor([time.time()], dtype=torch.float64, device=device)
    dist.broadcast(now, src=0)
    return float(now)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def compile_candidates(plan: TuningPlan, on_built: Callable[[], None] = lambda: None) -> int:
    """Compile what the search will measure first, in parallel and before any rank waits for it.
    Returns the number of kernels."""
    uses = {
        plan.config(num_tokens, overrides): (num_tokens, num_tokens)
        for num_tokens in plan.tokens
        for overrides in [{}, *candidates(plan, num_tokens)]
    }
    configs = [(*tokens, config) for config, tokens in uses.items()]
    build_deployment(configs, on_built=lambda kernel: on_built())
    return len(configs)
