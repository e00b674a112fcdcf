"""What adapters do with tokens and routing weights before the kernel sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.integrations.shares import mean_tokens, on_own_share, weighted_once

HIDDEN, TOPK = 8, 2


class Group:
    """One rank of a tensor parallel group; `gathered` are the shares that all of them gave."""

    def __init__(self, rank: int, gathered: torch.Tensor) -> None:
        self.rank_in_group = rank
        self.gathered = gathered
        self.given: torch.Tensor | None = None

    def all_gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        self.given = own
        return self.gathered


def twice(output: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Stands for the kernel, of which every token gives a result of its own."""
    assert x.shape[0] == ids.shape[0] == weights.shape[0] == output.shape[0]
    output.copy_(2 * x + ids.sum(1, keepdim=True) + weights.sum(1, keepdim=True))


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.arange(num_tokens * HIDDEN, dtype=torch.float32).view(num_tokens, HIDDEN)
    ids = torch.arange(num_tokens * TOPK).view(num_tokens, TOPK)
    return x, ids, 0.5 * ids


@pytest.mark.parametrize("is_routed_alone", [False, True])
@pytest.mark.parametrize("num_sharers", [2, 3, 4])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5, 8, 9])
def test_shares_of_ranks_are_all_tokens_once(
    num_tokens: int, num_sharers: int, is_routed_alone: bool
):
    """The last shares may be smaller, or empty. is_routed_alone: experts are of the own share."""
    given = inputs(num_tokens)
    expected = torch.empty(num_tokens, HIDDEN)
    twice(expected, *given)
    share = -(-num_tokens // num_sharers)
    padded = torch.zeros(share * num_sharers, HIDDEN)
    padded[:num_tokens] = expected
    for rank in range(num_sharers):
        group = Group(rank, padded)
        output = torch.full((num_tokens, HIDDEN), torch.nan)
        calls = []

        def run(*call: Any, calls: list[Any] = calls) -> None:
            calls.append(call)
            twice(*call)

        x, *routed = given
        if is_routed_alone:
            rows = slice(rank * share, (rank + 1) * share)
            routed = [tensor[rows] for tensor in routed]
        on_own_share(group, num_sharers, output, x, *routed, run)
        assert len(calls) == 1  # a rank without tokens, too, as the others wait for it
        assert torch.equal(output, expected)
        if num_tokens:
            assert group.given is not None
            assert torch.equal(group.given, padded[rank * share : (rank + 1) * share])


def test_who_shares_nothing_runs_all_tokens():
    given = inputs(5)
    output, expected = torch.empty(5, HIDDEN), torch.empty(5, HIDDEN)
    twice(expected, *given)
    on_own_share(None, 1, output, *given, twice)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("counts", "sp_size", "num_sharers", "expected"),
    [
        (None, 1, 1, 7),
        ([7, 7], 1, 1, 7),
        ([7, 0], 1, 1, 4),  # the mean of the ranks, not this rank's own
        ([0, 96], 1, 1, 48),
        ([7, 4], 1, 4, 2),
        ([64, 32], 2, 1, 24),
        ([0, 0], 1, 1, 0),
    ],
)
def test_ranks_with_unequal_tokens_expect_their_mean(counts, sp_size, num_sharers, expected):
    assert mean_tokens(counts, 7, sp_size, num_sharers) == expected


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_weight_that_is_applied_to_the_input_counts_once(is_weighted):
    x, weights = torch.tensor([[2.0, 4.0], [1.0, 3.0]]).bfloat16(), torch.tensor([[0.5], [0.25]])
    given = x * weights.bfloat16() if is_weighted else x
    tokens, rest = weighted_once(given, weights, is_weighted=is_weighted)
    assert torch.equal(tokens, x * weights.bfloat16())
    assert tokens.dtype == torch.bfloat16
    assert torch.equal(rest, torch.ones(2, 1))
