"""Tokens in E2M1 with an E4M3 scale for every 16 values, and a float32 for all of a token."""

from ..format import TokenFormat

FORMAT = TokenFormat(
    "nvfp4",
    "e2m1",
    4,
    in_products="nvfp4",
    local_scales="Nvfp4TokenScales",
    values_per_scale=16,
    scale_dtype="u32",
    values_per_word=64,
    has_token_scale=True,
)
