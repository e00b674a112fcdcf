"""A layer over more than one NVLink domain: its sizes, and the memory that each rank gives to it.

A call goes through in chunks. Each takes a part of the rank's own tokens, and what the other
domains send in that chunk, through one call of the fused kernel inside the domain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from deep_moe.tokens import TokenFormat, token_format
from deep_moe.weights import DEFAULT_WEIGHTS, default_token_format

from .segments import align_up, ceil_div
from .shape import MAX_SHARED_EXPERTS, MoEShape, require_int
from .symm_buffer_layout import symm_buffer_layout

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

MAX_DOMAINS = 1024
MAX_CHUNKS = 64
ROW_ALIGNMENT = 16  # bytes; of a token's row on its way between domains


@dataclass(frozen=True)
class RowFormat:
    """A token on its way to another domain: one row of bytes, with fields behind each other.

    values: E4M3 or BF16. scales: four UE8M0 bytes per int32 word, or float32, if there are some.
    ids: int32, global. weights: float32. tokens: int32, its number on its rank, where somebody asks
    for that.
    """

    values: slice
    scales: slice
    ids: slice
    weights: slice
    tokens: slice
    num_bytes: int

    @classmethod
    def of(
        cls,
        tokens: TokenFormat,
        hidden: int,
        num_topk: int,
        *,
        num_scale_words: int | None = None,
        is_numbered: bool = False,
    ) -> RowFormat:
        """num_scale_words: as they travel, by default the format's.

        >>> RowFormat.of(token_format("mxfp8"), 7168, 8).num_bytes
        7456
        """
        values = tokens.num_bytes(hidden)
        if num_scale_words is None:
            num_scale_words = tokens.num_scale_words(hidden)
        scales = values + 4 * num_scale_words
        ids = scales + 4 * num_topk
        weights = ids + 4 * num_topk
        number = weights + 4 * is_numbered
        return cls(
            slice(0, values),
            slice(values, scales),
            slice(scales, ids),
            slice(ids, weights),
            slice(weights, number),
            align_up(number, ROW_ALIGNMENT),
        )


class ExchangeSizes:
    """What follows, for the rows that travel between domains, from the sizes of a layer."""

    num_domains: int
    num_experts: int
    num_topk: int
    num_max_tokens_per_rank: int
    num_max_foreign_tokens: int | None
    num_chunks: int
    exact_sizes: bool

    @property
    def is_own_apart(self) -> bool:
        """Whether own tokens have a call of their own, in front of the chunks'."""
        return False

    @property
    def num_experts_per_domain(self) -> int:
        """Domain d owns the experts d * this and on."""
        return self.num_experts // self.num_domains

    @property
    def num_other_domains(self) -> int:
        return self.num_domains - 1

    @property
    def num_chunk_tokens(self) -> int:
        """Most own tokens of a chunk."""
        return ceil_div(self.num_max_tokens_per_rank, self.num_chunks)

    @property
    def num_pair_rows(self) -> int:
        """With fixed sizes: rows that a chunk has for the tokens from one domain to another."""
        if self.num_max_foreign_tokens is None or not self.num_other_domains:
            return self.num_chunk_tokens
        share = ceil_div(self.num_max_foreign_tokens, self.num_other_domains * self.num_chunks)
        return min(share, self.num_chunk_tokens)

    @property
    def num_chunk_foreign(self) -> int:
        """Most foreign tokens of a chunk."""
        most = self.num_other_domains * self.num_chunk_tokens
        if not self.exact_sizes:
            return self.num_other_domains * self.num_pair_rows
        if self.num_max_foreign_tokens is None:
            return most
        return min(most, ceil_div(self.num_max_foreign_tokens, self.num_chunks))

    @property
    def num_chunk_sent(self) -> int:
        """Most rows that a rank sends in a chunk; with fixed sizes it always sends as many."""
        if not self.exact_sizes:
            return self.num_chunk_foreign
        return self.num_chunk_tokens * min(self.num_other_domains, self.num_topk)

    @property
    def can_overflow(self) -> bool:
        """Whether tokens may be more than there is room for."""
        if self.exact_sizes:
            return self.num_chunk_foreign < self.num_other_domains * self.num_chunk_tokens
        return self.num_pair_rows < self.num_chunk_tokens and self.num_other_domains > 0

    @property
    def is_dense(self) -> bool:
        """Whether every token has a row for every other domain, whether it goes there or not: with
        fixed sizes, where there is room for all."""
        return not self.exact_sizes and not self.can_overflow

    # Of the table of partial sums: for each chunk the rows of its call's output, own tokens first,
    # then what came back; own tokens' rows where they are apart; a row of zeros.

    @property
    def num_chunk_rows(self) -> int:
        """Partial sums of a chunk."""
        own = 0 if self.is_own_apart else self.num_chunk_tokens
        return own + self.num_chunk_foreign + self.num_chunk_sent

    @property
    def num_partial_rows(self) -> int:
        """Partial sums of a call, and the row of zeros."""
        apart = self.num_max_tokens_per_rank if self.is_own_apart else 0
        return self.num_chunks * self.num_chunk_rows + apart + 1

    # Rows of a layer's memory, at the same place in every call.

    @property
    def row_of_nobody(self) -> int:
        """Behind the rows of own tokens: what is sent where there is no token."""
        return self.num_max_tokens_per_rank

    @property
    def row_of_zeros(self) -> int:
        """Behind the partial sums."""
        return self.num_partial_rows - 1


