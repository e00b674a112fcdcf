"""Experts that are held twice, chosen by their load, and moved there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.balancing import ExpertPlacement, LoadCounters, move_experts, place_experts
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import exact_layer, exact_tokens

from ..fused.conftest import run_ranks

__all__ = ["run_ranks"]

SHAPE = MoEShape(1, 6, 2, 256, 128, 16)  # of experts, not of places


@pytest.mark.parametrize("seed", range(20))
def test_ranks_get_about_the_same_load(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.choice([1, 2, 3, 4, 8])
    num_experts = draw.randint(1, 40)
    fewest = -(-num_experts // num_ranks)
    num_places = num_ranks * draw.randint(fewest, min(num_experts, fewest + 3))
    load = [draw.paretovariate(1.0) for _ in range(num_experts)]
    placement = place_experts(load, num_places, num_ranks)
    assert set(placement.experts) == set(range(num_experts))
    assert placement == place_experts(
        torch.tensor(load, dtype=torch.float64), num_places, num_ranks
    )
    copies = [len(places) for places in placement.places]
    assert sum(copies) == num_places
    # An expert has another copy only because others had less to do.
    could_have_more = [
        one / number for one, number in zip(load, copies, strict=True) if number < num_ranks
    ]
    for one, number in zip(load, copies, strict=True):
        assert number == 1 or one / (number - 1) >= max(could_have_more, default=0.0)
    loads = placement.loads(load)
    assert sum(loads) == pytest.approx(sum(load))
    shares = [one / number for one, number in zip(load, copies, strict=True)]
    assert max(loads) <= sum(load) / num_ranks + max(shares)


def test_a_rank_has_an_expert_once() -> None:
    placement = place_experts([100.0, 1.0, 1.0, 1.0], 8, 4)
    assert all(placement.experts[2 * r : 2 * r + 2].count(0) == 1 for r in range(4))
    assert placement.loads([100.0, 1.0, 1.0, 1.0]) == [26.0, 26.0, 25.5, 25.5]


@pytest.mark.parametrize("seed", range(5))
def test_experts_stay_where_they_can(seed: int) -> None:
    draw = random.Random(seed)
    load = [draw.paretovariate(1.0) for _ in range(24)]
    before = place_experts(load, 32, 4)
    assert place_experts(load, 32, 4, before=before) == before
    load[draw.randrange(24)] *= 4
    fresh, near = place_experts(load, 32, 4), place_experts(load, 32, 4, before=before)
    assert sorted(near.loads(load)) == pytest.approx(sorted(fresh.loads(load)))
    moved = [
        sum(a != b for a, b in zip(one.experts, before.experts, strict=True))
        for one in (near, fresh)
    ]
    assert moved[0] < moved[1]


def test_a_table_for_prepare_inputs() -> None:
    placement = ExpertPlacement((1, 0, 2, 1), 2)
    assert placement.expert_map().tolist() == [[1, -1], [0, 3], [2, -1]]
    assert placement.expert_map(3).shape == (3, 3)
    with pytest.raises(ValueError, match="num_copies must be at least 2; got 1"):
        placement.expert_map(1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: place_experts([1, 2], 3, 2), ValueError, r"num_places must be .* 2 to 4; got 3"),
        (lambda: place_experts([1, 2], 6, 2), ValueError, r"num_places must be .* 2 to 4; got 6"),
        (lambda: place_experts([1, 2], 2, 0), ValueError, "num_ranks must be at least 1; got 0"),
        (lambda: place_experts([1, -2], 2, 1), ValueError, "load must have numbers of at least 0"),
        (lambda: place_experts([], 2, 1), ValueError, "load must have numbers of at least 0"),
        (lambda: place_experts(3, 2, 1), TypeError, "load must be a tensor or a list"),
        (lambda: place_experts(torch.ones(2, 2), 4, 1), ValueError, r"load must be a tensor \["),
        (
            lambda: place_experts([1, 2], 4, 2, before=ExpertPlacement((0, 1), 1)),
            ValueError,
            "before must have 4 places on 2 ranks; got 2 on 1",
        ),
        (lambda: ExpertPlacement((0, 2), 1), ValueError, "experts must name each of 0 to 2"),
        (lambda: ExpertPlacement((0, 1, 2), 2), ValueError, "num_ranks must divide the 3 places"),
        (lambda: ExpertPlacement((0, 1), 1).loads([1]), ValueError, "load must have 2 numbers"),
        (lambda: LoadCounters(0, "cpu"), ValueError, "num_places must be at least 1; got 0"),
        (
            lambda: move_experts([], ExpertPlacement((0, 1), 1), ExpertPlacement((0, 1), 2)),
            ValueError,
            "before and after must have as many experts and places",
        ),
        (
            lambda: move_experts([torch.ones(1)], *[ExpertPlacement((0, 1), 1)] * 2),
            ValueError,
            r"tensors must be \[local places \(2\), ...\]; got \(1,\)",
        ),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_tensors_of_all_forms_move_between_ranks(run_ranks) -> None:
    """Rows that are not dense, scales of one byte, and a place whose expert both ranks have."""
    before, after = ExpertPlacement((0, 1, 2, 3, 0, 4), 2), ExpertPlacement((4, 1, 0, 1, 2, 3), 2)

    def rows(placement: ExpertPlacement, rank: int) -> list[torch.Tensor]:
        shared = 9  # which lies behind the places
        local = torch.tensor([*placement.experts[3 * rank : 3 * rank + 3], shared])
        values = local[:, None, None] * 100 + torch.arange(12).view(3, 4)
        return [
            values.mT.contiguous().mT.float(),
            values.to(torch.uint8),
            values[:, 0, 0].bfloat16(),
            (values % 7).to(torch.float8_e4m3fn),
        ]

    def work(rank: int) -> int:
        tensors = rows(before, rank)
        addresses = [tensor.data_ptr() for tensor in tensors]
        moved = move_experts(tensors, before, after, dist.group.WORLD)
        for tensor, expected in zip(tensors, rows(after, rank), strict=True):
            assert torch.equal(tensor.float(), expected.float())
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        assert move_experts(tensors, after, after, dist.group.WORLD) == 0
        return moved

    assert run_ranks(2, work) == [2, 3]


def test_a_layer_is_balanced_while_it_serves(run_ranks) -> None:
    """From counters over places to weights in their places. The results are the same to the bit,
    and the load is spread."""
    layer, num_places = exact_layer(SHAPE), 8

    def work(rank: int) -> None:
        tokens = exact_tokens(SHAPE, 4, seed=rank)
        ids = tokens.topk_idx.clone()
        ids[:, 0] = torch.where(ids[:, 1] == 0, 1, 0)  # every token names expert 0 or 1
        placement = ExpertPlacement((0, 1, 2, 3, 4, 5, 2, 3), 2)
        local = list(placement.experts[4 * rank : 4 * rank + 4])
        of_places = [tuple(tensor[local] for tensor in of) for of in (layer.l1, layer.l2)]
        weights = deep_moe.transform_weights_for_mega_moe(*of_places)
        buffer = deep_moe.get_symm_buffer_for_mega_moe(
            dist.group.WORLD, num_places, 16, 2, 256, 128
        )
        counters = LoadCounters(num_places, "cpu")
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
        expert_map = placement.expert_map(num_copies=2)

        def call() -> torch.Tensor:
            deep_moe.prepare_inputs(
                *(x, ids, tokens.topk_weights, buffer),
                expert_map=expert_map,
                expert_load=counters.on_device,
            )
            y = torch.empty_like(x)
            deep_moe.mega_moe(y, weights, buffer, num_sms=2, checked=False)
            return y

        def load_of_all(known: int) -> torch.Tensor:
            of_places = counters.collect() - known
            dist.all_reduce(of_places)
            load = torch.zeros(6, dtype=torch.int64)
            return load.index_add_(0, torch.tensor(placement.experts), of_places)

        first = call()
        load = load_of_all(0)
        assert int(load.sum()) == 2 * 4 * 2
        after = place_experts(load.tolist(), num_places, 2, before=placement)
        assert max(after.loads(load)) < max(placement.loads(load))
        move_experts(weights.tensors, placement, after, dist.group.WORLD)
        expert_map.copy_(after.expert_map(num_copies=2))
        placement = after
        assert torch.equal(call(), first)
        assert int(counters.on_device.sum()) == 4 * 2  # since they were collected
        dist.barrier()
        buffer.close()

    run_ranks(2, work)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_counters() -> None:
    counters = LoadCounters(4, "cuda")
    for _ in range(2):  # loads what follows, for loading a kernel waits for all others
        counters.on_device += 1
        counters.collect()
        torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    counters.on_device += 3
    assert counters.collect().tolist() == [2] * 4  # whose copy stands behind the sleep
    assert counters.collect().tolist() == [2] * 4
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    counters.on_device += 1
    assert counters.collect().tolist() == [5] * 4
    torch.cuda.synchronize()
    assert counters.collect().tolist() == [6] * 4
