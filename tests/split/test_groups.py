"""One process per rank over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.errors import MegaMoETimeoutError
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.split.throughput import AllToAll

from .reference import bits, check_dispatched, expected_out, random_inputs
from .throughput_reference import random_inputs as random_many


def make(**changes) -> LowLatencyAllToAll:
    arguments = {"num_max_tokens_per_rank": 4, "hidden": 128, "num_experts": 4, "num_topk": 2}
    return LowLatencyAllToAll(dist.group.WORLD, **{**arguments, "num_sms": 2, **changes})


@pytest.mark.parametrize("receive", [True, False])
def test_ranks_in_processes_get_every_bit(run_ranks, receive: bool) -> None:
    def work(rank: int) -> None:
        layer = make()
        for seed in range(3):
            inputs = random_inputs(layer.shape, (4, seed), seed)
            ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
            result = layer.dispatch(inputs.xs[rank], ids, receive=receive)
            if not receive:
                layer.receive(result.handle)
            check_dispatched(layer.shape, result, rank, inputs.xs, inputs.topk_idxs)
            out = layer.combine(inputs.ys[rank], ids, weights, result.handle, receive=receive)
            if not receive:
                layer.receive(result.handle)
            expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
            assert torch.equal(bits(out), bits(expected))
        layer.close()

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("hidden", 256),
        ("num_topk", 1),
        ("token_format", "bf16"),
        ("num_sms", 1),
        ("num_experts", 6),
        ("placement", "experts"),
    ],
)
def test_layers_that_differ_are_an_error_on_every_rank(run_ranks, argument, value) -> None:
    def work(rank: int) -> str:
        with pytest.raises(ValueError, match=f"{argument} must be the same on every rank") as error:
            make(**({argument: value} if rank == 1 else {}))
        return str(error.value)

    first, second = run_ranks(2, work)
    assert first == second


def test_steps_that_differ_are_an_error_on_every_rank(run_ranks) -> None:
    def work(rank: int) -> None:
        layer = make()
        inputs = random_inputs(layer.shape, (4, 4))
        ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
        result = layer.dispatch(inputs.xs[rank], ids)

        def other_step() -> None:
            if rank == 0:
                layer.dispatch(inputs.xs[rank], ids)
            else:
                layer.combine(inputs.ys[rank], ids, weights, result.handle)

        with pytest.raises(ValueError, match="step must be the same on every rank"):
            other_step()

    run_ranks(2, work)


def test_survivors_of_a_dead_rank_go_on(run_ranks) -> None:
    def work(rank: int) -> None:
        layer = make(num_experts=6, timeout_s=2.0)
        survivors = dist.new_group([0, 2])
        if rank == 1:
            return
        inputs = random_inputs(layer.shape, (4, 4, 3))
        ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
        with pytest.raises(MegaMoETimeoutError, match="missing: rank 1"):
            layer.dispatch(inputs.xs[rank], ids)
        layer.reset(survivors)
        layer.mask_ranks([1])
        for _ in range(3):
            result = layer.dispatch(inputs.xs[rank], ids)
            check_dispatched(layer.shape, result, rank, inputs.xs, inputs.topk_idxs, [1])
            out = layer.combine(inputs.ys[rank], ids, weights, result.handle)
            expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys, [1])
            assert torch.equal(bits(out), bits(expected))

    run_ranks(3, work)


def call_low_latency(layer: LowLatencyAllToAll, rank: int, is_left_out: bool) -> None:
    """Without rank 1 in parts."""
    if is_left_out:
        layer.mask_ranks([1])
    inputs = random_inputs(layer.shape, (4, 4, 3))
    ids = inputs.topk_idxs[rank]
    result = layer.dispatch(inputs.xs[rank], ids, receive=not is_left_out)
    if is_left_out:
        layer.receive(result.handle)
    layer.combine(inputs.ys[rank], ids, inputs.topk_weights[rank], result.handle)


def call_many_tokens(layer: AllToAll, rank: int, is_left_out: bool) -> None:
    """Without rank 1 with routing weights."""
    inputs = random_many(layer.shape, (4, 4, 3))
    mask = {"masked_ranks": torch.tensor([0, int(is_left_out), 0], dtype=torch.int32)}
    weights = inputs.topk_weights[rank] if is_left_out else None
    x, ids = inputs.xs[rank], inputs.topk_idxs[rank]
    _, handle = layer.dispatch(x, ids, topk_weights=weights, **mask)
    layer.combine(inputs.ys[rank], handle, topk_weights=weights, **mask)


def make_low_latency() -> tuple[Any, Any]:
    return make(num_experts=6, timeout_s=4.0), call_low_latency


def make_many_tokens() -> tuple[Any, Any]:
    own = {"expert_alignment": 4, "num_sms": 2, "timeout_s": 4.0}
    return AllToAll(dist.group.WORLD, 4, 128, 6, 2, 48, **own), call_many_tokens


@pytest.mark.parametrize("made", [make_low_latency, make_many_tokens])
def test_what_a_dead_rank_has_called_is_compared_with_no_later_call(run_ranks, made: Any) -> None:
    """The last call of rank 1 has the number of another call of the others behind their reset."""

    def work(rank: int) -> None:
        survivors = dist.new_group([0, 2])
        layer, call = made()
        call(layer, rank, False)
        if rank == 1:
            return
        layer.reset(survivors)
        call(layer, rank, True)

    run_ranks(3, work)


def test_a_rank_that_never_comes_is_named_and_reset_helps(run_ranks) -> None:
    def work(rank: int) -> str:
        layer = make(timeout_s=2.0)
        inputs = random_inputs(layer.shape, (4, 4))
        message = ""
        if rank == 0:
            with pytest.raises(MegaMoETimeoutError) as caught:
                layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
            message = str(caught.value)
        layer.reset()
        result = layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
        check_dispatched(layer.shape, result, rank, inputs.xs, inputs.topk_idxs)
        return message

    message, _ = run_ranks(2, work)
    assert "missing: rank 1" in message
