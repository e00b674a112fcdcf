"""Tokens in E4M3 with a UE8M0 scale for every 32 values, four in an int32."""

from ..format import TokenFormat

FORMAT = TokenFormat(
    "mxfp8",
    "e4m3",
    8,
    in_products="mxfp8",
    local_scales="ByteScalesPer32",
    values_per_scale=32,
    scale_dtype="u32",
    values_per_word=128,
    rounds_scales=True,
)
