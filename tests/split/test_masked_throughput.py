"""Steps for many tokens that leave ranks out: the others neither wait for them nor touch their
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from deep_moe.emulator.machine import SCHEDULES
from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.split.throughput import AllToAllHandle, Received
from tests.everyday import parametrize

from .reference import bits
from .throughput_reference import (
    Inputs,
    check_received,
    expected_scalars,
    expected_sums,
    handles_of,
    places_of,
    random_inputs,
    without_masked,
)


class MaskedRanks:
    """Ranks whose steps leave those in `masked` out."""

    def __init__(self, num_ranks: int = 3, **options: Any) -> None:
        sizes = {
            "max_tokens_per_rank": 8,
            "hidden": 256,
            "num_experts": 2 * num_ranks,
            "num_topk": 3,
            "max_recv_rows": 128,
            "expert_alignment": 8,
            "num_sms": 2,
            "timeout_s": 100.0,
        }
        self.layer = EmulatedThroughputAllToAll(num_ranks, **{**sizes, **options})
        self.shape = self.layer.shape
        for own in self.layer.layers:  # no step may count on zeros
            own.buffer.memory.tensor[own.buffer.layout.mark("control_bytes") :] = 0xFF
        self.masked_ranks = torch.zeros(num_ranks, dtype=torch.int32)

    def __enter__(self) -> MaskedRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.layer.close()

    def mask(self, *ranks: int) -> None:
        self.masked_ranks.zero_()
        self.masked_ranks[list(ranks)] = 7

    @property
    def active(self) -> list[int]:
        return (self.masked_ranks == 0).nonzero().flatten().tolist()

    def of_active(self, values: Sequence[Any]) -> list[Any]:
        return [values[rank] for rank in self.active]

    def options(self, schedule: Any = "random") -> dict[str, Any]:
        masks = [self.masked_ranks] * len(self.active)
        return {"masked_ranks": masks, "ranks": self.active, "schedule": schedule}

    def without_masked(self, inputs: Inputs) -> list[torch.Tensor]:
        masked = self.masked_ranks.nonzero().flatten().tolist()
        return without_masked(self.shape, inputs.topk_idxs, masked)

    def dispatch(self, inputs: Inputs, schedule: Any = "random") -> list[AllToAllHandle]:
        """With every bit; the active ranks' handles."""
        results = self.layer.dispatch(
            self.of_active(inputs.xs),
            self.of_active(inputs.topk_idxs),
            topk_weights=self.of_active(inputs.topk_weights),
            **self.options(schedule),
        )
        ids = self.without_masked(inputs)
        for rank, (received, handle) in zip(self.active, results, strict=True):
            check_received(self.shape, received, rank, ids, inputs.xs, weights=inputs.topk_weights)
            tokens = [len(x) if i in self.active else 0 for i, x in enumerate(inputs.xs)]
            assert handle.rank_tokens.tolist() == tokens
            assert torch.equal(handle.slot_rows >= 0, ids[rank] >= 0)
        return handles_of(results)

    def check_combine(
        self, inputs: Inputs, handles: list[AllToAllHandle], schedule: Any = "random"
    ) -> None:
        """Rows that are sent, then rows that are fetched."""
        weights = self.of_active(inputs.topk_weights)
        ids = self.without_masked(inputs)
        for is_here in (False, True):
            if is_here:
                self.layer.dispatch(  # the combine buffer is not for two combines in a row
                    self.of_active(inputs.xs), handles=handles, **self.options(schedule)
                )
                buffers = [own._combine_rows() for own in self.layer.layers]
                ys = [buffer.copy_(y) for buffer, y in zip(buffers, inputs.ys, strict=True)]
            else:
                ys = inputs.ys
            outs = self.layer.combine(
                self.of_active(ys), handles, topk_weights=weights, **self.options(schedule)
            )
            for rank, out in zip(self.active, outs, strict=True):
                own = inputs.topk_weights[rank]
                expected = expected_sums(self.shape, rank, ids, inputs.ys, own)
                assert torch.equal(bits(out), bits(expected))

    def check_scalars(
        self, inputs: Inputs, handles: list[AllToAllHandle], schedule: Any = "random"
    ) -> None:
        values = self.of_active(inputs.values)
        outs = self.layer.return_scalars(values, handles, **self.options(schedule))
        ids = self.without_masked(inputs)
        for rank, out in zip(self.active, outs, strict=True):
            expected = expected_scalars(self.shape, rank, ids, inputs.values)
            assert torch.equal(bits(out), bits(expected))

    def check(self, inputs: Inputs, schedule: Any = "random") -> None:
        handles = self.dispatch(inputs, schedule)
        self.check_combine(inputs, handles, schedule)
        self.check_scalars(inputs, handles, schedule)


