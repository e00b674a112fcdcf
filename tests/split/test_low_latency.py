"""Dispatch and combine of several ranks in one emulator, against plain PyTorch, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.heuristics.low_latency import PLACEMENTS
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.split.handle import Dispatched
from deep_moe.tokens import ALL_TO_ALL_FORMATS
from tests.everyday import parametrize

from .reference import Inputs, bits, check_dispatched, expected_out, random_inputs

ARCHS = ("sm_90a", "sm_100a", "sm_103a")


def ranks(
    num_ranks: int = 2,
    num_max_tokens_per_rank: int = 8,
    hidden: int = 256,
    num_experts: int = 8,
    num_topk: int = 3,
    **options: Any,
) -> EmulatedAllToAll:
    options = {"num_sms": 3, "timeout_s": 100.0, **options}
    return EmulatedAllToAll(
        num_ranks, num_max_tokens_per_rank, hidden, num_experts, num_topk, **options
    )


def handles(results: Sequence[Dispatched]) -> list[Any]:
    return [result.handle for result in results]


def check_call(
    layer: EmulatedAllToAll,
    inputs: Inputs,
    *,
    receive: bool = True,
    schedule: Any = "random",
    masked: Sequence[int] = (),
) -> list[torch.Tensor]:
    """One dispatch and one combine, and every bit of both."""
    alive = [rank for rank in range(layer.shape.num_ranks) if rank not in masked]

    def of_alive(values: list[Any]) -> list[Any]:
        return [values[rank] for rank in alive]

    options: dict[str, Any] = {"ranks": alive, "schedule": schedule}
    xs, ids = of_alive(inputs.xs), of_alive(inputs.topk_idxs)
    results = layer.dispatch(xs, ids, receive=receive, **options)
    if not receive:
        layer.receive(handles(results), **options)
    for rank, result in zip(alive, results, strict=True):
        check_dispatched(layer.shape, result, rank, inputs.xs, inputs.topk_idxs, masked)
    outs = layer.combine(
        of_alive(inputs.ys),
        ids,
        of_alive(inputs.topk_weights),
        handles(results),
        receive=receive,
        **options,
    )
    if not receive:
        layer.receive(handles(results), **options)
    for rank, out in zip(alive, outs, strict=True):
        weights = inputs.topk_weights[rank]
        expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys, masked)
        assert torch.equal(bits(out), bits(expected))
    return outs


@pytest.mark.parametrize("arch", ARCHS)
@parametrize("token_format", ALL_TO_ALL_FORMATS, everyday=["bf16", "fp8_128_ue8m0"])
def test_every_bit(token_format: str, arch: str) -> None:
    hidden = 512 if token_format == "fp8_128_ue8m0" else 256  # which has four scales in a word
    with ranks(token_format=token_format, arch=arch, hidden=hidden) as layer:
        check_call(layer, random_inputs(layer.shape, (8, 5)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule(schedule: str) -> None:
    with ranks(num_ranks=3, num_experts=9) as layer:
        check_call(layer, random_inputs(layer.shape, (8, 5, 7)), schedule=schedule)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_both_types_of_expert_ids(dtype: torch.dtype) -> None:
    with ranks() as layer:
        check_call(layer, random_inputs(layer.shape, (4, 8), dtype=dtype))


def test_calls_in_turn_find_the_halves_as_they_need_them() -> None:
    """Ranks bring other tokens in each call."""
    with ranks() as layer:
        for call in range(7):
            counts = (call % 4, 8 - call)
            check_call(layer, random_inputs(layer.shape, counts, seed=call))


def test_hundreds_of_calls_give_the_same_bits() -> None:
    with ranks(
        num_max_tokens_per_rank=4, hidden=128, num_experts=4, num_topk=2, num_sms=2
    ) as layer:
        kinds = [random_inputs(layer.shape, (4, kind), seed=kind) for kind in range(3)]
        first = [check_call(layer, inputs) for inputs in kinds]
        for i in range(300):
            inputs = kinds[i % 3]
            results = layer.dispatch(inputs.xs, inputs.topk_idxs)
            outs = layer.combine(inputs.ys, inputs.topk_idxs, inputs.topk_weights, handles(results))
            for out, expected in zip(outs, first[i % 3], strict=True):
                assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_run_ahead_of_each_other(schedule: str) -> None:
    run_ahead(schedule)


def run_ahead(schedule: str, **options: Any) -> None:
    """Kernels of several calls are queued on each rank, and no rank waits for the host."""
    with ranks(num_ranks=3, num_experts=6, **options) as layer:
        calls = [
            random_inputs(layer.shape, counts, seed=seed)
            for seed, counts in enumerate([(8, 5, 0), (1, 8, 3), (0, 0, 8), (8, 8, 8), (2, 3, 4)])
        ]
        queues: list[list[Any]] = [[] for _ in range(3)]
        results: list[list[Any]] = [[] for _ in calls]
        outs: list[list[torch.Tensor]] = [[] for _ in calls]
        for rank, own in enumerate(layer.layers):
            for i, inputs in enumerate(calls):
                ids = inputs.topk_idxs[rank]
                dispatch, result = own.prepare_dispatch(inputs.xs[rank], ids)
                weights = inputs.topk_weights[rank]
                combine, out = own.prepare_combine(inputs.ys[rank], ids, weights, result.handle)
                queues[rank] += [dispatch, combine]
                results[i].append(result)
                outs[i].append(out)
        layer.run(queues, schedule=schedule)
        for inputs, given, sums in zip(calls, results, outs, strict=True):
            for rank in range(3):
                check_dispatched(layer.shape, given[rank], rank, inputs.xs, inputs.topk_idxs)
                weights = inputs.topk_weights[rank]
                expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
                assert torch.equal(bits(sums[rank]), bits(expected))


@pytest.mark.parametrize("receive", [True, False])
def test_two_calls_under_way(receive: bool) -> None:
    """The second dispatch comes before the first combine."""
    with ranks() as layer:
        calls = [random_inputs(layer.shape, (8, 8), seed=seed) for seed in range(4)]
        for pair in (calls[:2], calls[2:]):
            results = []
            for inputs in pair:
                results.append(layer.dispatch(inputs.xs, inputs.topk_idxs, receive=receive))
                if not receive:
                    layer.receive(handles(results[-1]))
            for inputs, given in zip(pair, results, strict=True):
                outs = layer.combine(
                    inputs.ys, inputs.topk_idxs, inputs.topk_weights, handles(given)
                )
                for rank, out in enumerate(outs):
                    check_dispatched(layer.shape, given[rank], rank, inputs.xs, inputs.topk_idxs)
                    weights = inputs.topk_weights[rank]
                    expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
                    assert torch.equal(bits(out), bits(expected))


@parametrize("token_format", ALL_TO_ALL_FORMATS, everyday=["bf16", "fp8_128"])
def test_send_first_and_receive_later(token_format: str) -> None:
    with ranks(token_format=token_format, hidden=512) as layer:
        for seed in range(3):
            check_call(layer, random_inputs(layer.shape, (8, 3), seed), receive=False)


def test_no_tokens_at_all() -> None:
    with ranks() as layer:
        outs = check_call(layer, random_inputs(layer.shape, (0, 0)))
        assert [out.shape for out in outs] == [(0, 256)] * 2


def test_unused_slots_only() -> None:
    with ranks() as layer:
        outs = check_call(layer, random_inputs(layer.shape, (8, 8), unused=2.0))
        assert not any(bool(out.any()) for out in outs)


def test_all_tokens_to_one_expert_in_every_slot() -> None:
    """An expert gets no more rows than there are tokens."""
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        for ids in inputs.topk_idxs:
            ids.fill_(5)
        check_call(layer, inputs)
        assert layer.shape.num_rows_per_expert == 16


def test_one_rank_alone() -> None:
    with ranks(num_ranks=1, num_experts=3, num_topk=3) as layer:
        check_call(layer, random_inputs(layer.shape, (8,)))


def test_many_ranks() -> None:
    """More than a warp has lanes, so that words of several rounds are waited for."""
    with ranks(
        num_ranks=35, num_experts=35, num_max_tokens_per_rank=2, hidden=128, num_sms=1
    ) as layer:
        check_call(layer, random_inputs(layer.shape, [2, 1] * 17 + [0]))


@pytest.mark.parametrize(
    ("hidden", "num_experts", "num_topk", "num_sms"),
    [(128, 2, 1, 1), (384, 70, 5, 2), (640, 64, 9, 3), (1152, 66, 17, 2), (9216, 32, 32, 1)],
)
def test_odd_sizes(hidden: int, num_experts: int, num_topk: int, num_sms: int) -> None:
    with ranks(
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        num_sms=num_sms,
        num_max_tokens_per_rank=6,
    ) as layer:
        check_call(layer, random_inputs(layer.shape, (6, 3)))


@pytest.mark.parametrize("token_format", ["fp8_128", "fp8_128_pow2", "fp8_128_ue8m0", "mxfp8"])
def test_values_that_are_no_numbers_stay_in_their_group(token_format: str) -> None:
    with ranks(token_format=token_format, hidden=512) as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        inputs.xs[0][0, 3] = torch.inf
        inputs.xs[0][1, 130] = torch.nan
        inputs.xs[1][0, :128] = 0
        inputs.xs[1][1] = 1e-30
        inputs.xs[1][2, 0] = -torch.inf
        check_call(layer, inputs)


def test_scales_that_are_powers_of_two_are_the_smallest_that_fit() -> None:
    """Largest magnitudes at, below and above 448 times a power of two."""
    with ranks(num_ranks=1, token_format="fp8_128_ue8m0", hidden=512) as layer:
        inputs = random_inputs(layer.shape, (8,), unused=0.0)
        x = torch.zeros(8, 512)
        for token, exponent in enumerate(range(-16, 16, 4)):
            x[token, [0, 128, 256, 384]] = torch.tensor([448.0, 446.0, -450.0, 0.0]) * 2.0**exponent
        inputs.xs[0] = x.bfloat16()
        (result,) = layer.dispatch(inputs.xs, inputs.topk_idxs)
        check_dispatched(layer.shape, result, 0, inputs.xs, inputs.topk_idxs)
        assert result.scales is not None
        least = 127 - 22  # of a group of zeros: 1e-4 / 448 lies between 2^-23 and 2^-22
        for local, count in enumerate(result.recv_count.tolist()):
            for row in range(count):
                token = int(result.src_info[local, row])
                exponent = 127 - 16 + 4 * token
                word = int(result.scales[local, row, 0])
                found = [word >> shift & 0xFF for shift in (0, 8, 16, 24)]
                assert found == [exponent, exponent, exponent + 1, least]


@pytest.mark.parametrize("receive", [True, False])
def test_calls_of_other_formats_in_turn(receive: bool) -> None:
    with ranks(any_format=True, token_format="bf16", hidden=512) as layer:
        for seed, token_format in enumerate([*ALL_TO_ALL_FORMATS, *ALL_TO_ALL_FORMATS]):
            inputs = random_inputs(layer.shape, (8, 3), seed)
            results = layer.dispatch(
                inputs.xs, inputs.topk_idxs, token_format=token_format, receive=receive
            )
            if not receive:
                layer.receive(handles(results))
            shape = replace(layer.shape, token_format=token_format)
            for rank, result in enumerate(results):
                check_dispatched(shape, result, rank, inputs.xs, inputs.topk_idxs)
            check_combined(layer, inputs, results)


def check_combined(
    layer: EmulatedAllToAll, inputs: Inputs, results: Sequence[Dispatched], **options: Any
) -> None:
    outs = layer.combine(
        inputs.ys, inputs.topk_idxs, inputs.topk_weights, handles(results), **options
    )
    if not options.get("receive", True):
        layer.receive(handles(results))
    for rank, out in enumerate(outs):
        weights = inputs.topk_weights[rank]
        expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("receive", [True, False])
def test_a_call_combined_again_with_other_rows(receive: bool) -> None:
    with ranks() as layer:
        for seed in range(3):
            inputs = random_inputs(layer.shape, (8, 5), seed)
            results = layer.dispatch(inputs.xs, inputs.topk_idxs)
            check_combined(layer, inputs, results, receive=receive)
            for again in range(2):
                inputs.ys = random_inputs(layer.shape, (8, 5), 10 + seed + again).ys
                check_combined(layer, inputs, results, receive=receive, again=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_combined_again_by_ranks_that_run_ahead(schedule: str) -> None:
    """Nobody's rows are overwritten before they have been added."""
    with ranks(num_ranks=3, num_experts=9) as layer:
        again_with_other_rows(layer, schedule)


