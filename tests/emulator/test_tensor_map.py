"""Tensor maps: every rule has an error that names the field, and the image says what was asked."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warpcheck.tensor_map import DataType, OutOfBounds, Swizzle, TensorMapSpec

FP4 = {
    "data_type": DataType.PACKED_16U4_ALIGN16B,
    "address": 0x10000,
    "dims": (256, 64),
    "strides": (128,),
    "box": (128, 32),
    "swizzle": Swizzle.B128,
}
BYTES = {
    "data_type": DataType.UINT8,
    "address": 0x10000,
    "dims": (256, 64),
    "strides": (256,),
    "box": (128, 32),
    "swizzle": Swizzle.B128,
}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (BYTES, {"dims": ()}, "dims must be 1 to 5"),
        (BYTES, {"dims": (16,) * 6}, "dims must be 1 to 5"),
        (BYTES, {"strides": ()}, "strides must be 1 values"),
        (BYTES, {"box": (128,)}, "box must be 2 values"),
        (BYTES, {"element_strides": (1,)}, "element_strides must be 2 values"),
        (BYTES, {"address": 0x10008}, "address must be a multiple of 16"),
        (FP4, {"address": 0x10010}, "address must be a multiple of 32"),
        (BYTES, {"dims": (256, 0)}, r"dims\[1\] must be 1 to"),
        (BYTES, {"dims": (256, 2**32 + 1)}, r"dims\[1\] must be 1 to"),
        (FP4, {"dims": (192, 64)}, r"dims\[0\] must be a multiple of 128"),
        (BYTES, {"strides": (264,)}, r"strides\[0\] must be a multiple of 16"),
        (FP4, {"strides": (144,)}, r"strides\[0\] must be a multiple of 32"),
        (BYTES, {"strides": (2**40,)}, r"strides\[0\] must be .* below 2\*\*40"),
        (BYTES, {"strides": (-16,)}, r"strides\[0\] must be a multiple of 16"),
        (BYTES, {"box": (0, 1)}, r"box\[0\] must be 1 to 256"),
        (BYTES, {"box": (16, 257)}, r"box\[1\] must be 1 to 256"),
        (BYTES, {"element_strides": (1, 9)}, r"element_strides\[1\] must be 1 to 8"),
        (BYTES, {"box": (24, 8)}, r"box\[0\] must be a row of a multiple of 16 bytes"),
        (BYTES, {"box": (256, 8)}, r"box\[0\] must be a row of at most 128 bytes"),
        (BYTES, {"swizzle": Swizzle.B64}, r"box\[0\] must be a row of at most 64 bytes"),
        (BYTES, {"swizzle": Swizzle.B32}, r"box\[0\] must be a row of at most 32 bytes"),
        (FP4, {"box": (64, 32)}, r"box\[0\] must be 128"),
        (FP4, {"swizzle": Swizzle.B64}, "swizzle must be NONE, B128 or B128_ATOM_32B"),
        (BYTES, {"oob_fill": OutOfBounds.NAN}, "oob_fill must be ZEROS"),
    ],
)
def test_a_broken_rule_names_the_field(base: dict, change: dict[str, Any], message: str) -> None:
    TensorMapSpec(**base)
    with pytest.raises(ValueError, match=message):
        TensorMapSpec(**{**base, **change})


def test_odd_rows_of_packed_nibbles_are_refused() -> None:
    arguments = {**BYTES, "data_type": DataType.PACKED_16U4_ALIGN8B}
    with pytest.raises(ValueError, match=r"dims\[0\] must be a multiple of 2"):
        TensorMapSpec(**{**arguments, "dims": (255, 64)})


def test_nan_fill_is_for_floating_types() -> None:
    spec = TensorMapSpec(
        DataType.BFLOAT16, 0x1000, (64, 8), (128,), (64, 8), oob_fill=OutOfBounds.NAN
    )
    assert spec.encode_emulated()[12] == 1


def test_the_emulators_image_has_every_parameter_at_its_place() -> None:
    spec = TensorMapSpec(
        DataType.PACKED_16U4_ALIGN16B,
        0x123456789A00,
        dims=(7168, 4096, 3),
        strides=(3584, 3584 * 4096),
        box=(128, 64, 2),
        swizzle=Swizzle.B128,
        element_strides=(1, 2, 1),
    )
    image = spec.encode_emulated()
    assert len(image) == 128
    assert image[:8] == b"DMTMAP01"
    assert tuple(image[8:13]) == (14, 3, 0, 3, 0)
    assert struct.unpack_from("<Q", image, 16) == (0x123456789A00,)
    assert struct.unpack_from("<5Q", image, 24) == (7168, 4096, 3, 0, 0)
    assert struct.unpack_from("<4Q", image, 64) == (3584, 3584 * 4096, 0, 0)
    assert struct.unpack_from("<5H", image, 96) == (128, 64, 2, 0, 0)
    assert tuple(image[106:111]) == (1, 2, 1, 0, 0)
    assert image[111:] == bytes(17)


# A driver with one function, which refuses what the real one refuses: a null pointer.
DRIVER = r"""
#include <stdint.h>
#include <string.h>
static int encode(uint64_t* map, int, uint32_t rank, void*, const uint64_t* dims,
                  const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int, int,
                  int, int) {
    if (!dims || !strides || !box || !steps) return 1;
    for (uint32_t i = 0; i < rank; ++i) map[i] = dims[i];
    for (uint32_t i = 0; i + 1 < rank; ++i) map[5 + i] = strides[i];
    return 0;
}
extern "C" int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int*) {
    *function = strcmp(name, "cuTensorMapEncodeTiled") ? nullptr : (void*)encode;
    return 0;
}
"""
# The other process has no package of tests, which gives the module this name (tests/emulator).
ENCODE = f"""
import struct
from {TensorMapSpec.__module__} import DataType, TensorMapSpec
for dims, strides in (((1000,), ()), ((1000, 20, 3), (4096, 81920))):
    box = (128, 2, 2)[: len(dims)]
    image = TensorMapSpec(DataType.FLOAT32, 0x1000, dims, strides, box).encode_cuda()
    print(*struct.unpack_from("<9Q", image))
"""


def test_the_driver_gets_pointers_for_every_rank(tmp_path: Path) -> None:
    """A map of one dimension has no strides, but a null pointer for them is refused."""
    (tmp_path / "driver.cpp").write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    compiler = os.environ.get("CXX", "g++")
    subprocess.run(
        [compiler, "-shared", "-fPIC", tmp_path / "driver.cpp", "-o", library], check=True
    )
    result = subprocess.run(
        [sys.executable, "-c", ENCODE],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "1000 0 0 0 0 0 0 0 0",
        "1000 20 3 0 0 4096 81920 0 0",
    ]


@pytest.mark.parametrize("strides", [(0,), (16,), (240,)])
def test_rows_may_share_memory(strides: tuple[int, ...]) -> None:
    assert TensorMapSpec(**{**BYTES, "strides": strides}).strides == strides
