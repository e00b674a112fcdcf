"""One process per rank over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deep_moe.errors import MegaMoEError
from deep_moe.split.throughput import AllToAll

from .reference import bits
from .throughput_reference import check_received, expected_sums, random_inputs


def make(**changes) -> AllToAll:
    arguments = {
        "max_tokens_per_rank": 4,
        "hidden": 128,
        "num_experts": 4,
        "num_topk": 2,
        "max_recv_rows": 32,
        "expert_alignment": 4,
    }
    return AllToAll(dist.group.WORLD, **{**arguments, "num_sms": 2, **changes})


def test_ranks_in_processes_get_every_bit(run_ranks) -> None:
    def work(rank: int) -> None:
        layer = make()
        for seed in range(3):
            inputs = random_inputs(layer.shape, (4, seed), seed)
            received, handle = layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
            check_received(layer.shape, received, rank, inputs.topk_idxs, inputs.xs)
            out = layer.combine(inputs.ys[rank], handle)
            expected = expected_sums(layer.shape, rank, inputs.topk_idxs, inputs.ys)
            assert torch.equal(bits(out), bits(expected))
        layer.close()

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("max_recv_rows", 64), ("expert_alignment", 8), ("token_format", "mxfp8")],
)
def test_layers_that_differ_are_an_error_on_every_rank(run_ranks, argument, value) -> None:
    def work(rank: int) -> str:
        with pytest.raises(ValueError, match=f"{argument} must be the same on every rank") as error:
            make(**({argument: value} if rank == 1 else {}))
        return str(error.value)

    first, second = run_ranks(2, work)
    assert first == second


def test_weights_on_one_rank_only_are_an_error_on_every_rank(run_ranks) -> None:
    def work(rank: int) -> None:
        layer = make()
        inputs = random_inputs(layer.shape, (4, 4))
        weights = inputs.topk_weights[rank] if rank == 0 else None
        with pytest.raises(ValueError, match="topk_weights must be the same on every rank"):
            layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank], topk_weights=weights)

    run_ranks(2, work)


def test_too_many_rows_for_one_rank_are_an_error_on_every_rank(run_ranks) -> None:
    def work(rank: int) -> str:
        layer = make(max_recv_rows=8)
        x = torch.ones(4, 128, dtype=torch.bfloat16)
        with pytest.raises(MegaMoEError) as error:
            layer.dispatch(x, torch.full((4, 2), 3))
        return str(error.value)

    for message in run_ranks(2, work):
        assert "rank 1 would get 16 rows, padding included; max_recv_rows is 8" in message
