"""The emulator's functional units, called directly, against torch casts and numpy models."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from .tensor_images import tensor_map

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "emulator" / "src"

E4M3, E5M2, E2M3, E3M2, E2M1, F16, BF16, TF32 = range(8)
NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO, DOWN, UP = range(5)
KIND_F16, KIND_TF32, KIND_F8F6F4, KIND_I8, KIND_MXF8F6F4, KIND_MXF4, KIND_MXF4NVF4 = range(7)
INVALID_OPERATION = 9


@pytest.fixture(scope="session")
def units(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("units") / "libunits.so"
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{SOURCES}"),
            str(Path(__file__).parent / "unit_hooks.cpp"),
            str(SOURCES / "dot_kernel.cpp"),
            str(SOURCES / "tensor_core_sum.cpp"),
            *("-o", str(library)),
        ],
        check=True,
    )
    loaded = ctypes.CDLL(str(library))
    loaded.sum_like_hopper.restype = ctypes.c_float
    return loaded


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def decode(units: ctypes.CDLL, fmt: int, codes: np.ndarray) -> np.ndarray:
    codes = np.ascontiguousarray(codes, np.uint32)
    values = np.empty(codes.size, np.float64)
    units.decode_codes(fmt, pointer(codes), pointer(values), codes.size)
    return values.reshape(codes.shape)


def encode(
    units: ctypes.CDLL,
    fmt: int,
    values: object,
    rounding: int = NEAREST_EVEN,
    saturate: bool = True,
) -> np.ndarray:
    wide = np.ascontiguousarray(values, np.float64)
    codes = np.empty(wide.size, np.uint32)
    units.encode_values(fmt, pointer(wide), pointer(codes), wide.size, rounding, int(saturate))
    return codes.reshape(wide.shape)


# ---- number formats


@pytest.mark.parametrize(
    ("fmt", "dtype", "bits"),
    [
        (E4M3, torch.float8_e4m3fn, 8),
        (E5M2, torch.float8_e5m2, 8),
        (F16, torch.float16, 16),
        (BF16, torch.bfloat16, 16),
    ],
)
def test_every_code_decodes_like_torch(units, fmt, dtype, bits):
    codes = np.arange(2**bits, dtype=np.uint32)
    stored = torch.from_numpy(codes.astype(np.uint8 if bits == 8 else np.int16))
    expected = stored.view(dtype).to(torch.float64).numpy()
    assert np.array_equal(decode(units, fmt, codes), expected, equal_nan=True)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        (E4M3, torch.float8_e4m3fn),
        (E5M2, torch.float8_e5m2),
        (F16, torch.float16),
        (BF16, torch.bfloat16),
    ],
)
def test_rounding_to_nearest_agrees_with_torch_in_range(units, fmt, dtype):
    generator = np.random.default_rng(1)
    values = generator.standard_normal(200_000).astype(np.float32)
    values *= np.exp2(generator.integers(-24, 8, values.size)).astype(np.float32)
    limit = {E4M3: 448.0, E5M2: 57344.0, F16: 65504.0, BF16: 3e38}[fmt]
    values = values[np.abs(values) <= limit]
    # All exact codes and the midpoints between neighbours, where ties go to even.
    exact = decode(units, fmt, np.arange(128 if fmt in (E4M3, E5M2) else 0x7C00))
    exact = exact[np.isfinite(exact)]
    ties = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate([values, exact.astype(np.float32), ties.astype(np.float32)])
    expected = torch.from_numpy(values).to(dtype)
    expected = expected.view(torch.uint8 if expected.element_size() == 1 else torch.int16)
    bits = np.uint8 if expected.element_size() == 1 else np.uint16
    assert np.array_equal(encode(units, fmt, values).astype(bits), expected.numpy().view(bits))


def test_e4m3_saturates_as_measured_on_hardware(units):
    inf, nan = np.inf, np.nan
    values = [inf, -inf, nan, -nan, 464, 480, -0.0, 2**-10, 2**-10 * 1.001, 1.0625, 1.1875, 17]
    codes = [0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0x7E, 0x80, 0x00, 0x01, 0x38, 0x3A, 0x58]
    assert encode(units, E4M3, values).tolist() == codes


def test_e2m1_values_ties_and_overflow(units):
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert decode(units, E2M1, np.arange(16)).tolist() == magnitudes + [-m for m in magnitudes]
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 100.0, -np.inf, np.nan, -0.1]
    assert encode(units, E2M1, values).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 15, 7, 8]


@pytest.mark.parametrize(("fmt", "largest", "smallest"), [(E2M3, 7.5, 0.125), (E3M2, 28.0, 0.0625)])
def test_six_bit_formats(units, fmt, largest, smallest):
    values = decode(units, fmt, np.arange(32))
    assert values[1] == smallest
    assert values[31] == largest
    assert np.array_equal(encode(units, fmt, values), np.arange(32))


def test_directed_rounding(units):
    value = 1 + 2**-12  # between 1 and the next f16
    codes = {r: int(encode(units, F16, [value], r)[0]) for r in range(5)}
    assert codes == {
        NEAREST_EVEN: 0x3C00,
        NEAREST_AWAY: 0x3C00,
        TOWARD_ZERO: 0x3C00,
        DOWN: 0x3C00,
        UP: 0x3C01,
    }
    negative = {r: int(encode(units, F16, [-value], r)[0]) for r in (DOWN, UP)}
    assert negative == {DOWN: 0xBC01, UP: 0xBC00}
    tie = 1 + 2**-11
    assert encode(units, F16, [tie], NEAREST_EVEN)[0] == 0x3C00
    assert encode(units, F16, [tie], NEAREST_AWAY)[0] == 0x3C01
    assert encode(units, F16, [1e6], NEAREST_EVEN, saturate=False)[0] == 0x7C00
    assert encode(units, F16, [1e6], TOWARD_ZERO, saturate=False)[0] == 0x7BFF


def test_ue8m0_rounds_up_or_truncates(units):
    values = np.array(
        [1, 1.5, -1.5, 0, 2.0**-127, 2.0**-126 * 0.75, 2.0**127, 3e38, np.inf, np.nan], np.float32
    )
    codes = np.empty(values.size, np.uint8)
    units.encode_ue8m0(pointer(values), pointer(codes), values.size, 1, 1)
    assert codes.tolist() == [127, 128, 128, 0, 0, 1, 254, 254, 254, 255]
    units.encode_ue8m0(pointer(values), pointer(codes), values.size, 0, 1)
    assert codes.tolist() == [127, 127, 127, 0, 0, 0, 254, 254, 254, 255]


# ---- descriptors


def instruction_descriptor(units, bits, kind, group):
    fields = (ctypes.c_uint32 * 8)()
    error = ctypes.create_string_buffer(512)
    code = units.instruction_descriptor(ctypes.c_uint32(bits), kind, group, fields, error)
    return (list(fields), "") if code == 0 else (code, error.value.decode())


def test_instruction_descriptors_printed_by_cute(units):
    fields, _ = instruction_descriptor(units, 0x10A00280, KIND_MXF8F6F4, 2)
    assert fields[:3] == [256, 128, 32]
    for scale_id, bits in enumerate((0x10A00280, 0x30A00290, 0x50A002A0, 0x70A002B0)):
        fields, _ = instruction_descriptor(units, bits, KIND_MXF8F6F4, 2)
        assert fields[5:7] == [scale_id, scale_id]
    fields, _ = instruction_descriptor(units, 0x08900000, KIND_MXF8F6F4, 1)
    assert fields[:2] == [128, 64]
    fields, _ = instruction_descriptor(units, 0x08100010, KIND_F8F6F4, 1)
    assert fields[:2] == [128, 64]


@pytest.mark.parametrize(
    ("bits", "kind", "group", "text"),
    [
        (0x10A00280, KIND_MXF8F6F4, 1, "M = 256"),
        (0x10A00280 & ~(1 << 23), KIND_MXF8F6F4, 2, "UE8M0"),
        (0x10A00280 | 1 << 24, KIND_MXF8F6F4, 2, "bits [26:24]"),
        (0x10A00300, KIND_MXF8F6F4, 2, "format code 6"),
        (0x10820280, KIND_MXF8F6F4, 2, "N = 8"),
        (0x08100030, KIND_F8F6F4, 1, "D format"),
        (0x08100010, KIND_TF32, 1, "format code 0"),
        (0x10A08280, KIND_MXF8F6F4, 2, "K-major"),
    ],
)
def test_invalid_instruction_descriptors_are_named(units, bits, kind, group, text):
    code, error = instruction_descriptor(units, bits, kind, group)
    assert code == INVALID_OPERATION
    assert text in error


def matrix_address(units, bits, sm, row, chunk, mn_major=False):
    address = ctypes.c_uint32()
    error = ctypes.create_string_buffer(512)
    code = units.matrix_address(
        ctypes.c_uint64(bits), sm, int(mn_major), row, chunk, ctypes.byref(address), error
    )
    assert code == 0, error.value.decode()
    return address.value


def test_high_words_of_usual_descriptors(units):
    # SM100 K-major 128B with SBO 1024; start 0x2000 + one K advance of 32 bytes.
    bits = 0x40004040 << 32 | (0x2020 >> 4)
    for row in (0, 1, 7, 8, 127):
        for chunk in (0, 1):
            linear = 0x2020 + row // 8 * 1024 + row % 8 * 128 + chunk * 16
            assert matrix_address(units, bits, 100, row, chunk) == linear ^ (linear >> 3 & 0x70)
    # The scale source: rows of 16 bytes, 8 of them contiguous, SBO 128.
    bits = 0x00004008 << 32 | (0x3000 >> 4)
    assert [matrix_address(units, bits, 100, row, 0) for row in (0, 1, 8, 31)] == [
        0x3000,
        0x3010,
        0x3080,
        0x31F0,
    ]
    bits = 0x40000040 << 32 | (0x2000 >> 4)
    assert matrix_address(units, bits, 90, 3, 1) == 0x2000 + 3 * 128 + (16 ^ 3 * 16)


@pytest.mark.parametrize(("constant", "sm"), [(0, 90), (1 << 46, 100)])
def test_without_a_swizzle_the_base_offset_says_nothing(units, constant, sm):
    bits = constant | 0x0000_0010_0008_0000 | (0x2000 >> 4)
    assert matrix_address(units, bits | 5 << 49, sm, 9, 1) == matrix_address(units, bits, sm, 9, 1)
    assert matrix_address(units, bits | 5 << 49, sm, 9, 1) == 0x2000 + 0x100 + 16 + 0x80


@pytest.mark.parametrize(
    ("bits", "sm", "text"),
    [
        (3 << 61 | 1 << 46, 100, "swizzle code 3"),
        (1 << 49 | 1 << 46 | 2 << 61, 100, "base offset"),
        (1 << 49 | 1 << 62, 90, "base offset"),
    ],
)
def test_invalid_matrix_descriptors_are_named(units, bits, sm, text):
    address = ctypes.c_uint32()
    error = ctypes.create_string_buffer(512)
    assert (
        units.matrix_address(ctypes.c_uint64(bits), sm, 0, 0, 0, ctypes.byref(address), error) != 0
    )
    assert text in error.value.decode()


# ---- tcgen05.mma


def swizzle128(address: np.ndarray) -> np.ndarray:
    return address ^ (address >> 3 & 0x70)


def put_rows(shared: np.ndarray, start: int, rows: np.ndarray) -> None:
    """Writes K-major rows of up to 128 bytes as the 128-byte swizzle places them."""
    row, byte = np.meshgrid(np.arange(rows.shape[0]), np.arange(rows.shape[1]), indexing="ij")
    shared[swizzle128(start + row // 8 * 1024 + row % 8 * 128 + byte)] = rows


def put_scales(cells: np.ndarray, column: int, scales: np.ndarray) -> None:
    """`scales` [rows, 4] bytes, replicated to the four lane quadrants."""
    words = np.ascontiguousarray(scales, np.uint8).view(np.uint32).ravel()
    for row, word in enumerate(words):
        cells[row % 32 :: 32, column + row // 32] = word


def chunked(codes: np.ndarray, fmt: int) -> np.ndarray:
    """Rows of codes as the tensor core wants them: 16 elements in 16 bytes, padding behind."""
    if fmt in (E4M3, E5M2):
        return codes.astype(np.uint8)
    bits = 4 if fmt == E2M1 else 6
    rows = np.full(codes.shape, 0xA5, np.uint8)  # padding is never read
    for row in range(codes.shape[0]):
        for first in range(0, codes.shape[1], 16):
            packed = sum(
                int(code) << bits * i for i, code in enumerate(codes[row, first : first + 16])
            )
            rows[row, first : first + 2 * bits] = list(packed.to_bytes(2 * bits, "little"))
    return rows


FORMAT_CODE = {E4M3: 0, E5M2: 1, E2M3: 3, E3M2: 4, E2M1: 5}
FORMAT_BITS = {E4M3: 8, E5M2: 8, E2M3: 6, E3M2: 6, E2M1: 4}


def random_codes(units, rng, fmt, shape):
    codes = rng.integers(0, 2 ** FORMAT_BITS[fmt], shape)
    finite = np.isfinite(decode(units, fmt, codes))
    return np.where(finite, codes, 0)


def run_mma(
    units, kind, group, idesc, a, b, shared, cells, d, sfa, sfb, blocks, accumulate, repeat=1
):
    error = ctypes.create_string_buffer(512)
    arrays = ctypes.c_void_p * 2
    code = units.run_mma(
        kind, group, ctypes.c_uint32(idesc), ctypes.c_uint64(a), ctypes.c_uint64(b),
        arrays(*[s.ctypes.data for s in shared]), shared[0].size,
        arrays(*[c.ctypes.data for c in cells]),
        d, sfa, sfb, blocks, int(accumulate), repeat, error,
    )  # fmt: skip
    return code, error.value.decode()


A_START, B_START = 0x400, 0x8400
K128B = 0x40004040 << 32


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("n", [16, 48, 192, 256])
@pytest.mark.parametrize(("a_fmt", "b_fmt"), [(E2M1, E4M3), (E4M3, E5M2), (E2M3, E3M2)])
def test_block_scaled_mma_is_exact(units, group, n, a_fmt, b_fmt):
    rng = np.random.default_rng(n + group)
    m = 128 * group
    a, b = random_codes(units, rng, a_fmt, (m, 128)), random_codes(units, rng, b_fmt, (n, 128))
    sfa, sfb = rng.integers(120, 132, (m, 4)), rng.integers(120, 132, (n, 4))
    shared = [np.zeros(0x14000, np.uint8) for _ in range(group)]
    cells = [
        rng.standard_normal((128, 512)).astype(np.float32).view(np.uint32) for _ in range(group)
    ]
    before = [c.view(np.float32).copy() for c in cells]
    for cta in range(group):
        put_rows(shared[cta], A_START, chunked(a[128 * cta : 128 * cta + 128], a_fmt))
        put_rows(shared[cta], B_START, chunked(b[n // group * cta : n // group * (cta + 1)], b_fmt))
        put_scales(cells[cta], 400, sfa[128 * cta : 128 * cta + 128])
        put_scales(cells[cta], 420, sfb)
    for q in range(4):
        idesc = (
            FORMAT_CODE[a_fmt] << 7
            | FORMAT_CODE[b_fmt] << 10
            | n // 8 << 17
            | 1 << 23
            | m // 16 << 24
        )
        idesc |= q << 29 | q << 4
        a_desc, b_desc = K128B | (A_START + 32 * q) >> 4, K128B | (B_START + 32 * q) >> 4
        code, error = run_mma(
            units,
            KIND_MXF8F6F4,
            group,
            idesc,
            a_desc,
            b_desc,
            shared,
            cells,
            64,
            400,
            420,
            1,
            q != 1,
        )
        assert code == 0, error
    av, bv = decode(units, a_fmt, a), decode(units, b_fmt, b)
    for cta in range(group):
        rows = slice(128 * cta, 128 * cta + 128)
        d = before[cta][:, 64 : 64 + n].copy()
        for q in range(4):
            ks = slice(32 * q, 32 * q + 32)
            left = av[rows, ks] * np.exp2(sfa[rows, q, None] - 127.0)
            right = bv[:, ks] * np.exp2(sfb[:, q, None] - 127.0)
            d = (left @ right.T + (0 if q == 1 else d)).astype(np.float32)
        got = cells[cta].view(np.float32)[:, 64 : 64 + n]
        # A sum of E4M3 x E5M2 need not be exact in FP64, so its last bit depends on the order.
        assert np.allclose(got, d, rtol=2e-7, atol=0) if b_fmt == E5M2 else np.array_equal(got, d)
        untouched = np.ones(512, bool)
        untouched[64 : 64 + n] = False
        untouched[400:436] = False
        assert np.array_equal(cells[cta].view(np.float32)[:, untouched], before[cta][:, untouched])


def test_differing_scale_replicas_are_an_error(units):
    shared = [np.zeros(0x14000, np.uint8)]
    cells = [np.zeros((128, 512), np.uint32)]
    cells[0][37, 400] = 1 << 8  # lane 37 is a copy of lane 5; byte 1
    for q, expected in ((0, 0), (1, INVALID_OPERATION)):
        idesc = 16 // 8 << 17 | 1 << 23 | 8 << 24 | q << 29 | q << 4
        code, error = run_mma(
            units, KIND_MXF8F6F4, 1, idesc, K128B | A_START >> 4, K128B | B_START >> 4,
            shared, cells, 0, 400, 420, 1, False,
        )  # fmt: skip
        assert code == expected
    assert "A row 5" in error
    assert "lane 37" in error


def test_packed_fp4_with_two_and_four_scales(units):
    rng = np.random.default_rng(5)
    n, k = 32, 64
    for kind, blocks, ue4m3 in ((KIND_MXF4, 2, False), (KIND_MXF4NVF4, 4, True)):
        a, b = rng.integers(0, 16, (128, k)), rng.integers(0, 16, (n, k))
        packed = [(codes[:, 1::2] << 4 | codes[:, ::2]).astype(np.uint8) for codes in (a, b)]
        scales = [
            rng.integers(0x30, 0x48, (rows, 4)) if ue4m3 else rng.integers(120, 132, (rows, 4))
            for rows in (128, n)
        ]
        shared, cells = [np.zeros(0x14000, np.uint8)], [np.zeros((128, 512), np.uint32)]
        put_rows(shared[0], A_START, packed[0])
        put_rows(shared[0], B_START, packed[1])
        put_scales(cells[0], 400, scales[0])
        put_scales(cells[0], 420, scales[1])
        idesc = 1 << 7 | 1 << 10 | n // 8 << 17 | (0 if ue4m3 else 1) << 23 | 8 << 24
        code, error = run_mma(
            units,
            kind,
            1,
            idesc,
            K128B | A_START >> 4,
            K128B | B_START >> 4,
            shared,
            cells,
            0,
            400,
            420,
            blocks,
            False,
        )
        assert code == 0, error
        factors = [decode(units, E4M3, s) if ue4m3 else np.exp2(s - 127.0) for s in scales]
        left, right = (
            decode(units, E2M1, codes) * np.repeat(factor[:, :blocks], k // blocks, axis=1)
            for codes, factor in zip((a, b), factors, strict=True)
        )
        assert np.array_equal(cells[0].view(np.float32)[:, :n], (left @ right.T).astype(np.float32))


@pytest.mark.parametrize(("m", "group"), [(64, 1), (128, 1), (128, 2), (256, 2)])
def test_dense_accumulator_layouts(units, m, group):
    rng = np.random.default_rng(m + group)
    n, rows = 64, m // group
    a, b = (rng.integers(-8, 8, (count, 16)).astype(np.float16) for count in (m, n))
    shared, cells = [np.zeros(0x14000, np.uint8) for _ in range(group)], []
    for cta in range(group):
        cells.append(np.zeros((128, 512), np.uint32))
        put_rows(shared[cta], A_START, a[rows * cta : rows * (cta + 1)].view(np.uint8))
        put_rows(shared[cta], B_START, b[n // group * cta : n // group * (cta + 1)].view(np.uint8))
    idesc = 1 << 4 | n // 8 << 17 | m // 16 << 24
    code, error = run_mma(
        units,
        KIND_F16,
        group,
        idesc,
        K128B | A_START >> 4,
        K128B | B_START >> 4,
        shared,
        cells,
        0,
        0,
        0,
        1,
        False,
    )
    assert code == 0, error
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    for row in range(m):
        cta, local = divmod(row, rows)
        got = cells[cta].view(np.float32)
        if (m, group) == (64, 1):
            found = got[row % 16 + 32 * (row // 16), :n]
        elif (m, group) == (128, 2):
            found = np.concatenate([got[local, : n // 2], got[local + 64, : n // 2]])
        else:
            found = got[local, :n]
        assert np.array_equal(found, expected[row])


@pytest.mark.parametrize("swizzle", [0, 6, 4, 2])
def test_mn_major_operands(units, swizzle):
    """A stored with its rows contiguous: chunks of 8 F16 rows, CuTe's canonical MN-major layout."""
    rng = np.random.default_rng(3)
    a, b = (
        rng.integers(-8, 8, (128, 16)).astype(np.float16),
        rng.integers(-8, 8, (16, 16)).astype(np.float16),
    )
    span = {0: 16, 6: 32, 4: 64, 2: 128}[swizzle]
    mask = {0: 0, 6: 0x10, 4: 0x30, 2: 0x70}[swizzle]
    atom_bytes = 8 * span
    per_atom = span // 16
    num_atoms = 16 // per_atom
    shared, cells = [np.zeros(0x14000, np.uint8)], [np.zeros((128, 512), np.uint32)]
    for k in range(16):
        for chunk in range(16):
            linear = (
                A_START
                + (chunk // per_atom) * 2 * atom_bytes
                + k // 8 * atom_bytes
                + k % 8 * span
                + chunk % per_atom * 16
            )
            at = linear ^ (linear >> 3 & mask)
            shared[0][at : at + 16] = a[8 * chunk : 8 * chunk + 8, k].copy().view(np.uint8)
    put_rows(shared[0], B_START, b.view(np.uint8))
    rows_step, k_step = 2 * atom_bytes, atom_bytes  # between atoms
    leading, stride = (k_step, rows_step) if swizzle == 0 else (rows_step, k_step)
    desc = swizzle << 61 | 1 << 46 | stride >> 4 << 32 | leading >> 4 << 16 | A_START >> 4
    idesc = 1 << 4 | 1 << 15 | 16 // 8 << 17 | 8 << 24
    code, error = run_mma(
        units, KIND_F16, 1, idesc, desc, K128B | B_START >> 4, shared, cells, 0, 0, 0, 1, False
    )
    assert code == 0, error
    assert num_atoms * rows_step <= B_START - A_START
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    assert np.array_equal(cells[0].view(np.float32)[:, :16], expected)


def test_hopper_sum_drops_low_bits(units):
    def total(products, d):
        a = np.array(products, np.float64)
        return units.sum_like_hopper(
            pointer(a), pointer(np.ones_like(a)), len(products), ctypes.c_double(d)
        )

    assert total([1.0, 2.0**-13], 0.0) == 1 + 2.0**-13
    assert total([1.0, 2.0**-14], 0.0) == 1
    assert total([2.0**-14, 0.0], 1.0) == 1
    assert total([1.0, 2.0**-14], -1.0) == 0


# ---- tensor maps


def tensor_load(units, image, coordinates, destination, shared):
    image = np.frombuffer(image, np.uint8)
    coords = np.array(list(coordinates) + [0] * 5, np.int32)
    counted = ctypes.c_uint32()
    error = ctypes.create_string_buffer(512)
    code = units.tensor_load(
        pointer(image),
        pointer(coords),
        destination,
        pointer(shared),
        shared.size,
        ctypes.byref(counted),
        error,
    )
    return code, counted.value, error.value.decode()


SPANS = {0: (0, 0), 1: (32, 0x10), 2: (64, 0x30), 3: (128, 0x70)}


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("corner", [(0, 0), (-8, 3), (40, -2), (56, 30), (200, 0)])
def test_load_places_and_zero_fills(units, swizzle, corner):
    rng = np.random.default_rng(7)
    tensor = rng.integers(1, 2**16, (32, 64)).astype(np.uint16)
    width = (SPANS[swizzle][0] or 32) // 2
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [width, 8], swizzle)
    shared = np.full(0x1000, 0xEE, np.uint8)
    destination = 0x480
    code, counted, error = tensor_load(units, image, corner, destination, shared)
    assert code == 0, error
    assert counted == width * 2 * 8
    expected = np.full_like(shared, 0xEE)
    pitch = SPANS[swizzle][0] or width * 2
    for j in range(8):
        for i in range(width):
            x, y = corner[0] + i, corner[1] + j
            value = tensor[y, x] if 0 <= x < 64 and 0 <= y < 32 else 0
            linear = destination + j * pitch + 2 * i
            at = linear ^ (linear >> 3 & SPANS[swizzle][1])
            expected[at : at + 2] = np.array([value], np.uint16).view(np.uint8)
    assert np.array_equal(shared, expected)


