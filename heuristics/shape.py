"""The MoE problem that a kernel is built for: `MoEShape`, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from deep_moe.formats.weight_formats import DEFAULT_WEIGHTS, check_weights_name

from .segments import align_up

MAX_RANKS = 72  # one NVLink domain; KernelArgs has this many rank_buffers
MAX_TOPK = 32  # one warp lane per slot of a token
K_BLOCK = 128  # hidden and intermediate sizes are cut into blocks of this many elements
MAX_CANDIDATE_BLOCK_M = 192
POOL_ROUNDING = 384  # rows; a multiple of the 16 by which scale columns are counted
MIN_BLOCK_M = 8  # of all architectures; the block counters of the pool are sized for it


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
    num_experts: experts of all ranks together, a multiple of `num_ranks`.
    num_topk: expert slots per token, 1 to 32 and not above `num_experts`.
    hidden: width of a token, a multiple of 128.
    intermediate_hidden: width between the two linear layers, a multiple of 128.
    num_max_tokens_per_rank: most tokens that a rank brings to one call, at least 1.
    weights: format of the weights.

    >>> shape = MoEShape(num_ranks=8, num_experts=256, num_topk=8, hidden=7168,
    ...                  intermediate_hidden=2048, num_max_tokens_per_rank=256)
    >>> shape.num_experts_per_rank, shape.num_max_pool_tokens
    (32, 22656)
    """

    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    num_max_tokens_per_rank: int
    weights: str = field(default=DEFAULT_WEIGHTS, kw_only=True)

    def __post_init__(self) -> None:
        allowed = {
            "num_ranks": f"1 to {MAX_RANKS}",
            "num_experts": "a positive multiple of num_ranks",
            "num_topk": f"1 to {MAX_TOPK}",
            "hidden": f"a positive multiple of {K_BLOCK}",
            "intermediate_hidden": f"a positive multiple of {K_BLOCK}",
            "num_max_tokens_per_rank": "at least 1",
        }
        for name, words in allowed.items():
            require_int(name, getattr(self, name), words)
        check_weights_name(self.weights)

        def check(name: str, valid: bool, rule: str | None = None) -> None:
            if not valid:
                value = getattr(self, name)
                raise ValueError(f"{name} must be {rule or allowed[name]}; got {value}")

        check("num_ranks", 1 <= self.num_ranks <= MAX_RANKS)
        check(
            "num_experts",
            self.num_experts >= 1 and self.num_experts % self.num_ranks == 0,
            f"a positive multiple of num_ranks ({self.num_ranks})",
        )
        check("num_topk", 1 <= self.num_topk <= MAX_TOPK)
        check(
            "num_topk",
            self.num_topk <= self.num_experts,
            f"at most num_experts ({self.num_experts})",
        )
        check("hidden", self.hidden >= K_BLOCK and self.hidden % K_BLOCK == 0)
        check(
            "intermediate_hidden",
            self.intermediate_hidden >= K_BLOCK and self.intermediate_hidden % K_BLOCK == 0,
        )
        check("num_max_tokens_per_rank", self.num_max_tokens_per_rank >= 1)

    @property
    def num_experts_per_rank(self) -> int:
        """Experts that live on one rank; rank r owns r*this .. (r+1)*this - 1."""
        return self.num_experts // self.num_ranks

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

    @property
    def num_max_pool_tokens(self) -> int:
        """Rows of the token pool: every rank may send all slots of all its tokens here, for a token
        may name an expert in several slots, and each expert starts on a block boundary, so that
        behind its last token there are up to 191 rows with the largest blocks. The sum is rounded
        up, and the same for all block sizes.

        >>> MoEShape(8, 256, 8, 7168, 2048, 256).num_max_pool_tokens  # 2048*8 + 32*191, to 384
        22656
        """
        num_received = self.num_ranks * self.num_max_tokens_per_rank * self.num_topk
        padding = self.num_experts_per_rank * (MAX_CANDIDATE_BLOCK_M - 1)
        return align_up(num_received + padding, POOL_ROUNDING)

    @property
    def num_max_pool_blocks(self) -> int:
        """Blocks of the pool at the smallest block size of any architecture."""
        return self.num_max_pool_tokens // MIN_BLOCK_M

    @property
    def num_padded_sf_pool_tokens(self) -> int:
        """Columns of the pool's scale arrays. Each block's scales are padded to 128 columns; the
        worst case, blocks of 16 tokens, is used for all, so that the buffer does not depend on
        the tile that a call picks."""
        return self.num_max_pool_tokens // 16 * 128

    @property
    def num_l2_mask_words(self) -> int:
        """64-bit words that hold one bit per Linear1 n-block (2*intermediate_hidden/128)."""
        num_l1_n_blocks = 2 * self.intermediate_hidden // 128
        return -(-num_l1_n_blocks // 64)
