"""Tokens in BF16, which have no scales."""

from ..format import TokenFormat

FORMAT = TokenFormat("bf16", "bf16", 16, in_products="bf16", local_scales="NoTokenScales")