def again_with_other_rows(layer: EmulatedAllToAll, schedule: Any) -> None:
    num_tokens = (8, 5, 7)
    inputs = random_inputs(layer.shape, num_tokens)
    rows = [random_inputs(layer.shape, num_tokens, seed).ys for seed in range(3)]
    queues: list[list[Any]] = [[] for _ in layer.layers]
    outs: list[list[torch.Tensor]] = [[] for _ in rows]
    for rank, own in enumerate(layer.layers):
        ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
        launch, result = own.prepare_dispatch(inputs.xs[rank], ids)
        queues[rank].append(launch)
        for i, ys in enumerate(rows):
            launch, out = own.prepare_combine(ys[rank], ids, weights, result.handle, again=i > 0)
            queues[rank].append(launch)
            outs[i].append(out)
    layer.run(queues, schedule=schedule)
    for ys, sums in zip(rows, outs, strict=True):
        for rank, out in enumerate(sums):
            weights = inputs.topk_weights[rank]
            expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, ys)
            assert torch.equal(bits(out), bits(expected))


def repeats_with_other_rows() -> None:
    """A test of the mutations: calls that are combined again, without a look at each other."""
    for seed in range(3):
        with ranks(num_ranks=3, num_experts=9, timeout_s=0.01, schedule_seed=seed) as layer:
            again_with_other_rows(layer, "random")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_statistics_are_added_to(placement: str) -> None:
    with ranks(num_ranks=1, num_experts=4, placement=placement) as layer:
        (own,) = layer.layers
        totals, cycles = torch.ones(4, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
        expected = totals.clone()
        for seed in range(2):
            inputs = random_inputs(layer.shape, (8,), seed)
            result = own.dispatch(
                inputs.xs[0], inputs.topk_idxs[0], expert_totals=totals, wait_cycles=cycles
            )
            expected += result.recv_count
            assert torch.equal(totals, expected)
            dispatched = int(cycles)
            assert dispatched > 1
            own.combine(
                inputs.ys[0],
                inputs.topk_idxs[0],
                inputs.topk_weights[0],
                result.handle,
                wait_cycles=cycles,
            )
            assert int(cycles) > dispatched


def test_scales_by_column() -> None:
    with ranks(scales_by_column=True, token_format="mxfp8", hidden=512) as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        results = layer.dispatch(inputs.xs, inputs.topk_idxs)
        for rank, result in enumerate(results):
            assert result.scales is not None
            assert result.scales.shape == (4, 16, 4)
            assert result.scales.stride() == (64, 1, 16)
            check_dispatched(layer.shape, result, rank, inputs.xs, inputs.topk_idxs)


def test_an_output_of_the_callers() -> None:
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        results = layer.dispatch(inputs.xs, inputs.topk_idxs)
        outs = [torch.full((n, 256), torch.nan, dtype=torch.bfloat16) for n in (8, 5)]
        given = layer.combine(
            inputs.ys, inputs.topk_idxs, inputs.topk_weights, handles(results), outs
        )
        for rank, (out, other) in enumerate(zip(outs, given, strict=True)):
            assert out is other
            weights = inputs.topk_weights[rank]
            expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
            assert torch.equal(bits(out), bits(expected))


def test_unchecked_an_id_out_of_range_is_an_unused_slot() -> None:
    with ranks(checked=False) as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        inputs.topk_idxs[0][2, 1] = 8
        inputs.topk_idxs[1][3, 0] = -7
        inputs.topk_idxs[1][4, 2] = 1 << 40
        check_call(layer, inputs)


# ---- rows that stay where the experts write them


@pytest.mark.parametrize("receive", [True, False])
def test_rows_are_fetched_from_where_the_experts_wrote_them(receive: bool) -> None:
    check_fetched(receive)


def check_fetched(receive: bool, **options: Any) -> None:
    """Other kinds of calls lie between."""
    with ranks(num_ranks=3, num_experts=6, num_topk=4, zero_copy=True, **options) as layer:
        for seed in range(4):
            inputs = random_inputs(layer.shape, (8, seed, 5), seed)
            results = layer.dispatch(inputs.xs, inputs.topk_idxs)
            rows = []
            for own, result, y in zip(layer.layers, results, inputs.ys, strict=True):
                rows.append(own.get_combine_buffer(result.handle))
                rows[-1].copy_(y)
            outs = layer.combine(
                rows,
                inputs.topk_idxs,
                inputs.topk_weights,
                handles(results),
                zero_copy=True,
                receive=receive,
            )
            if not receive:
                layer.receive(handles(results))
            for rank, out in enumerate(outs):
                weights = inputs.topk_weights[rank]
                expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
                assert torch.equal(bits(out), bits(expected))
            if seed % 2:
                check_call(layer, random_inputs(layer.shape, (8, 4, 6), seed + 10))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_are_fetched_by_ranks_that_run_ahead(schedule: str) -> None:
    """The places of rows are told anew in each call; the rows themselves stay the same."""
    with ranks(num_ranks=3, num_experts=6, num_topk=4, zero_copy=True) as layer:
        calls = [random_inputs(layer.shape, (8, seed, 8 - seed), seed) for seed in range(4)]
        rows = calls[0].ys
        queues: list[list[Any]] = [[] for _ in range(3)]
        outs: list[list[torch.Tensor]] = [[] for _ in calls]
        for rank, own in enumerate(layer.layers):
            for i, inputs in enumerate(calls):
                ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
                dispatch, result = own.prepare_dispatch(inputs.xs[rank], ids)
                y = own.get_combine_buffer(result.handle).copy_(rows[rank])
                combine, out = own.prepare_combine(y, ids, weights, result.handle, zero_copy=True)
                queues[rank] += [dispatch, combine]
                outs[i].append(out)
        layer.run(queues, schedule=schedule)
        for inputs, sums in zip(calls, outs, strict=True):
            for rank, out in enumerate(sums):
                weights = inputs.topk_weights[rank]
                expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, rows)
                assert torch.equal(bits(out), bits(expected))


