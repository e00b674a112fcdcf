"""NVFP4: E2M1 values, an E4M3 scale for every 16 of them, and a float32 one for each matrix."""

DEFAULT_TOKENS = None
