"""cp.async.bulk.tensor in im2col mode, against NumPy: a convolution's patches."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from warpcheck import InvalidOperation, InvalidPtx, Machine, Unsupported
from warpcheck.tensor_map import DataType, Im2colMapSpec, OutOfBounds, Swizzle

from .device import aligned, run_kernel
from .raw_ptx import entry
from .tensor_images import tensor_map

LOAD = """
KERNEL()(const __grid_constant__ Map map, u32* out, u32 num_bytes, int c, int w, int h, int n,
         u32 x, u32 y) {
    u32 base = shared_address(dynamic_shared), barrier = base + 60000;
    if (threadIdx.x == 0) {
        init_barrier(barrier, 1);
        expect_bytes(barrier, num_bytes);
        asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%0, {%1, %2, %3, %4}],"
            " {%5, %6};" :: "l"(&map), "r"(c), "r"(w), "r"(h), "r"(n), "h"((u16)x), "h"((u16)y)
            : "memory");
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col"
            ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};"
            :: "r"(base), "l"(&map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier), "h"((u16)x),
               "h"((u16)y) : "memory");
    }
    __syncthreads();
    wait(barrier, 0);
    for (u32 i = threadIdx.x; i < num_bytes / 4; i += blockDim.x)
        out[i] = ((u32*)dynamic_shared)[i];
}
"""


def spec_of(tensor: np.ndarray, channels: int, pixels: int, **fields: object) -> Im2colMapSpec:
    """Of images [N, H, W, C]."""
    return Im2colMapSpec(
        DataType.UINT16,
        tensor.ctypes.data,
        tensor.shape[::-1],
        tensor.strides[2::-1],
        (channels, pixels),
        **fields,
    )


def images(shape: tuple[int, ...] = (3, 7, 9, 32)) -> np.ndarray:
    return aligned(np.random.default_rng(0).integers(1, 2**16, shape).astype(np.uint16))


@pytest.mark.parametrize(("padding", "stride"), [(1, 1), (0, 1), (1, 2), (0, 3)])
def test_patches_of_a_convolution(padding: int, stride: int) -> None:
    """All places of a 3 x 3 filter in all images, in their order, for each of its elements."""
    tensor = images()
    _, height, width, _ = tensor.shape
    padded = np.pad(tensor, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    spec = spec_of(
        tensor,
        16,
        100,
        element_strides=(1, stride, stride, 1),
        lower_corner=(-padding, -padding),
        upper_corner=(padding - 2, padding - 2),
    )
    for y in range(3):
        for x in range(3):
            out = np.zeros((100, 16), np.uint16)
            run_kernel(LOAD, spec.encode_emulated(), out, out.nbytes, 8, -padding, -padding, 0, x,
                       y, memory=(tensor,))  # fmt: skip
            rows = range(0, height + 2 * padding - 2, stride)
            columns = range(0, width + 2 * padding - 2, stride)
            patches = padded[:, [y + r for r in rows]][:, :, [x + c for c in columns], 8:24]
            expected = np.zeros((max(100, patches[..., 0].size), 16), np.uint16)
            expected[: patches[..., 0].size] = patches.reshape(-1, 16)
            assert np.array_equal(out, expected[:100])


def test_pixels_begin_anywhere_and_go_on_in_the_next_image() -> None:
    tensor = images()
    spec = spec_of(tensor, 64 // 2, 40, swizzle=Swizzle.B64, lower_corner=(0, 0),
                   upper_corner=(0, 0))  # fmt: skip
    out = np.zeros((40, 4, 8), np.uint16)
    run_kernel(LOAD, spec.encode_emulated(), out, out.nbytes, 0, 5, 4, 1, 0, 0, memory=(tensor,))
    pixels = tensor.reshape(-1, 4, 8)[63 + 4 * 9 + 5 :][:40]
    for i in range(40):  # 64-byte rows, two of which share the order of their 16-byte chunks
        assert np.array_equal(out[i], pixels[i][np.arange(4) ^ (i // 2 % 4)])


def test_beyond_the_last_image_and_the_channels_is_filled() -> None:
    tensor = images().view(np.float16)
    spec = Im2colMapSpec(
        DataType.FLOAT16, tensor.ctypes.data, tensor.shape[::-1], tensor.strides[2::-1], (16, 4),
        oob_fill=OutOfBounds.NAN, lower_corner=(0, 0), upper_corner=(0, 0),
    )  # fmt: skip
    out = np.zeros((4, 16), np.uint16)
    run_kernel(LOAD, spec.encode_emulated(), out, out.nbytes, 24, 7, 6, 2, 0, 0, memory=(tensor,))
    expected = np.full((4, 16), 0x7FF7, np.uint16)
    expected[:2, :8] = tensor.view(np.uint16)[2, 6, 7:9, 24:]
    assert np.array_equal(out, expected)


STORE = """
KERNEL()(const __grid_constant__ Map map, const u32* in, u32 num_bytes, int c, int w, int n) {
    u32 base = shared_address(dynamic_shared);
    for (u32 i = threadIdx.x; i < num_bytes / 4; i += blockDim.x)
        ((u32*)dynamic_shared)[i] = in[i];
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("KIND.3d.global.shared::cta.ADDim2col_no_offs.bulk_group"
            " [%0, {%1, %2, %3}], [%4];" :: "l"(&map), "r"(c), "r"(w), "r"(n), "r"(base)
            : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
"""


@pytest.mark.parametrize("adds", [False, True])
def test_pixels_are_stored(adds: bool) -> None:
    tensor = aligned(np.arange(4 * 10 * 8, dtype=np.uint32).reshape(4, 10, 8))
    expected = tensor.copy()
    spec = Im2colMapSpec(
        DataType.UINT32, tensor.ctypes.data, (8, 10, 4), tensor.strides[1::-1], (4, 12),
        element_strides=(1, 2, 1), lower_corner=(1,), upper_corner=(-1,),
    )  # fmt: skip
    values = np.random.default_rng(1).integers(0, 99, (12, 4)).astype(np.uint32)
    stem = "cp.reduce.async.bulk.tensor" if adds else "cp.async.bulk.tensor"
    source = STORE.replace("KIND", stem).replace("ADD", "add." if adds else "")
    run_kernel(source, spec.encode_emulated(), values, values.nbytes, 4, 5, 2, memory=(tensor,))
    # 1, 3, 5, 7 of each image, from the third place of the third image on.
    places = [(n, w) for n in (2, 3) for w in (1, 3, 5, 7)][2:]
    for (n, w), row in zip(places, values, strict=False):
        expected[n, w, 4:] = row + (expected[n, w, 4:] if adds else 0)
    assert np.array_equal(tensor, expected)


@pytest.mark.parametrize("corners", [(-1, 0), (0, 1)])
def test_stores_stay_in_the_image(corners: tuple[int, int]) -> None:
    tensor = aligned(np.zeros((4, 10, 8), np.uint32))
    spec = Im2colMapSpec(
        DataType.UINT32, tensor.ctypes.data, (8, 10, 4), tensor.strides[1::-1], (4, 12),
        lower_corner=corners[:1], upper_corner=corners[1:],
    )  # fmt: skip
    source = STORE.replace("KIND", "cp.async.bulk.tensor").replace("ADD", "")
    with pytest.raises(InvalidOperation, match="of dimension 1 reaches beyond the image"):
        run_kernel(source, spec.encode_emulated(), np.zeros((12, 4), np.uint32), 192, 4, 0, 0,
                   memory=(tensor,))  # fmt: skip


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ((0, -2, 0, 0, 0, 0), r"coordinate 1 is -2, outside of the bounding box -1\.\.7"),
        ((0, 0, 7, 0, 0, 0), r"coordinate 2 is 7, outside of the bounding box -1\.\.5"),
        ((0, 0, 0, 0, 256, 0), "offset 0 is 256, not below 256"),
        ((3, 0, 0, 0, 0, 0), "coordinate 0 is 3, not a multiple of 16 bytes"),
    ],
)
def test_places_that_do_not_exist(place: tuple[int, ...], text: str) -> None:
    tensor = images()
    spec = spec_of(tensor, 16, 8, lower_corner=(-1, -1), upper_corner=(-1, -1))
    with pytest.raises(InvalidOperation, match=text):
        run_kernel(LOAD, spec.encode_emulated(), np.zeros(64, np.uint32), 256, *place,
                   memory=(tensor,))  # fmt: skip


def test_maps_of_the_other_mode() -> None:
    tensor = images()
    tiled = tensor_map(1, tensor.ctypes.data, tensor.shape[::-1], tensor.strides[2::-1],
                       [16, 1, 1, 1])  # fmt: skip
    out = np.zeros(64, np.uint32)
    with pytest.raises(InvalidOperation, match="the tensor map is tiled"):
        run_kernel(LOAD, tiled, out, 256, 0, 0, 0, 0, 0, 0, memory=(tensor,))
    image = spec_of(tensor, 16, 8, lower_corner=(0, 0), upper_corner=(0, 0)).encode_emulated()
    source = LOAD.replace("global.im2col.mbarrier", "global.mbarrier").replace(
        "[%6], {%7, %8}", "[%6]"
    )
    source = source[: source.index('asm volatile("cp.async.bulk.prefetch')] + source[
        source.index('asm volatile("cp.async.bulk.tensor') :
    ]  # fmt: skip
    with pytest.raises(InvalidOperation, match="im2col, the instruction is not"):
        run_kernel(source.replace('.im2col"', '"'), image, out, 256, 0, 0, 0, 0, 0, 0,
                   memory=(tensor,))  # fmt: skip


@pytest.mark.parametrize(
    ("form", "error", "text"),
    [
        ("3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd0, {%r2, %r3, %r4}],"
         " [%r5], {%h1, %h2}", InvalidPtx, "number of im2col offsets"),
        ("2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd0, {%r2, %r3}],"
         " [%r5], {%h1}", InvalidPtx, "three to five dimensions"),
        ("3d.shared::cta.global.im2col::w.mbarrier::complete_tx::bytes [%r1],"
         " [%rd0, {%r2, %r3, %r4}], [%r5], {%h1, %h2}", Unsupported, "im2col::w"),
    ],
)  # fmt: skip
def test_forms_that_do_not_exist(form: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Machine().load(entry(f"cp.async.bulk.tensor.{form};", 0))


def fields_of(**fields: object) -> dict[str, object]:
    good = {"data_type": DataType.UINT16, "address": 4096, "dims": (32, 9, 7, 3),
            "strides": (64, 576, 4032), "box": (16, 64), "lower_corner": (-1, -1),
            "upper_corner": (-1, -1)}  # fmt: skip
    return good | fields


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dims": (32, 9), "strides": (64,)}, r"dims must be 3 to 5 sizes"),
        ({"box": (16, 64, 1, 1)}, "box must be channels and pixels"),
        ({"box": (16, 1025)}, r"box\[1\] must be 1 to 1024; got 1025"),
        ({"lower_corner": (-1,)}, "lower_corner must be 2 values for 4 dims"),
        ({"lower_corner": (-129, 0)}, "lower_corner must be -128 to 127 each"),
        ({"upper_corner": (-10, 0)}, "upper_corner must be corners with a box between them"),
        ({"oob_fill": OutOfBounds.NAN}, "oob_fill must be ZEROS"),
    ],
)
def test_bad_maps_name_the_field(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Im2colMapSpec(**fields_of(**fields))


def test_the_image_has_mode_and_corners() -> None:
    spec = Im2colMapSpec(**fields_of(lower_corner=(-1, 2), upper_corner=(3, -4)))
    image = spec.encode_emulated()
    tiled = tensor_map(1, 4096, (32, 9, 7, 3), (64, 576, 4032), (16, 64))
    assert len(image) == 128
    assert image[13] == 1
    assert image[:13] == tiled[:13]
    assert image[14:112] == tiled[14:112]
    assert struct.unpack("<6h", image[112:124]) == (-1, 2, 0, 3, -4, 0)