MASKS: list[tuple[int, ...]] = [(0,), (1,), (2,), (0, 2), ()]


@parametrize(
    ("masked", "schedule"),
    product(MASKS, SCHEDULES),
    everyday=[*((masked, "random") for masked in MASKS), ((1,), "slow_rank")],
)
def test_without_masked_ranks_the_others_have_every_bit(
    masked: tuple[int, ...], schedule: str
) -> None:
    """Steps of one kind in a row too, and ranks without tokens."""
    with MaskedRanks() as ranks:
        ranks.mask(*masked)
        for seed, counts in enumerate([(8, 5, 7), (0, 8, 1)]):
            ranks.check(random_inputs(ranks.shape, counts, seed), schedule)


def test_tokens_that_want_masked_experts_only_get_zeros_and_overflow_nothing() -> None:
    with MaskedRanks(max_recv_rows=40) as ranks:
        inputs = random_inputs(ranks.shape, (8, 8, 8), dtype=torch.int32)
        for ids in inputs.topk_idxs:
            ids.fill_(2)  # an expert of rank 1, which would get 72 rows
        with pytest.raises(MegaMoEError, match="rank 1 would get 72 rows"):
            ranks.dispatch(inputs)
        ranks.layer.reset()
        ranks.mask(1)
        ranks.check(inputs)


def test_more_ranks_than_a_warp_has_lanes() -> None:
    sizes = {"max_tokens_per_rank": 2, "hidden": 128, "num_experts": 35, "num_sms": 1}
    with MaskedRanks(35, **sizes, expert_alignment=1) as ranks:
        ranks.mask(0, 31, 32, 34)
        inputs = random_inputs(ranks.shape, [2, 1] * 17 + [2])
        ranks.check_scalars(inputs, ranks.dispatch(inputs))


@parametrize("schedule", SCHEDULES, everyday=["random"])
def test_the_mask_grows_between_steps(schedule: str) -> None:
    """With handles of dispatches in which a rank took part that is masked now."""
    with MaskedRanks() as ranks:
        inputs = random_inputs(ranks.shape, (8, 5, 7))
        before = ranks.dispatch(inputs, schedule)
        places = {rank: places_of(ranks.shape, inputs.topk_idxs, rank) for rank in range(3)}
        ranks.mask(1)
        handles = ranks.of_active(before)
        others = random_inputs(ranks.shape, (8, 5, 7), seed=1)
        results = ranks.layer.dispatch(
            ranks.of_active(others.xs),
            topk_weights=ranks.of_active(others.topk_weights),
            handles=handles,
            row_ids=True,
            **ranks.options(schedule),
        )
        for rank, (received, _) in zip(ranks.active, results, strict=True):
            check_rows_again(places[rank].rows, received, others, masked=1)
        ids, weights = ranks.without_masked(inputs), ranks.of_active(inputs.topk_weights)
        rows = [own._combine_rows() for own in ranks.layer.layers]
        for y, buffer in zip(inputs.ys, rows, strict=True):
            buffer.copy_(y)
        for ys in (rows, inputs.ys):
            outs = ranks.layer.combine(
                ranks.of_active(ys), handles, topk_weights=weights, **ranks.options(schedule)
            )
            for rank, out in zip(ranks.active, outs, strict=True):
                # Rows are where they were with rank 1; slots of its experts have none.
                kept = ids[rank] >= 0
                own = inputs.topk_weights[rank].where(kept, 0.0)
                expected = expected_sums(ranks.shape, rank, inputs.topk_idxs, inputs.ys, own)
                assert torch.equal(bits(out), bits(expected))
        values = ranks.of_active(inputs.values)
        outs = ranks.layer.return_scalars(values, handles, **ranks.options(schedule))
        for rank, out in zip(ranks.active, outs, strict=True):
            expected = expected_scalars(ranks.shape, rank, inputs.topk_idxs, inputs.values)
            assert torch.equal(bits(out), bits(expected.where(ids[rank] >= 0, 0.0)))
        ranks.mask(1, 2)
        ranks.check(others, schedule)


