"""The throughput all-to-all of several ranks in one emulator, against plain PyTorch, every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.split.throughput import AllToAllHandle
from deep_moe.tokens import ALL_TO_ALL_FORMATS

from .reference import bits, quantized
from .throughput_reference import (
    Inputs,
    check_received,
    expected_scalars,
    expected_sums,
    handles_of,
    places_of,
    random_inputs,
    row_of_slot,
)

UNITS_PER_ROUND = 32  # of split/parts.cuh


def ranks(
    num_ranks: int = 2,
    max_tokens_per_rank: int = 8,
    hidden: int = 256,
    num_experts: int = 8,
    num_topk: int = 3,
    max_recv_rows: int = 128,
    **options: Any,
) -> EmulatedThroughputAllToAll:
    options = {"num_sms": 3, "timeout_s": 100.0, "expert_alignment": 16, **options}
    return EmulatedThroughputAllToAll(
        num_ranks, max_tokens_per_rank, hidden, num_experts, num_topk, max_recv_rows, **options
    )


def check_dispatch(
    layer: EmulatedThroughputAllToAll, inputs: Inputs, schedule: Any = "random", **options: Any
) -> list[AllToAllHandle]:
    """One dispatch with weights, and every bit of it."""
    results = layer.dispatch(
        inputs.xs,
        inputs.topk_idxs,
        topk_weights=inputs.topk_weights,
        schedule=schedule,
        **options,
    )
    for rank, (received, _) in enumerate(results):
        check_received(
            layer.shape,
            received,
            rank,
            inputs.topk_idxs,
            inputs.xs,
            weights=inputs.topk_weights,
            **options,
        )
    return handles_of(results)


def check_combine(
    layer: EmulatedThroughputAllToAll,
    inputs: Inputs,
    handles: list[AllToAllHandle],
    *,
    weighted: bool = True,
    schedule: Any = "random",
) -> None:
    weights = inputs.topk_weights if weighted else None
    outs = layer.combine(inputs.ys, handles, topk_weights=weights, schedule=schedule)
    for rank, out in enumerate(outs):
        own_weights = inputs.topk_weights[rank] if weighted else None
        expected = expected_sums(layer.shape, rank, inputs.topk_idxs, inputs.ys, own_weights)
        assert torch.equal(bits(out), bits(expected))


def check_call(layer: EmulatedThroughputAllToAll, inputs: Inputs, schedule: Any = "random") -> None:
    handles = check_dispatch(layer, inputs, schedule)
    check_combine(layer, inputs, handles, schedule=schedule)


@pytest.mark.parametrize("token_format", ALL_TO_ALL_FORMATS)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_bit(token_format: str, arch: str) -> None:
    hidden = 512 if token_format == "fp8_128_ue8m0" else 256  # which has four scales in a word
    with ranks(arch=arch, hidden=hidden) as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        check_dispatch(layer, inputs, token_format=token_format)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_schedule(schedule: str) -> None:
    with ranks(num_ranks=3, num_experts=9) as layer:
        check_call(layer, random_inputs(layer.shape, (8, 5, 7)), schedule)


@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_added_with_weights_or_without(weighted: bool) -> None:
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 5), dtype=torch.int32)
        check_combine(layer, inputs, check_dispatch(layer, inputs), weighted=weighted)


@pytest.mark.parametrize("token_format", ["fp8_128", "mxfp8"])
def test_tokens_that_are_quantized_already(token_format: str) -> None:
    with ranks(token_format=token_format) as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        pairs = [quantized(x, token_format) for x in inputs.xs]
        scales = [scale for _, scale in pairs if scale is not None]
        results = layer.dispatch([x for x, _ in pairs], inputs.topk_idxs, x_sfs=scales)
        for rank, (received, _) in enumerate(results):
            check_received(
                layer.shape, received, rank, inputs.topk_idxs, inputs.xs, token_format=token_format
            )


@pytest.mark.parametrize("weighted", [True, False])
def test_other_rows_go_the_same_ways(weighted: bool) -> None:
    """What combine's gradient does: rows of each token to its slots, times their weights."""
    with ranks(token_format="mxfp8") as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        handles = check_dispatch(layer, inputs, token_format="mxfp8")
        others = random_inputs(layer.shape, (8, 5), seed=1)
        factors = others.topk_weights if weighted else None
        results = layer.dispatch(
            others.xs, topk_weights=factors, token_format="bf16", handles=handles
        )
        for rank, (received, handle) in enumerate(results):
            assert handle is handles[rank]
            check_received(
                layer.shape, received, rank, inputs.topk_idxs, others.xs, factors=factors
            )


