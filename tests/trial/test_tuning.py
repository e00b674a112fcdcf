"""The search for faster kernels: what enters a table, on made-up times, and a real run of it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import deep_moe.trial.tuning
from deep_moe.activations import Swiglu
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.tuning import TunedLayerKey, read_table
from deep_moe.trial.rank_processes import run_in_group
from deep_moe.trial.tuning import (
    CONFIRM_ROUNDS,
    SEARCH_ROUNDS,
    Finalist,
    Gain,
    RankMeasure,
    SizeResult,
    TuningPlan,
    candidates,
    compile_candidates,
    tune_on_rank,
    tune_size,
    tuned_layer,
)

FACTS = {
    "gpu": "Some GPU",
    "num_sms": 132,
    "date": "2026-11-21T10:00:00Z",
    "commit": None,
    "deep_moe": "9",
}


@pytest.fixture
def plan(tmp_path: Path) -> TuningPlan:
    return TuningPlan(
        shape=MoEShape(4, 256, 6, 4096, 2048, 8192),
        tokens=(128,),
        ends=0.0,
        table=tmp_path / "table.json",
        results=tmp_path / "results.json",
        arch="sm_90a",
        num_sms=132,
        activation=Swiglu(10.0),
    )


class Chip:
    """Times by config, with noise: `faster` tells how much less a field's value takes."""

    def __init__(
        self, plan: TuningPlan, faster: Mapping[tuple[str, int], float], noise: float = 0.0
    ) -> None:
        self.plan = plan
        self.faster = faster
        self.noise = noise
        self.random = random.Random(1)
        self.rounds: list[list[dict[str, int]]] = []

    def __call__(self, kernels: Sequence[Mapping[str, int]]) -> list[float]:
        self.rounds.append([dict(overrides) for overrides in kernels])
        return [self.seconds(self.plan.config(128, overrides).tunable) for overrides in kernels]

    def seconds(self, fields: Mapping[str, int]) -> float:
        gain = sum(self.faster.get(item, 0.0) for item in fields.items())
        return 1e-3 * (1 - gain) * (1 + self.random.gauss(0, self.noise))


def first_values(plan: TuningPlan) -> dict[str, int]:
    """A candidate of each field."""
    values: dict[str, int] = {}
    for overrides in candidates(plan, 128):
        for name, value in overrides.items():
            values.setdefault(name, value)
    return values


def never(share: float) -> bool:
    return False


def always(share: float) -> bool:
    return True


def test_a_faster_kernel_is_found_confirmed_and_entered(plan: TuningPlan):
    block_m = first_values(plan)["block_m"]
    chip = Chip(plan, {("block_m", block_m): 0.1}, noise=0.003)
    result = tune_size(plan, 128, chip, never)
    assert result.formula == plan.formula(128).tunable
    assert result.finalist is not None
    assert result.finalist.overrides == {"block_m": block_m}
    assert result.finalist.is_entry
    assert result.finalist.gain.median == pytest.approx(1 / 0.9 - 1, abs=0.01)
    (entry,) = tuned_layer(plan, result, FACTS).entries
    assert entry.gain == pytest.approx(result.finalist.gain.median, abs=1e-4)
    assert (entry.num_tokens, entry.date, entry.commit) == (128, "2026-11-21", "deep_moe 9")
    assert "block_m" in result.words()
    assert "an entry" in result.words()


def test_only_the_last_run_decides_and_it_has_the_two_alone(plan: TuningPlan):
    """The candidate that was lucky in the search is not faster afterwards."""
    block_m = first_values(plan)["block_m"]
    chip = Chip(plan, {("block_m", block_m): 0.1})

    def measure(kernels: Sequence[Mapping[str, int]]) -> list[float]:
        if len(kernels) == 2:
            chip.faster = {}
        return chip(kernels)

    result = tune_size(plan, 128, measure, never)
    assert result.finalist is not None
    assert result.finalist.num_rounds == CONFIRM_ROUNDS[0]
    assert not result.finalist.is_entry
    assert "not beyond noise" in result.words()
    layer = tuned_layer(plan, result, FACTS)
    assert (layer.measured_tokens, layer.entries) == ((128,), ())
    assert chip.rounds[-1] == [plan.formula(128).tunable, {"block_m": block_m}]


