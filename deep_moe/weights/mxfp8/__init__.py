"""MXFP8: E4M3 values, and a UE8M0 scale for every 32 of them."""

DEFAULT_TOKENS = None
