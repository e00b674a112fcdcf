"""A rank that never arrives: every role of the SM100 kernel leaves, and the call raises."""

from __future__ import annotations

import pytest
import torch

from deep_moe.errors import MegaMoETimeoutError
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import exact_layer, exact_tokens

from .layer_case import LayerCase


def test_missing_rank_is_named_and_the_kernel_ends() -> None:
    shape = MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=2,
        hidden=128,
        intermediate_hidden=128,
        num_max_tokens_per_rank=16,
    )
    case = LayerCase(shape, exact_layer(shape))
    ys = [torch.empty(0, shape.hidden, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(MegaMoETimeoutError, match=r"\b1\b"):
        case.ranks.call(ys, case.weights, ranks=[0], timeout_s=0.01)

    case.ranks.reset()
    tokens = [exact_tokens(shape, 16, seed=1), exact_tokens(shape, 9, seed=2)]
    results = case.compare_call(tokens)
    assert all(result.is_exact for result in results), results


def test_every_role_leaves_wherever_it_stands() -> None:
    """Limits so short that healthy waits exceed them, here and there: the call is right or raises,
    never hangs, and the buffer serves the next call."""
    shape = MoEShape(
        num_ranks=2,
        num_experts=4,
        num_topk=2,
        hidden=384,
        intermediate_hidden=256,
        num_max_tokens_per_rank=60,
    )
    case = LayerCase(shape, exact_layer(shape))
    tokens = [exact_tokens(shape, 60, seed=rank) for rank in range(2)]
    num_aborted = 0
    for schedule_seed in range(24):
        try:
            results = case.compare_call(
                tokens, timeout_s=10 ** (-5.5 + schedule_seed / 16), schedule_seed=schedule_seed
            )
            assert all(result.is_exact for result in results), (schedule_seed, results)
        except MegaMoETimeoutError:
            num_aborted += 1
            case.ranks.reset()
    assert num_aborted >= 3
    assert all(result.is_exact for result in case.compare_call(tokens))
