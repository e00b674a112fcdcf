"""Plants bugs into copies of the split path's headers; each has to be noticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.errors import MegaMoEError
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll

from ..split.reference import bits, check_dispatched, expected_out, random_inputs
from .catalogue import Mutation
from .planting import check_edits, noticed_in, noticed_in_test, planted_in_headers
from .split_catalogue import SPLIT_MUTATIONS


def name_of(mutation: Mutation) -> str:
    return mutation.name


def outcome(schedule: Any, seed: int) -> str:
    """Who noticed something in five calls that ranks begin without a look at each other."""

    def run() -> bool:
        layer = EmulatedAllToAll(
            2, 8, 384, 8, 4, token_format="mxfp8", num_sms=3, timeout_s=0.01, schedule_seed=seed
        )
        calls = [
            random_inputs(layer.shape, counts, seed=seed)
            for seed, counts in enumerate([(8, 5), (3, 8), (8, 0), (7, 8), (5, 2)])
        ]
        for inputs in calls:
            for ids in inputs.topk_idxs:
                ids[:1, 2] = ids[:1, 0]  # an expert in two slots
        queues: list[list[Any]] = [[], []]
        results: list[list[Any]] = [[] for _ in calls]
        outs: list[list[torch.Tensor]] = [[] for _ in calls]
        for rank, own in enumerate(layer.layers):
            # No call may count on zeros in the staging.
            memory = own.buffer.memory.tensor
            memory[own.buffer.layout.mark("control_bytes") :] = 0xFF
            for i, inputs in enumerate(calls):
                ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
                dispatch, result = own.prepare_dispatch(inputs.xs[rank], ids)
                combine, out = own.prepare_combine(inputs.ys[rank], ids, weights, result.handle)
                queues[rank] += [dispatch, combine]
                results[i].append(result)
                outs[i].append(out)
        try:
            layer.run(queues, schedule=schedule)
        except MegaMoEError as error:
            if "handle must be" not in str(error):
                raise
            return False
        for inputs, given, sums in zip(calls, results, outs, strict=True):
            for rank in range(2):
                check_dispatched(layer.shape, given[rank], rank, inputs.xs, inputs.topk_idxs)
                weights = inputs.topk_weights[rank]
                out = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
                if not torch.equal(bits(sums[rank]), bits(out)):
                    return False
        return True

    return noticed_in(run)


@pytest.mark.parametrize("mutation", SPLIT_MUTATIONS, ids=name_of)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    check_edits(mutation)


def test_names_are_given_once() -> None:
    assert max(Counter(map(name_of, SPLIT_MUTATIONS)).values()) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_bug_nobody_complains(schedule: str) -> None:
    assert outcome(schedule, 0) == ""


@pytest.fixture
def planted(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mutation]:
    mutation: Mutation = request.param
    with planted_in_headers(mutation, tmp_path, monkeypatch):
        yield mutation


@pytest.mark.slow
@pytest.mark.parametrize("planted", SPLIT_MUTATIONS, ids=name_of, indirect=True)
def test_bug_is_noticed(planted: Mutation) -> None:
    if planted.test:
        noticed = noticed_in_test("split", planted)
    else:
        noticed = next((found for seed in range(3) if (found := outcome("random", seed))), "")
    assert noticed in planted.catcher.split("|")
