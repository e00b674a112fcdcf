"""Operands: awkward values against each other, then random ones. The same on every machine.

RandomState is the generator that numpy promises never to change; floating-point operands are made
of bits, so that no library's rounding takes part.
"""

from __future__ import annotations

import zlib

import numpy as np

NUM = 2048  # operands of a lane-wise instruction

_INTEGER = {
    8: [0, 1, 2, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF],
    16: [0, 1, 2, 15, 16, 17, 0xFF, 0x100, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF],
    32: [
        *(0, 1, 2, 3, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000),
        *(0x7FFFFF, 0x800000, 0xFFFFFF, 0x1000000, 0x1000001, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000),
        *(0x80000001, 0xFFFF8000, 0xFFFFFF80, 0xFFFFFF7F, 0xFFFFFFFE, 0xFFFFFFFF),
    ],
    64: [
        *(0, 1, 2, 31, 32, 63, 64, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32),
        *((1 << 53) - 1, 1 << 53, (1 << 53) + 1, (1 << 24) + 1, (1 << 63) - 1, (1 << 63) - 1024),
        *(1 << 63, (1 << 63) + 1, (1 << 64) - 1, (1 << 64) - 2, (1 << 64) - (1 << 31)),
        *((1 << 64) - (1 << 31) - 1, (1 << 64) - 1025, (1 << 64) - (1 << 33)),
    ],
}
_F32 = [
    *(0, 1, 2, 0x400000, 0x7FFFFF, 0x800000, 0x800001),  # zero, denormals, the smallest normal
    *(0x3F800000, 0x3F800001, 0x3F7FFFFF, 0x3F000000, 0x3F000001, 0x3EFFFFFF),  # 1, 1/2
    *(0x3FC00000, 0x40000000, 0x40200000, 0x40600000, 0x3FBFFFFF),  # 1.5, 2, 2.5, 3.5
    *(0x43E00000, 0x43E80000, 0x43E80001, 0x43F00000),  # 448, 464, 480
    *(0x47600000, 0x47700000, 0x477FE000, 0x477FF000, 0x47800000),  # 57344, 61440, 65504, 65520
    *(0x42FE0000, 0x42FF0000, 0x43000000, 0x437F0000, 0x437F8000, 0x43800000),  # 127, 255
    *(0x46FFFE00, 0x46FFFF00, 0x47000000, 0x477FFF00, 0x477FFF80),  # 32767, 65535
    *(0x4B000000, 0x4B800000, 0x4B800001, 0x4EFFFFFF, 0x4F000000, 0x4F000001),  # 2^23, 2^31
    *(0x4F7FFFFF, 0x4F800000, 0x5EFFFFFF, 0x5F000000, 0x5F7FFFFF, 0x5F800000),  # 2^32, 2^63, 2^64
    *(0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000),  # f16's denormals
    *(0x3A800000, 0x3A800001, 0x3B000000, 0x3C7FFFFF, 0x3C800000, 0x3C700000),  # e4m3's
    *(0x37000000, 0x37000001, 0x37800000, 0x38700000),  # e5m2's
    *(0x7F000000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000),  # the largest, infinity
    *(0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FA12345),  # NaN
]
_F64 = [
    *(0, 1, (1 << 52) - 1, 1 << 52, (1 << 52) + 1),
    *(0x3FF0000000000000, 0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF, 0x3FE0000000000000),
    *(0x3FF8000000000000, 0x4000000000000000, 0x4004000000000000, 0x400C000000000000),
    *(0x41DFFFFFFFC00000, 0x41E0000000000000, 0x41EFFFFFFFE00000, 0x41F0000000000000),
    *(0x43DFFFFFFFFFFFFF, 0x43E0000000000000, 0x43EFFFFFFFFFFFFF, 0x43F0000000000000),
    *(0x36A0000000000000, 0x3690000000000000, 0x3690000000000001, 0x3810000000000000),
    *(0x380FFFFFFFFFFFFF, 0x47EFFFFFE0000000, 0x47EFFFFFEFFFFFFF, 0x47EFFFFFF0000000),
    *(0x40EFFC0000000000, 0x40EFFE0000000000, 0x3FF0000010000000, 0x3FF0000030000000),
    *(0x3E70000000000000, 0x3E60000000000000, 0x3E60000000000001),
    *(0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000),
    *(0x7FF0000000000001, 0x7FF8000000000000, 0x7FFFFFFFFFFFFFFF, 0x7FF4000000012345),
]
_F16 = [
    *(0, 1, 2, 0x3FF, 0x400, 0x401, 0x3BFF, 0x3C00, 0x3C01, 0x3800, 0x3E00, 0x4000, 0x4100),
    *(0x5F00, 0x5F40, 0x6400, 0x6800, 0x77FF, 0x7BFE, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF),
]
_BF16 = [
    *(0, 1, 2, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x3F00, 0x3FC0, 0x4000, 0x4020),
    *(0x43E0, 0x4F00, 0x7F00, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF),
]
# kind: bits, awkward values, bits of the exponent (0 for integers)
_FLOATS = {
    "f16": (16, _F16, 5),
    "bf16": (16, _BF16, 8),
    "f32": (32, _F32, 8),
    "f64": (64, _F64, 11),
}


