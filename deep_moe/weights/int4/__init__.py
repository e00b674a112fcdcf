"""INT4: integers from -8 to 7, and a BF16 scale for every 32 or 128 of them."""

DEFAULT_TOKENS = "bf16"
