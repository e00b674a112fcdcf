"""Tokens in E4M3 with one float32 scale of any size for all values of a token."""

from ..format import TokenFormat

FORMAT = TokenFormat(
    "fp8_token",
    "e4m3",
    8,
    in_products="fp8_token",
    local_scales="FloatPerToken",
    scale_dtype="f32",
    scales_whole_tokens=True,
)