# ---- ranks that are missing


def test_a_rank_that_does_not_dispatch_is_named() -> None:
    with ranks(num_ranks=3, num_experts=6, timeout_s=0.01) as layer:
        inputs = random_inputs(layer.shape, (4, 4, 4))
        with pytest.raises(MegaMoETimeoutError) as error:
            layer.dispatch(inputs.xs[:2], inputs.topk_idxs[:2], ranks=[0, 1])
        assert "token counts of another rank, in a split dispatch" in str(error.value)
        assert "missing: rank 2" in str(error.value)
        with pytest.raises(MegaMoEError, match=r"call its reset\(\) on every rank"):
            layer.dispatch(inputs.xs, inputs.topk_idxs)
        layer.reset()
        check_call(layer, inputs)


def test_a_rank_that_does_not_combine_is_named() -> None:
    with ranks(timeout_s=0.01) as layer:
        inputs = random_inputs(layer.shape, (4, 4))
        given = layer.dispatch(inputs.xs, inputs.topk_idxs)
        with pytest.raises(MegaMoETimeoutError) as error:
            layer.combine(
                inputs.ys[:1],
                inputs.topk_idxs[:1],
                inputs.topk_weights[:1],
                handles(given)[:1],
                ranks=[0],
            )
        assert "rows of another rank's experts, in a split combine" in str(error.value)
        assert "missing: rank 1" in str(error.value)


