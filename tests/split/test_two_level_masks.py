"""Layers over two domains of two ranks, of which rank 1 of domain 1 is left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.errors import LostDomainError, MegaMoETimeoutError
from deep_moe.heuristics.throughput import ThroughputShape
from deep_moe.split.domain_groups import DomainGroups, make_domain_groups
from deep_moe.trial.calls import rank_operands
from deep_moe.trial.comparison import compare
from deep_moe.trial.two_level import make_layer
from tests.everyday import parametrize

from . import test_two_level as moes
from . import test_two_level_low_latency as low_latency
from . import test_two_level_throughput as throughput
from .reference import bits, ids_in_domains
from .throughput_reference import check_received, random_inputs

DEAD = 3
COUNTS = (3, 3, 2, 1)


class LowLatency:
    """One rank of a layer, and what it has to get without masked ranks."""

    def __init__(self, **arguments: Any) -> None:
        self.layer = low_latency.make(2, **arguments)

    def check_call(self, seed: int, masked: Collection[int] = ()) -> None:
        shape = low_latency.shape_of(4)
        low_latency.check_call(self.layer, shape, 2, COUNTS, seed=seed, masked=list(masked))


class ManyTokens:
    def __init__(self, **arguments: Any) -> None:
        self.layer = throughput.make(2, **arguments)
        self.shape = ThroughputShape(num_ranks=4, **throughput.SIZES)

    def check_call(self, seed: int, masked: Collection[int] = ()) -> None:
        throughput.check_call(self.layer, self.shape, 2, COUNTS, seed, masked=masked)


class MoE:
    """With a shared expert where `shared` says so, whose own tokens have a call of their own."""

    def __init__(self, shared: int = 0, **arguments: Any) -> None:
        self.shape = replace(moes.SHAPE, num_max_tokens_per_rank=10, num_shared_experts=shared)
        self.layer = make_layer(self.shape, 2, moes.CPU, **arguments)
        self.model = moes.layer_of(self.shape, exact=True)

    def check_call(self, seed: int, masked: Collection[int] = ()) -> None:
        rank, shape = dist.get_rank(), self.shape
        weights, _ = rank_operands(shape, self.model, rank, moes.CPU, moes.ARCH)
        of_ranks = [moes.tokens_of(shape, True, r, num_unused_slots=seed % 2) for r in range(4)]
        given = [tokens.topk_idx for _, tokens in of_ranks]
        used = ids_in_domains(given, shape.num_experts_per_rank, 2, masked)
        x, tokens = of_ranks[rank]
        stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32)
        y = self.layer.call(x, tokens.topk_idx, tokens.topk_weights, weights, stats, **moes.CALL)
        expected = replace(tokens, topk_idx=used[rank])
        assert compare(y, moes.bounds_of(shape, 2, rank // 2, self.model, expected).y).is_exact
        local = torch.cat([ids.flatten() for ids in used]) - shape.num_experts_per_rank * rank
        assert stats.tolist() == [int((local == i).sum()) for i in range(len(stats))]


# By name the layer, its arguments, and those with which there might be too few rows for tokens of
# other domains.
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "low latency": (LowLatency, {}, {"num_max_foreign_tokens": 3}),
    "many tokens": (ManyTokens, {}, {"num_max_foreign_tokens": 3}),
    "fused": (MoE, {}, {"num_max_foreign_tokens": 9}),
    "fused, exact in chunks": (MoE, {"exact_sizes": True, "num_chunks": 2}, {}),
    "fused, shared expert": (MoE, {"shared": 1, "num_chunks": 2}, {}),
}


@parametrize("kind", KINDS, everyday=["low latency", "many tokens", "fused"])
def test_a_rank_that_stays_away_is_left_out(run_ranks, kind: str) -> None:
    """Nobody waits for it, in its domain or between domains, and who would need it to pass tokens
    on does without its domain."""
    one, arguments, _ = KINDS[kind]

    def work(rank: int) -> None:
        own = one(**arguments)
        layer = own.layer
        own.check_call(0)
        if rank != DEAD:
            layer.mask_ranks([DEAD])
            assert layer.masked_ranks() == [DEAD]
            for seed in range(2):
                own.check_call(seed, [DEAD])
            with pytest.raises(ValueError, match=f"ranks must be other ranks.*got {rank}"):
                layer.mask_ranks([rank])
            if one is not LowLatency:
                with pytest.raises(ValueError, match=r"ranks must hold .* \[3\] are missing"):
                    layer.mask_ranks([])
        dist.barrier()
        layer.reset()
        assert layer.masked_ranks() == []
        own.check_call(1)
        dist.barrier()
        layer.close()

    run_ranks(4, work)


@parametrize("kind", KINDS, everyday=["low latency"])
def test_survivors_of_a_failed_call_go_on(run_ranks, kind: str) -> None:
    """Rank 3 dies. The others' call fails; with groups without it they go on, and tell each other
    what all must know."""
    one, arguments, bounded = KINDS[kind]

    def work(rank: int) -> None:
        own = one(**arguments, **bounded, timeout_s=30.0 if one is MoE else 6.0)
        own.check_call(0)
        if rank == DEAD:
            return
        layer = own.layer
        with pytest.raises((LostDomainError, MegaMoETimeoutError)):
            own.check_call(1)
        alive = make_domain_groups(2, without=[DEAD])
        layer.reset(alive)
        assert layer.masked_ranks() == [DEAD]
        for seed in range(2):
            own.check_call(seed, [DEAD])
        transport = layer._transport if one is MoE else layer._relay.transport
        found = torch.tensor(7 if rank == 1 else 0)
        transport.largest(found)  # rank 2 has no group with rank 1
        assert int(found) == 7
        dist.barrier(alive.domain)
        layer.close()

    run_ranks(4, work)


def test_handles_of_before(run_ranks) -> None:
    """Slots that cannot be carried any more count as unused, and rows of tokens that do not come
    any more become zero."""

    def work(rank: int) -> None:
        layer = throughput.make(2, timeout_s=20.0)
        shape = ThroughputShape(num_ranks=4, **throughput.SIZES)
        inputs, others = (random_inputs(shape, COUNTS, seed) for seed in range(2))
        _, handle = layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
        if rank != DEAD:
            layer.mask_ranks([DEAD])
            used = ids_in_domains(inputs.topk_idxs, shape.num_experts_per_rank, 2, [DEAD])
            places = throughput.rows_by_slot(shape, 2, inputs.topk_idxs)
            kept = {
                (source, token, slot): place
                for (source, token, slot), place in places.items()
                if used[source][token, slot] >= 0
            }
            out = layer.combine(inputs.ys[rank], handle)
            expected = throughput.sums_of_rows(shape, 2, rank, inputs, kept)
            assert torch.equal(bits(out), bits(expected))
            received, _ = layer.dispatch(others.xs[rank], handle=handle)
            is_lost = [
                source == DEAD or (source // 2 != rank // 2 and rank // 2 * 2 + source % 2 == DEAD)
                for source in range(4)
            ]
            xs = [
                torch.zeros_like(x) if lost else x
                for x, lost in zip(others.xs, is_lost, strict=True)
            ]
            order = throughput.sources_of(rank, 4, 2)
            ids = [inputs.topk_idxs[source] for source in order]
            check_received(shape, received, rank, ids, [xs[source] for source in order])
            scalars = layer.return_scalars(inputs.values[rank], handle)
            for (source, token, slot), (owner, row) in places.items():
                if source == rank:
                    is_kept = (source, token, slot) in kept
                    value = inputs.values[owner][row] if is_kept else 0.0
                    assert scalars[token, slot] == value
        dist.barrier()
        layer.close()

    run_ranks(4, work)


@pytest.mark.parametrize("kind", ["low latency", "fused"])
def test_ranks_of_groups_that_all_tell_each_other(run_ranks, kind: str) -> None:
    """They would be waited for."""
    one, arguments, bounded = KINDS[kind]

    def work(rank: int) -> None:
        layer = one(**arguments, **bounded).layer
        with pytest.raises(ValueError, match=r"reset\(groups\) with groups without them .*\[\d\]"):
            layer.mask_ranks([(rank + 1) % 4])
        layer.close()

    run_ranks(4, work)


def test_groups_of_a_domain_are_there_for_one_rank_too(run_ranks) -> None:
    def work(rank: int) -> None:
        layer = throughput.make(2)
        if rank == 1:
            return
        groups = make_domain_groups(2, without=[1])
        assert groups.domain is not None
        with pytest.raises(TypeError, match="groups must be DomainGroups or None"):
            layer.reset(groups.domain)
        with pytest.raises(ValueError, match=r"groups\.domain must be a group of the remaining"):
            layer.reset(DomainGroups(None, groups.cross))
        layer.close()

    run_ranks(4, work)