@pytest.mark.parametrize("schedule", ["random", "slow_rank"])
def test_a_number_of_each_row_goes_back_to_its_slot(schedule: str) -> None:
    """Two of a kind are queued on each rank: the second may not write what others still fetch."""
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        handles = check_dispatch(layer, inputs)
        of_call = [random_inputs(layer.shape, (8, 5), seed).values for seed in range(2)]
        queues: list[list[Any]] = []
        outs = []
        for rank, own in enumerate(layer.layers):
            prepared = [own.prepare_return_scalars(v[rank], handles[rank]) for v in of_call]
            queues.append([launch for launch, _ in prepared])
            outs.append([out for _, out in prepared])
        layer.run(queues, schedule=schedule)
        for rank, of_rank in enumerate(outs):
            for values, out in zip(of_call, of_rank, strict=True):
                expected = expected_scalars(layer.shape, rank, inputs.topk_idxs, values)
                assert torch.equal(bits(out), bits(expected))


def test_rows_that_experts_wrote_into_the_buffer_are_fetched_from_there() -> None:
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        for _ in range(2):
            handles = check_dispatch(layer, inputs)
            buffers = [own.get_combine_buffer() for own in layer.layers]
            for buffer, y in zip(buffers, inputs.ys, strict=True):
                buffer.copy_(y)
            inputs.ys = buffers
            check_combine(layer, inputs, handles)
            inputs.ys = [y.clone() for y in buffers]


def test_the_combine_buffer_is_not_for_two_combines_in_a_row() -> None:
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 5))
        handles = check_dispatch(layer, inputs)
        buffers = [own.get_combine_buffer().zero_() for own in layer.layers]
        layer.combine(buffers, handles)
        with pytest.raises(ValueError, match="may still be fetching its rows"):
            layer.combine(buffers, handles)
        with pytest.raises(ValueError, match="may still fetch rows"):
            layer.layers[0].get_combine_buffer()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_run_ahead_of_each_other(schedule: str) -> None:
    """Kernels of all kinds, some of one kind in a row, are queued on each rank, and no rank waits
    for the host. Handles are used later than others', and more than once."""
    with ranks(num_ranks=3, num_experts=6) as layer:
        calls = [
            random_inputs(layer.shape, counts, seed=seed)
            for seed, counts in enumerate([(8, 5, 0), (1, 8, 3), (0, 0, 8)])
        ]
        queues: list[list[Any]] = [[] for _ in range(3)]
        given: list[list[Any]] = [[] for _ in range(3)]
        outs: list[list[Any]] = [[] for _ in range(3)]
        for rank, own in enumerate(layer.layers):
            for inputs in calls:
                weights = inputs.topk_weights[rank]
                launch, result = own.prepare_dispatch(
                    inputs.xs[rank], inputs.topk_idxs[rank], topk_weights=weights
                )
                queues[rank].append(launch)
                given[rank].append(result)
            for call in (1, 0, 2, 1):
                inputs = calls[call]
                launch, out = own.prepare_combine(inputs.ys[rank], given[rank][call][1])
                queues[rank].append(launch)
                outs[rank].append((call, out))
        layer.run(queues, schedule=schedule)
        for rank in range(3):
            for inputs, (received, _) in zip(calls, given[rank], strict=True):
                weights = inputs.topk_weights
                check_received(
                    layer.shape, received, rank, inputs.topk_idxs, inputs.xs, weights=weights
                )
            for call, out in outs[rank]:
                expected = expected_sums(layer.shape, rank, calls[call].topk_idxs, calls[call].ys)
                assert torch.equal(bits(out), bits(expected))


