"""Random shapes, routing, schedules and sequences of calls, against plain PyTorch, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.heuristics.low_latency import PLACEMENTS
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.tokens import ALL_TO_ALL_FORMATS

from .reference import Inputs, bits, check_dispatched, expected_out, random_inputs


def skewed(choose: random.Random, inputs: Inputs, num_experts: int) -> None:
    """Routing that is not uniform: a few experts for all, one slot for all, or one for a token."""
    kind = choose.choice(["uniform", "few", "repeated", "one"])
    for ids in inputs.topk_idxs:
        if kind == "few":
            ids[ids >= 0] %= choose.randint(1, num_experts)
        elif kind == "repeated":
            ids[:] = ids[:, :1]
        elif kind == "one":
            ids[ids >= 0] = choose.randrange(num_experts)


def run_case(seed: int) -> None:
    """One layer: calls in a row that no rank waits with, some of them two at once."""
    choose = random.Random(seed)
    num_ranks = choose.choice([1, 2, 2, 3, 4])
    num_experts = num_ranks * choose.choice([1, 2, 3, 7, 33])
    token_format = choose.choice(list(ALL_TO_ALL_FORMATS))
    hidden = 512 if token_format == "fp8_128_ue8m0" else 128 * choose.choice([1, 2, 3, 5])
    layer = EmulatedAllToAll(
        num_ranks,
        choose.choice([1, 3, 8, 20]),
        hidden,
        num_experts,
        min(num_experts, choose.choice([1, 2, 3, 6, 9])),
        token_format=token_format,
        any_format=choose.random() < 0.3,
        num_sms=choose.choice([1, 2, 3, 5]),
        arch=choose.choice(["sm_90a", "sm_100a"]),
        timeout_s=1.0,
        schedule_seed=seed,
        scales_by_column=choose.random() < 0.5,
        placement=PLACEMENTS[seed % 2],
    )
    most = layer.shape.num_max_tokens_per_rank
    calls = []
    for i in range(4):
        counts = [choose.choice([0, 1, most // 2, most]) for _ in range(num_ranks)]
        unused = choose.choice([0.0, 0.3, 0.9])
        dtype = choose.choice([torch.int64, torch.int32])
        calls.append(random_inputs(layer.shape, counts, 10 * seed + i, dtype=dtype, unused=unused))
        skewed(choose, calls[-1], num_experts)
    in_pairs, receive = choose.random() < 0.5, choose.random() < 0.5
    queues: list[list[Any]] = []
    given: list[list[Any]] = []
    for rank, own in enumerate(layer.layers):
        queue: list[Any] = []
        results: list[Any] = []

        def combine(call: int, own=own, queue=queue, results=results, rank=rank) -> None:
            inputs, result = calls[call], results[call][0]
            launch, out = own.prepare_combine(
                inputs.ys[rank],
                inputs.topk_idxs[rank],
                inputs.topk_weights[rank],
                result.handle,
                receive=receive,
            )
            queue.append(launch)
            if not receive:
                queue.append(own.prepare_receive(result.handle))
            results[call].append(out)

        for call, inputs in enumerate(calls):
            launch, result = own.prepare_dispatch(
                inputs.xs[rank], inputs.topk_idxs[rank], receive=receive
            )
            queue.append(launch)
            if not receive:
                queue.append(own.prepare_receive(result.handle))
            results.append([result])
            if not in_pairs:
                combine(call)
            elif call % 2:
                combine(call - 1)
                combine(call)
        queues.append(queue)
        given.append(results)
    layer.run(queues, schedule=choose.choice(SCHEDULES))
    for rank, results in enumerate(given):
        for inputs, (result, out) in zip(calls, results, strict=True):
            check_dispatched(layer.shape, result, rank, inputs.xs, inputs.topk_idxs)
            weights = inputs.topk_weights[rank]
            expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
            assert torch.equal(bits(out), bits(expected))
    layer.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_cases(seed: int) -> None:
    run_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 22))
def test_more_cases(seed: int) -> None:
    run_case(seed)