def check_rows_again(
    rows: Sequence[tuple[int, int, int] | None], received: Received, inputs: Inputs, masked: int
) -> None:
    """Of a dispatch with a handle of before: a masked rank's rows are as padding is."""
    assert received.row_ids is not None
    for row, source in enumerate(rows):
        if source is None or source[0] == masked:
            assert not bits(received.x[row]).any()
            assert received.row_ids[row] == -1
        else:
            rank, token, slot = source
            expected = inputs.topk_weights[rank][token, slot] * inputs.xs[rank][token].float()
            assert torch.equal(bits(received.x[row]), bits(expected.bfloat16()))


@parametrize("schedule", SCHEDULES, everyday=["random"])
def test_ranks_run_ahead_of_each_other_in_parts(schedule: str) -> None:
    """Steps are queued. A CTA's 45 tokens are six parts of a dispatch, and three of a combine."""
    sizes = {"hidden": 384, "max_tokens_per_rank": 90, "max_recv_rows": 512}
    with MaskedRanks(**sizes) as ranks:
        ranks.mask(1)
        mask = ranks.masked_ranks
        calls = [
            random_inputs(ranks.shape, counts, seed=seed)
            for seed, counts in enumerate([(90, 90, 0), (1, 0, 85), (37, 64, 64)])
        ]
        queues: list[list[Any]] = []
        results: list[list[Any]] = []
        for own in ranks.of_active(ranks.layer.layers):
            queue, of_rank, rank = [], [], own.rank
            for inputs in calls:
                x, ids = inputs.xs[rank], inputs.topk_idxs[rank]
                launch, received = own.prepare_dispatch(x, ids, masked_ranks=mask)
                again, same = own.prepare_dispatch(x, handle=received[1], masked_ranks=mask)
                y = inputs.ys[rank]
                combine, out = own.prepare_combine(y, received[1], masked_ranks=mask)
                queue += [launch, again, combine]
                of_rank.append((received[0], same[0], out))
            queues.append(queue)
            results.append(of_rank)
        ranks.layer.run(queues, ranks=ranks.active, schedule=schedule)
        for rank, of_rank in zip(ranks.active, results, strict=True):
            for inputs, (received, same, out) in zip(calls, of_rank, strict=True):
                ids = ranks.without_masked(inputs)
                for of_dispatch in (received, same):
                    check_received(ranks.shape, of_dispatch, rank, ids, inputs.xs)
                expected = expected_sums(ranks.shape, rank, ids, inputs.ys)
                assert torch.equal(bits(out), bits(expected))


def test_survivors_name_the_dead_and_go_on_after_a_reset() -> None:
    with MaskedRanks(timeout_s=0.01) as ranks:
        inputs = random_inputs(ranks.shape, (8, 5, 7))
        ranks.mask(1)
        options = ranks.options()
        ranks.mask()
        with pytest.raises(MegaMoETimeoutError, match=r"missing: rank 1\)"):
            ranks.layer.dispatch([inputs.xs[0], inputs.xs[2]], inputs.topk_idxs[::2], **options)
        ranks.layer.reset()
        ranks.mask(1)
        ranks.check(inputs)
        # Of the others, a masked one is not named.
        options["ranks"] = [0]
        with pytest.raises(MegaMoETimeoutError, match=r"missing: rank 2\)"):
            ranks.layer.dispatch(inputs.xs[:1], inputs.topk_idxs[:1], **options)


