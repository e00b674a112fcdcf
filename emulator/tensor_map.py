"""Tensor maps: one description, two encodings.

`TensorMapSpec` has the parameters of cuTensorMapEncodeTiled and `Im2colMapSpec` those of
cuTensorMapEncodeIm2col. Both check the rules, so that a bad map is an error that names the field,
on every machine. `encode_cuda` asks the driver; `encode_emulated` packs the same parameters into an
image that the emulator reads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

TENSOR_MAP_BYTES = 128
EMULATED_MAGIC = 0x313050414D544D44  # "DMTMAP01"

MAX_DIM = 2**32
MAX_STRIDE = 2**40
MAX_BOX = 256
MAX_PIXELS = 1024


class DataType(IntEnum):
    """CUtensorMapDataType."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    PACKED_16U4_ALIGN8B = 13
    PACKED_16U4_ALIGN16B = 14
    PACKED_16U6_ALIGN16B = 15

    @property
    def bits(self) -> int:
        """Size of an element in global memory."""
        return _ELEMENT_BITS[self]

    @property
    def is_floating(self) -> bool:
        return DataType.FLOAT16 <= self <= DataType.TFLOAT32_FTZ

    @property
    def is_padded(self) -> bool:
        """Whether 16 elements become a 16-byte chunk of shared memory."""
        return self in (DataType.PACKED_16U4_ALIGN16B, DataType.PACKED_16U6_ALIGN16B)


_ELEMENT_BITS = {
    DataType.UINT8: 8,
    DataType.UINT16: 16,
    DataType.UINT32: 32,
    DataType.INT32: 32,
    DataType.UINT64: 64,
    DataType.INT64: 64,
    DataType.FLOAT16: 16,
    DataType.FLOAT32: 32,
    DataType.FLOAT64: 64,
    DataType.BFLOAT16: 16,
    DataType.FLOAT32_FTZ: 32,
    DataType.TFLOAT32: 32,
    DataType.TFLOAT32_FTZ: 32,
    DataType.PACKED_16U4_ALIGN8B: 4,
    DataType.PACKED_16U4_ALIGN16B: 4,
    DataType.PACKED_16U6_ALIGN16B: 6,
}


class Interleave(IntEnum):
    """CUtensorMapInterleave, the value that is in use."""

    NONE = 0


class Swizzle(IntEnum):
    """CUtensorMapSwizzle."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @classmethod
    def of_row_bytes(cls, num_bytes: int) -> Swizzle:
        """The one that spans a row of 32, 64 or 128 bytes.

        >>> Swizzle.of_row_bytes(64).name
        'B64'
        """
        return {32: cls.B32, 64: cls.B64, 128: cls.B128}[num_bytes]

    @property
    def span_bytes(self) -> int | None:
        """Widest row of a box, None without a limit."""
        return {Swizzle.NONE: None, Swizzle.B32: 32, Swizzle.B64: 64}.get(self, 128)


class OutOfBounds(IntEnum):
    """CUtensorMapFloatOOBfill."""

    ZEROS = 0
    NAN = 1


class L2Promotion(IntEnum):
    """CUtensorMapL2promotion."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


