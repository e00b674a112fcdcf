"""Two and three ranks, a process each, against one rank with all experts and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.training.process_group import ProcessGroupWays

from ..fused.conftest import RunRanks, run_ranks
from .plain_layer import Layer, assert_close, assert_equal_bits, random_like

__all__ = ["run_ranks"]  # a fixture

WEIGHTS = ("w1", "w3", "w2", "b1", "b3", "b2")
TOKENS = {"uneven": (5, 2), "an empty rank": (0, 6), "three ranks": (4, 0, 3)}


def whole(num_ranks: int, num_tokens: Sequence[int], **kind: Any) -> Layer:
    """Of all ranks; the last expert, and in one of the cases the last rank, get no token."""
    return Layer.random(num_tokens=sum(num_tokens), num_experts=2 * num_ranks, biases=True, **kind)


def part(layer: Layer, rank: int, num_tokens: Sequence[int]) -> Layer:
    """A rank's tokens and experts."""
    begin = sum(num_tokens[:rank])
    own = slice(begin, begin + num_tokens[rank])
    tensors: dict[str, torch.Tensor | None] = {}
    for name, tensor in layer.tensors.items():
        of = slice(2 * rank, 2 * rank + 2) if name in WEIGHTS else own
        tensors[name] = None if tensor is None else tensor[of].detach().clone().requires_grad_()
    options = {**layer.options, "group": dist.group.WORLD}
    return Layer(layer.topk_idx[own].contiguous(), tensors, options)


def check_ranks(
    run_ranks: RunRanks, num_tokens: Sequence[int], bound: float, again: bool = True, **kind: Any
) -> None:
    """Every rank's output and gradients are parts of one rank's. again: and the same bits if
    received tokens are kept."""
    layer = whole(len(num_tokens), num_tokens, **kind)
    expected = layer.run()
    d_out = random_like(expected["out"])
    options = dict(layer.options)

    def work(rank: int) -> dict[str, list]:
        own = part(layer, rank, num_tokens)
        begin = sum(num_tokens[:rank])
        d_own = d_out[begin : begin + num_tokens[rank]]
        own.options |= options
        first = own.run(d_own)
        if again:
            assert_equal_bits(first, own.run(d_own, keep_received=True))
        return {name: value.double().tolist() for name, value in first.items()}

    results = run_ranks(len(num_tokens), work)
    for name, value in expected.items():
        shape = value.shape[1:]
        parts = [torch.tensor(own[name], dtype=torch.float64).view(-1, *shape) for own in results]
        assert_close({name: torch.cat(parts)}, {name: value}, bound)


@pytest.mark.parametrize("case", TOKENS)
def test_ranks_make_what_one_rank_makes(run_ranks: RunRanks, case: str) -> None:
    check_ranks(run_ranks, TOKENS[case], 1e-13, dtype=torch.float64)


@pytest.mark.parametrize(("precision", "size"), [("mxfp8", 32), ("fp8", 128)])
def test_in_bf16_ranks_round_each_slot(run_ranks: RunRanks, precision: str, size: int) -> None:
    """A row is rounded with its bias before it travels, a gradient once more."""
    sizes = {"hidden": size, "intermediate": size}
    check_ranks(run_ranks, (5, 2), 2 * 2.0**-9, **sizes, precision=precision)


def test_the_backward_pass_multiplies_received_tokens(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug of the flow that this layer was built after: a rank's own tokens in the gradients of
    weights whose rows came from other ranks. Planted here, the comparison has to see it."""
    real = ProcessGroupWays.receive
    calls: list[torch.Tensor] = []  # of a rank: x, then x again, then d_out

    def local_tokens(ways: ProcessGroupWays, tokens: torch.Tensor) -> torch.Tensor:
        received = real(ways, tokens)
        calls.append(tokens)
        is_again = len(calls) == 2
        return tokens[torch.arange(len(received)) % len(tokens)] if is_again else received

    monkeypatch.setattr(ProcessGroupWays, "receive", local_tokens)
    with pytest.raises(AssertionError, match="w1"):
        check_ranks(run_ranks, (5, 2), 1e-13, again=False, dtype=torch.float64)


def test_too_many_slots_are_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    layer = whole(2, (5, 2))
    layer.topk_idx.fill_(2)  # of rank 1: 21 slots

    def work(rank: int) -> str:
        own = part(layer, rank, (5, 2))
        assert own(max_recv_slots=21).isfinite().all()
        with pytest.raises(RuntimeError) as error:
            own(max_recv_slots=20)
        assert own(max_recv_slots=21).isfinite().all()  # the group goes on
        return str(error.value)

    words = "rank 1 would receive 21 slots, more than max_recv_slots (20); nothing was sent"
    assert run_ranks(2, work) == [words, words]


def test_modules_have_their_ranks_experts(run_ranks: RunRanks) -> None:
    def work(rank: int) -> list[int]:
        module = deep_moe.MoELayer(16, 24, 4, group=dist.group.WORLD)
        idx = torch.full((3, 1), 2 * (1 - rank))  # all of them the other rank's
        module(torch.ones(3, 16, dtype=torch.bfloat16), idx, torch.ones(3, 1)).sum().backward()
        assert module.w1.grad is not None
        return [*module.w1.shape, int(module.w1.grad.any())]

    assert run_ranks(2, work) == [[2, 16, 24, 1]] * 2


def test_what_goes_with_a_group_only() -> None:
    with pytest.raises(ValueError, match="go with a group"):
        Layer.random()(max_recv_slots=3)


def test_experts_are_shared_out_evenly() -> None:
    with pytest.raises(ValueError, match="num_experts must be a multiple of the group's 2 ranks"):
        deep_moe.MoELayer(16, 24, 3, group=dist.ProcessGroup(0, 2))
