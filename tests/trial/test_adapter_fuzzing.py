"""Fuzz cases of what adapters do with the tokens of ranks: every two values meet, and what is wrong
in a case is seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_moe.integrations import shares
from deep_moe.trial import adapter_fuzzing
from deep_moe.trial.adapter_fuzzing import AdapterCase, adapter_axes
from deep_moe.trial.fuzzing import ARCHS, BESIDE
from tests.everyday import parametrize


def case_of(**values: Any) -> AdapterCase:
    return AdapterCase(
        1,
        "sm_90a",
        {
            "weights": "mxfp4 x mxfp8",
            "shape": (4, 8, 2, 256, 128),
            "same tokens": "pairs",
            "calls": "several",
            "expected": "unknown",
            "ids": torch.int64,
            "routing weights": "in turn",
            "tokens": "any",
            "slots": "all",
            "values": "numbers",
            "schedule": "random",
            **values,
        },
    )


@pytest.mark.parametrize("tokens", ["any", "one rank has all", "none, 1 or most"])
@pytest.mark.parametrize("same_tokens", ["none", "pairs", "all"])
def test_cases_pass(same_tokens: str, tokens: str) -> None:
    assert case_of(**{"same tokens": same_tokens}, tokens=tokens).run() == ""


def test_ranks_that_hold_the_same_tokens_count_them_once() -> None:
    case = case_of()
    for tokens in case.inputs():
        assert tokens[0] is tokens[1]
        assert tokens[1] is not tokens[2] is tokens[3]
        assert case.received(tokens).sum() == 2 * (tokens[0].num_tokens + tokens[2].num_tokens)


def shares_without_rest(group: Any, num_sharers: int, *call: Any) -> None:
    """The last tokens are nobody's."""
    output, x, ids, weights, run = call
    own = slice(len(x) // num_sharers * num_sharers)
    output.zero_()
    shares.on_own_share(group, num_sharers, output[own], x[own], ids[own], weights[own], run)


def shares_in_another_order(group: Any, num_sharers: int, *call: Any) -> None:
    class Turned:
        rank_in_group = (group.rank_in_group + 1) % num_sharers
        all_gather = group.all_gather

    shares.on_own_share(Turned, num_sharers, *call)


def one_call_too_few(most: int, chunk: int) -> Iterator[slice]:
    return shares.rows_of_calls(most - 1, chunk)


def calls_of_own_tokens(most: int, chunk: int) -> Iterator[slice]:
    """Ranks do not all make as many calls."""
    is_first = threading.current_thread().name == "rank 0"
    return shares.rows_of_calls(most if is_first else 0, chunk)


@pytest.mark.parametrize(
    ("name", "wrong", "noticed"),
    [
        ("on_own_share", shares_without_rest, "call 0, rank"),
        ("on_own_share", shares_in_another_order, "call 0, rank"),
        ("rows_of_calls", one_call_too_few, "call 0, rank"),
        ("rows_of_calls", calls_of_own_tokens, "waits for ranks that do not come"),
    ],
)
def test_what_is_wrong_is_told(
    name: str, wrong: Callable[..., Any], noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of()
    # Rows of one call and one more, an odd number of them in all.
    monkeypatch.setattr(AdapterCase, "inputs", lambda _: [counts_of(case, (50, 50, 49, 49))])
    assert case.run() == ""
    monkeypatch.setattr(adapter_fuzzing, name, wrong)
    assert noticed in case.run()


def counts_of(case: AdapterCase, counts: tuple[int, ...]) -> list[Any]:
    """Tokens of all ranks: so many."""
    pairs = [case._tokens(rank, count, rank // 2) for rank, count in enumerate(counts)]
    return [pairs[rank - rank % 2] for rank in range(len(counts))]


PAIRS = [(arch, pair) for arch in ARCHS for pair in adapter_axes(arch)["weights"]]


@parametrize(
    ("arch", "weights"),
    PAIRS,
    everyday=[("sm_100a", "fp8" + BESIDE + "fp8_token"), ("sm_90a", "mxfp4" + BESIDE + "mxfp8")],
)
def test_a_step_without_tokens_leaves_nothing_in_flight(
    arch: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy into tensor memory was."""
    case = case_of(weights=weights, shape=(2, 4, 3, 256, 96), schedule="late_copies")
    case = replace(case, arch=arch)
    monkeypatch.setattr(AdapterCase, "inputs", lambda _: [counts_of(case, (0, 0))])
    assert case.run() == ""