def test_nobody_waits_for_a_rank_without_rows() -> None:
    """Rank 0 has sent no token to rank 1, which does not combine. But rank 0 combines again only
    when all ranks have come to that."""
    with ranks(timeout_s=0.01) as layer:
        inputs = random_inputs(layer.shape, (4, 4))
        inputs.topk_idxs[0] %= layer.shape.num_experts_per_rank
        given = layer.dispatch(inputs.xs, inputs.topk_idxs)
        weights = inputs.topk_weights[0]
        own = (inputs.ys[:1], inputs.topk_idxs[:1], [weights], handles(given)[:1])
        (out,) = layer.combine(*own, ranks=[0])
        expected = expected_out(layer.shape, 0, inputs.topk_idxs, weights, inputs.ys)
        assert torch.equal(bits(out), bits(expected))
        with pytest.raises(MegaMoETimeoutError, match="missing: rank 1"):
            layer.combine(*own, ranks=[0], again=True)


def test_after_a_failure_later_kernels_tell_nobody_anything() -> None:
    """Those that were launched behind the failed one: the peers run out of time too."""
    with ranks(timeout_s=0.01) as layer:
        inputs = random_inputs(layer.shape, (4, 4))
        queues: list[list[Any]] = []
        for rank, own in enumerate(layer.layers):
            launches = []
            for _ in range(3):
                x, ids = inputs.xs[rank], inputs.topk_idxs[rank]
                launch, _ = own.prepare_dispatch(x, ids)
                launches.append(launch)
            queues.append(launches[: 3 if rank == 0 else 1])
        with pytest.raises(MegaMoETimeoutError, match="missing: rank 1"):
            layer.run(queues)
        own = layer.layers[0].buffer
        segment = own.layout["num_calls"]
        num_calls = own.memory.tensor[segment.offset : segment.end].view(torch.int32)
        assert int(num_calls) == 2  # the third one found the mark of the second


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_masked_rank_gets_nothing(placement: str) -> None:
    """Not a word of its buffer changes, whether it was masked before the dispatch or behind it."""
    with ranks(num_ranks=3, num_experts=6, num_topk=4, placement=placement) as layer:
        inputs = random_inputs(layer.shape, (8, 4, 6))
        for masks_behind_dispatch in (True, False):
            alive = [0, 2]
            if masks_behind_dispatch:
                results = layer.dispatch(inputs.xs, inputs.topk_idxs)
                layer.mask_ranks([1])
                results = [results[rank] for rank in alive]
            memory = layer.layers[1].buffer.memory.tensor
            before = memory.clone()
            if not masks_behind_dispatch:
                own = ([values[rank] for rank in alive] for values in (inputs.xs, inputs.topk_idxs))
                results = layer.dispatch(*own, ranks=alive)
            layer.combine(
                *(
                    [values[rank] for rank in alive]
                    for values in (inputs.ys, inputs.topk_idxs, inputs.topk_weights)
                ),
                handles(results),
                ranks=alive,
            )
            assert torch.equal(memory, before)


