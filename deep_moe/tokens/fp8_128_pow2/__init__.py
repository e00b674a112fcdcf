"""Tokens in E4M3 with a float32 power of two for every 128 values: products take each as four equal
UE8M0 scales."""

from ..format import TokenFormat

FORMAT = TokenFormat(
    "fp8_128_pow2",
    "e4m3",
    8,
    in_products="mxfp8",
    local_scales="FloatPowersPer128",
    values_per_scale=128,
    scale_dtype="f32",
    values_per_word=128,
    rounds_scales=True,
)
