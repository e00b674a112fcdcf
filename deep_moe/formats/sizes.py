"""Sizes that all formats and kernels are made for."""

SCALE_GROUP = (1, 32)  # rows and values along K that share a scale

# Of which hidden and intermediate sizes are multiples, and up to multiples of which weights are
# padded with zeros when they are transformed.
SIZE_UNIT, K_BLOCK = 32, 128