def test_hundreds_of_calls_give_the_same_bits() -> None:
    with ranks(
        max_tokens_per_rank=4, hidden=128, num_experts=4, num_topk=2, num_sms=2, max_recv_rows=64
    ) as layer:
        kinds = [random_inputs(layer.shape, (4, kind), seed=kind) for kind in range(3)]
        for inputs in kinds:
            check_call(layer, inputs)
        first = []
        for i in range(150):
            inputs = kinds[i % 3]
            results = layer.dispatch(inputs.xs, inputs.topk_idxs)
            outs = layer.combine(inputs.ys, handles_of(results))
            first = first if i >= 3 else [*first, outs]
            for out, expected in zip(outs, first[i % 3], strict=True):
                assert torch.equal(bits(out), bits(expected))


def test_rounds_are_counted_past_32_bits() -> None:
    """Words that count what was told are never reset."""
    with ranks(num_sms=4) as layer:
        for own in layer.layers:
            own._segment("units_told").view(torch.int32).fill_(-UNITS_PER_ROUND)
            own._segment("num_counts").view(torch.int32).fill_(-1)
            own._segment("arrivals").view(torch.int32).fill_(-UNITS_PER_ROUND)
            own._segment("count_arrivals").view(torch.int32).fill_(-1)
        for seed in range(2):
            check_call(layer, random_inputs(layer.shape, (8, 5), seed))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tokens_go_in_parts(schedule: str) -> None:
    """A CTA's 45 tokens are six parts of a dispatch; their 90 pieces are three parts of a combine.
    Other ranks have fewer of both, and none. Steps are queued, so that ranks run ahead."""
    sizes = {"num_ranks": 3, "hidden": 384, "num_experts": 6, "max_tokens_per_rank": 90}
    with ranks(**sizes, max_recv_rows=512, num_sms=2, token_format="bf16") as layer:
        calls = [
            random_inputs(layer.shape, counts, seed=seed)
            for seed, counts in enumerate([(90, 37, 0), (0, 1, 85), (64, 64, 64)])
        ]
        queues: list[list[Any]] = [[] for _ in range(3)]
        results: list[list[Any]] = [[] for _ in range(3)]
        for rank, own in enumerate(layer.layers):
            for inputs in calls:
                x, ids = inputs.xs[rank], inputs.topk_idxs[rank]
                launch, received = own.prepare_dispatch(x, ids)
                again, same = own.prepare_dispatch(x, handle=received[1])
                combine, out = own.prepare_combine(inputs.ys[rank], received[1])
                queues[rank] += [launch, again, combine]
                results[rank].append((received[0], same[0], out))
        layer.run(queues, schedule=schedule)
        for rank in range(3):
            for inputs, (received, same, out) in zip(calls, results[rank], strict=True):
                for of_dispatch in (received, same):
                    check_received(layer.shape, of_dispatch, rank, inputs.topk_idxs, inputs.xs)
                expected = expected_sums(layer.shape, rank, inputs.topk_idxs, inputs.ys)
                assert torch.equal(bits(out), bits(expected))


def test_more_tokens_of_a_cta_than_there_are_parts_of_the_least_size() -> None:
    """300 tokens are 30 parts of ten tokens."""
    with ranks(max_tokens_per_rank=300, hidden=128, num_sms=1, max_recv_rows=2048) as layer:
        check_call(layer, random_inputs(layer.shape, (300, 270)))


