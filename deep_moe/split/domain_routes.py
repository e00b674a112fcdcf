"""Which token goes to which domain, in which row, and where its partial sums lie. All on the
device: nothing here waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_moe.heuristics.two_level import TwoLevelShape


@dataclass(frozen=True)
class ChunkRoutes:
    """One chunk of a rank's own tokens, `begin` to `end` of the call.

    counts: int64 [other domains], tokens for each of them, in the order of the domains.
    token_of_row: int64 [rows that may be sent], the call's token of each row, or `num_tokens_max`,
    which names the row of nobody. row_of_token: int64 [tokens, other domains], the row of each
    token, or `num_chunk_sent` for none.
    """

    begin: int
    end: int
    counts: torch.Tensor
    token_of_row: torch.Tensor
    row_of_token: torch.Tensor


def domains_of(topk_idx: torch.Tensor, shape: TwoLevelShape) -> torch.Tensor:
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


def route_chunk(
    goes_to_others: torch.Tensor, begin: int, end: int, shape: TwoLevelShape
) -> ChunkRoutes:
    """goes_to_others: bool [tokens of the call, other domains]. A domain's rows lie in the order of
    the tokens: with exact sizes behind those of the domain before, with fixed sizes at a place of
    their own. Tokens for which there is no row there are in the counts alone."""
    goes = goes_to_others[begin:end]
    device = goes.device
    num_tokens, num_others = goes.shape
    num_rows = shape.num_chunk_sent
    position = goes.cumsum(dim=0)
    counts = position[-1] if num_tokens else position.new_zeros(num_others)
    if shape.exact_sizes:
        first_row = counts.cumsum(dim=0) - counts
        has_row = goes
    else:
        first_row = torch.arange(num_others, device=device) * shape.num_pair_rows
        has_row = goes & (position <= shape.num_pair_rows)
    rows = (first_row + position - 1).where(has_row, num_rows)
    tokens = torch.arange(begin, end, device=device).unsqueeze(1).expand(-1, num_others)
    nobody = shape.num_max_tokens_per_rank
    token_of_row = torch.full((num_rows + 1,), nobody, device=device)
    token_of_row.scatter_(0, rows.flatten(), tokens.flatten())
    return ChunkRoutes(begin, end, counts, token_of_row[:num_rows], rows)


def partial_rows(
    goes: torch.Tensor,
    routes: list[ChunkRoutes],
    own_domain: int,
    shape: TwoLevelShape,
) -> torch.Tensor:
    """int64 [tokens, sums]: where the partial sums of each token lie in the table of the call, in
    the order of their domains; behind a token's last one, the row of zeros.

    goes: `domains_of` the call's tokens.
    """
    zeros = shape.num_partial_rows - 1
    device = goes.device
    tables = []
    for chunk, of_chunk in enumerate(routes):
        first = chunk * shape.num_chunk_rows
        tokens = torch.arange(of_chunk.end - of_chunk.begin, device=device)
        if shape.is_own_apart:
            own = shape.num_chunks * shape.num_chunk_rows + of_chunk.begin + tokens
        else:
            own = first + tokens
        # With shared experts the own domain has something for every token.
        is_used = goes[of_chunk.begin : of_chunk.end, own_domain] | shape.is_own_apart
        own = own.where(is_used, zeros).unsqueeze(1)
        came_back = first + shape.num_chunk_rows - shape.num_chunk_sent
        rows = of_chunk.row_of_token
        rows = (came_back + rows).where(rows < shape.num_chunk_sent, zeros)
        tables.append(torch.cat([rows[:, :own_domain], own, rows[:, own_domain:]], dim=1))
    table = torch.cat(tables)
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
    total = partials.index_select(0, rows[:, 0]).float()
    for column in range(1, rows.shape[1]):
        total += partials.index_select(0, rows[:, column])
    return out.copy_(total)
