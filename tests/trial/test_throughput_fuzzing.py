"""Fuzz cases of the layer of many tokens: every two values meet, and what is wrong is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial import throughput_fuzzing
from deep_moe.trial.synthetic import exact_tokens
from deep_moe.trial.throughput_fuzzing import ThroughputCase, most_rows_of, throughput_axes

from .fuzz_cases import with_values


def test_room_for_what_comes_is_just_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    case = with_values(
        ThroughputCase,
        arch="sm_90a",
        weights="fp8 x fp8_128",
        room="for what comes",
        shape=(2, 4, 3, 512, 96),
    )
    case = replace(case, values=case.values | {"tokens": "few", "alignment": 32})
    assert case.run() == ""
    given = most_rows_of
    monkeypatch.setattr(throughput_fuzzing, "most_rows_of", lambda *sizes: given(*sizes) - 1)
    assert "rows" in case.run()


def test_rows_that_are_copied_and_rows_that_lie_there() -> None:
    case = with_values(
        ThroughputCase, arch="sm_100a", weights="mxfp4 x mxfp8", shape=(2, 4, 3, 512, 96)
    )
    for rows in throughput_axes(case.arch)["rows"]:
        own = replace(case, values=case.values | {"tokens": "few", "rows": rows})
        assert own.run() == "", rows


def test_rows_are_those_of_the_fullest_rank_of_the_larger_call() -> None:
    shape = MoEShape(2, 4, 1, 512, 128, 9)
    ids = torch.tensor([[0], [0], [3], [-1]])
    one, other = (replace(exact_tokens(shape, 4), topk_idx=own) for own in (ids, ids * 0 + 2))
    assert most_rows_of(shape, [[one, one]], 1) == 4
    assert most_rows_of(shape, [[one, one], [one, other]], 4) == 8
    assert most_rows_of(shape, None, 4) == 18 + 6