@dataclass(frozen=True)
class TensorMapSpec:
    """A tiled tensor map.

    address: of element 0, in bytes. dims: elements, innermost first. strides: bytes, of dims 1 and
    up, 0 or less than a row's bytes where rows share memory. box: elements copied at once.
    element_strides: step within a box, all 1 by default.
    """

    data_type: DataType
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE
    element_strides: tuple[int, ...] = ()
    interleave: Interleave = Interleave.NONE
    oob_fill: OutOfBounds = OutOfBounds.ZEROS
    l2_promotion: L2Promotion = L2Promotion.B256

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * rank)
        _require(1 <= rank <= 5, "dims", self.dims, "1 to 5 sizes")
        for name, length in (("strides", rank - 1), ("box", rank), ("element_strides", rank)):
            value = getattr(self, name)
            _require(len(value) == length, name, value, f"{length} values for {rank} dims")
        self._check_global()
        self._check_box()
        self._check_fill()

    # Of each size of the box; the last one is that of those that follow.
    _max_box: ClassVar[tuple[int, ...]] = (MAX_BOX,)

    def _check_fill(self) -> None:
        if self.oob_fill == OutOfBounds.NAN:
            _require(
                self.data_type.is_floating, "oob_fill", self.oob_fill, "ZEROS for this data_type"
            )

    def _check_global(self) -> None:
        alignment = 32 if self.data_type.is_padded else 16
        _require(
            self.address % alignment == 0,
            "address",
            hex(self.address),
            f"a multiple of {alignment} bytes",
        )
        for i, dim in enumerate(self.dims):
            _require(1 <= dim <= MAX_DIM, f"dims[{i}]", dim, "1 to 2**32")
        grain = 1
        if self.data_type.is_padded:
            grain = 128
        elif self.data_type == DataType.PACKED_16U4_ALIGN8B:
            grain = 2
        _require(self.dims[0] % grain == 0, "dims[0]", self.dims[0], f"a multiple of {grain}")
        for i, stride in enumerate(self.strides):
            _require(
                stride % alignment == 0 and 0 <= stride < MAX_STRIDE,
                f"strides[{i}]",
                stride,
                f"a multiple of {alignment} bytes below 2**40",
            )

    def _check_box(self) -> None:
        for i, size in enumerate(self.box):
            largest = self._max_box[min(i, len(self._max_box) - 1)]
            _require(1 <= size <= largest, f"box[{i}]", size, f"1 to {largest}")
        for i, step in enumerate(self.element_strides):
            _require(1 <= step <= 8, f"element_strides[{i}]", step, "1 to 8")
        row_bits = self.box[0] * self.data_type.bits
        if self.data_type.is_padded:
            _require(self.box[0] == 128, "box[0]", self.box[0], "128 for padded element types")
            allowed = (Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B)
            _require(
                self.swizzle in allowed,
                "swizzle",
                self.swizzle.name,
                "NONE, B128 or B128_ATOM_32B for padded element types",
            )
            return
        _require(row_bits % 128 == 0, "box[0]", self.box[0], "a row of a multiple of 16 bytes")
        span = self.swizzle.span_bytes
        if span is not None:
            _require(
                row_bits // 8 <= span,
                "box[0]",
                self.box[0],
                f"a row of at most {span} bytes with swizzle {self.swizzle.name}",
            )

    def encode_emulated(self) -> bytes:
        """The image that the emulator reads: 128 bytes, little endian."""
        return _image(self).ljust(TENSOR_MAP_BYTES, b"\0")

    def encode_cuda(self) -> bytes:
        """The driver's image for the current context."""
        from cuda.bindings import driver

        status, tensor_map = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType(int(self.data_type)),
            len(self.dims),
            self.address,
            [driver.cuuint64_t(dim) for dim in self.dims],
            # A map of one dimension has no strides, but the driver refuses the null pointer that an
            # empty list becomes.
            [driver.cuuint64_t(stride) for stride in self.strides or (16,)],
            [driver.cuuint32_t(size) for size in self.box],
            [driver.cuuint32_t(step) for step in self.element_strides],
            driver.CUtensorMapInterleave(int(self.interleave)),
            driver.CUtensorMapSwizzle(int(self.swizzle)),
            driver.CUtensorMapL2promotion(int(self.l2_promotion)),
            driver.CUtensorMapFloatOOBfill(int(self.oob_fill)),
        )
        return _encoded(self, status, tensor_map)


# Smallest and largest corner by the number of spatial dimensions.
_CORNERS = {1: (-(2**15), 2**15 - 1), 2: (-128, 127), 3: (-16, 15)}


