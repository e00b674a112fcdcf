"""The MoE problem that a kernel is built for: `MoEShape`, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from deep_moe.formats.sizes import K_BLOCK, SIZE_UNIT
from deep_moe.tokens import TokenFormat, token_format
from deep_moe.weights import DEFAULT_WEIGHTS, check_weights_name, default_token_format

from .segments import align_up

if TYPE_CHECKING:
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

MAX_RANKS = 72  # one NVLink domain; KernelArgs has this many rank_buffers
MAX_EXPERTS = 1024  # of all ranks
MAX_SIZE = 2**31  # of tokens and their values, which are below it
MAX_TOPK = 32  # one warp lane per slot of a token
MAX_SHARED_EXPERTS = 4
MAX_CANDIDATE_BLOCK_M = 192
POOL_ROUNDING = 384  # rows; a multiple of the 16 by which scale columns are counted
# Rows of a buffer's pool where a caller says nothing. With 8,192 tokens on each of 8 ranks
# deepseek-v4-pro's buffer takes 0.97 GiB, where a row for each token that may come takes 5.5. It
# costs at most 0.9 % of the time (two H100s, 2026-11-26: benchmarks/LOG.md).
DEFAULT_POOL_TOKENS = 24_576
MIN_BLOCK_M = 8  # of all architectures; the block counters of the pool are sized for it
# A page of a list holds so many times what an even routing of the most tokens brings to a list, and
# all tokens of a rank that brings no more than so many.
_EVEN_SHARES_PER_LIST_PAGE = 4
_TOKENS_PER_LIST_PAGE = 128
_LIST_PAGE_ROUNDING = 32  # slots, 128 bytes


def require_int(name: str, value: object, allowed: str) -> int:
    """`value` as an int, or a TypeError that names the field and what it may be."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, {allowed}; got {value!r}")
    return value


def expected_tokens_per_expert(
    num_tokens: int, *, num_topk: int, num_experts_per_rank: int
) -> Fraction:
    """Tokens that an expert gets when all ranks bring `num_tokens` and routing is uniform.

    Each rank's tokens spread over all ranks' experts, so that of how many ranks they are makes no
    difference.

    >>> expected_tokens_per_expert(10, num_topk=6, num_experts_per_rank=32)
    Fraction(15, 8)
    """
    return Fraction(num_tokens * num_topk, num_experts_per_rank)


