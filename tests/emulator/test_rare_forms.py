"""Forms of instructions that few kernels use, against NumPy: rows picked by tensor copies, atomics
of 128 bits and of vectors of halves, states of mbarriers, magnitudes, matrices of bytes and of
elements of 4 and 6 bits, products with block scales, loads of tensor memory that reduce."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import InvalidOperation, InvalidPtx, Machine, Unsupported

from .device import aligned, run_kernel
from .raw_ptx import entry, run_body, run_lanes
from .tensor_images import tensor_map

# ---- cp.async.bulk.tensor, four rows by number

GATHER = """
KERNEL()(const __grid_constant__ Map map, u32* out, int x, int a, int b, int c, int d) {
    u32 base = shared_address(dynamic_shared), barrier = base + 1024;
    if (threadIdx.x == 0) {
        init_barrier(barrier, 1);
        expect_bytes(barrier, 4 * 64);
        asm volatile("prefetch.tensormap [%0];" :: "l"(&map));
        asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4"
            " [%0, {%1, %2, %3, %4, %5}];"
            :: "l"(&map), "r"(x), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4"
            ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
            :: "r"(base), "l"(&map), "r"(x), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
            : "memory");
    }
    __syncthreads();
    wait(barrier, 0);
    for (u32 i = threadIdx.x; i < 64; i += blockDim.x) out[i] = ((u32*)dynamic_shared)[i];
}
"""
SCATTER = """
KERNEL()(const __grid_constant__ Map map, const u32* in, int x, int a, int b, int c, int d) {
    u32 base = shared_address(dynamic_shared);
    for (u32 i = threadIdx.x; i < 64; i += blockDim.x) ((u32*)dynamic_shared)[i] = in[i];
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
            " [%1, {%2, %3, %4, %5, %6}], [%0];"
            :: "r"(base), "l"(&map), "r"(x), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
"""


@pytest.mark.parametrize("swizzle", [0, 2])
@pytest.mark.parametrize("rows", [(5, 0, 31, 5), (-1, 2, 32, 7)])
def test_four_rows_are_gathered(rows: tuple[int, ...], swizzle: int) -> None:
    tensor = aligned(np.random.default_rng(0).integers(1, 2**16, (32, 64)).astype(np.uint16))
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [32, 1], swizzle)
    out = np.zeros((4, 32), np.uint16)
    run_kernel(GATHER, image, out, 8, *rows, memory=(tensor,))
    for j, row in enumerate(rows):
        expected = tensor[row, 8:40] if 0 <= row < 32 else np.zeros(32, np.uint16)
        if swizzle:  # 64-byte rows, two of which share the 16-byte chunks' order
            expected = expected.reshape(4, 8)[np.arange(4) ^ (j // 2 % 4)].reshape(32)
        assert np.array_equal(out[j], expected)


def test_four_rows_are_scattered() -> None:
    target = aligned(np.zeros((32, 64), np.uint16))
    image = tensor_map(1, target.ctypes.data, [64, 32], [128], [32, 1])
    values = np.arange(1, 129, dtype=np.uint16).reshape(4, 32)
    run_kernel(SCATTER, image, values, 16, 9, 2, 32, 30, memory=(target,))
    expected = np.zeros((32, 64), np.uint16)
    for j, row in enumerate((9, 2, 32, 30)):
        if row < 32:
            expected[row, 16:48] = values[j]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("source", [GATHER, SCATTER])
def test_rows_are_picked_by_maps_of_one_row(source: str) -> None:
    tensor = aligned(np.zeros((32, 64), np.uint16))
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [32, 4])
    with pytest.raises(InvalidOperation, match="a box of one row, the tensor map's has 4"):
        run_kernel(source, image, np.zeros(64, np.uint32), 0, 0, 1, 2, 3, memory=(tensor,))


# ---- atomics of vectors of halves


@pytest.mark.parametrize("name", ["min", "max"])
def test_vectors_of_halves_keep_their_extremes(name: str) -> None:
    """All lanes at one place; a number wins over NaN."""
    values = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float16)
    values[3, 5] = np.nan
    out = np.full(8, 0.5, np.float16)
    run_body(
        "mov.u32 %r0, %tid.x; mad.wide.u32 %rd1, %r0, 16, %p1;"
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];"
        f"red.relaxed.gpu.global.v4.f16x2.{name}.noftz [%p0], {{%r1, %r2, %r3, %r4}};",
        out,
        values,
    )
    extreme = np.fmin if name == "min" else np.fmax
    assert np.array_equal(out, extreme.reduce(values, initial=np.float16(0.5)))


def test_an_extreme_returns_what_was_there() -> None:
    numbers = np.array([1.5, -2.0, 3.0, -4.0], np.float32)
    place = (numbers.view(np.uint32) >> 16).astype(np.uint16)  # as bf16
    old = np.zeros(4, np.uint16)
    run_body(
        "mov.b16 %h0, 0;"  # all four against 0
        "atom.global.v4.bf16.max.noftz {%h1, %h2, %h3, %h4}, [%p0], {%h0, %h0, %h0, %h0};"
        "st.global.v4.b16 [%p1], {%h1, %h2, %h3, %h4};",
        place,
        old,
        threads=1,
    )
    assert np.array_equal((old.astype(np.uint32) << 16).view(np.float32), numbers)
    found = (place.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(found, np.maximum(numbers, 0))


def test_one_half_has_no_extreme() -> None:
    with pytest.raises(Unsupported, match=r"type \.f16 is not supported here"):
        run_body("atom.global.min.noftz.f16 %h0, [%p0], %h1;", np.zeros(2, np.uint16))


# ---- states of mbarriers


def test_a_state_tells_how_many_arrivals_were_pending() -> None:
    """And still tells whether its phase is over."""
    out = np.zeros(5, np.uint32)
    waits = "mbarrier.test_wait.shared.b64 %c1, [%r1], %rd3; selp.u32 %r5, 1, 0, %c1;"
    run_body(
        "mov.u32 %r1, s; mbarrier.init.shared.b64 [%r1], 5;"
        "mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %rd1, [%r1], 2;"
        "mbarrier.arrive_drop.noComplete.release.cta.shared::cta.b64 %rd2, [%r1], 1;"
        "mbarrier.arrive.shared.b64 %rd3, [%r1];"
        "mbarrier.pending_count.b64 %r2, %rd1; mbarrier.pending_count.b64 %r3, %rd2;"
        "mbarrier.pending_count.b64 %r4, %rd3;"
        "st.global.u32 [%p0], %r2; st.global.u32 [%p0+4], %r3; st.global.u32 [%p0+8], %r4;"
        f"{waits} st.global.u32 [%p0+12], %r5; mbarrier.arrive.shared.b64 _, [%r1];"
        f"{waits} st.global.u32 [%p0+16], %r5;",
        out,
        threads=1,
        module=".shared .align 8 .b64 s;\n",
    )
    assert out.tolist() == [5, 3, 2, 0, 1]


# ---- smallest and largest magnitudes of three


@pytest.mark.parametrize(("name", "extreme"), [("min", np.fmin), ("max", np.fmax)])
def test_magnitudes_of_three_are_compared(name: str, extreme: np.ufunc) -> None:
    a, b, c = np.random.default_rng(2).normal(size=(3, 32)).astype(np.float32)
    b[4] = c[7] = np.nan
    result = run_lanes(f"{name}.abs.f32 $d, $a, $b, $c;", np.float32, a, b, c)
    assert np.array_equal(result, extreme(extreme(abs(a), abs(b)), abs(c)))


# ---- atom.b128

WIDE = """
.reg .b128 %w<4>; .reg .b64 %x<8>;
mov.u32 %r0, %tid.x;
cvt.u64.u32 %x0, %r0;
add.u64 %x1, %x0, 100;
mov.b128 %w0, {%x0, %x1};
"""


def test_128_bits_are_exchanged_at_once() -> None:
    word, out = aligned(np.array([7, 8], np.uint64)), np.zeros((32, 2), np.uint64)
    run_body(
        WIDE + "atom.exch.relaxed.gpu.global.b128 %w1, [%p0], %w0; mov.b128 {%x2, %x3}, %w1;"
        "mad.wide.u32 %rd0, %r0, 16, %p1; st.global.v2.u64 [%rd0], {%x2, %x3};",
        word,
        out,
    )
    # The lanes in some order: what one leaves the next one finds.
    pairs = [(7, 8)] + [(lane, lane + 100) for lane in range(32)]
    assert sorted([*map(tuple, out.tolist()), tuple(word.tolist())]) == sorted(pairs)


@pytest.mark.parametrize(("low", "high"), [(7, 8), (7, 9), (6, 8)])
def test_128_bits_are_compared_at_once(low: int, high: int) -> None:
    word, out = aligned(np.array([7, 8], np.uint64)), np.zeros(2, np.uint64)
    run_body(
        WIDE + f"mov.u64 %x4, {low}; mov.u64 %x5, {high}; mov.b128 %w2, {{%x4, %x5}};"
        "atom.cas.acq_rel.sys.global.b128 %w1, [%p0], %w2, %w0; mov.b128 {%x2, %x3}, %w1;"
        "st.global.v2.u64 [%p1], {%x2, %x3};",
        word,
        out,
        threads=1,
    )
    assert out.tolist() == [7, 8]
    assert word.tolist() == ([0, 100] if (low, high) == (7, 8) else [7, 8])


# ---- ldmatrix

LOAD_MATRIX = """
.shared .align 128 .b8 rows[512];
mov.u32 %r0, %tid.x;
mad.wide.u32 %rd0, %r0, 16, %p0;
ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd0];
mov.u32 %r5, rows;
mad.lo.u32 %r5, %r0, 16, %r5;
st.shared.v4.u32 [%r5], {%r1, %r2, %r3, %r4};
bar.warp.sync -1;
ldmatrix.sync.aligned.FORM {REGISTERS}, [%r5];
mad.wide.u32 %rd1, %r0, BYTES, %p1;
STORES
"""


def load_matrix(form: str, count: int, rows: np.ndarray) -> np.ndarray:
    """The registers of all lanes as bytes, [32, 4 * count]."""
    out = np.zeros((32, 4 * count), np.uint8)
    registers = [f"%r{10 + i}" for i in range(count)]
    body = LOAD_MATRIX.replace("FORM", form).replace("REGISTERS", ", ".join(registers))
    stores = "".join(f"st.global.u32 [%rd1+{4 * i}], {r};\n" for i, r in enumerate(registers))
    run_body(body.replace("BYTES", str(4 * count)).replace("STORES", stores), rows, out)
    return out


def packed_rows(elements: np.ndarray, bits: int) -> np.ndarray:
    """Rows of 16 elements, from the lowest bit of 16 bytes on; other bits are ones."""
    rows = np.zeros((len(elements), 16), np.uint8)
    for row, values in zip(rows, elements, strict=True):
        number = sum(int(value) << bits * i for i, value in enumerate(values))
        number |= (1 << 128) - (1 << 16 * bits)
        row[:] = np.frombuffer(number.to_bytes(16, "little"), np.uint8)
    return rows


# Elements' bits by the source's format.
SQUARE_FORMS = {"shared.b8": 8, "shared.b8x16.b6x16_p32": 6, "shared.b8x16.b4x16_p64": 4}


@pytest.mark.parametrize("form", SQUARE_FORMS)
@pytest.mark.parametrize("count", [1, 2])
def test_square_matrices_of_bytes_are_transposed(form: str, count: int) -> None:
    bits = SQUARE_FORMS[form]
    elements = np.random.default_rng(bits).integers(0, 2**bits, (32, 16))
    rows = elements.astype(np.uint8) if bits == 8 else packed_rows(elements, bits)
    out = load_matrix(f"m16n16.x{count}.trans.{form}", 2 * count, rows)
    for t in range(32):
        for matrix in range(count):
            for half in range(2):  # a register: four rows of one column
                first = 16 * matrix + 4 * (t % 4)
                expected = elements[first : first + 4, t // 4 + 8 * half]
                at = 8 * matrix + 4 * half
                assert out[t, at : at + 4].tolist() == expected.tolist()


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_small_elements_become_bytes(bits: int, count: int) -> None:
    elements = np.random.default_rng(bits).integers(0, 2**bits, (32, 16))
    form = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    out = load_matrix(f"m8n16.x{count}.shared.b8x16.{form}", count, packed_rows(elements, bits))
    for t in range(32):
        for matrix in range(count):
            expected = elements[8 * matrix + t // 4, 4 * (t % 4) : 4 * (t % 4) + 4]
            assert out[t, 4 * matrix : 4 * matrix + 4].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "form", ["m16n16.x4.trans.shared.b8", "m16n16.x1.shared.b8", "m8n16.x1.shared.b8"]
)
def test_forms_of_ldmatrix_that_do_not_exist(form: str) -> None:
    with pytest.raises(InvalidPtx):
        load_matrix(form, 4, np.zeros((32, 16), np.uint8))


# ---- mma with block scales

# Bits of exponent and fraction.
ELEMENTS = {"e4m3": (4, 3), "e5m2": (5, 2), "e3m2": (3, 2), "e2m3": (2, 3), "e2m1": (2, 1)}


def values_of(kind: str, codes: np.ndarray) -> np.ndarray:
    if kind == "ue8m0":
        return np.exp2(codes.astype(np.float64) - 127)
    exponent_bits, fraction_bits = ELEMENTS[kind.removeprefix("u")]
    exponent = codes >> fraction_bits & 2**exponent_bits - 1
    fraction = (codes & 2**fraction_bits - 1) / 2**fraction_bits
    bias = 2 ** (exponent_bits - 1) - 1
    magnitude = np.where(
        exponent > 0,
        (1 + fraction) * np.exp2(exponent.astype(np.float64) - bias),
        fraction * np.exp2(1.0 - bias),
    )
    return np.where(codes >> exponent_bits + fraction_bits & 1, -magnitude, magnitude)


def random_codes(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    exponent_bits, fraction_bits = ELEMENTS[kind]
    codes = rng.integers(0, 2 ** (1 + exponent_bits + fraction_bits), shape).astype(np.uint8)
    if exponent_bits > 3:  # no NaN or infinity
        codes[codes & 0x7C == 0x7C] = 0x30
    return codes


def fragments(codes: np.ndarray, kind: str, rows: int, packed: bool) -> np.ndarray:
    """The registers of A (16 rows) or B (8 columns as rows), [32, rows // 4]."""
    bytes_of = codes << 2 if kind == "e2m1" and not packed else codes
    words = np.zeros((32, rows // 4), np.uint32)
    each, bits = (8, 4) if packed else (4, 8)
    for t in range(32):
        for r in range(rows // 4):
            row = t // 4 + (8 * (r % 2) if rows == 16 else 0)
            first = each * (t % 4) + 4 * each * (r // 2 if rows == 16 else r)
            for e in range(each):
                words[t, r] |= np.uint32(int(bytes_of[row, first + e]) << bits * e)
    return words


def multiply(form: str, words: np.ndarray, scales: str) -> np.ndarray:
    """D of the 16 x 8 tile; words: A, B, C and scale registers of each lane, [32, 12]."""
    count = words.shape[1]
    out = np.zeros((32, 4), np.float32)
    loads = "".join(f"ld.global.u32 %r{10 + i}, [%rd0+{4 * i}];\n" for i in range(count))
    a, b, c = (
        ", ".join(f"%r{10 + i}" for i in span) for span in (range(4), range(4, 6), range(6, 10))
    )
    run_body(
        f"mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, {4 * count}, %p0; {loads}"
        f"mma.sync.aligned.{form} {{%r1, %r2, %r3, %r4}}, {{{a}}}, {{{b}}}, {{{c}}}{scales};\n"
        "mad.wide.u32 %rd1, %r0, 16, %p1; st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};",
        words,
        out,
    )
    tile = np.zeros((16, 8), np.float32)
    for t in range(32):
        for i in range(4):
            tile[t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2] = out[t, i]
    return tile


@pytest.mark.parametrize(
    ("kind", "a_kind", "b_kind", "scale", "num_scales"),
    [
        ("mxf8f6f4", "e4m3", "e2m1", "ue8m0", 1),
        ("mxf8f6f4", "e2m1", "e5m2", "ue8m0", 1),
        ("mxf8f6f4", "e3m2", "e2m3", "ue8m0", 1),
        ("mxf4", "e2m1", "e2m1", "ue8m0", 2),
        ("mxf4nvf4", "e2m1", "e2m1", "ue8m0", 2),
        ("mxf4nvf4", "e2m1", "e2m1", "ue4m3", 4),
        ("f8f6f4", "e3m2", "e4m3", "", 0),
    ],
)
@pytest.mark.parametrize("selectors", [(0, 0, 0, 0), (2, 1, 0, 3)])
def test_products_with_block_scales(
    kind: str,
    a_kind: str,
    b_kind: str,
    scale: str,
    num_scales: int,
    selectors: tuple[int, int, int, int],
) -> None:
    byte_a, thread_a, byte_b, thread_b = selectors
    if num_scales == 4:
        byte_a = byte_b = 0
    packed = kind.startswith("mxf4")
    k = 64 if packed else 32
    rng = np.random.default_rng(k + num_scales)
    a, b = random_codes(rng, a_kind, (16, k)), random_codes(rng, b_kind, (8, k))
    c = rng.integers(-9, 9, (16, 8)).astype(np.float32)
    words = np.zeros((32, 12), np.uint32)
    words[:, :4], words[:, 4:6] = (
        fragments(a, a_kind, 16, packed),
        fragments(b, b_kind, 8, packed),
    )
    for t in range(32):
        for i in range(4):
            words[t, 6 + i] = c[t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2].view(np.uint32)
    # Other bytes and lanes hold what would spoil the result.
    low, high = (118, 128) if scale == "ue8m0" else (0x20, 0x40)
    scale_bytes = rng.integers(low, high, (32, 2, 4)).astype(np.uint8)
    words[:, 10:] = scale_bytes.view(np.uint32)[..., 0]
    a_values, b_values = values_of(a_kind, a), values_of(b_kind, b)
    for row in range(16 if num_scales else 0):
        lane = 4 * (row % 8) + 2 * thread_a + row // 8
        chosen = scale_bytes[lane, 0, byte_a : byte_a + num_scales]
        a_values[row] *= np.repeat(values_of(scale, chosen), k // num_scales)
    for column in range(8 if num_scales else 0):
        chosen = scale_bytes[4 * column + thread_b, 1, byte_b : byte_b + num_scales]
        b_values[column] *= np.repeat(values_of(scale, chosen), k // num_scales)
    shape = f"m16n8k{k}.row.col.f32.{a_kind}.{b_kind}.f32"
    if num_scales:
        form = f"kind::{kind}.block_scale.scale_vec::{num_scales}X.{shape}.{scale}"
        operands = f", {{%r20}}, {{{byte_a}, {thread_a}}}, {{%r21}}, {{{byte_b}, {thread_b}}}"
    else:
        form, operands = f"kind::{kind}.{shape}", ""
    tile = multiply(form, words, operands)
    assert np.array_equal(tile, (a_values @ b_values.T + c).astype(np.float32))


@pytest.mark.parametrize(
    ("form", "operands", "error", "text"),
    [
        (
            "kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue8m0",
            ", {%r20}, {1, 0}, {%r21}, {0, 0}",
            InvalidOperation,
            "byte 1 of thread 0 does not exist",
        ),
        (
            "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0",
            ", {%r20}, {0, 2}, {%r21}, {0, 0}",
            InvalidOperation,
            "byte 0 of thread 2 does not exist",
        ),
        (
            "kind::mxf4nvf4.block_scale.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
            ", {%r20}, {0, 0}, {%r21}, {0, 0}",
            InvalidPtx,
            "does not exist for this kind",
        ),
        (
            "kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3",
            ", {%r20}, {0, 0}, {%r21}, {0, 0}",
            InvalidPtx,
            "scales of .ue8m0",
        ),
    ],
)
def test_scales_that_do_not_exist(
    form: str, operands: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        multiply(form, np.zeros((32, 12), np.uint32), operands)


# ---- tcgen05.ld.red

LOAD_REDUCE = """
.shared .align 16 .b32 place;
mov.u32 %r0, %tid.x;
mov.u32 %r1, place;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
bar.warp.sync -1;
ld.shared.u32 %r2, [place];
mad.wide.u32 %rd0, %r0, 16, %p0;
ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%rd0];
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r2], {%r3, %r4, %r5, %r6};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.red.sync.aligned.32x32b.x4.FORM {%r7, %r8, %r9, %r10}, %r11, [%r2];
tcgen05.wait::ld.sync.aligned;
mad.wide.u32 %rd1, %r0, 20, %p1;
st.global.u32 [%rd1], %r7; st.global.u32 [%rd1+4], %r8; st.global.u32 [%rd1+8], %r9;
st.global.u32 [%rd1+12], %r10; st.global.u32 [%rd1+16], %r11;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("kind", ["u32", "s32", "f32", "abs.f32", "NaN.f32"])
def test_loads_of_tensor_memory_reduce(operation: str, kind: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 2**32, (32, 4), dtype=np.uint32)
    if "f32" in kind:
        values = rng.normal(size=(32, 4)).astype(np.float32)
        values[3, 1] = np.nan
        values[4] = [0.0, -0.0, 0.0, -0.0]
    out = np.zeros((32, 5), values.dtype)
    run_body(LOAD_REDUCE.replace("FORM", f"{operation}.{kind}"), values, out)
    assert np.array_equal(out[:, :4].view(np.uint32), values.view(np.uint32))
    seen = values.view(np.int32) if kind == "s32" else values
    seen = np.abs(seen) if kind == "abs.f32" else seen
    reduce = {"min": np.fmin.reduce, "max": np.fmax.reduce}
    if kind == "NaN.f32":
        reduce = {"min": np.minimum.reduce, "max": np.maximum.reduce}
    expected = reduce[operation](seen, axis=1).astype(seen.dtype)
    got = out[:, 4].view(seen.dtype)
    assert np.array_equal(got, expected, equal_nan="f32" in kind)
    if kind == "f32":
        assert np.signbit(got[4]) == (operation == "min")


def test_some_shapes_have_no_reduction() -> None:
    body = LOAD_REDUCE.replace("ld.red.sync.aligned.32x32b.x4", "ld.red.sync.aligned.16x64b.x4")
    with pytest.raises(InvalidPtx, match=r"this shape has no \.red"):
        Machine().load(entry(body.replace("FORM", "min.u32"), 2))


# ---- sparse matrices

SPARSE = """
mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %p0; mad.wide.u32 %rd1, %r0, 4, %p1;
mad.wide.u32 %rd2, %r0, 4, %p2; mad.wide.u32 %rd3, %r0, 4, %p3;
"""


@pytest.mark.parametrize(("kind", "k"), [("s8", 64), ("s8", 32), ("f16", 32), ("f16", 16)])
def test_products_with_a_sparse_matrix(kind: str, k: int) -> None:
    rng = np.random.default_rng(k)
    size = 1 if kind == "s8" else 2
    dtype = np.int8 if kind == "s8" else np.float16
    a, b = rng.integers(-4, 5, (16, k // 2)), rng.integers(-4, 5, (k, 8))
    pairs = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)])
    kept = pairs[rng.integers(0, 6, (16, k // 4))]
    dense = np.zeros((16, k), np.int64)
    words = np.zeros(32, np.uint32)
    selector = (0 if k == 64 else 1) if kind == "s8" else 1 if k == 32 else 2
    for row in range(16):
        for group in range(k // 4):
            first, second = kept[row, group]
            dense[row, 4 * group + first] = a[row, 2 * group]
            dense[row, 4 * group + second] = a[row, 2 * group + 1]
            if kind == "s8":  # a register has 32 elements of a row; rows 8 apart are neighbours
                thread = row // 8 + (4 * group // 32 * 2 if k == 64 else 2 * selector)
                bit = 4 * group % 32
            else:  # half a register has 16 elements of a row
                thread = selector if k == 16 else 2 * selector + 4 * group // 16
                bit = 16 * (row // 8) + 4 * group % 16
            words[row % 8 * 4 + thread] |= np.uint32((first | second << 2) << bit)
    per = 4 // size
    lanes = np.arange(32)

    def fragment(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(matrix[rows, columns].astype(dtype)).view(np.uint32)[..., 0]

    element = np.arange(per)
    num_a, num_b = 16 * k // 2 // per // 32, 8 * k // per // 32
    a_words = np.stack([
        fragment(
            a,
            (lanes // 4 + 8 * (r & 1))[:, None],
            per * (lanes % 4)[:, None] + element + 4 * per * (r >> 1),
        )
        for r in range(num_a)
    ])  # fmt: skip
    b_words = np.stack([
        fragment(b, per * (lanes % 4)[:, None] + element + 4 * per * r, (lanes // 4)[:, None])
        for r in range(num_b)
    ])  # fmt: skip
    out = np.zeros((4, 32), np.uint32)
    loads = "".join(f"ld.global.u32 %r{10 + i}, [%rd1+{128 * i}];" for i in range(num_a))
    loads += "".join(f"ld.global.u32 %r{20 + i}, [%rd2+{128 * i}];" for i in range(num_b))
    named = [", ".join(f"%r{f + i}" for i in range(n)) for f, n in ((10, num_a), (20, num_b))]
    types = "s32.s8.s8.s32" if kind == "s8" else "f32.f16.f16.f32"
    run_body(
        SPARSE
        + f"{loads} ld.global.u32 %r30, [%rd3]; mov.u32 %r40, 0;"
        + f"mma.sp::ordered_metadata.sync.aligned.m16n8k{k}.row.col.{types} {{%r1, %r2, %r3, %r4}},"
        f" {{{named[0]}}}, {{{named[1]}}}, {{%r40, %r40, %r40, %r40}}, %r30, {selector};"
        + "".join(f"st.global.u32 [%rd0+{128 * i}], %r{1 + i};" for i in range(4)),
        out,
        a_words,
        b_words,
        words,
    )
    expected = dense @ b
    values = out.view(np.int32 if kind == "s8" else np.float32)
    for i in range(4):
        assert np.array_equal(values[i], expected[lanes // 4 + 8 * (i // 2), lanes % 4 * 2 + i % 2])


def test_metadata_of_one_element_twice_is_an_error() -> None:
    body = (
        "mov.u32 %r1, 0; mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {%r2, %r3, %r4, %r5}, {%r1, %r1}, {%r1, %r1}, {%r1, %r1, %r1, %r1}, %r1, 0;"
    )
    with pytest.raises(InvalidOperation, match="sparse metadata 0x0 of row 0"):
        run_body(body)
    with pytest.raises(InvalidPtx, match="selector"):
        run_body(body[:-2] + "4;")


# ---- weight-stationary products

STATIONARY = """
KERNEL()(const uint4* in, u32* out, u32 rows, u32 n, u32 turns) {
    u32 base = shared_address(dynamic_shared), warp = threadIdx.x / 32;
    u32 barrier = base + 60000, columns = base + 60008;
    for (u32 i = threadIdx.x; i < (rows + n) * 8; i += blockDim.x)
        ((uint4*)dynamic_shared)[i ^ (i >> 3 & 7)] = in[i];
    fence_async();
    if (threadIdx.x == 0) init_barrier(barrier, 1);
    if (warp == 0)
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 256;"
            :: "r"(columns) : "memory");
    __syncthreads();
    u32 tmem = *(u32*)(dynamic_shared + 60008);
    if (threadIdx.x == 0) {
        u64 a = 0x4000404000000000ull | base >> 4, b = a + rows * 8;
        u32 shape = 1 << 4 | n >> 3 << 17 | rows >> 4 << 24;
        for (u32 turn = 0; turn < turns; ++turn)
            for (u32 k = 0; k < 4; ++k)
                asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0;"
                    " tcgen05.mma.ws.cta_group::1.kind::f16.collector::b0::fill"
                    " [%0], %1, %2, %3, p; }"
                    :: "r"(tmem), "l"(a + 2 * k), "l"(b + 2 * k), "r"(shape), "r"(turn + k)
                    : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(barrier) : "memory");
    }
    __syncwarp();
    wait(barrier, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (u32 column = 0; column < n * rows / 128; ++column) {
        u32 value;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];"
            : "=r"(value) : "r"(tmem + (warp * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        out[column * 128 + threadIdx.x] = value;
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    if (warp == 0)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 256;" :: "r"(tmem));
}
"""


@pytest.mark.parametrize(("rows", "n"), [(32, 64), (32, 256), (64, 128), (128, 64)])
def test_weight_stationary_products(rows: int, n: int) -> None:
    tiles = np.random.default_rng(rows).integers(-3, 4, (rows + n, 64)).astype(np.float16)
    out = np.zeros((n * rows // 128, 128), np.float32)
    run_kernel(STATIONARY, tiles, out, rows, n, 2)
    a, b = tiles[:rows].astype(np.float32), tiles[rows:].astype(np.float32)
    # Lanes hold the rows; where there are fewer, first those of the first columns.
    parts = (2 * (a @ b.T)).reshape(rows, 128 // rows, -1)
    assert np.array_equal(out, parts.transpose(2, 1, 0).reshape(out.shape))


def test_weight_stationary_products_that_do_not_exist() -> None:
    out = np.zeros((32, 128), np.float32)
    with pytest.raises(InvalidOperation, match=r"tcgen05.mma.ws .* M = 32, N = 32 does not exist"):
        run_kernel(STATIONARY, np.zeros((64, 64), np.float16), out, 32, 32, 1)


# ---- st.async and red.async to global memory, integer products that saturate


def test_stores_and_updates_of_global_memory_that_may_be_late() -> None:
    out = np.arange(32, dtype=np.uint32)
    run_body(
        "mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %p0; mov.u32 %r1, 7;"
        "setp.lt.u32 %c0, %r0, 16; @%c0 st.async.mmio.release.sys.global.u32 [%rd0], %r1;"
        "@!%c0 red.async.mmio.release.sys.global.add.u32 [%rd0], %r1;",
        out,
    )
    assert np.array_equal(out, np.where(np.arange(32) < 16, 7, np.arange(32) + 7))


@pytest.mark.parametrize("saturates", [False, True])
def test_integer_products_saturate(saturates: bool) -> None:
    out = np.zeros((2, 32), np.int32)
    form = "mma.sync.aligned.m16n8k32.row.col" + ".satfinite" * saturates
    registers = "{%r3, %r3, %r3, %r3}"
    run_body(
        "mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %p0; mov.u32 %r3, 0x01010101;"
        "mov.u32 %r4, 0x7ffffff0; mov.u32 %r5, 0x80000010; mov.u32 %r6, 0xffffffff;"
        f"{form}.s32.s8.s8.s32 {{%r10, %r11, %r12, %r13}}, {registers}, {{%r3, %r3}},"
        " {%r4, %r4, %r4, %r4};"
        f"{form}.s32.s8.s8.s32 {{%r14, %r15, %r16, %r17}}, {registers}, {{%r6, %r6}},"
        " {%r5, %r5, %r5, %r5};"
        "st.global.u32 [%rd0], %r10; st.global.u32 [%rd0+128], %r14;",
        out,
    )
    sums = np.array([0x7FFFFFF0 + 32, -0x80000000 + 0x10 - 32])
    expected = np.clip(sums, -(2**31), 2**31 - 1) if saturates else sums.astype(np.int32)
    assert np.array_equal(out, np.repeat(expected[:, None], 32, 1))
