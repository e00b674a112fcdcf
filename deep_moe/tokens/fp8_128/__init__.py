"""Tokens in E4M3 with a float32 scale of any size for every 128 values."""

from ..format import TokenFormat

FORMAT = TokenFormat(
    "fp8_128",
    "e4m3",
    8,
    in_products="fp8_128",
    local_scales="FloatsPer128",
    values_per_scale=128,
    scale_dtype="f32",
    values_per_word=128,
)