@dataclass(frozen=True)
class MoEShape:
    """Sizes of one expert-parallel MoE layer, equal on every rank.

    num_ranks: ranks among which the experts are divided, 1 to 72.
    num_experts: experts of all ranks together, a multiple of `num_ranks`, at most 1024.
    num_topk: expert slots per token, 1 to 32 and not above `num_experts`.
    hidden: width of a token, a multiple of 32.
    intermediate_hidden: width between the two linear layers, the same.
    num_max_tokens_per_rank: most tokens that a rank brings to one call, at least 1.
    num_pool_tokens: rows of the pool that received tokens go through, a multiple of 384. With fewer
        than a call may bring, the pool is a ring, whose rows are used again within a call. None:
        as many as a call may bring. As many or more become None.
    weights: format of the weights. biases: whether both linear layers have biases.
    num_shared_experts: experts, of the routed ones' widths, that every rank has and that each token
        goes to beside its slots, 0 to 4; with `num_topk` at most 32. `num_experts` is without them.
    token_format: of the caller's tokens, "mxfp8", "nvfp4", "fp8_128" or "fp8_token", the last two
        with hidden a multiple of 128, or "bf16"; which of them go with the weights, depends on the
        target. A shape knows none, so there is a default only where all targets have the same.
    has_gate: whether Linear1 has rows of gate above those of up, or up alone: as the activation of
        the call says (`choose_config`). Buffers are the same for both. Without, there are no
        biases.

    >>> shape = MoEShape(num_ranks=8, num_experts=256, num_topk=8, hidden=7168,
    ...                  intermediate_hidden=2048, num_max_tokens_per_rank=256)
    >>> shape.num_experts_per_rank, shape.num_pool_rows
    (32, 22656)
    """

    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    num_max_tokens_per_rank: int
    num_pool_tokens: int | None = None
    weights: WeightsName = field(default=DEFAULT_WEIGHTS, kw_only=True)
    biases: bool = field(default=False, kw_only=True)
    num_shared_experts: int = field(default=0, kw_only=True)
    token_format: TokenFormatName = field(default=None, kw_only=True)  # type: ignore[arg-type]
    has_gate: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.token_format is None:
            object.__setattr__(self, "token_format", default_token_format(self.weights))
        check_weights_name(self.weights)
        if not self.tokens.is_of_products:
            raise ValueError(
                f"token_format must be one that products take, as {self.tokens.in_products!r}; "
                f"got {self.token_format!r}"
            )
        sizes = f"a positive multiple of {SIZE_UNIT}"
        allowed = {
            "num_ranks": f"1 to {MAX_RANKS}",
            "num_experts": f"a positive multiple of num_ranks, at most {MAX_EXPERTS}",
            "num_topk": f"1 to {MAX_TOPK}",
            "hidden": sizes,
            "intermediate_hidden": sizes,
            "num_max_tokens_per_rank": "at least 1",
            "num_pool_tokens": f"a positive multiple of {POOL_ROUNDING}",
            "num_shared_experts": f"0 to {MAX_SHARED_EXPERTS}",
        }
        for name, words in allowed.items():
            if name != "num_pool_tokens" or self.num_pool_tokens is not None:
                require_int(name, getattr(self, name), words)
        for name in ("biases", "has_gate"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool; got {getattr(self, name)!r}")
        if self.biases and not self.has_gate:
            raise ValueError(
                "biases must be False with an activation without a gate, for which there are none; "
                "got True"
            )

        def check(name: str, valid: bool, rule: str | None = None) -> None:
            if not valid:
                value = getattr(self, name)
                raise ValueError(f"{name} must be {rule or allowed[name]}; got {value}")

        check("num_ranks", 1 <= self.num_ranks <= MAX_RANKS)
        check(
            "num_experts",
            1 <= self.num_experts <= MAX_EXPERTS and self.num_experts % self.num_ranks == 0,
            f"a positive multiple of num_ranks ({self.num_ranks}), at most {MAX_EXPERTS}",
        )
        check("num_topk", 1 <= self.num_topk <= MAX_TOPK)
        check(
            "num_topk",
            self.num_topk <= self.num_experts,
            f"at most num_experts ({self.num_experts})",
        )
        for name in ("hidden", "intermediate_hidden"):
            size = getattr(self, name)
            check(name, size > 0 and size % SIZE_UNIT == 0)
            check(name, size < MAX_SIZE, "below 2^31")
        if self.tokens.scale_dtype == "f32":
            rule = f"a multiple of {K_BLOCK} with token_format {self.token_format}"
            check("hidden", self.hidden % K_BLOCK == 0, rule)
        check("num_max_tokens_per_rank", self.num_max_tokens_per_rank >= 1)
        check("num_max_tokens_per_rank", self.num_max_tokens_per_rank < MAX_SIZE, "below 2^31")
        check("num_shared_experts", 0 <= self.num_shared_experts <= MAX_SHARED_EXPERTS)
        check(
            "num_shared_experts",
            self.num_slots <= MAX_TOPK,
            f"at most {MAX_TOPK - self.num_topk} with num_topk {self.num_topk}",
        )
        if self.num_pool_tokens is None:
            return
        lacking = POOL_ROUNDING - self.num_pool_tokens
        check(
            "num_pool_tokens",
            lacking <= 0,
            f"{allowed['num_pool_tokens']}, {lacking} rows more at least",
        )
        check("num_pool_tokens", self.num_pool_tokens % POOL_ROUNDING == 0)
        if self.num_pool_tokens >= self.most_pool_tokens:
            object.__setattr__(self, "num_pool_tokens", None)

    @property
    def padded(self) -> MoEShape:
        """The layer that kernels compute and buffers hold: sizes up to multiples of 128. This one,
        if they are.

        >>> shape = MoEShape(4, 128, 4, 2880, 2880, 256)
        >>> shape.padded.hidden, shape.padded.padded == shape.padded
        (2944, True)
        """
        hidden, intermediate = (
            align_up(size, K_BLOCK) for size in (self.hidden, self.intermediate_hidden)
        )
        if (hidden, intermediate) == (self.hidden, self.intermediate_hidden):
            return self
        return replace(self, hidden=hidden, intermediate_hidden=intermediate)

    @property
    def buffer_arguments(self) -> dict[str, Any]:
        """What `get_symm_buffer_for_mega_moe` takes behind the group, by name: a buffer for calls
        of this shape.

        >>> sorted(MoEShape(2, 8, 2, 256, 128, 16).buffer_arguments)[:4]
        ['biases', 'hidden', 'intermediate_hidden', 'num_experts']
        """
        names = (one.name for one in fields(self) if one.name not in ("num_ranks", "has_gate"))
        return {name: getattr(self, name) for name in names}

    @property
    def tokens(self) -> TokenFormat:
        """What tokens and Linear1's output are."""
        return token_format(self.token_format)

    def with_gate(self, has_gate: bool) -> MoEShape:
        """The same layer for an activation with or without a gate."""
        return self if has_gate is self.has_gate else replace(self, has_gate=has_gate)

    @property
    def num_l1_matrices(self) -> int:
        """Matrices of `intermediate_hidden` rows, one below the other, in Linear1's weights: gate
        and up, or up alone."""
        return 2 if self.has_gate else 1

    @property
    def num_l1_rows(self) -> int:
        """Rows of Linear1's weights.

        >>> shape = MoEShape(8, 512, 22, 1024, 2688, 256, has_gate=False)
        >>> shape.num_l1_rows, shape.with_gate(True).num_l1_rows
        (2688, 5376)
        """
        return self.num_l1_matrices * self.intermediate_hidden

    @property
    def num_weights_per_expert(self) -> int:
        """Values in the weights of both layers."""
        return self.hidden * (self.num_l1_rows + self.intermediate_hidden)

    @property
    def num_experts_per_rank(self) -> int:
        """Experts that live on one rank; rank r owns r*this .. (r+1)*this - 1."""
        return self.num_experts // self.num_ranks

    @property
    def num_local_experts(self) -> int:
        """Experts whose weights one rank holds: its routed ones, then the shared ones."""
        return self.num_experts_per_rank + self.num_shared_experts

    @property
    def num_slots(self) -> int:
        """Contributions to a token: one for each of its slots, then one for each shared expert."""
        return self.num_topk + self.num_shared_experts

    def expected_tokens_per_expert(self, num_tokens: int) -> Fraction:
        """What an expert of this layer gets, by that formula, when ranks bring `num_tokens`.

        >>> float(MoEShape(8, 256, 8, 7168, 2048, 1024).expected_tokens_per_expert(1024))
        256.0
        """
        return expected_tokens_per_expert(
            num_tokens,
            num_topk=self.num_topk,
            num_experts_per_rank=self.num_experts_per_rank,
        )

    def expected_tokens_per_local_expert(self, num_tokens: int) -> Fraction:
        """The same over all experts of a rank, of which the shared ones get its own tokens.

        >>> shape = MoEShape(8, 256, 8, 7168, 2048, 1024, num_shared_experts=1)
        >>> float(shape.expected_tokens_per_local_expert(33))  # 32 experts of 8.25, one of 33
        9.0
        """
        routed = self.num_experts_per_rank * self.expected_tokens_per_expert(num_tokens)
        return (routed + self.num_shared_experts * num_tokens) / self.num_local_experts

    @property
    def num_max_received(self) -> int:
        """Rows that a rank may have to compute: every slot of all ranks' tokens, for a token may
        name an expert in several slots, and for each shared expert its own tokens."""
        of_all_ranks = self.num_ranks * self.num_max_tokens_per_rank * self.num_topk
        return of_all_ranks + self.num_shared_experts * self.num_max_tokens_per_rank

    @property
    def most_pool_tokens(self) -> int:
        """Rows of a pool in which every row that a call may bring has its own: all that is
        received, and, as each expert starts on a block boundary, up to 191 rows behind its last
        token with the largest blocks. The sum is rounded up, and the same for all block sizes.

        >>> MoEShape(8, 256, 8, 7168, 2048, 256).most_pool_tokens  # 2048*8 + 32*191, to 384
        22656
        """
        padding = self.num_local_experts * (MAX_CANDIDATE_BLOCK_M - 1)
        return align_up(self.num_max_received + padding, POOL_ROUNDING)

    @property
    def num_pool_rows(self) -> int:
        """Rows of the pool."""
        return self.num_pool_tokens or self.most_pool_tokens

    @property
    def is_bounded(self) -> bool:
        """Whether the pool has fewer rows than a call may bring."""
        return self.num_pool_tokens is not None

    @property
    def num_max_pool_blocks(self) -> int:
        """Blocks that a call may have at the smallest block size of any architecture, whether each
        has rows of its own or not."""
        return self.most_pool_tokens // MIN_BLOCK_M

    @property
    def num_padded_sf_pool_tokens(self) -> int:
        """Columns of the pool's scale arrays. Each block's scales are padded to 128 columns. With
        the worst case of rows it is also the worst case of padding, blocks of 16 tokens, that is
        used for all, so that the buffer does not depend on the tile that a call picks. A ring has
        two columns per row: then small blocks find fewer places in it than it has rows.

        >>> MoEShape(8, 256, 8, 7168, 2048, 256, 3840).num_padded_sf_pool_tokens
        7680
        """
        worst_case = self.most_pool_tokens // 16 * 128
        return min(worst_case, 2 * self.num_pool_rows) if self.is_bounded else worst_case

    @property
    def num_list_page_slots(self) -> int:
        """Slots in a page of the lists that ranks write for each other, one for each expert and
        source rank. So many that lists have one page but where routing is far from even, or tokens
        name an expert in several slots.

        >>> MoEShape(8, 384, 6, 7168, 3072, 8192).num_list_page_slots  # 4 * 8192*6/384
        512
        >>> MoEShape(8, 384, 6, 7168, 3072, 512).num_list_page_slots
        128
        """
        num_slots = self.num_max_tokens_per_rank * self.num_topk
        even_share = -(-num_slots // self.num_experts)
        wanted = max(
            _EVEN_SHARES_PER_LIST_PAGE * even_share,
            min(self.num_max_tokens_per_rank, _TOKENS_PER_LIST_PAGE),
        )
        return min(align_up(wanted, _LIST_PAGE_ROUNDING), num_slots)

    @property
    def num_further_list_pages(self) -> int:
        """Pages of a source rank's lists on one owner beyond each list's first. A list of n slots
        takes (n - 1) // page of them, and all together have no more slots than the rank: so many
        suffice for all, and one may need them all.

        >>> MoEShape(8, 384, 6, 7168, 3072, 8192).num_further_list_pages
        95
        """
        num_slots = self.num_max_tokens_per_rank * self.num_topk
        return (num_slots - 1) // self.num_list_page_slots

    @property
    def num_l2_mask_words(self) -> int:
        """64-bit words that hold one bit per Linear1 n-block, of which there are at most
        2*intermediate_hidden/128."""
        num_l1_n_blocks = 2 * self.padded.intermediate_hidden // 128
        return -(-num_l1_n_blocks // 64)
