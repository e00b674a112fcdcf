"""Sizes of published models, by name."""

from __future__ import annotations

from .shape import MoEShape

# name: (num_experts, num_topk, hidden, intermediate_hidden)
PRESETS: dict[str, tuple[int, int, int, int]] = {
    "deepseek-v4-flash": (256, 6, 4096, 2048),
    "deepseek-v4-pro": (384, 6, 7168, 3072),
    "deepseek-v3": (256, 8, 7168, 2048),
}


def preset_shape(name: str, *, num_ranks: int, num_max_tokens_per_rank: int) -> MoEShape:
    """The shape of a published model on `num_ranks` ranks.

    >>> shape = preset_shape("deepseek-v3", num_ranks=8, num_max_tokens_per_rank=256)
    >>> shape.num_experts, shape.num_topk, shape.hidden, shape.intermediate_hidden
    (256, 8, 7168, 2048)
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
    num_experts, num_topk, hidden, intermediate_hidden = PRESETS[name]
    return MoEShape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
    )
