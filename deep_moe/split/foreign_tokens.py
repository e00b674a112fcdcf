"""More tokens from other domains than there is room for: found on the device, told as an error."""

from __future__ import annotations

import torch

from deep_moe.errors import ForeignTokensError
from deep_moe.heuristics.two_level import ExchangeSizes

from .domain_groups import DomainPlace

_COUNT_BITS = 32  # of a number of tokens, beside where it was met


def worst_of(counts: torch.Tensor, room: int, place: DomainPlace) -> torch.Tensor:
    """int64 []: the largest of counts int64 [..., chunks] that is more than `room`, behind it which
    rank found it and where; 0 if none is."""
    rank = place.domain * place.num_ranks + place.rank
    where = torch.arange(counts.numel(), device=counts.device) + rank * counts.numel()
    met = (counts.flatten() << _COUNT_BITS) + where
    met = met.where(counts.flatten() > room, 0)
    return met.amax() if counts.numel() else counts.new_zeros(())


def raise_overflow(worst: int, shape: ExchangeSizes, num_ranks: int) -> None:
    """ForeignTokensError for what `worst_of` said on some rank. num_ranks: of a domain."""
    if not worst:
        return
    count, where = worst >> _COUNT_BITS, worst % (1 << _COUNT_BITS)
    num_entries = shape.num_chunks * (1 if shape.exact_sizes else shape.num_other_domains)
    rank_of_all, entry = divmod(where, num_entries)
    domain, rank = divmod(rank_of_all, num_ranks)
    other, chunk = divmod(entry, shape.num_chunks)
    if shape.exact_sizes:
        who = f"rank {rank} of domain {domain} is sent {count} tokens by other domains"
        room = shape.num_chunk_foreign
    else:
        to = other + (other >= domain)
        who = f"rank {rank} of domain {domain} has {count} tokens for domain {to}"
        room = shape.num_pair_rows
    raise ForeignTokensError(
        f"num_max_foreign_tokens must be larger: {who} in chunk {chunk}, where "
        f"{shape.num_max_foreign_tokens} in {shape.num_chunks} chunks leave room for {room}"
    )