def test_best_values_of_several_fields_are_tried_together(plan: TuningPlan):
    best = first_values(plan)
    first, other = sorted(best)
    faster = {(first, best[first]): 0.04, (other, best[other]): 0.03}
    result = tune_size(plan, 128, Chip(plan, faster), never)
    assert result.finalist is not None
    assert result.finalist.overrides == {first: best[first], other: best[other]}


def test_where_nothing_is_faster_nothing_is_confirmed(plan: TuningPlan):
    chip = Chip(plan, dict.fromkeys(first_values(plan).items(), -0.02), noise=0.001)
    result = tune_size(plan, 128, chip, never)
    assert result.finalist is None
    assert len(chip.rounds) == SEARCH_ROUNDS[0]
    assert "nothing faster among" in result.words()
    assert tuned_layer(plan, result, FACTS).entries == ()


@pytest.mark.parametrize("is_time_left", [never, always])
def test_time_decides_between_the_fewest_and_the_most_rounds(plan: TuningPlan, is_time_left):
    chip = Chip(plan, {("block_m", first_values(plan)["block_m"]): 0.1})
    tune_size(plan, 128, chip, is_time_left)
    which = 1 if is_time_left is always else 0
    num_confirming = sum(len(kernels) == 2 for kernels in chip.rounds)
    assert num_confirming == CONFIRM_ROUNDS[which]
    assert len(chip.rounds) - num_confirming == SEARCH_ROUNDS[which]


def test_all_kernels_of_a_round_are_measured_with_the_formulas(plan: TuningPlan):
    chip = Chip(plan, {})
    tune_size(plan, 128, chip, never)
    formula, *others = chip.rounds[0]
    assert formula == plan.formula(128).tunable
    assert others == candidates(plan, 128)
    assert all(set(overrides) <= set(formula) for overrides in others)


def test_what_will_be_measured_is_compiled_once(plan: TuningPlan, monkeypatch):
    built = []
    monkeypatch.setattr(
        deep_moe.trial.tuning, "build_deployment", lambda uses, on_built: built.extend(uses)
    )
    sizes = dataclasses.replace(plan, tokens=(128, 129, 4096))
    assert compile_candidates(sizes) == len(built)
    configs = [config for _, _, config in built]
    assert len(set(configs)) == len(configs)
    for num_tokens in sizes.tokens:
        assert plan.formula(num_tokens) in configs
        assert plan.config(num_tokens, candidates(plan, num_tokens)[-1]) in configs


class TestGain:
    def test_less_than_two_percent_is_no_entry(self):
        assert Gain.of([1.03] * 8, [1.0] * 8).is_beyond_noise
        assert not Gain.of([1.019] * 8, [1.0] * 8).is_beyond_noise

    def test_less_than_three_standard_errors_is_no_entry(self):
        noisy = [1.0, 1.1] * 4
        gain = Gain.of([1.05] * 8, noisy)
        assert gain.median > 0
        assert not gain.is_beyond_noise
        assert Gain.of([1.05] * 800, noisy * 100).standard_error < gain.standard_error / 9

    @pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
    def test_equal_kernels_hardly_ever_make_an_entry(self, noise: float):
        chance = random.Random(3)

        def times() -> list[float]:
            return [1 + chance.gauss(0, noise) for _ in range(CONFIRM_ROUNDS[0])]

        num_entries = sum(Gain.of(times(), times()).is_beyond_noise for _ in range(1000))
        assert num_entries <= 20

    def test_drift_that_both_share_is_no_noise(self):
        warming = [1 + 0.05 * i for i in range(8)]
        gain = Gain.of([1.03 * seconds for seconds in warming], warming)
        assert gain.standard_error == pytest.approx(0, abs=1e-9)
        assert gain.is_beyond_noise