@dataclass(frozen=True)
class Im2colMapSpec(TensorMapSpec):
    """An im2col tensor map, of images of channels: (C, W, N), (C, W, H, N) or (C, W, H, D, N).

    box: channels and pixels that are copied at once. lower_corner, upper_corner: of the box that
    the filter's base moves in, in the order W, H, D; the lower one from the image's first element,
    the upper one from its last. element_strides: steps of the base.
    """

    lower_corner: tuple[int, ...] = ()
    upper_corner: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rank = len(self.dims)
        _require(3 <= rank <= 5, "dims", self.dims, "3 to 5 sizes")
        _require(len(self.box) == 2, "box", self.box, "channels and pixels")
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * rank)
        low, high = _CORNERS[rank - 2]
        lengths = {"strides": rank - 1, "element_strides": rank}
        lengths |= {"lower_corner": rank - 2, "upper_corner": rank - 2}
        for name, length in lengths.items():
            value = getattr(self, name)
            _require(len(value) == length, name, value, f"{length} values for {rank} dims")
            if "corner" in name:
                _require(all(low <= x <= high for x in value), name, value, f"{low} to {high} each")
        for lower, upper, dim in zip(
            self.lower_corner, self.upper_corner, self.dims[1:-1], strict=True
        ):
            _require(
                lower <= dim - 1 + upper,
                "upper_corner",
                self.upper_corner,
                "corners with a box between them",
            )
        self._check_global()
        self._check_box()
        self._check_fill()

    _max_box: ClassVar[tuple[int, ...]] = (MAX_BOX, MAX_PIXELS)

    def encode_emulated(self) -> bytes:
        """The image that the emulator reads: 128 bytes, little endian."""
        corners = (*_padded(self.lower_corner, 3), *_padded(self.upper_corner, 3))
        image = bytearray(_image(self).ljust(112, b"\0"))
        image[13] = 1
        return bytes(image + struct.pack("<6h", *corners)).ljust(TENSOR_MAP_BYTES, b"\0")

    def encode_cuda(self) -> bytes:
        """The driver's image for the current context."""
        from cuda.bindings import driver

        status, tensor_map = driver.cuTensorMapEncodeIm2col(
            driver.CUtensorMapDataType(int(self.data_type)),
            len(self.dims),
            self.address,
            [driver.cuuint64_t(dim) for dim in self.dims],
            [driver.cuuint64_t(stride) for stride in self.strides],
            list(self.lower_corner),
            list(self.upper_corner),
            self.box[0],
            self.box[1],
            [driver.cuuint32_t(step) for step in self.element_strides],
            driver.CUtensorMapInterleave(int(self.interleave)),
            driver.CUtensorMapSwizzle(int(self.swizzle)),
            driver.CUtensorMapL2promotion(int(self.l2_promotion)),
            driver.CUtensorMapFloatOOBfill(int(self.oob_fill)),
        )
        return _encoded(self, status, tensor_map)


def _image(spec: TensorMapSpec) -> bytes:
    return struct.pack(
        "<Q5B3x Q5Q4Q5H5B",
        EMULATED_MAGIC,
        spec.data_type,
        len(spec.dims),
        spec.interleave,
        spec.swizzle,
        spec.oob_fill,
        spec.address,
        *_padded(spec.dims, 5),
        *_padded(spec.strides, 4),
        *_padded(spec.box, 5),
        *_padded(spec.element_strides, 5),
    )


def _encoded(spec: TensorMapSpec, status: Any, tensor_map: Any) -> bytes:
    if status != type(status).CUDA_SUCCESS:
        raise ValueError(f"the driver refused a tensor map ({status.name}): {spec}")
    words = [int(word) for word in tensor_map.opaque]
    return struct.pack(f"<{len(words)}Q", *words)


def _require(holds: bool, field: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{field} must be {allowed}; got {value}")


def _padded(values: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*values, *(0,) * (length - len(values)))
