"""The all-to-all for many tokens over several domains: a process for each rank, gloo between
domains, the emulator inside them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.errors import ForeignTokensError, MegaMoEError
from deep_moe.heuristics.throughput import ThroughputShape
from deep_moe.split.domain_groups import make_domain_groups
from deep_moe.split.two_level_throughput import TwoLevelAllToAll

from .reference import bits, ids_in_domains, quantized
from .throughput_reference import Inputs, check_received, places_of, random_inputs

SIZES: dict[str, Any] = {
    "max_tokens_per_rank": 4,
    "hidden": 128,
    "num_experts": 8,
    "num_topk": 2,
    "max_recv_rows": 64,
    "expert_alignment": 4,
}


def make(num_domains: int, **changes: Any) -> TwoLevelAllToAll:
    groups = make_domain_groups(num_domains)
    return TwoLevelAllToAll(*groups, **{**SIZES, "num_sms": 2, **changes})


def sources_of(rank: int, num_all: int, num_domains: int) -> list[int]:
    """Source ranks in the order of the rows that `rank` gets."""
    num_ranks = num_all // num_domains
    own = rank // num_ranks
    return sorted(range(num_all), key=lambda s: (s % num_ranks, s // num_ranks != own, s))


def rows_by_slot(
    shape: ThroughputShape, num_domains: int, topk_idxs: list[torch.Tensor]
) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(rank, row) of each used (source rank, token, slot)."""
    found = {}
    for rank in range(shape.num_ranks):
        order = sources_of(rank, shape.num_ranks, num_domains)
        places = places_of(shape, [topk_idxs[source] for source in order], rank)
        for row, place in enumerate(places.rows):
            if place is not None:
                found[(order[place[0]], *place[1:])] = rank, row
    return found


def expected_sums(
    shape: ThroughputShape, num_domains: int, rank: int, inputs: Inputs, weights: Any
) -> torch.Tensor:
    """Of each domain in slot order, rounded; then of the domains."""
    places = rows_by_slot(shape, num_domains, inputs.topk_idxs)
    return sums_of_rows(shape, num_domains, rank, inputs, places, weights)


def sums_of_rows(
    shape: ThroughputShape,
    num_domains: int,
    rank: int,
    inputs: Inputs,
    places: dict[tuple[int, int, int], tuple[int, int]],
    weights: Any = None,
) -> torch.Tensor:
    """The same of the slots that have a place."""
    num_ranks = shape.num_ranks // num_domains
    out = torch.zeros(inputs.xs[rank].shape[0], shape.hidden)
    for token in range(out.shape[0]):
        for domain in range(num_domains):
            part = torch.zeros(shape.hidden)
            for slot in range(shape.num_topk):
                owner, row = places.get((rank, token, slot), (-1, 0))
                if owner >= 0 and owner // num_ranks == domain:
                    weight = 1.0 if weights is None else weights[token, slot]
                    part = part + weight * inputs.ys[owner][row].float()
            out[token] = out[token] + part.bfloat16().float()
    return out.bfloat16()


def check_call(
    layer: TwoLevelAllToAll,
    shape: ThroughputShape,
    num_domains: int,
    counts: tuple[int, ...],
    seed: int,
    *,
    given: bool = False,
    masked: Collection[int] = (),
) -> None:
    """Every bit of a dispatch and of two combines. given: the caller has quantized the tokens."""
    rank = layer.rank
    order = sources_of(rank, shape.num_ranks, num_domains)
    inputs = random_inputs(shape, counts, seed)
    x, scales = inputs.xs[rank], None
    if given:
        x, scales = quantized(x, layer.token_format)
    weights = inputs.topk_weights[rank] if seed else None
    received, handle = layer.dispatch(x, inputs.topk_idxs[rank], topk_weights=weights, x_sf=scales)
    used = ids_in_domains(inputs.topk_idxs, shape.num_experts_per_rank, num_domains, masked)
    check_received(
        shape,
        received,
        rank,
        [used[source] for source in order],
        [inputs.xs[source] for source in order],
        token_format=layer.token_format,
        weights=[inputs.topk_weights[source] for source in order] if seed else None,
    )
    for of_slots in (None, inputs.topk_weights[rank]):
        out = layer.combine(inputs.ys[rank], handle, topk_weights=of_slots)
        expected = expected_sums(
            shape, num_domains, rank, replace(inputs, topk_idxs=used), of_slots
        )
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize(
    ("num_domains", "num_ranks", "token_format", "given"),
    [
        (2, 2, "bf16", False),
        (3, 1, "fp8_128", True),
        pytest.param(2, 1, "mxfp8", False, marks=pytest.mark.slow),
        pytest.param(2, 1, "fp8_128_pow2", False, marks=pytest.mark.slow),
    ],
)
def test_every_bit_of_calls_in_turn(
    run_ranks, num_domains: int, num_ranks: int, token_format: str, given: bool
) -> None:
    world = num_domains * num_ranks
    sizes = {**SIZES, "num_experts": 3 * world}

    def work(rank: int) -> None:
        layer = make(num_domains, token_format=token_format, num_experts=3 * world)
        shape = ThroughputShape(num_ranks=world, **sizes)
        for call, counts in enumerate([(4, 0, 3, 1), (0, 0, 0, 0), (2, 4, 4, 0)]):
            check_call(layer, shape, num_domains, counts[:world], call, given=given)
        layer.check()
        dist.barrier()
        layer.close()

    run_ranks(world, work)


