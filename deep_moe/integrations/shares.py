"""How tokens and routing weights come to the kernel where ranks hold the same tokens, or bring
different numbers of them. Nothing here imports an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def on_own_share(
    group: Any,
    num_sharers: int,
    output: torch.Tensor,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> None:
    """Let `run(output, x, topk_ids, topk_weights)` see this rank's share of the tokens, and write
    what all shares gave into `output`.

    group: as vLLM's tensor parallel group has `rank_in_group` and `all_gather`. num_sharers: its
    ranks, if they hold the same tokens; otherwise 1, and the share is all of them. topk_ids,
    topk_weights: of all tokens, or of this rank's share alone.
    """
    if num_sharers == 1:
        run(output, x, topk_ids, topk_weights)
        return
    num_tokens = x.shape[0]
    rows = rows_of_share(group, num_sharers, num_tokens)
    if topk_ids.shape[0] == num_tokens:
        topk_ids, topk_weights = topk_ids[rows], topk_weights[rows]
    # The last ranks' shares may be smaller, or empty.
    own = x.new_zeros(-(-num_tokens // num_sharers), x.shape[1])
    run(own[: x[rows].shape[0]], x[rows], topk_ids, topk_weights)
    if num_tokens:
        output.copy_(group.all_gather(own, dim=0)[:num_tokens])


def rows_of_share(group: Any, num_sharers: int, num_tokens: int) -> slice:
    """Of all tokens, which this rank gives the kernel; both as `on_own_share` has them."""
    share = -(-num_tokens // num_sharers)
    first = group.rank_in_group * share
    return slice(first, first + share)


def rows_of_calls(num_most_tokens: int, chunk: int) -> Iterator[slice]:
    """The rows of each call, at most `chunk` of them, if a rank has at most `num_most_tokens`: as
    many calls on every rank, at least one.

    >>> list(rows_of_calls(5, 3)), list(rows_of_calls(0, 3))
    ([slice(0, 3, None), slice(3, 6, None)], [slice(0, 3, None)])
    """
    for first in range(0, max(num_most_tokens, 1), chunk):
        yield slice(first, first + chunk)


def mean_tokens(
    counts: Sequence[int] | None, num_tokens: int, sp_size: int = 1, num_sharers: int = 1
) -> int:
    """That ranks bring to the kernel, rounded up.

    counts: of each data parallel rank, None or empty if the host does not know: then this rank's
    `num_tokens`. sp_size: ranks that sequence parallelism spreads a data parallel rank's tokens
    over. num_sharers: ranks that share them otherwise.

    >>> mean_tokens([5, 12], 5), mean_tokens([5, 12], 5, sp_size=1, num_sharers=4)
    (9, 3)
    """
    if not counts:
        return num_tokens
    return -(-sum(counts) // (len(counts) * sp_size * num_sharers))


def weighted_once(
    x: torch.Tensor, topk_weights: torch.Tensor, *, is_weighted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and routing weights for a layer whose weights are applied to the input, of one expert
    per token: the kernel multiplies by what it is given, so it is given ones. is_weighted: whether
    a stage of vLLM's in front has applied them."""
    ones = torch.ones_like(topk_weights)
    return (x if is_weighted else x * topk_weights.to(x.dtype)), ones
