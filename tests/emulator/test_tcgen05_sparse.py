"""tcgen05.mma.sp, the zero-column masks of .ws, and tcgen05.cp that decompresses, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import InvalidOperation, Unsupported

from .device import run_kernel
from .test_rare_forms import ELEMENTS, packed_rows, random_codes, values_of

# Operands lie in shared memory without a swizzle: 16 bytes of all rows, then the next 16 bytes.
# `cells` are columns of tensor memory from 256 on, [128][num_columns].
PRODUCT = """
#define PAIR PAIRED
KERNEL()(const uint4* image, u32 count, const u32* cells, u32 num_columns, u32* out, u32 rows,
         u32 n, u32 shape, u32 mask_low, u32 mask_high, u32 b_rows) {
    u32 base = shared_address(dynamic_shared), warp = threadIdx.x / 32, rank = 0;
    u32 barrier = base + 60000, columns = base + 60008;
    if (PAIR) rank = cluster_rank();
    image += rank * count, cells += rank * 128 * num_columns, out += rank * 128 * n;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) ((uint4*)dynamic_shared)[i] = image[i];
    fence_async();
    if (threadIdx.x == 0) init_barrier(barrier, 1);
    if (warp == 0)
        asm volatile("tcgen05.alloc.GROUP.sync.aligned.shared::cta.b32 [%0], 512;"
            :: "r"(columns) : "memory");
    __syncthreads();
    u32 tmem = *(u32*)(dynamic_shared + 60008);
    for (u32 column = 0; column < num_columns; ++column)
        asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};"
            :: "r"(tmem + (warp * 32 << 16) + 256 + column),
               "r"(cells[threadIdx.x * num_columns + column]) : "memory");
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    if (PAIR) cluster_sync();
    if (threadIdx.x == 0 && rank == 0) {
        asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
        u64 a = 1ull << 46 | 8ull << 32 | (u64)rows << 16 | base >> 4;
        u64 b = 1ull << 46 | 8ull << 32 | (u64)b_rows << 16 | base + rows * A_BYTES >> 4;
        u64 mask = (u64)mask_high << 32 | mask_low;
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %7, 0; INSTRUCTION }"
            :: "r"(tmem), "l"(a), "l"(b), "r"(tmem + 256), "r"(shape), "r"(tmem + 260), "l"(mask),
               "r"(0), "r"(tmem + 264) : "memory");
        asm volatile(COMMIT :: "r"(barrier), "h"((u16)3) : "memory");
    }
    __syncwarp();
    wait(barrier, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (u32 column = 0; column < n * STORED_ROWS / 128; ++column) {
        u32 value;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];"
            : "=r"(value) : "r"(tmem + (warp * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        out[column * 128 + threadIdx.x] = value;
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    if (PAIR) cluster_sync();
    if (warp == 0)
        asm volatile("tcgen05.dealloc.GROUP.sync.aligned.b32 %0, 512;" :: "r"(tmem));
}
"""
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
COMMIT_PAIR = (
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
    " [%0], %1;"
)


def source(instruction: str, a_bytes: int = 32, stored_rows: str = "128") -> str:
    pair = "cta_group::2" in instruction
    text = PRODUCT.replace("INSTRUCTION", instruction).replace("PAIRED", str(int(pair)))
    text = text.replace("GROUP", f"cta_group::{1 + pair}").replace("A_BYTES", str(a_bytes))
    text = text.replace("STORED_ROWS", stored_rows)
    return text.replace("COMMIT", '"' + (COMMIT_PAIR if pair else COMMIT) + '"')


def image(*operands: np.ndarray) -> np.ndarray:
    """Operands of rows of bytes, as the kernel's descriptors see them."""
    return np.concatenate([
        rows.reshape(len(rows), -1, 16).transpose(1, 0, 2).reshape(-1) for rows in operands
    ])  # fmt: skip


PAIRS = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)])