def test_fp4_load_spreads_chunks_and_counts_packed_bytes(units):
    rng = np.random.default_rng(8)
    tensor = rng.integers(0, 256, (20, 128), dtype=np.uint8)  # 256 values a row
    storage = np.zeros(tensor.size + 32, np.uint8)
    offset = -storage.ctypes.data % 32
    storage[offset : offset + tensor.size] = tensor.ravel()
    image = tensor_map(14, storage.ctypes.data + offset, [256, 20], [128], [128, 8], 3)
    shared = np.full(0x2000, 0xEE, np.uint8)
    code, counted, error = tensor_load(units, image, (128, 16), 0x400, shared)
    assert code == 0, error
    assert counted == 64 * 8
    for j in range(8):
        for chunk in range(8):
            linear = 0x400 + 128 * j + 16 * chunk
            at = linear ^ (linear >> 3 & 0x70)
            expected = (
                tensor[16 + j, 64 + 8 * chunk : 72 + 8 * chunk]
                if 16 + j < 20
                else np.zeros(8, np.uint8)
            )
            assert np.array_equal(shared[at : at + 8], expected)
            assert (shared[at + 8 : at + 16] == 0xEE).all()
    assert tensor_load(units, image, (64, 0), 0x400, shared)[0] == INVALID_OPERATION


