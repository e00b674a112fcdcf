"""The low-latency all-to-all over several domains: a process for each rank, gloo between domains,
the emulator inside them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.errors import ForeignTokensError, LostDomainError, MegaMoETimeoutError
from deep_moe.heuristics.low_latency import LowLatencyShape
from deep_moe.split.domain_groups import DomainGroups, make_domain_groups
from deep_moe.split.handle import Dispatched
from deep_moe.split.two_level_low_latency import TwoLevelLowLatencyAllToAll

from . import nccl_ep_stand_in
from .reference import (
    Inputs,
    bits,
    ids_in_domains,
    quantized,
    random_inputs,
    rows_of_expert,
    used_experts,
)

SIZES: dict[str, Any] = {
    "num_max_tokens_per_rank": 4,
    "hidden": 256,
    "num_experts": 8,
    "num_topk": 3,
}


def make(num_domains: int, groups: DomainGroups | None = None, **changes: Any):
    if groups is None:
        groups = make_domain_groups(num_domains)
    return TwoLevelLowLatencyAllToAll(*groups, **{**SIZES, "num_sms": 2, **changes})


def shape_of(num_ranks: int, token_format: str = "fp8_128", **changes: Any) -> LowLatencyShape:
    """As if all ranks were one domain."""
    sizes = {name: changes.get(name, value) for name, value in SIZES.items()}
    return LowLatencyShape(num_ranks=num_ranks, token_format=token_format, **sizes)


def check_dispatched(
    shape: LowLatencyShape, num_domains: int, result: Dispatched, rank: int, inputs: Inputs
) -> None:
    """Every bit of what a rank received that means something, wherever `layout_range` says."""
    num_ranks = shape.num_ranks // num_domains
    domain = rank // num_ranks
    tokens = [quantized(x, shape.token_format) for x in inputs.xs]
    for local in range(shape.num_experts_per_rank):
        rows = rows_of_expert(shape, inputs.topk_idxs, rank * shape.num_experts_per_rank + local)
        # By number in the domain; then this domain first.
        rows.sort(
            key=lambda row: (
                row.source_rank % num_ranks,
                row.source_rank // num_ranks != domain,
                row.source_rank,
            )
        )
        assert int(result.recv_count[local]) == len(rows)
        sources = [row.source_rank for row in rows]
        for source in range(shape.num_ranks):
            packed = int(result.layout_range[local, source])
            assert packed & 0xFFFFFFFF == sources.count(source)
            if source in sources:
                assert packed >> 32 == sources.index(source)
        for i, row in enumerate(rows):
            values, scales = tokens[row.source_rank]
            assert int(result.src_info[local, i]) == row.token
            assert torch.equal(bits(result.recv_x[local, i]), bits(values[row.token]))
            if scales is not None:
                assert result.scales is not None
                assert torch.equal(bits(result.scales[local, i]), bits(scales[row.token]))


def experts_on(shape: LowLatencyShape, rank: int, result: Dispatched) -> torch.Tensor:
    """Rows that say whose they are: expert, source rank, token."""
    y = torch.full(result.recv_x.shape, torch.nan, dtype=torch.bfloat16)
    for local in range(shape.num_experts_per_rank):
        for source in range(shape.num_ranks):
            packed = int(result.layout_range[local, source])
            for i in range(packed >> 32, (packed >> 32) + (packed & 0xFFFFFFFF)):
                expert = rank * shape.num_experts_per_rank + local
                y[local, i] = row_of(shape, expert, source, int(result.src_info[local, i]))
    return y


def row_of(shape: LowLatencyShape, expert: int, source: int, token: int) -> torch.Tensor:
    seed = (expert * shape.num_ranks + source) * 1024 + token
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape.hidden, generator=generator).bfloat16()


def expected_out(
    shape: LowLatencyShape, num_domains: int, rank: int, topk_idx: torch.Tensor, weights
) -> torch.Tensor:
    """Sums of a domain in slot order, rounded; the domains' in their order, rounded again."""
    per_domain = shape.num_experts // num_domains
    out = torch.zeros(topk_idx.shape[0], shape.hidden)
    for token, slots in enumerate(topk_idx.tolist()):
        for domain in range(num_domains):
            part = torch.zeros(shape.hidden)
            for slot, expert in used_experts(shape, slots):
                if expert // per_domain == domain:
                    part = part + row_of(shape, expert, rank, token).float() * weights[token, slot]
            out[token] = out[token] + part.bfloat16().float()
    return out.bfloat16()


