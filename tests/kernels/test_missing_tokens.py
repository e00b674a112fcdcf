"""Tokens that dispatch never brings: many roles wait in vain, and the error names the cause."""

from __future__ import annotations

import pytest
import torch

from deep_moe.errors import MegaMoETimeoutError
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import exact_layer, exact_tokens

from .layer_case import LayerCase


@pytest.mark.parametrize("pool_block_idx", range(2))
def test_the_wait_for_them_is_reported(arch: str, pool_block_idx: int) -> None:
    shape = MoEShape(
        num_ranks=1,
        num_experts=2,
        num_topk=2,
        hidden=256,
        intermediate_hidden=256,
        num_max_tokens_per_rank=20,
    )
    case = LayerCase(shape, exact_layer(shape), arch=arch)
    tokens = [exact_tokens(shape, 20, seed=1)]
    buffer = case.ranks.buffers[0]
    counts = buffer.layout["l1_arrival_count"]
    words = buffer.memory.tensor[counts.offset : counts.end].view(torch.int32)
    for schedule_seed in range(3):
        words[pool_block_idx] += 1 << 20
        # Far more than the emulator's clock leaps between two looks at it.
        with pytest.raises(
            MegaMoETimeoutError, match="for tokens of a pool block, before Linear1 loads them:"
        ):
            case.call(tokens, timeout_s=400.0, schedule_seed=schedule_seed)
        case.ranks.reset()
    assert all(result.is_exact for result in case.compare_call(tokens))