def test_five_dimensions_and_element_strides(units):
    rng = np.random.default_rng(9)
    tensor = rng.integers(0, 2**31, (3, 4, 5, 6, 8), dtype=np.int32)
    strides = list(tensor.strides[-2::-1])
    image = tensor_map(
        3, tensor.ctypes.data, [8, 6, 5, 4, 3], strides, [4, 4, 2, 2, 1], 0, [1, 2, 1, 1, 1]
    )
    shared = np.zeros(0x1000, np.uint8)
    code, counted, error = tensor_load(units, image, (4, 1, 3, 2, 1), 0x400, shared)
    assert code == 0, error
    expected = tensor[1, 2:4, 3:5, 1:5:2, 4:8]
    assert counted == expected.size * 4
    assert np.array_equal(shared[0x400 : 0x400 + counted].view(np.int32), expected.ravel())


def test_store_clips_rows_exactly_and_columns_to_16_bytes(units):
    target = np.zeros((10, 128), np.uint8)
    image = tensor_map(0, target.ctypes.data, [100, 6], [128], [64, 4], 2)
    shared = np.zeros(0x1000, np.uint8)
    tile = np.random.default_rng(10).integers(1, 255, (4, 64), dtype=np.uint8)
    for j in range(4):
        for i in range(64):
            linear = 0x400 + 64 * j + i
            shared[linear ^ (linear >> 3 & 0x30)] = tile[j, i]
    coords = np.array([64, 4, 0, 0, 0], np.int32)
    error = ctypes.create_string_buffer(512)
    assert (
        units.tensor_store(
            pointer(np.frombuffer(image, np.uint8)),
            pointer(coords),
            0x400,
            pointer(shared),
            shared.size,
            error,
        )
        == 0
    )
    expected = np.zeros_like(target)
    expected[4:6, 64:112] = tile[:2, :48]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"address": 8}, "global address"),
        ({"strides": [24]}, "stride 1"),
        ({"box": [300, 1]}, "box dimension 0"),
        ({"swizzle": 1, "box": [64, 1]}, "swizzle span"),
        ({"box": [8, 1]}, "no multiple of 16"),
        ({"data_type": 14}, "exactly 128"),
        ({"nan_fill": 1}, "NaN fill"),
    ],
)
def test_invalid_tensor_maps_are_named(units, fields, text):
    usual = {"data_type": 0, "address": 0, "dims": [128, 4], "strides": [128], "box": [64, 1]}
    code, _, error = tensor_load(
        units, tensor_map(**(usual | fields)), (0, 0), 0x400, np.zeros(0x1000, np.uint8)
    )
    assert code != 0
    assert text in error


def test_an_image_without_the_magic_is_refused(units):
    code, _, error = tensor_load(units, bytes(128), (0, 0), 0x400, np.zeros(0x1000, np.uint8))
    assert code == INVALID_OPERATION
    assert "DMTMAP01" in error