class Source:
    """Random bits that depend on nothing but `name`."""

    def __init__(self, name: str) -> None:
        self._random = np.random.RandomState(zlib.crc32(name.encode()))

    def words(self, num: int, bits: int = 32) -> np.ndarray:
        dtype = np.dtype(f"<u{bits // 8}")
        return np.frombuffer(self._random.bytes(num * dtype.itemsize), dtype).copy()

    def below(self, limit: int, num: int) -> np.ndarray:
        return (self.words(num, 64) % np.uint64(limit)).astype(np.int64)

    def pick(self, values: list[int], num: int, bits: int) -> np.ndarray:
        return np.array(values, f"<u{bits // 8}")[self.below(len(values), num)]

    def shuffled(self, array: np.ndarray) -> np.ndarray:
        return array[np.argsort(self.words(len(array), 64), kind="stable")]

    def floats(self, kind: str, num: int, spread: int | None = None) -> np.ndarray:
        """Bits of random floats; spread: exponents of that many values around 1, else all."""
        bits, _, exponent_bits = _FLOATS[kind]
        words = self.words(num, bits)
        if spread is None:
            return words
        shift = bits - 1 - exponent_bits
        bias = (1 << (exponent_bits - 1)) - 1
        exponents = (bias - spread // 2 + self.below(spread, num)).astype(words.dtype)
        kept = words & words.dtype.type((1 << (bits - 1)) | ((1 << shift) - 1))
        return kept | (exponents << words.dtype.type(shift))


def bits_of(kind: str) -> int:
    """Of a kind of operand as it lies in memory."""
    if kind.startswith("amount"):
        return 32
    if kind.endswith("x2"):
        return 2 * bits_of(kind[:-2])
    return int("".join(c for c in kind if c.isdigit())) if kind not in ("bf16",) else 16


def awkward(kind: str) -> list[int]:
    if kind in _FLOATS:
        bits, values, _ = _FLOATS[kind]
        return values + [value | 1 << (bits - 1) for value in values]
    if kind.startswith("amount"):
        return [0, 1, 5, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 70, 255, 256, 1 << 31]
    return _INTEGER[bits_of(kind)]


def random_values(source: Source, kind: str, num: int) -> np.ndarray:
    if kind in _FLOATS:
        values = source.floats(kind, num)
        near = source.floats(kind, num, 24)
        return np.where(source.words(num) % 4 == 0, values, near)
    if kind.startswith("amount"):
        return source.below(int(kind[6:] or 70), num).astype("<u4")
    values = source.words(num, bits_of(kind))
    # Half of them short, so that quotients and comparisons are not all alike.
    shift = source.below(bits_of(kind), num).astype(values.dtype)
    return np.where(source.words(num) % 2 == 0, values, values >> shift)


def operands(name: str, kinds: tuple[str, ...], num: int = NUM) -> list[np.ndarray]:
    """`num` tuples of operands: the first half awkward values, crossed for the first two kinds;
    then random ones; of the last quarter the second is close to the first or its negative."""
    source = Source(name)
    pairs = [kind for kind in kinds if kind.endswith("x2")]
    if pairs:  # two independent lists of the halves
        halves = [kind[:-2] if kind.endswith("x2") else kind for kind in kinds]
        low, high = operands(name + " low", tuple(halves), num), operands(name, tuple(halves), num)
        high = [source.shuffled(array) for array in high]
        return [
            low_part.astype("<u4") | high_part.astype("<u4") << 16
            if kind.endswith("x2")
            else low_part
            for kind, low_part, high_part in zip(kinds, low, high, strict=True)
        ]
    half, quarter = num // 2, num // 4
    columns = []
    edges = [awkward(kind) for kind in kinds]
    if len(kinds) == 1:
        order = np.arange(half) % len(edges[0])
        if half < len(edges[0]):
            order = source.shuffled(np.arange(len(edges[0])))[:half]
        columns.append(order)
    else:
        cross = source.shuffled(np.arange(len(edges[0]) * len(edges[1])))
        cross = np.resize(cross, half)
        columns += [cross // len(edges[1]), cross % len(edges[1])]
    columns += [source.below(len(edges[i]), half) for i in range(2, len(kinds))]
    arrays = []
    for kind, values, column in zip(kinds, edges, columns, strict=True):
        first = np.array(values, f"<u{bits_of(kind) // 8}")[column]
        arrays.append(np.concatenate([first, random_values(source, kind, num - half)]))
    if len(kinds) > 1 and bits_of(kinds[0]) == bits_of(kinds[1]):
        a, b = arrays[0], arrays[1]
        near = a[-quarter:] + (source.below(7, quarter) - 3).astype(a.dtype)
        if kinds[0] in _FLOATS:
            sign = a.dtype.type(1 << (bits_of(kinds[0]) - 1))
            near = np.where(source.words(quarter) % 2 == 0, near, near ^ sign)
        b[-quarter:] = near
    return arrays
