"""What two levels move between NVLink domains, and how long a network port takes for it: a model,
in which routing is uniform and a port carries its bytes at a constant rate, both ways at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

PORT_BYTES = 50e9  # per second of a port of 400 Gb/s, one for each GPU


def share_with_expert(num_experts: int, num_domains: int, num_topk: int) -> float:
    """Tokens that name an expert of one given domain, of all tokens.

    >>> round(share_with_expert(256, 4, 8), 3), round(share_with_expert(256, 32, 8), 3)
    (0.904, 0.227)
    """
    per_domain = num_experts // num_domains
    return 1 - math.comb(num_experts - per_domain, num_topk) / math.comb(num_experts, num_topk)


@dataclass(frozen=True)
class DomainTraffic:
    """Of one rank in one call, each way.

    num_rows: that tokens need, on average. num_fixed_rows: that fixed sizes send for as many own
    tokens of each rank as domains may all get. dispatch_us, combine_us: of a port for `num_rows`.
    fixed_dispatch_us, fixed_combine_us: for `num_fixed_rows`.
    """

    num_domains: int
    num_rows: float
    num_fixed_rows: int
    dispatch_us: float
    combine_us: float
    fixed_dispatch_us: float
    fixed_combine_us: float


def domain_traffic(
    num_domains: int,
    num_experts: int,
    num_topk: int,
    num_tokens: int,
    row_bytes: int,
    sum_bytes: int,
    port_bytes: float = PORT_BYTES,
) -> DomainTraffic:
    """row_bytes: of a token on its way. sum_bytes: of the sum that comes back.

    >>> found = domain_traffic(4, 256, 8, 128, 7472, 14336)
    >>> round(found.num_rows), found.num_fixed_rows, round(found.dispatch_us)
    (347, 384, 52)
    """
    others = num_domains - 1
    rows = others * num_tokens * share_with_expert(num_experts, num_domains, num_topk)
    fixed = others * num_tokens
    us = 1e6 / port_bytes
    return DomainTraffic(
        num_domains,
        rows,
        fixed,
        rows * row_bytes * us,
        rows * sum_bytes * us,
        fixed * row_bytes * us,
        fixed * sum_bytes * us,
    )