def test_a_rank_that_was_left_out_comes_back_behind_a_reset_alone() -> None:
    with MaskedRanks(timeout_s=0.01) as ranks:
        inputs = random_inputs(ranks.shape, (8, 5, 7))
        ranks.mask(1)
        handles = ranks.dispatch(inputs)
        options = ranks.options()
        ranks.mask()
        with pytest.raises(MegaMoEError, match="must leave out rank 1, as an earlier call did"):
            ranks.layer.combine(ranks.of_active(inputs.ys)[::2], handles, **options)
        ranks.layer.reset()
        ranks.check(inputs)


def test_a_masked_rank_that_calls_stops_alone() -> None:
    """Checked, before its kernel starts; unchecked, in the kernel, which tells others nothing."""
    for checked in (True, False):
        with MaskedRanks(checked=checked) as ranks:
            ranks.mask(1)
            inputs = random_inputs(ranks.shape, (8, 5, 7))
            call = {**ranks.options(), "ranks": [1], "masked_ranks": [ranks.masked_ranks]}
            error = ValueError if checked else MegaMoEError
            with pytest.raises(error, match="masked_ranks must leave out other ranks"):
                ranks.layer.dispatch(inputs.xs[1:2], inputs.topk_idxs[1:2], **call)
            for rank in (0, 2):
                buffer = ranks.layer.layers[rank].buffer
                assert not buffer.memory.tensor[: buffer.layout.mark("control_bytes")].any()


def test_once_given_the_mask_is_given_to_all_steps() -> None:
    with MaskedRanks() as ranks:
        inputs = random_inputs(ranks.shape, (8, 5, 7))
        handles = ranks.dispatch(inputs)
        for step in (
            lambda: ranks.layer.dispatch(inputs.xs, inputs.topk_idxs),
            lambda: ranks.layer.combine(inputs.ys, handles),
            lambda: ranks.layer.return_scalars(inputs.values, handles),
        ):
            with pytest.raises(ValueError, match="masked_ranks must be given to every call"):
                step()
        ranks.layer.reset()
        ranks.layer.dispatch(inputs.xs, inputs.topk_idxs)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([0, 1, 0], "masked_ranks must be a tensor or None; got list"),
        (torch.zeros(3), "masked_ranks must be torch.int32; got torch.float32"),
        (torch.zeros(2, dtype=torch.int32), r"masked_ranks must have shape \(3,\)"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), "masked_ranks must be on cpu"),
        (torch.zeros(6, dtype=torch.int32)[::2], "masked_ranks must be contiguous"),
    ],
    ids=["type", "dtype", "shape", "device", "strides"],
)
def test_the_mask_of_another_form_is_refused(wrong: Any, words: str) -> None:
    with MaskedRanks() as ranks:
        inputs = random_inputs(ranks.shape, (8, 5, 7))
        handles = ranks.dispatch(inputs)
        x, ids, y, values = (
            of_ranks[0] for of_ranks in (inputs.xs, inputs.topk_idxs, inputs.ys, inputs.values)
        )
        own = ranks.layer.layers[0]
        for step in (
            lambda: own.dispatch(x, ids, masked_ranks=wrong),
            lambda: own.combine(y, handles[0], masked_ranks=wrong),
            lambda: own.return_scalars(values, handles[0], masked_ranks=wrong),
        ):
            with pytest.raises((TypeError, ValueError), match=words):
                step()


def test_steps_without_a_mask_have_kernels_without_it() -> None:
    with MaskedRanks() as ranks:
        own = ranks.layer.layers[0]
        inputs = random_inputs(ranks.shape, (8, 5, 7))
        x, ids = inputs.xs[0], inputs.topk_idxs[0]
        plain, _ = own.prepare_dispatch(x, ids)
        masked, _ = own.prepare_dispatch(x, ids, masked_ranks=ranks.masked_ranks)
        assert not plain.config.masks_ranks
        assert masked.config == replace(plain.config, masks_ranks=True)
