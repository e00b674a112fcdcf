"""As many experts as are allowed: 512 on a rank, 1024 in all, with 16 of them for each token."""

from __future__ import annotations

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import exact_layer, exact_tokens

from .layer_case import LayerCase


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_result_is_exact(arch: str, num_ranks: int) -> None:
    shape = MoEShape(num_ranks, 512 * num_ranks, 16, 128, 128, 6)
    case = LayerCase(shape, exact_layer(shape), arch=arch)
    tokens = [exact_tokens(shape, 6 - rank, seed=rank + 1) for rank in range(num_ranks)]
    # The first and the last expert of every rank are among them.
    for own in tokens:
        own.topk_idx[0, : 2 * num_ranks] = torch.tensor(
            [idx for rank in range(num_ranks) for idx in (512 * rank, 512 * rank + 511)]
        )
    for y, expected in zip(case.call(tokens), case.expected(tokens), strict=True):
        assert torch.equal(y, expected)
    case.check_control_words()
