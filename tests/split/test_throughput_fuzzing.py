"""Random shapes, routing, schedules and orders of steps, against plain PyTorch, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.tokens import ALL_TO_ALL_FORMATS

from .reference import bits
from .throughput_reference import (
    Inputs,
    check_received,
    expected_scalars,
    expected_sums,
    random_inputs,
)


def skewed(choose: random.Random, inputs: Inputs, num_experts: int) -> None:
    """Routing that is not uniform: a few experts for all, one for all slots, or one for all."""
    kind = choose.choice(["uniform", "few", "repeated", "one"])
    few, one = choose.randint(1, num_experts), choose.randrange(num_experts)
    for ids in inputs.topk_idxs:
        if kind == "few":
            ids[ids >= 0] %= few
        elif kind == "repeated":
            ids[:] = ids[:, :1]
        elif kind == "one":
            ids[ids >= 0] = one


def run_case(seed: int) -> None:
    """One layer: steps of all kinds in a row that no rank waits with."""
    choose = random.Random(seed)
    num_ranks = choose.choice([1, 2, 2, 3, 4])
    num_experts = num_ranks * choose.choice([1, 2, 3, 7, 33])
    num_topk = min(num_experts, choose.choice([1, 2, 3, 6, 9]))
    most = choose.choice([1, 3, 8, 20])
    alignment = choose.choice([1, 4, 32])
    token_format = choose.choice(list(ALL_TO_ALL_FORMATS))
    layer = EmulatedThroughputAllToAll(
        num_ranks,
        most,
        512 if token_format == "fp8_128_ue8m0" else 128 * choose.choice([1, 2, 3, 5]),
        num_experts,
        num_topk,
        num_ranks * most * num_topk + num_experts // num_ranks * alignment,
        expert_alignment=alignment,
        token_format=token_format,
        num_sms=choose.choice([1, 2, 3, 5]),
        arch=choose.choice(["sm_90a", "sm_100a"]),
        timeout_s=1.0,
        schedule_seed=seed,
    )
    shape = layer.shape
    calls = []
    dtype = choose.choice([torch.int64, torch.int32])
    for i in range(3):
        counts = [choose.choice([0, 1, most // 2, most]) for _ in range(num_ranks)]
        unused = choose.choice([0.0, 0.3, 0.9])
        calls.append(random_inputs(shape, counts, 10 * seed + i, dtype=dtype, unused=unused))
        skewed(choose, calls[-1], num_experts)
    steps: list[tuple[str, int]] = []
    for call in range(3):
        steps.append(("dispatch", call))
        kinds = ["combine", "sum", "again", "scalars"]
        steps += [
            (choose.choice(kinds), choose.randint(0, call)) for _ in range(choose.randint(0, 2))
        ]
    queues: list[list[Any]] = [[] for _ in range(num_ranks)]
    results: list[list[Any]] = [[] for _ in range(num_ranks)]
    for rank, own in enumerate(layer.layers):
        handles: list[Any] = []
        for step, call in steps:
            inputs = calls[call]
            weights = inputs.topk_weights[rank]
            result: Any
            if step == "dispatch":
                launch, result = own.prepare_dispatch(
                    inputs.xs[rank], inputs.topk_idxs[rank], topk_weights=weights
                )
                handles.append(result[1])
            elif step == "again":
                launch, result = own.prepare_dispatch(
                    inputs.xs[rank], topk_weights=weights, token_format="bf16", handle=handles[call]
                )
            elif step == "scalars":
                launch, result = own.prepare_return_scalars(inputs.values[rank], handles[call])
            else:
                factors = weights if step == "combine" else None
                launch, result = own.prepare_combine(
                    inputs.ys[rank], handles[call], topk_weights=factors
                )
            queues[rank].append(launch)
            results[rank].append(result)
    layer.run(queues, schedule=choose.choice(SCHEDULES))
    for rank in range(num_ranks):
        for (step, call), result in zip(steps, results[rank], strict=True):
            inputs = calls[call]
            ids, xs, all_weights = inputs.topk_idxs, inputs.xs, inputs.topk_weights
            if step == "dispatch":
                check_received(
                    shape, result[0], rank, ids, xs, token_format=token_format, weights=all_weights
                )
            elif step == "again":
                check_received(shape, result[0], rank, ids, xs, factors=all_weights)
            elif step == "scalars":
                expected = expected_scalars(shape, rank, ids, inputs.values)
                assert torch.equal(bits(result), bits(expected))
            else:
                own_weights = all_weights[rank] if step == "combine" else None
                expected = expected_sums(shape, rank, ids, inputs.ys, own_weights)
                assert torch.equal(bits(result), bits(expected))
    layer.close()


@pytest.mark.parametrize("seed", range(5))
def test_cases(seed: int) -> None:
    run_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 26))
def test_more_cases(seed: int) -> None:
    run_case(seed)
