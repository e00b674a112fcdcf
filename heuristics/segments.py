"""Memory maps as data: a layout is a list of named segments, declared once.

The symmetric buffer, the shared memory of a CTA and tensor memory are all described by a
`Layout`. Python allocates from it, the JIT renders its constants into the kernel's `Config`, and
the command line prints it, so the three cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

DTYPE_BYTES = {
    "u8": 1,
    "bf16": 2,
    "u32": 4,
    "i32": 4,
    "f32": 4,
    "u64": 8,
    "i64": 8,
}


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


def ceil_div(value: int, divisor: int) -> int:
    """Integer quotient, rounded up."""
    return -(-value // divisor)


@dataclass(frozen=True)
class Segment:
    """One named array inside a layout. `offset` and `num_bytes` are in bytes."""

    name: str
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]
    purpose: str

    @property
    def end(self) -> int:
        """Offset of the first byte behind the segment."""
        return self.offset + self.num_bytes

    @property
    def stride(self) -> int:
        """Distance between neighbours along the first dimension, in the units of `offset`."""
        return self.num_bytes // self.shape[0]


@dataclass(frozen=True)
class Layout:
    """Segments in address order, their total size, and named positions between them."""

    unit: ClassVar[str] = "u8"  # dtype of what offsets and sizes count
    segments: tuple[Segment, ...]
    num_bytes: int
    marks: tuple[tuple[str, int], ...] = ()

    def __getitem__(self, name: str) -> Segment:
        for segment in self.segments:
            if segment.name == name:
                return segment
        known = ", ".join(segment.name for segment in self.segments)
        raise KeyError(f"no segment named {name!r}; there are {known}")

    def mark(self, name: str) -> int:
        """The named position, in bytes from the start."""
        return dict(self.marks)[name]

    def constants(self) -> dict[str, int]:
        """What the kernel's `Config` gets, beside the dimensions and types: `<segment>_offset` and
        `<segment>_stride` for each segment, the marks, and `num_bytes`."""
        return {**self._places("offset"), **dict(self.marks), "num_bytes": self.num_bytes}

    def _places(self, word_for_offset: str) -> dict[str, int]:
        return {
            f"{segment.name}_{word}": value
            for segment in self.segments
            for word, value in ((word_for_offset, segment.offset), ("stride", segment.stride))
        }

    def dimensions(self) -> dict[str, int]:
        """`<segment>_dim<i>`: the elements along each dimension of each segment.

        >>> Layout((Segment("x", 0, 24, "u32", (2, 3), "tokens"),), 24).dimensions()
        {'x_dim0': 2, 'x_dim1': 3}
        """
        return {
            f"{segment.name}_dim{i}": size
            for segment in self.segments
            for i, size in enumerate(segment.shape)
        }

    def element_types(self) -> dict[str, str]:
        """`<segment>_element`: the dtype of each segment."""
        return {f"{segment.name}_element": segment.dtype for segment in self.segments}

    def rows(self) -> Iterator[Segment]:
        """The segments with alignment gaps as rows named `padding`: the sizes of all rows add up
        to `num_bytes`."""
        position = 0
        for segment in self.segments:
            if segment.offset > position:
                yield self._padding(position, segment.offset)
            yield segment
            position = segment.end
        if self.num_bytes > position:
            yield self._padding(position, self.num_bytes)

    def _padding(self, begin: int, end: int) -> Segment:
        return Segment("padding", begin, end - begin, self.unit, (end - begin,), "unused")


class LayoutBuilder:
    """Appends segments one after the other and keeps each aligned."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._marks: list[tuple[str, int]] = []
        self._end = 0

    def add(
        self, name: str, dtype: str, shape: tuple[int, ...], purpose: str, *, alignment: int
    ) -> None:
        """Append an array of `dtype` and `shape` at the next multiple of `alignment` bytes."""
        offset = align_up(self._end, alignment)
        num_bytes = prod(shape) * DTYPE_BYTES[dtype]
        self._segments.append(Segment(name, offset, num_bytes, dtype, shape, purpose))
        self._end = offset + num_bytes

    def mark(self, name: str, *, alignment: int = 1) -> None:
        """Name the current end, moved up to a multiple of `alignment`."""
        self._end = align_up(self._end, alignment)
        self._marks.append((name, self._end))

    def build(self, *, alignment: int) -> Layout:
        """The finished layout; its size is a multiple of `alignment`."""
        num_bytes = align_up(self._end, alignment)
        return Layout(tuple(self._segments), num_bytes, tuple(self._marks))
