"""A weight format for tests, and for those who write one: E2M1, with one float32 per row."""

DEFAULT_TOKENS = "bf16"
