"""Tokens in E4M3 with a UE8M0 scale for every 128 values, four in an int32: products take each as
four equal ones."""

from ..format import TokenFormat

FORMAT = TokenFormat(
    "fp8_128_ue8m0",
    "e4m3",
    8,
    in_products="mxfp8",
    local_scales="ByteScalesPer128",
    values_per_scale=128,
    scale_dtype="u32",
    values_per_word=512,
    rounds_scales=True,
)
