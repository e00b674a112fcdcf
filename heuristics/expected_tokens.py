"""How many tokens per rank a call has, as far as one rank can tell.

The tile has to fit the tokens that a rank's experts receive, from all ranks; before the launch the
rank knows only how many tokens it sends itself.
"""

from __future__ import annotations

from .shape import MoEShape


def expected_tokens_per_rank(shape: MoEShape, num_tokens: int, num_received_tokens: int = 0) -> int:
    """The rank's own number of tokens, unless its experts received clearly more in its last call.

    num_received_tokens: (token, expert) pairs in an earlier call, 0 if there was none. Ranks with
    equal numbers of tokens and uniform routing receive num_tokens * num_topk. With more than half
    as many again, the other ranks bring more tokens, or this rank's experts are the popular ones;
    then num_received_tokens / num_topk counts, rounded up to a power of two or 3/2 of one, so that
    a load that varies a little asks for few kernels. Less than expected changes nothing: a tile
    that is too large costs little, one that is too small reads the weights again and again.

    >>> shape = MoEShape(4, 384, 6, 7168, 3072, 8192)
    >>> [expected_tokens_per_rank(shape, 64, 6 * n) for n in (0, 64, 96, 97, 130, 600, 9000)]
    [64, 64, 64, 128, 192, 768, 8192]
    """
    if 2 * num_received_tokens <= 3 * num_tokens * shape.num_topk:
        return num_tokens
    per_rank = -(-num_received_tokens // shape.num_topk)
    power = 1 << (per_rank - 1).bit_length()  # not below per_rank, less than twice as much
    rounded = power - power // 4 if per_rank <= power - power // 4 else power
    return min(max(rounded, num_tokens), shape.num_max_tokens_per_rank)
