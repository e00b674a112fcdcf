"""An all-to-all over more than one NVLink domain: its sizes, and the memory that each rank gives to
what travels between domains.

A token goes once to each other domain that owns one of its experts, to the rank there that has its
sender's number. That one lists its own tokens and behind them those of the other domains, domain
after domain, and has an all-to-all of its domain carry them on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from deep_moe.formats.sizes import K_BLOCK
from deep_moe.tokens import ALL_TO_ALL_FORMATS, TokenFormat, token_format

from .low_latency import NUM_HALVES, check_row_format, grouped_format, travelling_words
from .shape import MAX_TOPK, require_int
from .two_level import MAX_DOMAINS, ExchangeSizes, RowFormat

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName


@dataclass(frozen=True)
class RelayShape(ExchangeSizes):
    """Sizes of what travels between domains, equal on every rank.

    num_domains: 1 to 1024. num_ranks: of each domain. num_experts: of all domains together, a
    multiple of num_domains * num_ranks. num_max_tokens_per_rank: most own tokens of a rank in one
    call. num_max_foreign_tokens: most tokens that a rank takes from all other domains together in
    one call; each domain has its share, rounded up. None: as many as they may send. token_format:
    one of ALL_TO_ALL_FORMATS. is_numbered: tokens' numbers on their ranks travel along. group_size,
    dtype: as of LowLatencyShape.

    >>> shape = RelayShape(4, 8, 256, 8, 7168, 128, token_format="fp8_128", is_numbered=True)
    >>> shape.num_pair_rows, shape.num_listed_tokens, shape.row.num_bytes
    (128, 512, 7472)
    """

    num_chunks: ClassVar[int] = 1  # type: ignore[misc]
    exact_sizes: ClassVar[bool] = False  # type: ignore[misc]

    num_domains: int
    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    num_max_tokens_per_rank: int
    num_max_foreign_tokens: int | None = None
    token_format: TokenFormatName = field(kw_only=True)
    is_numbered: bool = field(default=False, kw_only=True)
    group_size: int = field(default=K_BLOCK, kw_only=True)
    dtype: str = field(default="bf16", kw_only=True)

    def __post_init__(self) -> None:
        token_format(self.token_format, ALL_TO_ALL_FORMATS)  # or an error
        limits = {
            "num_domains": (1, MAX_DOMAINS),
            "num_ranks": (1, None),
            "num_topk": (1, MAX_TOPK),
            "num_max_tokens_per_rank": (1, None),
        }
        if self.num_max_foreign_tokens is not None:
            limits["num_max_foreign_tokens"] = (0, None)
        for name, (least, most) in limits.items():
            allowed = f"at least {least}" if most is None else f"{least} to {most}"
            value = require_int(name, getattr(self, name), allowed)
            if value < least or (most is not None and value > most):
                raise ValueError(f"{name} must be {allowed}; got {value}")
        allowed = f"a positive multiple of {K_BLOCK}"
        if require_int("hidden", self.hidden, allowed) < 1 or self.hidden % K_BLOCK:
            raise ValueError(f"hidden must be {allowed}; got {self.hidden}")
        check_row_format(self, self.token_format)
        num_owners = self.num_domains * self.num_ranks
        allowed = (
            f"a positive multiple of the {num_owners} ranks of all domains, and num_topk "
            f"({self.num_topk}) or more for each of the {self.num_domains} domains"
        )
        num_experts = require_int("num_experts", self.num_experts, allowed)
        is_enough = num_experts // self.num_domains >= self.num_topk
        if num_experts < 1 or num_experts % num_owners or not is_enough:
            raise ValueError(f"num_experts must be {allowed}; got {num_experts}")

    @property
    def num_all_ranks(self) -> int:
        return self.num_domains * self.num_ranks

    @property
    def tokens(self) -> TokenFormat:
        return grouped_format(self.token_format, self.group_size)

    @property
    def num_scale_words(self) -> int:
        """Of a token on its way: packed only where the experts are."""
        return self.hidden // travelling_words(self.tokens) if self.tokens.has_scales else 0

    @property
    def num_listed_tokens(self) -> int:
        """Own and foreign tokens of a call inside the domain."""
        return self.num_chunk_tokens + self.num_chunk_foreign

    @cached_property
    def row(self) -> RowFormat:
        """Of a token between domains."""
        return RowFormat.of(
            self.tokens,
            self.hidden,
            self.num_topk,
            num_scale_words=self.num_scale_words,
            is_numbered=self.is_numbered,
        )

    @property
    def buffer_bytes(self) -> dict[str, int]:
        """What a rank keeps for what travels, by what it is for.

        >>> shape = RelayShape(4, 8, 256, 8, 7168, 128, token_format="fp8_128", is_numbered=True)
        >>> {name: round(size / 2**20, 1) for name, size in shape.buffer_bytes.items()}
        {'tokens between domains': 6.5, 'listed tokens': 3.6, 'partial sums': 24.5}
        """
        rows = self.num_chunk_foreign + self.num_chunk_sent + self.num_max_tokens_per_rank + 1
        values = self.tokens.num_bytes(self.hidden)
        listed = values + 4 * (self.num_scale_words + 1)
        weights = 4 * self.num_topk * (NUM_HALVES * self.num_listed_tokens + self.num_chunk_sent)
        weights += 4 * self.num_topk * (self.num_max_tokens_per_rank + 1)
        # A router's output that says nothing, twice, for what quantizes.
        unrouted = 2 * (8 + 4) * self.num_topk * self.num_max_tokens_per_rank
        id_table = 8 * (self.num_experts + 2)
        return {
            "tokens between domains": rows * self.row.num_bytes + weights + unrouted + id_table,
            "listed tokens": self.num_listed_tokens * listed,
            "partial sums": NUM_HALVES * self.num_partial_rows * self.hidden * 2,
        }
