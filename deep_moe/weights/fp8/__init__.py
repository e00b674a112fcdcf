"""FP8: E4M3 values with scales per 32 or per 128 x 128 of them."""

DEFAULT_TOKENS = "mxfp8"