@dataclass(frozen=True)
class CallSizes(ExchangeSizes):
    """Sizes of a call in which no rank has more than `num_max_tokens_per_rank` tokens, which may be
    fewer than its layer has room for.

    >>> layer = TwoLevelShape(2, 8, 256, 8, 7168, 2048, 4096)
    >>> layer.num_pair_rows, CallSizes(layer, 128).num_pair_rows
    (4096, 128)
    """

    layer: TwoLevelShape
    num_max_tokens_per_rank: int

    def __post_init__(self) -> None:
        for name in ExchangeSizes.__annotations__.keys() - {"num_max_tokens_per_rank"}:
            object.__setattr__(self, name, getattr(self.layer, name))

    @property
    def is_own_apart(self) -> bool:
        return self.layer.is_own_apart

    @property
    def row_of_nobody(self) -> int:
        return self.layer.row_of_nobody

    @property
    def row_of_zeros(self) -> int:
        return self.layer.row_of_zeros


@dataclass(frozen=True)
class TwoLevelShape(ExchangeSizes):
    """Sizes of a layer over several domains, equal on every rank.

    num_domains: 1 to 1024. num_ranks: of each domain. num_experts: of all domains together, a
    multiple of num_domains * num_ranks; a domain has at least num_topk. num_max_tokens_per_rank:
    most own tokens of a rank in one call. num_max_foreign_tokens: most tokens that a rank takes
    from all other domains together in one call; each chunk has its share, rounded up, and with
    fixed sizes each domain its share of that. None: as many as they may send. num_chunks: 1 to 64.
    exact_sizes: the host knows what is sent, and no more than that travels; else each chunk has
    the same number of rows for each domain. The rest as in MoEShape, of one domain.

    >>> shape = TwoLevelShape(4, 8, 256, 8, 7168, 2048, 4096, num_chunks=4)
    >>> shape.num_experts_per_domain, shape.num_chunk_tokens, shape.num_chunk_foreign
    (64, 1024, 3072)
    >>> shape.domain_shape.num_max_tokens_per_rank
    4096
    """

    num_domains: int
    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    num_max_tokens_per_rank: int
    num_max_foreign_tokens: int | None = None
    num_chunks: int = 1
    exact_sizes: bool = field(default=False, kw_only=True)
    weights: WeightsName = field(default=DEFAULT_WEIGHTS, kw_only=True)
    biases: bool = field(default=False, kw_only=True)
    num_shared_experts: int = field(default=0, kw_only=True)
    num_pool_tokens: int | None = field(default=None, kw_only=True)
    token_format: TokenFormatName = field(default=None, kw_only=True)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.token_format is None:
            object.__setattr__(self, "token_format", default_token_format(self.weights))
        if self.tokens.has_float_scales:
            raise ValueError(
                "token_format must have scales of powers of two, or none, between domains; "
                f"got {self.token_format!r}"
            )
        limits = {"num_domains": MAX_DOMAINS, "num_chunks": MAX_CHUNKS}
        for name, most in limits.items():
            value = require_int(name, getattr(self, name), f"1 to {most}")
            if not 1 <= value <= most:
                raise ValueError(f"{name} must be 1 to {most}; got {value}")
        least = {"num_ranks": 1, "num_max_tokens_per_rank": 1, "num_topk": 1}
        if self.num_max_foreign_tokens is not None:
            least["num_max_foreign_tokens"] = 0
        for name, lowest in least.items():
            value = require_int(name, getattr(self, name), f"at least {lowest}")
            if value < lowest:
                raise ValueError(f"{name} must be at least {lowest}; got {value}")
        if not isinstance(self.exact_sizes, bool):
            raise TypeError(f"exact_sizes must be a bool; got {self.exact_sizes!r}")
        num_owners = self.num_domains * self.num_ranks
        allowed = (
            f"a positive multiple of the {num_owners} ranks of all domains, and num_topk "
            f"({self.num_topk}) or more for each of the {self.num_domains} domains"
        )
        num_experts = require_int("num_experts", self.num_experts, allowed)
        if (
            num_experts < 1
            or num_experts % num_owners
            or num_experts // self.num_domains < self.num_topk
        ):
            raise ValueError(f"num_experts must be {allowed}; got {num_experts}")
        allowed = f"0 to {MAX_SHARED_EXPERTS}"
        num_shared = require_int("num_shared_experts", self.num_shared_experts, allowed)
        if not 0 <= num_shared <= MAX_SHARED_EXPERTS:
            raise ValueError(f"num_shared_experts must be {allowed}; got {num_shared}")
        _ = self.domain_shape, self.own_shape  # or an error

    @property
    def tokens(self) -> TokenFormat:
        return token_format(self.token_format)

    @property
    def row(self) -> RowFormat:
        """Of a token between domains."""
        return RowFormat.of(self.tokens, self.hidden, self.num_topk)

    @property
    def is_own_apart(self) -> bool:
        """Whether own tokens have a call of their own, in front of the chunks': every token of a
        call goes to its shared experts, and foreign ones must not."""
        return self.num_shared_experts > 0

    @property
    def stages_own(self) -> bool:
        """Whether own tokens wait in memory of their own for the calls that take them: with several
        calls. Otherwise they are quantized into the domain's buffer."""
        return self.num_chunks > 1 or self.is_own_apart

    @cached_property
    def domain_shape(self) -> MoEShape:
        """Of the calls inside a domain that foreign tokens take part in."""
        own = 0 if self.is_own_apart else self.num_chunk_tokens
        return self._call_shape(max(1, own + self.num_chunk_foreign), 0)

    @cached_property
    def own_shape(self) -> MoEShape | None:
        """Of the call of own tokens, where they have one."""
        if not self.is_own_apart:
            return None
        return self._call_shape(self.num_max_tokens_per_rank, self.num_shared_experts)

    def _call_shape(self, num_max_tokens: int, num_shared_experts: int) -> MoEShape:
        return MoEShape(
            num_ranks=self.num_ranks,
            num_experts=self.num_experts_per_domain,
            num_topk=self.num_topk,
            hidden=self.hidden,
            intermediate_hidden=self.intermediate_hidden,
            num_max_tokens_per_rank=num_max_tokens,
            num_pool_tokens=self.num_pool_tokens,
            weights=self.weights,
            token_format=self.token_format,
            biases=self.biases,
            num_shared_experts=num_shared_experts,
        )

    @property
    def buffer_bytes(self) -> dict[str, int]:
        """What a rank gives to the layer, by what it is for.

        >>> shape = TwoLevelShape(2, 8, 256, 8, 7168, 2048, 128)
        >>> {name: round(size / 2**20, 1) for name, size in shape.buffer_bytes.items()}
        {'symmetric buffers': 245.5, 'tokens between domains': 2.7, 'partial sums': 5.3}
        """
        shapes = [self.domain_shape, *([self.own_shape] if self.own_shape is not None else [])]
        row, tokens = self.row, self.num_max_tokens_per_rank
        # Ids of 8 bytes, and once more as the domain's own.
        staged = 8 * self.num_topk
        if self.stages_own:
            staged = row.weights.stop + (4 + 8) * self.num_topk
        id_table = 8 * (self.num_experts + 2)
        rows = self.num_chunks * (self.num_chunk_foreign + self.num_chunk_sent) + tokens + 1
        return {
            "symmetric buffers": sum(symm_buffer_layout(shape).num_bytes for shape in shapes),
            "tokens between domains": rows * row.num_bytes + tokens * staged + id_table,
            "partial sums": self.num_partial_rows * self.hidden * 2,
        }
