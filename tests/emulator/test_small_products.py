"""mma.sync of 4-bit elements and bits, of eight rows, of halves by quads of lanes; sparse FP4 and
block scales; wgmma of bits; conversions of small numbers; against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import InvalidPtx, Machine

from .device import run_kernel
from .raw_ptx import entry, run_body
from .test_rare_forms import fragments, random_codes, values_of
from .test_tcgen05_sparse import image, sparse_rows

LANES = np.arange(32)


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of small codes as rows of words, the first element lowest."""
    flat = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    packed = np.packbits(flat[..., :bits].reshape(len(codes), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)


def registers(codes: np.ndarray, bits: int) -> np.ndarray:
    """Of A (8 or 16 rows) or, by its columns, of B: [registers, 32]. A lane has a word of a row,
    then of the row 8 below, then four words further of both."""
    words = words_of(codes, bits)
    rows = [LANES // 4 + first for first in range(0, len(codes), 8)]
    return np.stack([
        words[row, 4 * column + LANES % 4] for column in range(words.shape[1] // 4) for row in rows
    ])  # fmt: skip


def multiply(form: str, tail: str, operands: list[np.ndarray], num_d: int) -> np.ndarray:
    """D's registers, [num_d, 32]. operands: registers of A, B, C and what follows; the latter are
    named %r50, %r51, ... in `tail`."""
    out = np.zeros((num_d, 32), np.uint32)
    body, braces = "mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %p0;", []
    for index, (first, operand) in enumerate(zip((20, 30, 40, 50), operands, strict=False)):
        body += f"mad.wide.u32 %rd{1 + index}, %r0, 4, %p{1 + index};"
        body += "".join(
            f"ld.global.u32 %r{first + i}, [%rd{1 + index}+{128 * i}];" for i in range(len(operand))
        )
        braces.append("{" + ", ".join(f"%r{first + i}" for i in range(len(operand))) + "}")
    results = ", ".join(f"%r{1 + i}" for i in range(num_d))
    body += f"{form} {{{results}}}, {', '.join(braces[:3])}{tail};"
    body += "".join(f"st.global.u32 [%rd0+{128 * i}], %r{1 + i};" for i in range(num_d))
    run_body(body, out, *[np.ascontiguousarray(operand, np.uint32) for operand in operands])
    return out


def results(tile: np.ndarray) -> np.ndarray:
    """A 8 or 16 x 8 tile as registers of C or D."""
    return np.stack([
        tile[LANES // 4 + 8 * (i // 2), LANES % 4 * 2 + i % 2] for i in range(len(tile) // 4)
    ])  # fmt: skip


def integers(kind: str, codes: np.ndarray) -> np.ndarray:
    bits = int(kind[1:])
    signed = kind[0] == "s"
    return codes.astype(np.int64) - ((codes >> bits - 1) << bits if signed else 0)


@pytest.mark.parametrize("end", ["", ".satfinite"])
@pytest.mark.parametrize(
    ("m", "k", "a_kind", "b_kind"),
    [
        (8, 16, "s8", "u8"),
        (8, 32, "u4", "s4"),
        (16, 32, "s4", "s4"),
        (16, 64, "u4", "u4"),
        (16, 64, "s4", "u4"),
    ],
)
def test_products_of_small_integers(m: int, k: int, a_kind: str, b_kind: str, end: str) -> None:
    bits, rng = int(a_kind[1:]), np.random.default_rng(k)
    a, b = rng.integers(0, 2**bits, (m, k)), rng.integers(0, 2**bits, (8, k))
    c = rng.integers(-9, 9, (m, 8))
    c[0, 0], c[1, 1] = 2**31 - 1, -(2**31)
    form = f"mma.sync.aligned.m{m}n8k{k}.row.col{end}.s32.{a_kind}.{b_kind}.s32"
    operands = [registers(a, bits), registers(b, bits), results(c.astype(np.int32).view(np.uint32))]
    out = multiply(form, "", operands, m // 4)
    sums = integers(a_kind, a) @ integers(b_kind, b).T + c
    expected = np.clip(sums, -(2**31), 2**31 - 1) if end else sums
    assert np.array_equal(out, results(expected.astype(np.int32).view(np.uint32)))


@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize(("m", "k"), [(8, 128), (16, 128), (16, 256)])
def test_products_of_bits(m: int, k: int, operation: str) -> None:
    rng = np.random.default_rng(k + m)
    a, b, c = rng.integers(0, 2, (m, k)), rng.integers(0, 2, (8, k)), rng.integers(-9, 9, (m, 8))
    form = f"mma.sync.aligned.m{m}n8k{k}.row.col.s32.b1.b1.s32.{operation}.popc"
    operands = [registers(a, 1), registers(b, 1), results(c.astype(np.int32).view(np.uint32))]
    together = a[:, None] ^ b[None] if operation == "xor" else a[:, None] & b[None]
    expected = (together.sum(-1) + c).astype(np.int32).view(np.uint32)
    assert np.array_equal(multiply(form, "", operands, m // 4), results(expected))


@pytest.mark.parametrize(("k", "selector"), [(64, 0), (64, 1), (128, 0)])
def test_sparse_products_of_four_bits(k: int, selector: int) -> None:
    rng = np.random.default_rng(k)
    kept, b = rng.integers(0, 16, (16, k // 2)), rng.integers(0, 16, (8, k))
    dense, nibbles = sparse_rows(rng, kept, 2, tf32=False)
    operands = [registers(kept, 4), registers(b, 4), np.zeros((4, 32), np.uint32)]
    operands.append(metadata(nibbles, selector)[None])
    form = f"mma.sp::ordered_metadata.sync.aligned.m16n8k{k}.row.col.s32.s4.u4.s32"
    out = multiply(form, f", %r50, {selector}", operands, 4)
    # A code of zero is a zero, where no metadata points.
    expected = integers("s4", dense) @ integers("u4", b).T
    assert np.array_equal(out, results(expected.astype(np.int32).view(np.uint32)))


def metadata(nibbles: np.ndarray, selector: int) -> np.ndarray:
    """Registers of 16 rows of 8 or 16 groups: a register has 8 groups of a row, that of the row 8
    below lies in the next lane."""
    words = np.full(32, 0xEEEEEEEE, np.uint32)
    for row, groups in enumerate(nibbles):
        for part in range(len(groups) // 8):
            lane = row % 8 * 4 + row // 8 + 2 * (part + selector)
            words[lane] = sum(int(v) << 4 * i for i, v in enumerate(groups[8 * part :][:8]))
    return words


@pytest.mark.parametrize(
    ("kind", "element", "scales"),
    [("f8f6f4", "e2m1", 0), ("f8f6f4", "e3m2", 0), ("mxf8f6f4", "e4m3", 1), ("mxf4", "e2m1", 2),
     ("mxf4nvf4", "e2m1", 4)],
)  # fmt: skip
def test_sparse_products_of_small_floats(kind: str, element: str, scales: int) -> None:
    packed, rng = kind.startswith("mxf4"), np.random.default_rng(scales)
    k = 128 if packed else 64
    kept, b = random_codes(rng, element, (16, k // 2)), random_codes(rng, element, (8, k))
    dense, nibbles = sparse_rows(rng, kept, 2 if packed else 1, tf32=False)
    a_values, b_values = values_of(element, dense), values_of(element, b)
    operands = [fragments(kept, element, 16, packed).T, wide_fragments(b, element, packed),
                np.zeros((4, 32), np.uint32)]  # fmt: skip
    extra, tail = [metadata(nibbles, 0)], ", %r50, 0"
    form = f"mma.sp::ordered_metadata.sync.aligned.kind::{kind}"
    shape = f"m16n8k{k}.row.col.f32.{element}.{element}.f32"
    if scales:
        scale = "ue4m3" if kind == "mxf4nvf4" else "ue8m0"
        low, high = (0x20, 0x40) if scale == "ue4m3" else (118, 128)
        factors = rng.integers(low, high, (2, 32, 4)).astype(np.uint8)
        extra += list(factors.view(np.uint32)[..., 0])
        tail += ", {%r51}, {0, 0}, {%r52}, {0, 0}"
        shape += f".{scale}"
        form += f".block_scale.scale_vec::{scales}X"
        for row in range(16):
            own = factors[0, 4 * (row % 8) + row // 8, :scales]
            a_values[row] *= np.repeat(values_of(scale, own), k // scales)
        for column in range(8):
            own = factors[1, 4 * column, :scales]
            b_values[column] *= np.repeat(values_of(scale, own), k // scales)
    out = multiply(f"{form}.{shape}", tail, [*operands, np.stack(extra)], 4)
    expected = (a_values @ b_values.T).astype(np.float32)
    assert np.array_equal(out, results(expected.view(np.uint32)))


def wide_fragments(codes: np.ndarray, element: str, packed: bool) -> np.ndarray:
    """B's four registers: those of the first half of K, then of the second."""
    half = codes.shape[1] // 2
    return np.concatenate([
        fragments(codes[:, part : part + half], element, 8, packed).T for part in (0, half)
    ])  # fmt: skip


@pytest.mark.parametrize("orders", [("row", "col"), ("row", "row"), ("col", "col"), ("col", "row")])
@pytest.mark.parametrize(("d", "c"), [("f32", "f32"), ("f32", "f16"), ("f16", "f16")])
def test_products_of_quads(orders: tuple[str, str], d: str, c: str) -> None:
    rng = np.random.default_rng(7)
    a, b = rng.integers(-4, 5, (4, 8, 4)), rng.integers(-4, 5, (4, 4, 8))
    addend = rng.integers(-9, 9, (4, 8, 8))
    quad, far = LANES % 16 // 4, LANES // 16 * 4  # lanes 16 apart work together
    i = np.arange(4)

    def halves(values: np.ndarray) -> np.ndarray:  # [32, n] -> [n / 2, 32]
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint32).T

    own = (LANES % 4 + far)[:, None]
    a_lanes = (a[quad[:, None], own, i] if orders[0] == "row"
               else a[quad[:, None], far[:, None] + i, LANES[:, None] % 4])  # fmt: skip
    b_lanes = (b[quad[:, None], i, own] if orders[1] == "col"
               else b[quad[:, None], LANES[:, None] % 4, far[:, None] + i])  # fmt: skip

    def tile(values: np.ndarray, kind: str) -> np.ndarray:
        e = np.arange(8)
        if kind == "f16":
            return halves(values[quad[:, None], own, e])
        row = (LANES % 2 + far)[:, None] + (e & 2)
        lanes = values[quad[:, None], row, (e & 4) + (LANES & 2)[:, None] + (e & 1)]
        return np.ascontiguousarray(lanes.astype(np.float32)).view(np.uint32).T

    form = f"mma.sync.aligned.m8n8k4.{orders[0]}.{orders[1]}.{d}.f16.f16.{c}"
    expected = tile(a @ b + addend, d)
    out = multiply(form, "", [halves(a_lanes), halves(b_lanes), tile(addend, c)], len(expected))
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("m16n8k64.row.col.s32.s4.s8.s32 {R4}, {R4}, {R2}, {R4}", "different sizes"),
        ("m16n8k256.row.col.s32.b1.b1.s32 {R4}, {R4}, {R2}, {R4}", "the operation"),
        ("m8n8k64.row.col.s32.s4.s4.s32 {R2}, {R2}, {R2}, {R2}", "K does not match"),
        ("m8n8k4.row.f32.f16.f16.f32 {R8}, {R2}, {R2}, {R8}", "orders of A and B"),
    ],
)
def test_products_that_do_not_exist(form: str, text: str) -> None:
    for count in (2, 4, 8):
        form = form.replace(f"R{count}", ", ".join(f"%r{i}" for i in range(count)))
    with pytest.raises(InvalidPtx, match=text):
        Machine().load(entry(f"mma.sync.aligned.{form};", 0))


BITS = """
KERNEL()(const uint4* in, int* out) {
    u32 base = shared_address(dynamic_shared);
    for (u32 i = threadIdx.x; i < 80 * 2; i += blockDim.x) ((uint4*)dynamic_shared)[i] = in[i];
    fence_async();
    __syncthreads();
    int d[8];
    for (int i = 0; i < 8; ++i) d[i] = i;
    u64 a = 8ull << 32 | 64ull << 16 | base >> 4, b = 8ull << 32 | 16ull << 16 | base + 2048 >> 4;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{ .reg .pred p; setp.ne.u32 p, 1, 0;"
        " wgmma.mma_async.sync.aligned.m64n16k256.s32.b1.b1.and.popc"
        " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p; }"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
          "+r"(d[7]) : "l"(a), "l"(b) : "memory");
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = d[i];
}
"""


def test_products_of_bits_in_shared_memory() -> None:
    bits = np.random.default_rng(0).integers(0, 2, (80, 256)).astype(np.uint8)
    rows = np.packbits(bits, axis=1, bitorder="little")
    out = np.zeros((128, 8), np.int32)
    run_kernel(BITS, image(rows[:64], rows[64:]), out, arch="sm_90a")
    products = bits[:64].astype(np.int32) @ bits[64:].T.astype(np.int32)
    for thread in range(128):
        for i in range(8):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
            assert out[thread, i] == products[row, column] + i


# ---- conversions


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_conversions_with_scales(kind: str) -> None:
    rng = np.random.default_rng(0)
    codes = random_codes(rng, kind, (32, 2)).astype(np.uint32)
    scales = rng.integers(110, 140, (32, 2)).astype(np.uint32)
    width = 4 if kind == "e2m1" else 8
    packed, packed_scales = codes[:, 0] | codes[:, 1] << width, scales[:, 0] | scales[:, 1] << 8
    out = np.zeros((32, 2), np.uint16)
    source = "cvt.u8.u16 %b, %h0; " if kind == "e2m1" else ""
    name = "%b" if kind == "e2m1" else "%h0"
    run_body(
        "mov.u32 %r0, %tid.x; mad.wide.u32 %rd0, %r0, 4, %p0; mad.wide.u32 %rd1, %r0, 4, %p1;"
        "mad.wide.u32 %rd2, %r0, 4, %p2; .reg .b8 %b;"
        f"ld.global.u16 %h0, [%rd1]; ld.global.u16 %h1, [%rd2]; {source}"
        f"cvt.rn.scaled::n2::ue8m0.bf16x2.{kind}x2 %r1, {name}, %h1; st.global.u32 [%rd0], %r1;",
        out,
        packed,
        packed_scales,
    )
    expected = values_of(kind, codes) * values_of("ue8m0", scales)
    assert np.array_equal((out.astype(np.uint32) << 16).view(np.float32), expected)


@pytest.mark.parametrize(("kind", "bits"), [("u4", 4), ("s4", 4), ("u2", 2), ("s2", 2)])
def test_small_integers_are_packed(kind: str, bits: int) -> None:
    rng = np.random.default_rng(bits)
    a, b = rng.integers(-20, 20, (2, 32)).astype(np.int32)
    rest, out = rng.integers(0, 2**32, 32, dtype=np.uint32), np.zeros(32, np.uint32)
    run_body(
        "mov.u32 %r0, %tid.x;"
        + "".join(f"mad.wide.u32 %rd{i}, %r0, 4, %p{i};" for i in range(4))
        + "ld.global.u32 %r1, [%rd1]; ld.global.u32 %r2, [%rd2]; ld.global.u32 %r3, [%rd3];"
        f"cvt.pack.sat.{kind}.s32.b32 %r4, %r1, %r2, %r3; st.global.u32 [%rd0], %r4;",
        out,
        a,
        b,
        rest,
    )
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind[0] == "s" else (0, 2**bits - 1)
    mask = 2**bits - 1
    x, y = (np.clip(values, low, high).astype(np.uint32) & np.uint32(mask) for values in (a, b))
    assert np.array_equal(out, rest << np.uint32(2 * bits) | x << np.uint32(bits) | y)
