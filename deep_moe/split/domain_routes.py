"""The domain and row of each token, and the places of its partial sums. Everything is computed on
the device; nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

import torch

from deep_moe.heuristics.two_level import ExchangeSizes


@dataclass(frozen=True)
class Routes:
    """Of a rank's own tokens in a call, for all chunks at once: what a chunk takes of the host is
    time in which its GPU waits.

    bounds: of each chunk its first token and the one behind its last. Tokens are numbered through
    the call, and stand in `row_of_token` chunk by chunk, all of one size: the last ones there
    may be nobody's.

    counts: int64 [chunks, other domains], tokens for each of them, in the order of the domains.
    token_of_row: int64 [chunks, rows that may be sent], the call's token of each row, or
    `row_of_nobody`. row_of_token: int64
    [chunks, chunk's tokens, other domains], the row of each token, or `num_chunk_sent` for none.
    """

    bounds: list[tuple[int, int]]
    counts: torch.Tensor
    token_of_row: torch.Tensor
    row_of_token: torch.Tensor


def known_ids(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Ids as they travel, in which `ids_in_domain` has them: those that name no expert are -1 or
    num_experts, whichever is next, since one kernel can see to that."""
    return topk_idx.clamp(-1, num_experts)


def ids_in_domain(
    num_experts: int, num_domains: int, domain: int, device: torch.device
) -> torch.Tensor:
    """A domain's own number of each expert, -1 for others' and for what `known_ids` has for no
    expert: int64 [num_experts + 2], whose last one `torch.take` has for -1.

    >>> ids_in_domain(4, 2, 1, torch.device("cpu")).tolist()
    [-1, -1, 0, 1, -1, -1]
    """
    number = num_experts // num_domains
    table = torch.full((num_experts + 2,), -1, dtype=torch.int64, device=device)
    table[domain * number : (domain + 1) * number] = torch.arange(number, device=device)
    return table


def domains_of(topk_idx: torch.Tensor, shape: ExchangeSizes) -> torch.Tensor:
    """bool [tokens, domains]: where some expert of a token lives. Ids that name no expert name no
    domain."""
    is_expert = (topk_idx >= 0) & (topk_idx < shape.num_experts)
    domain = topk_idx.clamp(0, shape.num_experts - 1) // shape.num_experts_per_domain
    nobody = shape.num_domains
    size = (topk_idx.shape[0], nobody + 1)
    goes = torch.zeros(size, dtype=torch.bool, device=topk_idx.device)
    return goes.scatter_(1, domain.where(is_expert, nobody), True)[:, :nobody]


def others(of_domains: torch.Tensor, own: int) -> torch.Tensor:
    """Columns of the domains but one's own."""
    return torch.cat([of_domains[:, :own], of_domains[:, own + 1 :]], dim=1)


def chunk_bounds(num_tokens: int, num_chunks: int) -> list[tuple[int, int]]:
    """First token of each chunk, and the one behind its last.

    >>> chunk_bounds(10, 4), chunk_bounds(1, 2)
    ([(0, 3), (3, 6), (6, 9), (9, 10)], [(0, 1), (1, 1)])
    """
    size = -(-num_tokens // num_chunks)
    return [
        (min(chunk * size, num_tokens), min((chunk + 1) * size, num_tokens))
        for chunk in range(num_chunks)
    ]


def route_chunks(goes_to_others: torch.Tensor, shape: ExchangeSizes) -> Routes:
    """goes_to_others: bool [tokens of the call, other domains]. A domain's rows lie in the order of
    the tokens: with exact sizes behind those of the domain before, with fixed sizes at a place of
    their own. Tokens for which there is no row there are in the counts alone."""
    device = goes_to_others.device
    num_tokens, num_others = goes_to_others.shape
    num_chunks, num_rows = shape.num_chunks, shape.num_chunk_sent
    size = -(-num_tokens // num_chunks)
    missing = num_chunks * size - num_tokens
    goes = goes_to_others
    if missing:
        goes = torch.cat([goes, goes.new_zeros((missing, num_others))])
    goes = goes.view(num_chunks, size, num_others)
    position = goes.cumsum(dim=1)
    counts = goes.sum(dim=1)
    if shape.exact_sizes:
        first_row = counts.cumsum(dim=1) - counts
        has_row = goes
    else:
        first_row = torch.arange(num_others, device=device) * shape.num_pair_rows
        first_row = first_row.expand(num_chunks, -1)
        has_row = goes & (position <= shape.num_pair_rows)
    rows = (first_row.unsqueeze(1) + position - 1).where(has_row, num_rows)
    tokens = torch.arange(num_chunks * size, device=device)
    tokens = tokens.view(num_chunks, size, 1).expand(-1, -1, num_others)
    nobody = shape.row_of_nobody
    token_of_row = torch.full((num_chunks, num_rows + 1), nobody, device=device)
    token_of_row.scatter_(1, rows.flatten(1), tokens.flatten(1))
    bounds = chunk_bounds(num_tokens, num_chunks)
    return Routes(bounds, counts, token_of_row[:, :num_rows], rows)


def partial_rows(
    goes: torch.Tensor, routes: Routes, own_domain: int, shape: ExchangeSizes
) -> torch.Tensor:
    """int64 [tokens, sums]: where the partial sums of each token lie in the table of the call, in
    the order of their domains; behind a token's last one, the row of zeros.

    goes: `domains_of` the call's tokens.
    """
    zeros = shape.row_of_zeros
    num_tokens = goes.shape[0]
    num_chunks, size, num_others = routes.row_of_token.shape
    first = torch.arange(num_chunks, device=goes.device).view(-1, 1, 1) * shape.num_chunk_rows
    came_back = first + (shape.num_chunk_rows - shape.num_chunk_sent)
    rows = routes.row_of_token
    rows = (came_back + rows).where(rows < shape.num_chunk_sent, zeros)
    rows = rows.view(num_chunks * size, num_others)[:num_tokens]
    tokens = torch.arange(num_chunks * size, device=goes.device)
    if shape.is_own_apart:
        # With shared experts the own domain has something for every token.
        own = tokens[:num_tokens] + num_chunks * shape.num_chunk_rows
    else:
        own = (first.view(-1, 1) + tokens[:size]).view(-1)[:num_tokens]
        own = own.where(goes[:, own_domain], zeros)
    table = torch.cat([rows[:, :own_domain], own.unsqueeze(1), rows[:, own_domain:]], dim=1)
    num_sums = shape.num_topk + shape.is_own_apart
    if num_sums >= shape.num_domains:
        return table
    order = (table == zeros).argsort(dim=1, stable=True)
    return table.gather(1, order[:, :num_sums])


def add_in_domain_order(
    partials: torch.Tensor, rows: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """out: bfloat16 [tokens, hidden], the sums in float32 of the partial sums [rows, hidden] that
    `rows` [tokens, sums] names, one after the other, rounded once."""
    columns = rows.unbind(dim=1)
    return sum_rounded_once((partials.index_select(0, column) for column in columns), out)


def sum_rounded_once(terms: Iterable[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """out: the terms, of its type and shape, added in float32 one after the other, and rounded."""
    first, *rest = islice(terms := iter(terms), 2)
    following = next(terms, None)
    if following is None:
        # Of two terms PyTorch's sum is that, in one kernel.
        return torch.add(first, *rest, out=out) if rest else out.copy_(first)
    total = first.float()
    for term in chain(rest, (following,), terms):
        total += term
    return out.copy_(total)