def test_survivors_go_on() -> None:
    with ranks(num_ranks=3, num_experts=6, num_topk=4) as layer:
        for seed in range(3):
            check_call(layer, random_inputs(layer.shape, (8, 4, 6), seed))
        layer.mask_ranks([1])
        assert layer.layers[0].masked_ranks() == [1]
        for seed in range(3):
            check_call(layer, random_inputs(layer.shape, (8, 4, 6), seed), masked=[1])


def test_survivors_go_on_after_a_failure_and_the_dead_may_return() -> None:
    with ranks(num_ranks=3, num_experts=6, timeout_s=0.01) as layer:
        inputs = random_inputs(layer.shape, (8, 4, 6))
        with pytest.raises(MegaMoETimeoutError, match="missing: rank 0"):
            layer.dispatch(inputs.xs[1:], inputs.topk_idxs[1:], ranks=[1, 2])
        layer.reset()
        layer.mask_ranks([0])
        check_call(layer, inputs, masked=[0])
        layer.reset()
        assert layer.layers[1].masked_ranks() == []
        check_call(layer, inputs)


def test_the_last_of_many_ranks_can_be_masked() -> None:
    with ranks(
        num_ranks=66, num_experts=66, num_max_tokens_per_rank=1, hidden=128, num_sms=1, num_topk=4
    ) as layer:
        layer.mask_ranks([1, 33, 64])
        check_call(layer, random_inputs(layer.shape, [1] * 66), masked=[1, 33, 64])


