"""Sizes that all formats and kernels are made for."""

# Rows and values along K that share a scale.
SCALE_GROUP = (1, 32)
WHOLE = 1 << 30  # more than any matrix has
WHOLE_ROW, WHOLE_MATRIX = (1, WHOLE), (WHOLE, WHOLE)

# Of which hidden and intermediate sizes are multiples, and up to multiples of which weights are
# padded with zeros when they are transformed.
SIZE_UNIT, K_BLOCK = 32, 128
