"""FP8: E4M3 values with scales per 32, per 128 x 128, per row or per matrix of them."""

DEFAULT_TOKENS = "mxfp8"