def test_the_kernel_finds_a_stale_handle_that_the_host_cannot_know() -> None:
    """A graph may be replayed: then the buffer's own count is ahead of the host's."""
    with ranks(num_ranks=1, num_experts=2, num_topk=1) as layer:
        inputs = random_inputs(layer.shape, (8,))
        (own,) = layer.layers
        (given,) = layer.dispatch(inputs.xs, inputs.topk_idxs)
        launch, _ = own.prepare_dispatch(inputs.xs[0], inputs.topk_idxs[0])
        layer.run([[launch, launch]])
        with pytest.raises(MegaMoEError, match=r"one of the last 2 dispatches; .* last but 2"):
            layer.combine(inputs.ys, inputs.topk_idxs, inputs.topk_weights, [given.handle])


def test_a_captured_kernel_may_run_any_number_of_times() -> None:
    """The same launches again and again, as a graph's replays; the tensors' contents change."""
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        queues, results, outs = [], [], []
        for rank, own in enumerate(layer.layers):
            ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
            dispatch, result = own.prepare_dispatch(inputs.xs[rank], ids)
            combine, out = own.prepare_combine(inputs.ys[rank], ids, weights, result.handle)
            queues.append([dispatch, combine])
            results.append(result)
            outs.append(out)
        for seed in range(5):
            other = random_inputs(layer.shape, (8, 5), seed=seed)
            for rank in range(2):
                inputs.xs[rank].copy_(other.xs[rank])
                inputs.topk_idxs[rank].copy_(other.topk_idxs[rank])
            layer.run(queues)
            for rank in range(2):
                check_dispatched(layer.shape, results[rank], rank, inputs.xs, inputs.topk_idxs)
                weights = inputs.topk_weights[rank]
                expected = expected_out(layer.shape, rank, inputs.topk_idxs, weights, inputs.ys)
                assert torch.equal(bits(outs[rank]), bits(expected))