def test_gradients(run_ranks) -> None:
    """Other rows the ways of a dispatch, times weights; a number of each row back to its slot; a
    handle serves again after another dispatch."""

    def work(rank: int) -> None:
        layer, shape = make(2), ThroughputShape(num_ranks=2, **SIZES)
        order = sources_of(rank, 2, 2)
        inputs, others = (random_inputs(shape, (4, 3), seed) for seed in range(2))
        _, handle = layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
        layer.dispatch(others.xs[rank], others.topk_idxs[rank])
        received, same = layer.dispatch(
            others.xs[rank], topk_weights=inputs.topk_weights[rank], handle=handle
        )
        assert same is handle
        check_received(
            shape,
            received,
            rank,
            [inputs.topk_idxs[source] for source in order],
            [others.xs[source] for source in order],
            factors=[inputs.topk_weights[source] for source in order],
        )
        scalars = layer.return_scalars(inputs.values[rank], handle)
        expected = torch.zeros_like(scalars)
        places = rows_by_slot(shape, 2, inputs.topk_idxs)
        for (source, token, slot), (owner, row) in places.items():
            if source == rank:
                expected[token, slot] = inputs.values[owner][row]
        assert torch.equal(scalars, expected)
        dist.barrier()
        layer.close()

    run_ranks(2, work)


def test_too_many_rows_and_too_many_foreign_tokens(run_ranks) -> None:
    def work(rank: int) -> list[str]:
        messages = [""]
        x, ids = torch.ones(4, 128).bfloat16(), torch.zeros(4, 2, dtype=torch.int64)
        layer = make(2, max_recv_rows=8, timeout_s=4.0)
        if rank == 0:  # who owns the expert; only its domain learns of that
            with pytest.raises(MegaMoEError) as caught:
                layer.dispatch(x, ids)
            messages = [str(caught.value)]
        else:
            layer.dispatch(x, ids)
        layer.reset()
        layer.dispatch(x[:1], ids[:1])
        dist.barrier()
        layer.close()
        layer = make(2, num_max_foreign_tokens=2)
        with pytest.raises(ForeignTokensError) as too_many:
            layer.dispatch(x, ids)
        messages.append(str(too_many.value))
        dist.barrier()
        layer.close()
        return messages

    first, second = run_ranks(2, work)
    assert first[0].startswith("domain 0: ")
    assert "max_recv_rows" in first[0]
    assert first[1] == second[1]
    assert "rank 0 of domain 1 has 4 tokens for domain 0" in first[1]


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token_format must be one of .*got 'fp8_128_ue8m0'"):
        TwoLevelAllToAll(None, None, **SIZES, token_format="fp8_128_ue8m0", device="cpu")
    layer = TwoLevelAllToAll(None, None, **SIZES, device="cpu", num_sms=2)
    x, ids = torch.zeros(2, 128).bfloat16(), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="dispatch must have either topk_idx or the handle"):
        layer.dispatch(x)
    with pytest.raises(ValueError, match=r"x must have at most max_tokens_per_rank \(4\)"):
        layer.dispatch(torch.zeros(5, 128).bfloat16(), ids)
    with pytest.raises(ValueError, match="x_sf must be None for an x of bfloat16"):
        layer.dispatch(x, ids, x_sf=torch.ones(2, 1))
    with pytest.raises(ValueError, match="x must be bfloat16 for token_format 'bf16'"):
        layer.dispatch(x.to(torch.float8_e4m3fn), ids, x_sf=torch.ones(2, 1))
    _, handle = layer.dispatch(x, ids)
    with pytest.raises(ValueError, match="x must have as many tokens as the handle's dispatch"):
        layer.dispatch(x[:1], handle=handle)
    with pytest.raises(TypeError, match="handle must be what a dispatch returned"):
        layer.combine(torch.zeros(64, 128).bfloat16(), "handle")  # type: ignore[arg-type]
    layer.close()