def sparse_rows(
    rng: np.random.Generator, kept: np.ndarray, unit: int, tf32: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The dense matrix with `kept` spread over twice as many columns, and the metadata's nibbles,
    one for each group."""
    rows, half = kept.shape
    dense = np.zeros((rows, 2 * half), kept.dtype)
    if tf32:
        places = rng.integers(0, 2, (rows, half))
        np.put_along_axis(dense, 2 * np.arange(half) + places, kept, 1)
        return dense, np.where(places, 0b1110, 0b0100)
    groups = half // (2 * unit)
    chosen = PAIRS[rng.integers(0, 6, (rows, groups))]
    within = (chosen[..., None] * unit + np.arange(unit)).reshape(rows, groups, 2 * unit)
    columns = (4 * unit * np.arange(groups)[:, None] + within).reshape(rows, half)
    np.put_along_axis(dense, columns, kept, 1)
    return dense, chosen[..., 0] | chosen[..., 1] << 2


def lanes_of(rows: int) -> np.ndarray:
    """The lanes of 128 or 64 rows; the latter take half of each 32."""
    row = np.arange(rows)
    return row if rows == 128 else row // 16 * 32 + row % 16


def metadata_cells(nibbles: np.ndarray, wide: bool) -> np.ndarray:
    """Cells of 128 lanes by CuTe's layouts. wide: of 16 and 32-bit elements, one column."""
    rows = len(nibbles)
    cells = np.full((128, 4), 0xEEEEEEEE, np.uint32)
    numbers = [sum(int(v) << 4 * i for i, v in enumerate(row)) for row in nibbles]
    if not wide:
        for lane, number in zip(lanes_of(rows), numbers, strict=True):
            cells[lane, :2] = number & 0xFFFFFFFF, number >> 32
        return cells
    cells[:, 0] = 0
    for row, number in enumerate(numbers):
        for half in range(2):
            lane = lanes_of(rows)[row // 16 * 16 + half * 8 + row % 8]
            cells[lane, 0] |= np.uint32((number >> 16 * half & 0xFFFF) << 16 * (row // 8 % 2))
    return cells


def codes_of(kind: str, values: np.ndarray) -> np.ndarray:
    if kind == "f16":
        return values.astype(np.float16).view(np.uint8)
    if kind == "tf32":
        return values.astype(np.float32).view(np.uint8)
    return values.astype(np.int8).view(np.uint8)


# K of the sparse product, the descriptor's formats, the element's bytes.
KINDS = {"f16": (32, 0, 1 << 4, 2), "tf32": (16, 2 << 7 | 2 << 10, 1 << 4, 4),
         "i8": (64, 1 << 7 | 1 << 10, 2 << 4, 1)}  # fmt: skip


def shape_of(kind: str, m: int, n: int, selector: int = 0) -> int:
    _, formats, result, _ = KINDS[kind]
    return 1 << 2 | selector | formats | result | n >> 3 << 17 | m >> 4 << 24


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stationary", "m"), [("", 128), ("", 64), (".ws", 128)])
def test_sparse_products(kind: str, stationary: str, m: int) -> None:
    k = KINDS[kind][0]
    n, rng = 64, np.random.default_rng(k + m)
    kept, b = rng.integers(-4, 5, (m, k // 2)), rng.integers(-4, 5, (n, k))
    dense, nibbles = sparse_rows(rng, kept, 1, kind == "tf32")
    operands = image(codes_of(kind, kept), codes_of(kind, b))
    cells = metadata_cells(nibbles, kind != "i8")
    selector = int(kind == "tf32")  # which of two columns
    if selector:
        cells = np.roll(cells, 1, axis=1)
    out = np.zeros((n, 128), np.int32 if kind == "i8" else np.float32)
    instruction = f"tcgen05.mma{stationary}.sp.cta_group::1.kind::{kind} [%0], %1, %2, [%3], %4, p;"
    stop = m != 64  # half of the lanes have no result
    run_kernel(source(instruction), operands, len(operands) // 16, cells, 4, out, m, n,
               shape_of(kind, m, n, selector), 0, 0, n, stop_at_findings=stop)  # fmt: skip
    assert np.array_equal(out.T[lanes_of(m)], dense @ b.T)


def test_sparse_products_of_a_pair() -> None:
    n, rng = 64, np.random.default_rng(5)
    kept, b = rng.integers(-4, 5, (256, 16)), rng.integers(-4, 5, (n, 32))
    dense, nibbles = sparse_rows(rng, kept, 1, tf32=False)
    parts = [
        image(codes_of("f16", kept[128 * i : 128 * i + 128]), codes_of("f16", b[32 * i :][:32]))
        for i in range(2)
    ]
    cells = np.stack([metadata_cells(nibbles[128 * i : 128 * i + 128], True) for i in range(2)])
    out = np.zeros((2, n, 128), np.float32)
    instruction = "tcgen05.mma.sp.cta_group::2.kind::f16 [%0], %1, %2, [%3], %4, p;"
    run_kernel(source(instruction), np.stack(parts), len(parts[0]) // 16, cells, 4, out, 128, n,
               shape_of("f16", 256, n), 0, 0, 32, ctas=2, cluster=2)  # fmt: skip
    assert np.array_equal(out.transpose(0, 2, 1).reshape(256, n), dense @ b.T)


@pytest.mark.parametrize(
    ("kind", "element", "scales"),
    [("f8f6f4", "e2m3", 0), ("mxf8f6f4", "e4m3", 1), ("mxf4", "e2m1", 2), ("mxf4nvf4", "e2m1", 4)],
)
def test_sparse_products_of_small_elements(kind: str, element: str, scales: int) -> None:
    packed = kind.startswith("mxf4")
    n, k, rng = 64, 128 if packed else 64, np.random.default_rng(scales)
    kept, b = random_codes(rng, element, (128, k // 2)), random_codes(rng, element, (n, k))
    dense, nibbles = sparse_rows(rng, kept, 2 if packed else 1, tf32=False)
    rows = [codes[:, ::2] | codes[:, 1::2] << 4 if packed else codes for codes in (kept, b)]
    if element == "e2m3":
        rows = [packed_rows(codes.reshape(-1, 16), 6).reshape(codes.shape) for codes in rows]
    operands = image(*rows)
    cells = np.zeros((128, 12), np.uint32)
    cells[:, :4] = metadata_cells(nibbles, wide=False)
    a_values, b_values = values_of(element, dense), values_of(element, b)
    # A code of zero is a zero, where no metadata points.
    if scales:
        scale = "ue4m3" if kind == "mxf4nvf4" else "ue8m0"
        low, high = (0x20, 0x40) if scale == "ue4m3" else (118, 128)
        factors = rng.integers(low, high, (128 + n, 4)).astype(np.uint8)
        for row in range(128 + n):
            first, at = (4, row) if row < 128 else (8, row - 128)
            cells[at % 32 :: 32, first + at // 32] = factors[row].view(np.uint32)[0]
            values = a_values[row] if row < 128 else b_values[at]
            values *= np.repeat(values_of(scale, factors[row, :scales]), k // scales)
        vector = f".block_scale.scale_vec::{scales}X"
        shape = 1 << 2 | n >> 3 << 17 | 1 << 27 | (scale == "ue8m0") << 23
        shape |= 1 << 7 | 1 << 10 if packed else 0
        operands_of = "[%0], %1, %2, [%3], %4, [%5], [%8], p;"
    else:
        vector, shape = "", 1 << 2 | 1 << 4 | 3 << 7 | 3 << 10 | n >> 3 << 17 | 8 << 24
        operands_of = "[%0], %1, %2, [%3], %4, p;"
    out = np.zeros((n, 128), np.float32)
    instruction = f"tcgen05.mma.sp.cta_group::1.kind::{kind}{vector} {operands_of}"
    run_kernel(source(instruction), operands, len(operands) // 16, cells, 12, out, 128, n, shape,
               0, 0, n)  # fmt: skip
    assert np.array_equal(out.T, (a_values @ b_values.T).astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "cell", "text"),
    [
        (shape_of("f16", 128, 64) & ~4, 0x44444444, r"bit 2 \(sparse\) must be 1"),
        (shape_of("i8", 128, 64, 1), 0x44444444, "sparsity selector .* must be 0"),
        (shape_of("f16", 128, 64), 0, "sparse metadata 0x0 of row 0, element 0 does not exist"),
    ],
)
def test_sparse_products_that_do_not_exist(shape: int, cell: int, text: str) -> None:
    kind = "i8" if "selector" in text else "f16"
    instruction = f"tcgen05.mma.sp.cta_group::1.kind::{kind} [%0], %1, %2, [%3], %4, p;"
    operands, cells = np.zeros(128 * 32 + 64 * 64, np.uint8), np.full((128, 4), cell, np.uint32)
    with pytest.raises(InvalidOperation, match=text):
        run_kernel(source(instruction), operands, len(operands) // 16, cells, 4,
                   np.zeros((64, 128), np.float32), 128, 64, shape, 0, 0, 64)  # fmt: skip


# ---- zero-column masks


def mask_of(starts: list[int], firsts: list[int], skip: int, use: int, shift: int = 0) -> int:
    """The descriptor of fields as PTX's examples have them."""
    mask = 1 << 39 | skip << 40 | use << 48 | shift << 56
    mask |= sum(start << 8 * i for i, start in enumerate(starts))
    return mask | sum(first << 32 + i for i, first in enumerate(firsts))


def zero_columns(length: int, start: int, first: int, skip: int, use: int) -> np.ndarray:
    run = [1] * (skip + 1), [0] * (use + 1)
    pattern = (run[0] + run[1] if first else run[1] + run[0]) * length
    return np.array(pattern[start : start + length], bool)


@pytest.mark.parametrize(
    ("m", "starts", "firsts", "shift"),
    [
        (128, [0], [0], 0),
        (64, [0, 0], [1, 0], 0),
        (32, [0, 1, 2, 1], [1, 1, 0, 0], 2),
        (128, [0], [0], 8),
    ],
)
def test_columns_that_count_as_zero(
    m: int, starts: list[int], firsts: list[int], shift: int
) -> None:
    n, b_rows, rng = 128, 144, np.random.default_rng(m)
    a, b = rng.integers(-4, 5, (m, 16)), rng.integers(-4, 5, (b_rows, 16))
    operands = image(codes_of("f16", a), codes_of("f16", b))
    mask = mask_of(starts, firsts, 2, 3, shift)
    part = n * m // 128
    zeros = np.concatenate([
        zero_columns(part, start, first, 2, 3)
        for start, first in zip(starts, firsts, strict=True)
    ])  # fmt: skip
    out = np.zeros((part, 128), np.float32)
    instruction = "tcgen05.mma.ws.cta_group::1.kind::f16 [%0], %1, %2, %4, p, %6;"
    max_shift = 1 if shift else 0  # 8 columns
    shape = 1 << 4 | n >> 3 << 17 | m >> 4 << 24 | max_shift << 30
    run_kernel(source(instruction, stored_rows="rows"), operands, len(operands) // 16,
               np.zeros((128, 4), np.uint32), 4, out, m, n, shape, mask & 0xFFFFFFFF, mask >> 32,
               b_rows)  # fmt: skip
    expected = a @ b[shift : shift + n].T * ~zeros
    parts = expected.reshape(m, 128 // m, part)
    assert np.array_equal(out, parts.transpose(2, 1, 0).reshape(out.shape))


@pytest.mark.parametrize(
    ("mask", "error", "text"),
    [
        (mask_of([0], [0], 2, 3, 1), InvalidOperation, "a shift of 1 columns"),
        (mask_of([4], [0], 2, 3), Unsupported, "start count 0 skips the first run of 4 columns"),
        (1 << 63 | 1 << 39, InvalidOperation, "must be 0"),
    ],
)
def test_masks_that_do_not_exist(mask: int, error: type[Exception], text: str) -> None:
    operands = np.zeros((128 + 64) * 32, np.uint8)
    instruction = "tcgen05.mma.ws.cta_group::1.kind::f16 [%0], %1, %2, %4, p, %6;"
    shape = 1 << 4 | 64 >> 3 << 17 | 128 >> 4 << 24
    with pytest.raises(error, match=text):
        run_kernel(source(instruction), operands, len(operands) // 16,
                   np.zeros((128, 4), np.uint32), 4, np.zeros((64, 128), np.float32), 128, 64,
                   shape, mask & 0xFFFFFFFF, mask >> 32, 64)  # fmt: skip


# ---- tcgen05.cp with decompression: A of small elements in tensor memory


@pytest.mark.parametrize("element", ["e2m1", "e3m2", "e2m3"])
def test_small_elements_are_decompressed_for_the_product(element: str) -> None:
    rng, n = np.random.default_rng(1), 64
    bits = 1 + sum(ELEMENTS[element])
    a, b = random_codes(rng, element, (128, 32)), random_codes(rng, "e4m3", (n, 32))
    packed = packed_rows(a.reshape(-1, 16), bits).reshape(128, 32)
    operands = image(packed, b)
    form = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    code = {"e2m3": 3, "e3m2": 4, "e2m1": 5}[element]
    shape = 1 << 4 | code << 7 | n >> 3 << 17 | 8 << 24
    instruction = (
        f"tcgen05.cp.cta_group::1.128x256b.b8x16.{form} [%3], %1;"
        "tcgen05.mma.cta_group::1.kind::f8f6f4 [%0], [%3], %2, %4, p;"
    )
    out = np.zeros((n, 128), np.float32)
    run_kernel(source(instruction), operands, len(operands) // 16, np.zeros((128, 8), np.uint32), 8,
               out, 128, n, shape, 0, 0, n)  # fmt: skip
    expected = values_of(element, a) @ values_of("e4m3", b).T
    assert np.array_equal(out.T, expected.astype(np.float32))


def test_bytes_of_decompressed_elements() -> None:
    """FP4 in the middle four bits of its byte, FP6 in the low six."""
    elements = np.random.default_rng(2).integers(0, 16, (32, 16)).astype(np.uint8)
    operands = np.zeros((128, 32), np.uint8)
    operands[:32, :16] = packed_rows(elements, 4)
    instruction = "tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b4x16_p64 [%0], %1;"
    out = np.zeros((4, 128), np.uint32)
    flat = image(operands)
    run_kernel(source(instruction), flat, len(flat) // 16, np.zeros((128, 1), np.uint32), 1, out,
               128, 4, 0, 0, 0, 0)  # fmt: skip
    stored = np.ascontiguousarray(out.T).view(np.uint8).reshape(4, 32, 16)
    assert (stored == elements << 2).all()