def test_a_ctas_parts_that_do_not_come_name_their_rank() -> None:
    """Rank 1 has fewer tokens, and is there for the dispatch alone."""
    with ranks(num_ranks=3, num_experts=6, max_tokens_per_rank=40, timeout_s=0.01) as layer:
        inputs = random_inputs(layer.shape, (40, 3, 40))
        handles = handles_of(layer.dispatch(inputs.xs, inputs.topk_idxs))
        taking_part = [0, 2]
        with pytest.raises(MegaMoETimeoutError, match=r"missing: rank 1\)"):
            layer.combine(
                [inputs.ys[rank] for rank in taking_part],
                [handles[rank] for rank in taking_part],
                ranks=taking_part,
            )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_must_agree_where_rows_are(schedule: str) -> None:
    """Whoever looks finds that rank 1 is not as the others. Many tokens: they go in parts."""
    sizes = {"num_ranks": 3, "num_experts": 6, "max_tokens_per_rank": 60, "max_recv_rows": 512}
    for odd_one_is_here in (True, False):
        with ranks(**sizes, num_sms=1) as layer:
            inputs = random_inputs(layer.shape, (60, 3, 40))
            handles = check_dispatch(layer, inputs)
            for rank, own in enumerate(layer.layers):
                if (rank == 1) == odd_one_is_here:
                    inputs.ys[rank] = own.get_combine_buffer().copy_(inputs.ys[rank])
            with pytest.raises(MegaMoEError, match="on all ranks or on none") as error:
                layer.combine(inputs.ys, handles, schedule=schedule)
            here = "not on this rank, and on" if odd_one_is_here else "on this rank, and not on"
            found_by_rank_1 = "it is on" if odd_one_is_here else "it is not on"
            text = str(error.value)
            assert f"{here} rank 1" in text or (text.startswith("rank 1, ") and found_by_rank_1)
            for own in layer.layers:
                with pytest.raises(MegaMoEError):
                    own.dispatch(inputs.xs[0], inputs.topk_idxs[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_are_sent_and_fetched_in_turn(schedule: str) -> None:
    """Those that are fetched come with a mark, which a rank that is ahead tells during the other
    ranks' dispatch. What is fetched lies where rows were sent to before."""
    with ranks(num_ranks=3, num_experts=6) as layer:
        inputs = random_inputs(layer.shape, (8, 5, 0))
        buffers = [own.get_combine_buffer().copy_(inputs.ys[0]) for own in layer.layers]
        held = [buffer.clone() for buffer in buffers]
        queues: list[list[Any]] = [[] for _ in range(3)]
        outs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for is_here in (False, True, True, False, False, True):
            for rank, own in enumerate(layer.layers):
                dispatch, (_, handle) = own.prepare_dispatch(
                    inputs.xs[rank], inputs.topk_idxs[rank]
                )
                y = buffers[rank] if is_here else inputs.ys[rank]
                combine, out = own.prepare_combine(y, handle)
                queues[rank] += [dispatch, combine]
                ys = held if is_here else inputs.ys
                outs.append((out, expected_sums(layer.shape, rank, inputs.topk_idxs, ys)))
            if is_here:
                continue
            for source, (owner, row) in row_of_slot(layer.shape, inputs.topk_idxs).items():
                rank, token, slot = source
                if owner != rank:
                    held[rank][token * layer.shape.num_topk + slot] = inputs.ys[owner][row]
        layer.run(queues, schedule=schedule)
        for out, expected in outs:
            assert torch.equal(bits(out), bits(expected))


def test_no_tokens_at_all() -> None:
    with ranks() as layer:
        check_call(layer, random_inputs(layer.shape, (0, 0)))


def test_unused_slots_only() -> None:
    with ranks() as layer:
        check_call(layer, random_inputs(layer.shape, (8, 8), unused=2.0))


def test_ids_out_of_range_count_as_unused_where_nobody_looks() -> None:
    with ranks(checked=False) as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        inputs.topk_idxs[0][0, 0] = 8
        inputs.topk_idxs[1][3, 1] = 1 << 40
        check_call(layer, inputs)


def test_all_tokens_to_one_expert_in_every_slot() -> None:
    """Each slot is a row of its own."""
    with ranks() as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        for ids in inputs.topk_idxs:
            ids.fill_(5)
        check_call(layer, inputs)


def test_one_rank_alone() -> None:
    with ranks(num_ranks=1, num_experts=3) as layer:
        check_call(layer, random_inputs(layer.shape, (8,)))


def test_many_ranks() -> None:
    """More than a warp has lanes."""
    with ranks(
        num_ranks=35,
        num_experts=35,
        max_tokens_per_rank=2,
        hidden=128,
        num_sms=1,
        expert_alignment=1,
    ) as layer:
        check_call(layer, random_inputs(layer.shape, [2, 1] * 17 + [0]))


@pytest.mark.parametrize(
    ("hidden", "num_experts", "num_topk", "num_sms", "alignment"),
    [(128, 2, 1, 1, 128), (384, 70, 5, 2, 8), (640, 64, 9, 3, 1), (1152, 66, 17, 9, 4)],
)
def test_odd_sizes(
    hidden: int, num_experts: int, num_topk: int, num_sms: int, alignment: int
) -> None:
    with ranks(
        hidden=hidden,
        num_experts=num_experts,
        num_topk=num_topk,
        num_sms=num_sms,
        expert_alignment=alignment,
        max_recv_rows=512,
        max_tokens_per_rank=6,
    ) as layer:
        check_call(layer, random_inputs(layer.shape, (6, 3)))


def test_several_warps_count_more_slots_than_they_load_at_once() -> None:
    """The last CTA counts 1120 slots before its own, with two warps that load 1024 at once."""
    with ranks(
        hidden=2048,
        num_experts=32,
        num_topk=32,
        num_sms=2,
        max_tokens_per_rank=70,
        max_recv_rows=2048,
        expert_alignment=1,
    ) as layer:
        check_dispatch(layer, random_inputs(layer.shape, (70, 3), unused=0.7))


def test_rows_fit_to_the_last_one() -> None:
    with ranks(max_recv_rows=32, expert_alignment=32) as layer:
        inputs = random_inputs(layer.shape, (8, 2))
        for ids in inputs.topk_idxs:
            ids.fill_(6)
        check_call(layer, inputs)


def test_more_rows_than_there_is_room_for_are_an_error_on_every_rank() -> None:
    """Rank 1 would get 48; rank 0, which gets none, says so too."""
    with ranks(max_recv_rows=32) as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        for ids in inputs.topk_idxs:
            ids.fill_(6)
        with pytest.raises(MegaMoEError, match=r"rank 1 would get 48 rows.*max_recv_rows is 32"):
            layer.dispatch(inputs.xs, inputs.topk_idxs)
        for own in layer.layers:
            with pytest.raises(MegaMoEError):
                own.check()
            status = own.buffer.memory.status
            assert (status.peer_rank, status.seen, status.expected) == (1, 48, 32)
        with pytest.raises(MegaMoEError, match="reset"):
            layer.dispatch(inputs.xs, inputs.topk_idxs)
        layer.reset()
        fewer = random_inputs(layer.shape, (8, 2))
        for ids in fewer.topk_idxs:
            ids.fill_(6)
        check_call(layer, fewer)


def test_a_rank_that_does_not_come_is_named() -> None:
    with ranks(num_ranks=3, num_experts=6, timeout_s=0.01) as layer:
        inputs = random_inputs(layer.shape, (8, 8, 8))
        with pytest.raises(MegaMoETimeoutError, match=r"missing: rank 1\)"):
            layer.dispatch(
                [inputs.xs[0], inputs.xs[2]],
                [inputs.topk_idxs[0], inputs.topk_idxs[2]],
                ranks=[0, 2],
            )
        layer.reset()
        check_call(layer, inputs)


def test_kernels_behind_a_failed_one_do_nothing() -> None:
    """Launched already, they neither wait nor tell anybody anything."""
    with ranks(max_recv_rows=32) as layer:
        inputs = random_inputs(layer.shape, (8, 8))
        for ids in inputs.topk_idxs:
            ids.fill_(6)
        queues: list[list[Any]] = []
        outs = []
        for rank, own in enumerate(layer.layers):
            launch, (_, handle) = own.prepare_dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
            handle.slot_rows.fill_(-1)
            combine, out = own.prepare_combine(inputs.ys[rank], handle, out=inputs.xs[rank].clone())
            queues.append([launch, combine])
            outs.append(out)
        with pytest.raises(MegaMoEError, match="would get 48 rows"):
            layer.run(queues)
        for x, out in zip(inputs.xs, outs, strict=True):
            assert torch.equal(bits(out), bits(x))


@pytest.mark.parametrize("is_known", [False, True])
def test_rows_say_whose_they_are(is_known: bool) -> None:
    """With a handle, too, whose weights multiply; padding is nobody's."""
    with EmulatedThroughputAllToAll(*(2, 4, 128, 4, 3, 64), expert_alignment=4, num_sms=2) as ranks:
        inputs = random_inputs(ranks.shape, (4, 2), 3)
        results = ranks.dispatch(inputs.xs, inputs.topk_idxs, row_ids=not is_known)
        if is_known:
            assert all(received.row_ids is None for received, _ in results)
            handles = [handle for _, handle in results]
            results = ranks.dispatch(
                inputs.xs, handles=handles, topk_weights=inputs.topk_weights, row_ids=True
            )
        for rank, (received, _) in enumerate(results):
            rows = places_of(ranks.shape, inputs.topk_idxs, rank).rows
            expected = [-1 if row is None else (row[0] * 4 + row[1]) * 3 + row[2] for row in rows]
            assert received.row_ids is not None
            assert received.row_ids[: len(rows)].tolist() == expected
