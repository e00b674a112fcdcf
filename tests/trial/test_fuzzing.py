"""Fuzz cases: what they differ in, and that a wrong result in any of them is seen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from deep_moe.activations import Activation
from deep_moe.trial import fuzzing
from deep_moe.trial.adapter_fuzzing import AdapterCase
from deep_moe.trial.calls import RankOutput, initial_y, model_inputs
from deep_moe.trial.fuzzing import (
    ARCHS,
    CASES_PER_KERNEL,
    TOKENS_OF_RANKS,
    Coverage,
    FuzzCase,
    axes,
    counts_of_ranks,
    pairwise,
)
from deep_moe.trial.grouped_fuzzing import GroupedCase
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.split_fuzzing import SplitCase
from deep_moe.trial.synthetic import received
from deep_moe.trial.throughput_fuzzing import ThroughputCase
from deep_moe.trial.two_level_fuzzing import TwoLevelCase
from tests.everyday import parametrize

from .fuzz_cases import with_values

KINDS = (FuzzCase, SplitCase, ThroughputCase, GroupedCase, TwoLevelCase, AdapterCase)


def one_round(kind: type[FuzzCase], arch: str, first_round: int = 0) -> list[FuzzCase]:
    num_cases = kind.cases_per_round() * len(ARCHS)
    numbers = range(first_round * num_cases, (first_round + 1) * num_cases)
    return [case for case in map(kind.of, numbers) if case.arch == arch]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_round_every_two_values_meet(kind: type[FuzzCase], arch: str) -> None:
    for which in range(2 if kind is FuzzCase else 1):
        coverage = Coverage()
        for case in one_round(kind, arch, which):
            coverage.add(case, "")
        assert coverage.num_cases == kind.cases_per_round()
        assert coverage.num_pairs == coverage.num_all_pairs > 300
        assert {axis: len(seen) for axis, seen in coverage.values.items()} == {
            "path": 1,
            "arch": 1,
            **{axis: len(values) for axis, values in kind.axes_of(arch).items()},
        }


@pytest.mark.parametrize("kind", KINDS)
def test_cases_in_a_row_share_what_is_compiled_in(kind: type[FuzzCase]) -> None:
    for first in range(0, 12 * CASES_PER_KERNEL, CASES_PER_KERNEL):
        cases = [kind.of(first + i) for i in range(CASES_PER_KERNEL)]
        held = {(case.arch, *list(case.values.values())[: kind.num_held]) for case in cases}
        assert len(held) == 1
        assert len({tuple(map(str, case.values.values())) for case in cases}) > 1


def test_rounds_differ() -> None:
    one, other = (
        [tuple(map(str, case.values.values())) for case in one_round(FuzzCase, ARCHS[0], i)]
        for i in (0, 1)
    )
    assert one != other


def test_pairwise_refuses_rows_too_few_for_all_pairs() -> None:
    assert len(pairwise((2, 2), 4, seed=3)) == 4
    with pytest.raises(ValueError, match="num_rows must be larger than 3"):
        pairwise((2, 2), 3, seed=3)


def test_axes_that_are_held_meet_the_others_all_the_same() -> None:
    rows = pairwise((3, 2, 4), 24, seed=1, num_held=2, hold=4)
    for i, j in itertools.combinations(range(3), 2):
        assert len({(row[i], row[j]) for row in rows}) == (3, 2, 4)[i] * (3, 2, 4)[j]
    held = [row[:2] for row in rows]
    assert all(held[i] == held[i - i % 4] for i in range(24))


def test_coverage_counts_failures_and_pairs_once() -> None:
    case = FuzzCase.of(0)
    coverage = Coverage()
    coverage.add(case, "")
    coverage.add(case, "broken")
    assert (coverage.num_cases, coverage.num_failed) == (2, 1)
    assert coverage.num_pairs == len(list(itertools.combinations(axes(case.arch), 2)))


@pytest.mark.parametrize("slots", axes(ARCHS[0])["slots"])
def test_slots_are_what_their_axis_says(slots: str) -> None:
    case = with_values(FuzzCase, slots=slots, tokens="many")
    for of_call in case.inputs():
        for tokens in of_call:
            ids = tokens.topk_idx
            valid = (ids >= 0) & (ids < case.shape.num_experts)
            is_twice = (ids[:, 0] == ids[:, 1]) & valid[:, 0]
            assert is_twice.any() == (slots in ("named twice", "one expert in all"))
            unused = (~valid).sum(dim=1)
            if slots == "unused":
                assert (unused == 1).all()
            elif slots == "none in the last token":
                assert unused.tolist() == [0] * (len(ids) - 1) + [case.shape.num_topk]
            else:
                assert not unused.any()
            if slots == "all to one expert":
                assert (ids == 0).any(dim=1).all()
            assert (ids == 0).all() == (slots == "one expert in all")


def test_calls_have_other_tokens_and_one_may_be_nan() -> None:
    case = with_values(FuzzCase, values="NaN", tokens="many")
    first, second = case.inputs()
    for of_call in (first, second):
        for tokens in of_call:
            assert tokens.x.float().isnan().sum() == 1
    assert any(
        one.num_tokens != other.num_tokens or not torch.equal(one.topk_idx, other.topk_idx)
        for one, other in zip(first, second, strict=True)
    )


def right_outputs(case: FuzzCase) -> list[list[RankOutput]]:
    """What a right kernel gives."""
    scale_block = case.target_weights.scale_block
    layer = fuzzing.exact_layer(case.shape, seed=1, scale_block=scale_block)
    outputs = []
    for of_call in case.inputs():
        stats = received(case.shape, of_call).split(case.shape.num_experts_per_rank)
        outputs.append([])
        for rank, tokens in enumerate(of_call):
            own = model_inputs(tokens)[1]
            y = reference_mega_moe(
                *layer.operands(own),
                activation=case.values["activation"],
                numerics=case.target_weights.numerics,
                **layer.biases,
                num_shared_experts=case.shape.num_shared_experts,
                y=initial_y(own.num_tokens, case.shape.hidden) if case.accumulates else None,
            )
            outputs[-1].append(RankOutput(y, stats[rank].clone()))
    return outputs


def one_value(outputs: list[list[RankOutput]]) -> None:
    row = outputs[1][0].y[-1]
    row.mul_(2).add_(1)


def a_nan(outputs: list[list[RankOutput]]) -> None:
    y = outputs[0][0].y
    y[(~y.isnan().any(dim=1)).nonzero()[0], 3] = torch.nan


def a_nan_lost(outputs: list[list[RankOutput]]) -> None:
    y = outputs[0][0].y
    y[y.isnan()] = 0


def one_count(outputs: list[list[RankOutput]]) -> None:
    outputs[1][0].stats[0] += 1


SPOILS = (one_value, a_nan, a_nan_lost, one_count)
ACTIVATIONS = axes(ARCHS[0])["activation"]


@parametrize(
    ("spoil", "activation"),
    itertools.product(SPOILS, ACTIVATIONS),
    everyday=list(zip(SPOILS, ACTIVATIONS, strict=False)),
    ids=lambda value: str(value) if isinstance(value, Activation) else None,
)
def test_what_is_wrong_in_either_call_is_told(
    spoil: Callable[[list[list[RankOutput]]], None],
    activation: Activation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = with_values(
        FuzzCase,
        weights="mxfp4 x mxfp8",
        values="NaN",
        tokens="many",
        inputs="prepared",
        activation=activation,
    )
    outputs = right_outputs(case)
    monkeypatch.setattr(fuzzing, "run_emulated_in_a_row", lambda *_, **__: outputs)
    assert case.run() == ""
    spoil(outputs)
    assert "rank 0" in case.run()


def test_ranks_have_as_many_tokens_as_their_axis_says() -> None:
    choose = random.Random(0)
    drawn = {
        kind: [counts_of_ranks(kind, 3, 64, choose) for _ in range(200)] for kind in TOKENS_OF_RANKS
    }
    for kind, each in drawn.items():
        assert all(len(counts) == 3 and 0 <= min(counts) <= max(counts) <= 64 for counts in each)
        assert len(set(map(tuple, each))) > 10, kind
    assert all(1 <= min(counts) <= max(counts) <= 3 for counts in drawn["few"])
    assert all(min(counts) >= 61 for counts in drawn["many"])
    assert all(min(counts) == 0 for counts in drawn["one rank has none"])
    assert all(
        sorted(counts)[:2] == [0, 0] and max(counts) > 0 for counts in drawn["one rank has all"]
    )
    assert {count for counts in drawn["none, 1 or most"] for count in counts} == {0, 1, 64}
