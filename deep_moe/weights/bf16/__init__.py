"""BF16: no scales."""

DEFAULT_TOKENS = "bf16"