class FakeLayer:
    """A layer of one value, which a `wrong` block_m changes."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong
        self.y = torch.zeros(4, 2, dtype=torch.bfloat16)
        self.calls: list[Mapping[str, int]] = []
        self.buffer = self
        self.memory = self
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def raise_if_failed(self) -> None:
        pass

    def __call__(self, clamp: float | None, overrides: Mapping[str, int]) -> None:
        self.calls.append(overrides)
        self.y[:] = torch.tensor([1.0, 0.0])
        if overrides["block_m"] == self.wrong:
            self.y[3] = torch.tensor([0.0, 1.0])


def test_a_kernel_with_another_result_ends_the_search(monkeypatch):
    monkeypatch.setattr(deep_moe.trial.tuning, "timed", lambda *_: ([[1.0]], 0.0))
    measure = RankMeasure(FakeLayer(wrong=32), Swiglu())  # type: ignore[arg-type]
    assert measure([{"block_m": 8}, {"block_m": 16}]) == [1.0, 1.0]
    with pytest.raises(
        RuntimeError, match=r"\{'block_m': 32\} and the formula's differ in 2 of 8 .* at 4 tok"
    ):
        measure([{"block_m": 8}, {"block_m": 32}])


def test_the_order_changes_from_round_to_round_and_is_balanced(monkeypatch):
    """Of two kernels each is first as often as the other."""
    order: list[int] = []

    def timed(call, *_):
        order.append(call.args[1]["block_m"])
        return [[1.0], [2.0]], 0.0

    monkeypatch.setattr(deep_moe.trial.tuning, "timed", timed)
    measure = RankMeasure(FakeLayer(wrong=-1), Swiglu())  # type: ignore[arg-type]
    for _ in range(8):
        assert measure([{"block_m": 8}, {"block_m": 16}]) == [2.0, 2.0]  # of the slowest rank
    assert order[::2].count(8) == order[::2].count(16) == 4
    order.clear()
    kernels = [{"block_m": value} for value in range(6)]
    for _ in range(4):
        measure(kernels)
    assert len({tuple(order[i : i + 6]) for i in range(0, 24, 6)}) == 4


@pytest.mark.slow
def test_a_run_in_the_emulator_measures_every_size_and_writes_the_table(
    plan: TuningPlan, monkeypatch, tmp_path: Path
):
    """With fewer candidates and rounds; what it finds is the emulator's."""
    monkeypatch.setattr(deep_moe.trial.tuning, "candidates", lambda *_: [{"num_stages": 2}])
    monkeypatch.setattr(deep_moe.trial.tuning, "SEARCH_ROUNDS", (1, 1))
    monkeypatch.setattr(deep_moe.trial.tuning, "CONFIRM_ROUNDS", (2, 2))
    monkeypatch.setattr(deep_moe.trial.tuning, "CALLS_PER_ROUND", 1)
    small = TuningPlan(
        shape=MoEShape(1, 2, 1, 128, 128, 9),
        tokens=(3, 9),
        ends=1e12,
        table=plan.table,
        results=plan.results,
        arch="sm_90a",
        num_sms=4,
        activation=Swiglu(10.0),
        commit="abc",
    )
    rendezvous = f"file://{tmp_path}/rendezvous"
    group = {"init_method": rendezvous, "rank": 0, "world_size": 1}
    run_in_group(tune_on_rank, torch.device("cpu"), (small,), **group)
    results = json.loads(plan.results.read_text())
    assert [result["num_tokens"] for result in results] == [3, 9]
    assert all(result["num_candidates"] == 1 for result in results)
    assert all(result["formula_us"] > 0 for result in results)
    table = read_table(plan.table)
    assert table is not None
    (layer,) = table.layers
    assert layer.key == TunedLayerKey.of(small.shape, device="emulator", arch="sm_90a", num_sms=4)
    assert layer.measured_tokens == (3, 9)


def test_no_size_is_begun_when_the_time_is_over(plan: TuningPlan, tmp_path: Path):
    over = TuningPlan(
        shape=MoEShape(1, 2, 1, 128, 128, 1),
        tokens=(1,),
        ends=0.0,
        table=plan.table,
        results=plan.results,
        arch="sm_90a",
        num_sms=4,
        activation=Swiglu(10.0),
    )
    plan.results.write_text("[]")
    group = {"init_method": f"file://{tmp_path}/rendezvous", "rank": 0, "world_size": 1}
    run_in_group(tune_on_rank, torch.device("cpu"), (over,), **group)
    assert json.loads(plan.results.read_text()) == []
    assert not plan.table.exists()


def test_a_result_without_a_finalist_is_plain_json(plan: TuningPlan):
    gain = Gain(0.05, 0.001)
    finalist = Finalist({"num_stages": 5}, 95.0, gain, 8, is_entry=gain.is_beyond_noise)
    for result in (SizeResult(8, 3, {}, 100.0), SizeResult(8, 3, {}, 100.0, finalist)):
        assert result.words().startswith("8 tokens/rank: 100.0 us by formula")
