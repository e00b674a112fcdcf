"""tcgen05.mma of packed E2M1 with block scales, against sums in float64: kinds mxf4nvf4 and mxf4,
one CTA and a pair, in every swizzle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from warpcheck import EmulatorError

from .device import run_kernel
from .test_tcgen05 import E2M1_VALUES, e4m3_values

M_PER_CTA = 128
MMA_K = 64
MMA_BYTES = 32  # of a row
WORDS_BYTES = 512  # scales of 128 rows, a word each
SWIZZLES = {"none": (0, 0), "32B": (6, 0x10), "64B": (4, 0x30), "128B": (2, 0x70)}

# Each CTA copies its tiles to shared memory; one thread of the first brings the words of scales to
# tensor memory and multiplies step by step along K.
MMA = """
KERNEL(__cluster_dims__(GROUP))(const u32* in, u32* out, u32 n, u32 tile_words, u32 b_offset,
                                u32 sf_offset, u32 num_words, u32 sfb_groups, u32 num_steps) {
    u32 base = shared_address(dynamic_shared);
    u32 rank = cluster_rank(), warp = threadIdx.x / 32;
    u32 a = base + 1024, b = a + b_offset, sf = a + sf_offset;
    for (u32 i = threadIdx.x; i < tile_words; i += blockDim.x)
        ((u32*)dynamic_shared)[256 + i] = in[rank * tile_words + i];
    fence_async();
    if (threadIdx.x == 0) init_barrier(base, 1);
    if (warp == 0) {
        asm volatile("tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%0], 512;"
            :: "r"(base + 8) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned;");
    }
    cluster_sync();
    u32 tmem = ((u32*)dynamic_shared)[2];
    if (rank == 0 && threadIdx.x == 32) {
        u64 words = 0x0000400800000000ull, operand = OPERANDull;
        u32 groups = 1 + sfb_groups;
        for (u32 i = 0; i < num_words * groups; ++i)
            asm volatile("tcgen05.cp.cta_group::GROUP.32x128b.warpx4 [%0], %1;"
                :: "r"(tmem + 256 + 4 * i), "l"(words | ((sf + 512 * i) & 0x3FFFF) >> 4)
                : "memory");
        for (u32 step = 0; step < num_steps; ++step) {
            u32 id = step % MMAS_PER_WORD * (4 / MMAS_PER_WORD);
            u32 sfa = tmem + 256 + 4 * groups * (step / MMAS_PER_WORD);
            u32 idesc = IDESC | (n >> 3) << 17 | id << 29 | id << 4;
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %6, 0;"
                "tcgen05.mma.cta_group::GROUP.kind::KIND [%0], %1, %2, %3, [%4], [%5], p; }"
                :: "r"(tmem), "l"(operand | ((a + 32 * step) & 0x3FFFF) >> 4),
                   "l"(operand | ((b + 32 * step) & 0x3FFFF) >> 4), "r"(idesc),
                   "r"(sfa), "r"(sfa + 4), "r"(step) : "memory");
        }
        asm volatile("tcgen05.commit.cta_group::GROUP.mbarrier::arrive::one.shared::cluster"
            ".multicast::cluster.b64 [%0], %1;" :: "r"(base), "h"((u16)(GROUP * 2 - 1)) : "memory");
    }
    __syncwarp();
    wait(base, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (u32 column = 0; column < n; ++column) {
        u32 value;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];"
            : "=r"(value) : "r"(tmem + (warp * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        out[(rank * 128 + threadIdx.x) * n + column] = value;
    }
    cluster_sync();
    if (warp == 0)
        asm volatile("tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %0, 512;" :: "r"(tmem));
}
"""


@dataclass(frozen=True)
class Form:
    """A form of the instruction. scales_per_mma: of each row."""

    kind: str
    scales_per_mma: int
    is_e4m3: bool


FORMS = (
    Form("mxf4nvf4.block_scale.block16", 4, True),
    Form("mxf4nvf4.block_scale.scale_vec::4X", 4, True),
    Form("mxf4nvf4.block_scale.scale_vec::2X", 2, False),
    Form("mxf4.block_scale.block32", 2, False),
    Form("mxf4.block_scale", 2, False),
)


def placed(rows: np.ndarray, swizzle: str) -> np.ndarray:
    """Packed rows [rows, bytes along K] as an operand's descriptor places them, 1024-aligned."""
    num_rows, row_bytes = rows.shape
    _, mask = SWIZZLES[swizzle]
    tile = np.zeros(-(-rows.size // 1024) * 1024, np.uint8)
    for r in range(num_rows):
        for chunk in range(row_bytes // 16):
            if mask:
                at = r * row_bytes + 16 * chunk
                at ^= (at >> 3) & mask
            else:  # groups of 8 rows of one chunk, the next chunk behind all of them
                at = r * 16 + chunk * num_rows * 16
            tile[at : at + 16] = rows[r, 16 * chunk : 16 * chunk + 16]
    return tile


def operand_constants(swizzle: str, num_rows: int, row_bytes: int) -> int:
    """A descriptor but for its address."""
    code, mask = SWIZZLES[swizzle]
    stride, leading = (8 * row_bytes, 0) if mask else (128, 16 * num_rows)
    return code << 61 | 1 << 46 | stride >> 4 << 32 | leading >> 4 << 16


def packed_pairs(codes: np.ndarray) -> np.ndarray:
    return codes[:, ::2] | codes[:, 1::2] << 4


def scale_words(scales: np.ndarray) -> np.ndarray:
    """uint8 [rows, 4] in the order of tcgen05.cp, the rows up to a multiple of 128."""
    out = np.zeros(-(-scales.shape[0] // 128) * WORDS_BYTES, np.uint8)
    for r, row in enumerate(scales):
        at = r // 128 * WORDS_BYTES + r % 32 * 16 + r % 128 // 32 * 4
        out[at : at + 4] = row
    return out


@dataclass(frozen=True)
class Case:
    """Operands: E2M1 codes [rows, K] and scale bytes [rows, scales]."""

    a: np.ndarray
    b: np.ndarray
    sfa: np.ndarray
    sfb: np.ndarray


def random_case(form: Form, group: int, n: int, num_steps: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    num_scales = num_steps * form.scales_per_mma
    # E4M3: zero, subnormal numbers, and up to the largest.
    low, high = (0, 0x7F) if form.is_e4m3 else (118, 130)

    def operand(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        codes = rng.integers(0, 16, (num_rows, num_steps * MMA_K), dtype=np.uint8)
        return codes, rng.integers(low, high, (num_rows, num_scales), dtype=np.uint8)

    (a, sfa), (b, sfb) = operand(M_PER_CTA * group), operand(n)
    return Case(a, b, sfa, sfb)


def expected(form: Form, case: Case) -> np.ndarray:
    """Each instruction rounds the exact sum once to FP32."""
    group = MMA_K // form.scales_per_mma

    def values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        numbers = e4m3_values(scales.astype(np.int64)) if form.is_e4m3 else np.exp2(scales - 127.0)
        return E2M1_VALUES[codes] * np.repeat(numbers, group, axis=1)

    left, right = values(case.a, case.sfa), values(case.b, case.sfb)
    d = np.zeros((left.shape[0], right.shape[0]), np.float32)
    for first in range(0, left.shape[1], MMA_K):
        k = slice(first, first + MMA_K)
        d = (left[:, k] @ right[:, k].T + d).astype(np.float32)
    return d


def run(form: Form, case: Case, group: int, swizzle: str, **options) -> np.ndarray:
    n, row_bytes = case.b.shape[0], case.a.shape[1] // 2
    num_steps = row_bytes // MMA_BYTES
    mmas_per_word = 4 // form.scales_per_mma
    num_words = -(-num_steps // mmas_per_word)

    def words_of(scales: np.ndarray) -> list[np.ndarray]:
        padded = np.zeros((scales.shape[0], 4 * num_words), np.uint8)
        padded[:, : scales.shape[1]] = scales
        return [scale_words(padded[:, 4 * i : 4 * i + 4]) for i in range(num_words)]

    tiles = []
    for cta in range(group):
        rows = slice(M_PER_CTA * cta, M_PER_CTA * cta + M_PER_CTA)
        a = placed(packed_pairs(case.a[rows]), swizzle)
        b = placed(packed_pairs(case.b[n // group * cta : n // group * (cta + 1)]), swizzle)
        sf = [part for pair in zip(words_of(case.sfa[rows]), words_of(case.sfb), strict=True)
              for part in pair]  # fmt: skip
        tiles.append(np.concatenate([a, b, *sf]))
    # One operand descriptor serves both, so that without a swizzle they have as many rows.
    constants = operand_constants(swizzle, M_PER_CTA, row_bytes)
    source = (
        MMA.replace("GROUP * 2 - 1", str(2 * group - 1))
        .replace("GROUP", str(group))
        .replace("KIND", form.kind)
        .replace("OPERAND", hex(constants))
        .replace("IDESC", hex(1 << 7 | 1 << 10 | M_PER_CTA * group >> 4 << 24
                              | (0 if form.is_e4m3 else 1 << 23)))
        .replace("MMAS_PER_WORD", str(mmas_per_word))
    )  # fmt: skip
    out = np.zeros((M_PER_CTA * group, n), np.float32)
    run_kernel(
        source, np.concatenate(tiles), out, n, tiles[0].nbytes // 4, a.nbytes,
        a.nbytes + b.nbytes, num_words, -(-n // 128), num_steps,
        ctas=group, cluster=group, **options,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
@pytest.mark.parametrize(("group", "n"), [(1, 8), (1, 136), (2, 16), (2, 240)])
def test_products_of_packed_values_are_exact(form, group, n):
    case = random_case(form, group, n, num_steps=4, seed=n)
    assert np.array_equal(run(form, case, group, "128B"), expected(form, case))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(("swizzle", "num_steps"), [("none", 1), ("32B", 1), ("64B", 2)])
def test_every_swizzle(arch, swizzle, num_steps):
    n = M_PER_CTA if swizzle == "none" else 24
    case = random_case(FORMS[0], 1, n, num_steps, seed=5)
    out = run(FORMS[0], case, 1, swizzle, arch=arch)
    assert np.array_equal(out, expected(FORMS[0], case))


@pytest.mark.parametrize("byte", [0x7F, 0xB8])
def test_a_scale_that_is_no_number_spoils_its_row_only(byte):
    """UE4M3 has no sign: what hardware makes of the bit is not known, and so is the result."""
    case = random_case(FORMS[0], 1, 8, num_steps=1, seed=1)
    case.sfb[3, 2] = byte
    out = run(FORMS[0], case, 1, "32B")
    assert (out[:, 3].copy().view(np.uint32) == 0x7FFFFFFF).all()
    case.sfb[3, 2] = 0
    others = np.arange(8) != 3
    assert np.array_equal(out[:, others], expected(FORMS[0], case)[:, others])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mxf4nvf4.block_scale", "scale vector size"),
        ("mxf4nvf4", "needs .block_scale"),
        ("mxf4.block_scale.block16", "scale vector size"),
    ],
)
def test_forms_that_do_not_exist(kind, text):
    form = Form(kind, 4, True)
    with pytest.raises(EmulatorError, match=text):
        run(form, random_case(form, 1, 8, num_steps=1, seed=1), 1, "32B")


def test_two_floats_become_a_byte_of_two_codes():
    """Ties go to even, the first source is the high nibble, NaN becomes 6."""
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 100.0, -np.inf, np.nan, -0.1]
    codes = [0, 2, 2, 4, 4, 6, 6, 7, 7, 15, 7, 8]
    source = """
KERNEL()(const float* in, u32* out) {
    asm volatile("{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2; cvt.u32.u8 %0, pair; }"
        : "=r"(out[threadIdx.x]) : "f"(in[2 * threadIdx.x + 1]), "f"(in[2 * threadIdx.x]));
}
"""
    out = np.zeros(len(values) // 2, np.uint32)
    run_kernel(source, np.array(values, np.float32), out, threads=out.size)
    assert out.tolist() == [
        low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)
    ]
