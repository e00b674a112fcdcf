"""MXFP4: E2M1 values, and a UE8M0 scale for every 32 of them."""

DEFAULT_TOKENS = "mxfp8"
