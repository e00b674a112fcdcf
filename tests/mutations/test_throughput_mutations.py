"""Plants bugs into copies of the throughput all-to-all's headers; each has to be noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.errors import MegaMoEError
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll

from ..split.reference import bits
from ..split.throughput_reference import (
    check_received,
    expected_scalars,
    expected_sums,
    random_inputs,
)
from .catalogue import Mutation
from .planting import check_edits, noticed_in, noticed_in_test, planted_in_headers
from .throughput_catalogue import THROUGHPUT_MUTATIONS

# Of a call: what is done, with the handle of which dispatch.
STEPS = (
    ("dispatch", 0),
    ("combine", 0),
    ("dispatch", 1),
    ("again", 0),
    ("again", 1),
    ("combine", 1),
    ("combine", 0),
    ("scalars", 0),
    ("scalars", 1),
    ("dispatch", 2),
)


def outcome(schedule: Any, seed: int) -> str:
    """Who noticed something in steps that ranks begin without a look at each other."""

    def run() -> bool:
        layer = EmulatedThroughputAllToAll(
            2, 40, 384, 8, 4, 320, expert_alignment=8, num_sms=2, timeout_s=0.01, schedule_seed=seed
        )
        calls = [
            random_inputs(layer.shape, counts, seed=seed)
            for seed, counts in enumerate([(40, 21), (3, 8), (8, 33)])
        ]
        queues: list[list[Any]] = [[], []]
        results: list[list[Any]] = [[], []]
        for rank, own in enumerate(layer.layers):
            # No step may count on zeros.
            own.buffer.memory.tensor[own.buffer.layout.mark("control_bytes") :] = 0xFF
            handles: list[Any] = []
            for step, call in STEPS:
                inputs = calls[call]
                x, weights = inputs.xs[rank], inputs.topk_weights[rank]
                result: Any
                if step == "dispatch":
                    launch, result = own.prepare_dispatch(
                        x, inputs.topk_idxs[rank], topk_weights=weights
                    )
                    handles.append(result[1])
                elif step == "again":
                    launch, result = own.prepare_dispatch(
                        x, topk_weights=weights, handle=handles[call]
                    )
                elif step == "scalars":
                    launch, result = own.prepare_return_scalars(inputs.values[rank], handles[call])
                else:
                    launch, result = own.prepare_combine(
                        inputs.ys[rank], handles[call], topk_weights=weights
                    )
                for tensor in launch.written.values():
                    tensor.view(torch.uint8).fill_(0xFF)
                queues[rank].append(launch)
                results[rank].append(result)
        try:
            layer.run(queues, schedule=schedule)
        except MegaMoEError as error:
            if "would get" not in str(error):
                raise
            return False
        return all(
            is_right(layer, calls[call], step, rank, result)
            for rank in range(2)
            for (step, call), result in zip(STEPS, results[rank], strict=True)
        )

    return noticed_in(run)


def is_right(
    layer: EmulatedThroughputAllToAll, inputs: Any, step: str, rank: int, result: Any
) -> bool:
    ids, weights = inputs.topk_idxs, inputs.topk_weights
    if step == "dispatch":
        check_received(layer.shape, result[0], rank, ids, inputs.xs, weights=weights)
        return True
    if step == "again":
        check_received(layer.shape, result[0], rank, ids, inputs.xs, factors=weights)
        return True
    if step == "scalars":
        expected = expected_scalars(layer.shape, rank, ids, inputs.values)
    else:
        expected = expected_sums(layer.shape, rank, ids, inputs.ys, weights[rank])
    return torch.equal(bits(result), bits(expected))


@pytest.mark.parametrize("mutation", THROUGHPUT_MUTATIONS, ids=lambda mutation: mutation.name)
def test_edit_changes_the_source(mutation: Mutation) -> None:
    check_edits(mutation)


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
@pytest.mark.parametrize(
    "planted", THROUGHPUT_MUTATIONS, ids=lambda mutation: mutation.name, indirect=True
)
def test_bug_is_noticed(planted: Mutation) -> None:
    if planted.test:
        noticed = noticed_in_test("split", planted)
    else:
        noticed = next((found for seed in range(3) if (found := outcome("random", seed))), "")
    assert noticed in planted.catcher.split("|")