def check_call(
    layer: TwoLevelLowLatencyAllToAll,
    shape: LowLatencyShape,
    num_domains: int,
    counts: tuple[int, ...],
    *,
    seed: int = 0,
    receive: bool = True,
    zero_copy: bool = False,
    again: bool = False,
    masked: list[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> None:
    rank = layer.rank
    given = random_inputs(shape, counts, seed, dtype=dtype)
    used = ids_in_domains(given.topk_idxs, shape.num_experts_per_rank, num_domains, masked or [])
    inputs = replace(given, topk_idxs=used)
    ids, weights = given.topk_idxs[rank], given.topk_weights[rank]
    result = layer.dispatch(given.xs[rank], ids, receive=receive)
    if not receive:
        with pytest.raises(ValueError, match=r"combine must follow receive\(handle\)"):
            layer.combine(torch.zeros(0), ids, weights, result.handle)
        layer.receive(result.handle)
    check_dispatched(shape, num_domains, result, rank, inputs)
    y = experts_on(shape, rank, result)
    if zero_copy:
        y = layer.get_combine_buffer(result.handle).copy_(y)
    expected = expected_out(shape, num_domains, rank, inputs.topk_idxs[rank], weights)
    for is_again in (False, True) if again else (False,):
        out = layer.combine(
            y, ids, weights, result.handle, zero_copy=zero_copy, receive=receive, again=is_again
        )
        if not receive:
            layer.receive(result.handle)
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize(
    ("num_domains", "num_ranks", "arguments", "calls"),
    [
        pytest.param(2, 2, {}, {}, id="fp8"),
        pytest.param(2, 2, {}, {"receive": False, "dtype": torch.int32}, id="in_parts"),
        pytest.param(3, 1, {"num_experts": 9, "placement": "experts"}, {}, id="three_domains"),
        pytest.param(2, 1, {"zero_copy": True}, {"zero_copy": True}, id="zero_copy"),
        pytest.param(2, 2, {"token_format": "bf16"}, {"again": True}, id="bf16_again"),
        pytest.param(2, 2, {"token_format": "mxfp8"}, {}, id="mxfp8", marks=pytest.mark.slow),
        pytest.param(2, 1, {"token_format": "fp8_128_ue8m0", "hidden": 512}, {}, id="packed"),
        pytest.param(2, 1, {"token_format": "fp8_128_pow2"}, {}, id="pow2", marks=pytest.mark.slow),
        pytest.param(2, 2, {"transport": "nccl_ep"}, {}, id="nccl_ep"),
    ],
)
def test_every_bit_of_calls_in_turn(run_ranks, num_domains, num_ranks, arguments, calls) -> None:
    world = num_domains * num_ranks

    def work(rank: int) -> None:
        nccl_ep_stand_in.install()
        layer = make(num_domains, **arguments)
        sizes = {name: arguments[name] for name in (*SIZES, "token_format") if name in arguments}
        shape = shape_of(world, **sizes)
        assert (layer.rank, layer.domain) == (rank, rank // num_ranks)
        held = [own for own in vars(layer._relay).values() if isinstance(own, torch.Tensor)]
        held = [*held, *layer._relay._unrouted]
        storages = [own.untyped_storage() for own in held if own.numel()]
        own_bytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        mask_bytes = layer._relay._goes_there.nbytes + layer._relay._worst.nbytes
        assert layer.nbytes - layer._inside.nbytes == sum(own_bytes.values()) - mask_bytes
        for call, counts in enumerate([(4, 0, 3, 1), (0, 0, 0, 0), (2, 4, 4, 0)]):
            check_call(layer, shape, num_domains, counts[:world], seed=call, **calls)
        layer.check()
        dist.barrier()
        uses_nccl_ep = arguments.get("transport") == "nccl_ep"
        assert (nccl_ep_stand_in.Group.num_open > 0) == uses_nccl_ep
        layer.close()
        assert nccl_ep_stand_in.Group.num_open == 0

    run_ranks(world, work)


def test_one_domain(run_ranks) -> None:
    def work(rank: int) -> None:
        layer = make(1)
        check_call(layer, shape_of(2), 1, (4, 3))
        dist.barrier()
        layer.close()

    run_ranks(2, work)


def test_two_calls_under_way(run_ranks) -> None:
    """The second dispatch comes before the first combine."""

    def work(rank: int) -> None:
        layer, shape = make(2), shape_of(2)
        given = [random_inputs(shape, (4, 2), seed) for seed in range(2)]
        results = []
        for inputs in given:
            results.append(layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank]))
            check_dispatched(shape, 2, results[-1], rank, inputs)
        for inputs, result in zip(given, results, strict=True):
            ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
            y = experts_on(shape, rank, result)
            out = layer.combine(y, ids, weights, result.handle)
            assert torch.equal(bits(out), bits(expected_out(shape, 2, rank, ids, weights)))
        dist.barrier()
        layer.close()

    run_ranks(2, work)


def test_statistics(run_ranks) -> None:
    def work(rank: int) -> None:
        layer, shape = make(2), shape_of(2)
        inputs = random_inputs(shape, (4, 2))
        totals, cycles = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        for _ in range(2):
            result = layer.dispatch(
                inputs.xs[rank], inputs.topk_idxs[rank], expert_totals=totals, wait_cycles=cycles
            )
        assert torch.equal(totals, 2 * result.recv_count)
        assert cycles[1 - rank] == 0
        dist.barrier()
        layer.close()

    run_ranks(2, work)


def test_room_for_some(run_ranks) -> None:
    """Two tokens fit of those that go to the other domain. Three are an error on all ranks."""

    def work(rank: int) -> str:
        layer = make(2, num_max_foreign_tokens=2)
        shape = shape_of(2)
        x = torch.ones(4, 256, dtype=torch.bfloat16)
        ids = torch.full((4, 3), -1)
        ids[:3, 0] = (1 - rank) * 4 if rank == 1 else 0
        with pytest.raises(ForeignTokensError) as caught:
            layer.dispatch(x, ids)
        ids[0] = -1
        weights = torch.ones(4, 3)
        result = layer.dispatch(x, ids)
        out = layer.combine(experts_on(shape, rank, result), ids, weights, result.handle)
        assert torch.equal(bits(out), bits(expected_out(shape, 2, rank, ids, weights)))
        dist.barrier()
        layer.close()
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == second
    assert "rank 0 of domain 1 has 3 tokens for domain 0" in first


def test_a_domain_that_is_lost_is_named_and_the_others_go_on(run_ranks) -> None:
    """Of three domains of one rank the last one's process ends."""

    def work(rank: int) -> str:
        layer = make(3, num_experts=9, timeout_s=3.0)
        shape = shape_of(3, num_experts=9)
        check_call(layer, shape, 3, (4, 3, 2))
        left = dist.new_group([0, 1])
        if rank == 2:
            return ""
        inputs = random_inputs(shape, (4, 3, 2))
        with pytest.raises(LostDomainError) as caught:
            layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
        layer.reset(DomainGroups(None, left))
        assert layer.masked_ranks() == [2]
        for seed in range(2):
            check_call(layer, shape, 3, (4, 3, 2), seed=seed, masked=[2])
        dist.barrier(left)
        layer.close()
        return str(caught.value)

    first, second, _ = run_ranks(3, work)
    assert "domain 2 is lost: its rank 0 does not answer" in first
    assert "domain 2 is lost" in second


def test_a_rank_that_never_comes_is_named_with_its_domain(run_ranks) -> None:
    """Rank 1 of domain 0 does not call: rank 0 there waits for it in the kernel."""

    def work(rank: int) -> str:
        layer = make(2, timeout_s=3.0, num_max_tokens_per_rank=4)
        message = ""
        if rank != 1:
            inputs = random_inputs(shape_of(4), (4, 4, 4, 4))
            with pytest.raises((MegaMoETimeoutError, LostDomainError)) as caught:
                layer.dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
            message = str(caught.value)
        else:
            time.sleep(8.0)
        dist.barrier()
        return message

    first, _, third, fourth = run_ranks(4, work)
    assert first.startswith("domain 0: rank 0")
    assert "missing: rank 1" in first
    assert "domain 0" in fourth
    assert third.startswith("domain 1: rank 0")


def test_traces(run_ranks, tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        layer = make(2, enable_profiling=True)
        check_call(layer, shape_of(2), 2, (4, 3))
        path = tmp_path / f"{rank}.json"
        layer.dump_dispatch_trace(path)
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        layer.dump_combine_trace(path)
        names |= {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        dist.barrier()
        layer.close()
        return sorted(names)

    for names in run_ranks(2, work):
        phases = {"quant_and_put", "count_put", "wait", "postprocess"}
        assert phases | {"copy_and_put", "recv_wait", "topk_reduce"} <= set(names)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": 6}, "num_experts must be a positive multiple of the 4 ranks"),
        ({"num_max_tokens_per_rank": 4000}, "num_max_foreign_tokens must be at most 96"),
        ({"num_max_foreign_tokens": -1}, "num_max_foreign_tokens must be at least 0; got -1"),
        ({"hidden": 100}, "hidden must be a positive multiple of 128; got 100"),
        ({"token_format": "nvfp4"}, "token_format must be one of"),
        ({"num_transport_sms": -1}, "num_transport_sms must be at least 0; got -1"),
        ({"transport": "ib"}, "transport must be one of torch, nccl_ep; got 'ib'"),
    ],
)
def test_what_it_is_made_with(changes: dict[str, Any], text: str) -> None:
    from deep_moe.heuristics.domain_relay import RelayShape
    from deep_moe.split.domain_transport import check_transport
    from deep_moe.split.two_level_layer import check_listed, sms_beside_transport

    sizes = {**SIZES, "token_format": "fp8_128", **changes}
    num_sms = sizes.pop("num_transport_sms", 32)
    transport = sizes.pop("transport", "torch")

    def make_one() -> None:
        check_transport(transport)
        check_listed(RelayShape(2, 2, **sizes), "num_max_tokens_per_rank", 4096)
        sms_beside_transport(torch.device("cpu"), None, num_sms, 2)

    with pytest.raises(ValueError, match=text):
        make_one()


def test_what_it_is_called_with() -> None:
    layer = TwoLevelLowLatencyAllToAll(None, None, **SIZES, device="cpu", num_sms=2)
    x, ids = torch.zeros(2, 256).bfloat16(), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"x must have at most num_max_tokens_per_rank \(4\)"):
        layer.dispatch(torch.zeros(5, 256).bfloat16(), ids)
    with pytest.raises(TypeError, match="handle must be what a dispatch returned"):
        layer.receive("handle")  # type: ignore[arg-type]
    result = layer.dispatch(x, ids)
    with pytest.raises(ValueError, match="receive must follow a dispatch or a combine"):
        layer.receive(result.handle)
    result = layer.dispatch(x, ids, receive=False)
    with pytest.raises(ValueError, match=r"dispatch must follow receive\(handle\)"):
        layer.dispatch(x, ids)
    layer.receive(result.handle)
    with pytest.raises(ValueError, match="topk_weights must"):
        layer.combine(result.recv_x.bfloat16(), ids, torch.ones(2, 2), result.handle)
    layer.close()
    with pytest.raises(ValueError, match="closed"):
        layer.dispatch(x, ids)
