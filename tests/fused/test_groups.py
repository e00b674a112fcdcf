"""One process per rank over gloo: creation of the buffer, and calls in the emulator."""

import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.fused import emulated_call
from deep_moe.heuristics import MoEShape
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.everyday import parametrize


def make_shape(num_ranks: int) -> MoEShape:
    return MoEShape(num_ranks, 2 * num_ranks, 2, 128, 128, 8)


def make_buffer(num_ranks: int, group=None, **changes):
    shape = make_shape(num_ranks)
    arguments = {
        "num_experts": shape.num_experts,
        "num_max_tokens_per_rank": shape.num_max_tokens_per_rank,
        "num_topk": shape.num_topk,
        "hidden": shape.hidden,
        "intermediate_hidden": shape.intermediate_hidden,
    }
    if num_ranks > 1 and group is None:
        group = dist.group.WORLD
    return deep_moe.get_symm_buffer_for_mega_moe(group, **{**arguments, **changes})


class RankCall:
    """One rank's part of a call whose exact result is known."""

    def __init__(self, rank: int, num_ranks: int, num_tokens: int = 8, seed: int = 0) -> None:
        shape = make_shape(num_ranks)
        self.layer = exact_layer(shape)
        self.weights = deep_moe.transform_weights_for_mega_moe(*self.layer.of_rank(rank, num_ranks))
        self.tokens = exact_tokens(shape, num_tokens, seed=100 * seed + rank)
        self.y = torch.full((num_tokens, shape.hidden), torch.nan, dtype=torch.bfloat16)

    def fill(self, buffer) -> None:
        n = self.tokens.num_tokens
        buffer.x[:n].copy_(self.tokens.x)
        buffer.x_sf[:n].copy_(self.tokens.x_sf)
        buffer.topk_idx[:n].copy_(self.tokens.topk_idx)
        buffer.topk_weights[:n].copy_(self.tokens.topk_weights)

    def run(self, buffer, **options) -> None:
        self.fill(buffer)
        deep_moe.fp8_fp4_mega_moe(self.y, *self.weights, buffer, num_sms=2, **options)

    def is_right(self) -> bool:
        tokens = self.tokens
        expected = reference_mega_moe(
            *self.layer.operands(tokens),
        )
        return torch.equal(self.y, expected)


def test_every_rank_maps_the_memory_of_all(run_ranks) -> None:
    def work(rank: int) -> list[int]:
        buffer = make_buffer(3)
        assert buffer.rank == rank
        assert buffer.num_ranks == 3
        buffer.x.view(torch.uint8).fill_(rank + 1)
        dist.barrier()
        offset = buffer.layout["input_x"].offset
        seen = [int(block.tensor[offset]) for block in buffer.memory.blocks]
        assert buffer.memory.addresses[rank] == buffer.memory.tensor.data_ptr()
        dist.barrier()
        return seen

    assert run_ranks(3, work) == [[1, 2, 3]] * 3


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_max_tokens_per_rank", 9),
        ("num_topk", 1),
        ("hidden", 256),
        ("num_experts", 9),
        ("num_pool_tokens", 384),
        ("num_shared_experts", 1),
    ],
)
def test_sizes_that_differ_are_an_error_on_every_rank(run_ranks, argument: str, value: int) -> None:
    """B10. 9 experts are not even divisible by the ranks: still, no rank is left alone."""

    def work(rank: int) -> str:
        changes = {argument: value} if rank == 1 else {}
        with pytest.raises(ValueError, match=f"{argument} must be the same on every rank") as error:
            make_buffer(3, **changes)
        return str(error.value)

    first, *others = run_ranks(3, work)
    assert first.endswith("on ranks 0, 2 and " + f"{value} on rank 1")
    assert others == [first, first]


def test_a_subgroup_first_then_the_world(run_ranks) -> None:
    """B20."""

    def work(rank: int) -> tuple[int, int]:
        pairs = [dist.new_group([0, 2]), dist.new_group([1])]
        own = pairs[0] if rank in (0, 2) else pairs[1]
        in_pair = make_buffer(1 if rank == 1 else 2, group=own)
        in_world = make_buffer(3)
        in_pair.x.view(torch.uint8).fill_(10 + rank)
        in_world.x.view(torch.uint8).fill_(20 + rank)
        dist.barrier()
        last = [block.tensor[in_pair.layout["input_x"].offset] for block in in_pair.memory.blocks]
        all_of_world = [
            int(block.tensor[in_world.layout["input_x"].offset]) for block in in_world.memory.blocks
        ]
        assert all_of_world == [20, 21, 22]
        dist.barrier()
        return in_pair.rank, int(last[-1])

    assert run_ranks(3, work) == [(0, 12), (0, 11), (1, 12)]


def test_a_group_without_this_process_is_refused(run_ranks) -> None:
    def work(rank: int) -> None:
        pair = dist.new_group([0, 2])
        if rank == 1:
            with pytest.raises(TypeError, match=r"group must be .* this process belongs to"):
                make_buffer(2, group=pair)
        else:
            make_buffer(2, group=pair)

    run_ranks(3, work)


