"""Tensor map images as the emulator reads them, packed independently of the launch layer."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def tensor_map(
    data_type: int,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 0,
    element_strides: Sequence[int] | None = None,
    nan_fill: int = 0,
) -> bytes:
    def padded(values: Sequence[int], count: int) -> list[int]:
        return list(values) + [0] * (count - len(values))

    rank = len(dims)
    image = struct.pack("<Q8B", 0x313050414D544D44, data_type, rank, 0, swizzle, nan_fill, 0, 0, 0)
    image += struct.pack("<Q5Q4Q", address, *padded(dims, 5), *padded(strides, 4))
    image += struct.pack("<5H5B", *padded(box, 5), *padded(element_strides or [1] * rank, 5))
    return image.ljust(128, b"\0")