def test_nothing_is_left_in_shared_memory(run_ranks) -> None:
    """B9. A hundred times, every rank's files, mappings and folder entries stay as they were."""

    def work(rank: int) -> None:
        def open_files() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        def mappings(name: str) -> int:
            return Path("/proc/self/maps").read_text().count(name)

        def entries() -> list[str]:
            """Those that can be ours: other processes make and remove theirs all the time."""
            ours = ("deep_moe", str(os.getpid()))
            names = (entry.name for entry in Path("/dev/shm").iterdir())
            return [name for name in names if any(word in name for word in ours)]

        make_buffer(2).close()
        in_folder, mapped_from_folder = entries(), mappings(" /dev/shm/")
        files = open_files()
        for _ in range(100):
            make_buffer(2).close()
        gc.collect()
        assert mappings("memfd:deep_moe") == 0
        assert open_files() <= files
        assert entries() == in_folder
        assert mappings(" /dev/shm/") == mapped_from_folder

    run_ranks(2, work)


def test_ranks_in_processes_get_exact_results(run_ranks) -> None:
    def work(rank: int) -> bool:
        buffer = make_buffer(2)
        results = []
        for number in range(2):  # the second call finds what the first left behind
            call = RankCall(rank, 2, num_tokens=8 - 3 * rank, seed=number)
            call.run(buffer)
            results.append(call.is_right())
        return all(results)

    assert run_ranks(2, work) == [True, True]


def test_an_idle_rank_and_a_late_rank(run_ranks) -> None:
    """B5, B7: the limit of waiting is no limit of what a peer may do first."""

    def work(rank: int) -> bool:
        buffer = make_buffer(3)
        if rank == 2:
            time.sleep(3)
        call = RankCall(rank, 3, num_tokens=0 if rank == 1 else 8)
        call.run(buffer, timeout_s=600)
        return call.is_right()

    assert run_ranks(3, work) == [True] * 3


def test_a_subgroup_computes(run_ranks) -> None:
    def work(rank: int) -> bool | None:
        pair = dist.new_group([0, 2])
        if rank == 1:
            return None
        buffer = make_buffer(2, group=pair)
        call = RankCall(buffer.rank, 2)
        call.run(buffer)
        return call.is_right()

    assert run_ranks(3, work) == [True, None, True]


def test_a_rank_that_never_arrives_is_named_and_reset_helps(run_ranks) -> None:
    def work(rank: int) -> str:
        buffer = make_buffer(2)
        message = ""
        if rank == 0:
            with pytest.raises(MegaMoETimeoutError) as caught:
                RankCall(rank, 2).run(buffer, timeout_s=2)
            message = str(caught.value)
            with pytest.raises(MegaMoEError, match="reset\\(\\) on every rank"):
                RankCall(rank, 2).run(buffer)
        buffer.reset()
        call = RankCall(rank, 2)
        call.run(buffer)
        assert call.is_right()
        return message

    message, _ = run_ranks(2, work)
    assert "rank 0" in message
    assert "token counts of a local expert from all ranks" in message
    assert "missing: rank 1" in message


OF_ALL_RANKS = [
    ("num_sms", (2, 4)),
    ("fast_math", (True, False)),
    ("activation_clamp", (None, 7.0)),
    ("activation", ("swiglu", "situ")),
]


@pytest.mark.parametrize(("name", "values"), OF_ALL_RANKS)
def test_a_call_tells_other_ranks_what_must_be_equal(
    monkeypatch: pytest.MonkeyPatch, name: str, values: tuple[Any, Any]
) -> None:
    told: list[Mapping[str, Any]] = []
    monkeypatch.setattr(emulated_call, "run_rank", lambda *given, **_: told.append(given[2]))
    call, buffer = RankCall(0, 1), make_buffer(1, device="cpu")
    for value in values:
        options = {"num_sms": 2, name: value}
        deep_moe.fp8_fp4_mega_moe(call.y, *call.weights, buffer, **options)
    first, second = told
    assert first[name] != second[name]


@parametrize(("name", "values"), OF_ALL_RANKS, everyday=OF_ALL_RANKS[:1])
def test_calls_that_differ_are_an_error_on_every_rank(run_ranks, name: str, values) -> None:
    """The first rank is already inside its kernel when the second finds the difference."""

    def work(rank: int) -> tuple[str, bool]:
        buffer = make_buffer(2)
        call = RankCall(rank, 2)
        call.fill(buffer)
        options = {"num_sms": 2, name: values[rank]}
        if rank == 1:
            time.sleep(2)
        # Whoever waited for the limit instead of the peer would not be back in time.
        with pytest.raises(ValueError, match=f"{name} must be the same on every rank") as caught:
            deep_moe.fp8_fp4_mega_moe(call.y, *call.weights, buffer, timeout_s=3600, **options)
        buffer.reset()
        call.run(buffer)
        return str(caught.value), call.is_right()

    answers = run_ranks(2, work)
    assert answers[0] == answers[1]
    assert answers[0][1]
