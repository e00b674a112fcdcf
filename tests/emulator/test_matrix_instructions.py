"""wgmma, ldmatrix, stmatrix and mma.sync as instructions of a running kernel, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from warpcheck import EmulatorError

from .device import run_kernel


def random_e4m3(rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    codes = (
        rng.integers(0, 0x7F, shape, dtype=np.uint8)
        | rng.integers(0, 2, shape, dtype=np.uint8) << 7
    )
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    return codes, values


def swizzled(rows: np.ndarray) -> np.ndarray:
    """128-byte rows as the 128-byte swizzle places them in a 1024-aligned tile."""
    tile = np.zeros_like(rows)
    for r in range(rows.shape[0]):
        for chunk in range(8):
            at = 16 * chunk ^ (r % 8) * 16
            tile[r, at : at + 16] = rows[r, 16 * chunk : 16 * chunk + 16]
    return tile


def wgmma_source(n: int, a_in_registers: bool, types: str, k: int, tail: str = "") -> str:
    count = n // 2
    d = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4)) if a_in_registers else f"%{count}"
    b = f"%{count + (4 if a_in_registers else 1)}"
    accumulate = f"%{count + (5 if a_in_registers else 2)}"
    inputs = (
        ", ".join(f'"r"(a[4 * q + {i}])' for i in range(4))
        if a_in_registers
        else '"l"(high | ((base + 32 * q) & 0x3FFFF) >> 4)'
    )
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    transposes = "" if "e4m3" in types else (", 0" if a_in_registers else ", 0, 0")
    operand_a = f"{{{a}}}" if a_in_registers else a
    return f"""
KERNEL()(const u32* in, const u32* fragments, float* out) {{
    u32 base = shared_address(dynamic_shared);
    for (u32 i = threadIdx.x; i < (64 + {n}) * 32; i += blockDim.x)
        ((u32*)dynamic_shared)[i] = in[i];
    fence_async();
    __syncthreads();
    const u64 high = 0x4000004000000000ull;
    float d[{count}];
    u32 a[16];
    for (int i = 0; i < 16; ++i) a[i] = fragments[threadIdx.x * 16 + i];
    for (int i = 0; i < {count}; ++i) d[i] = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (u32 q = 0; q < 4; ++q) {{
        asm volatile("{{ .reg .pred p; setp.ne.u32 p, {accumulate}, 0;"
            "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{types}"
            " {{{d}}}, {operand_a}, {b}, p, 1, 1{transposes}; }}"
            : {outputs} : {inputs}, "l"(high | ((base + 8192 + 32 * q) & 0x3FFFF) >> 4), "r"(q));
    }}
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    {tail}
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < {count}; ++i) out[threadIdx.x * {count} + i] = d[i];
}}
"""


def accumulator_matrix(out: np.ndarray, n: int) -> np.ndarray:
    d = np.zeros((64, n), np.float32)
    for thread in range(128):
        w, t = divmod(thread, 32)
        for i in range(n // 2):
            d[16 * w + t // 4 + 8 * (i >> 1 & 1), 2 * (t % 4) + (i & 1) + 8 * (i >> 2)] = out[
                thread, i
            ]
    return d


def a_fragments(rows: np.ndarray) -> np.ndarray:
    """Registers of the 64 x 128 bytes of A, four per step of 32 bytes."""
    fragments = np.zeros((128, 16, 4), np.uint8)
    for thread in range(128):
        w, t = divmod(thread, 32)
        for q in range(4):
            for r in range(4):
                m, k = 16 * w + t // 4 + 8 * (r & 1), 32 * q + 4 * (t % 4) + 16 * (r >> 1)
                fragments[thread, 4 * q + r] = rows[m, k : k + 4]
    return fragments.view(np.uint32)


@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize("n", [8, 16, 64])
@pytest.mark.parametrize("types", ["e4m3.e4m3", "bf16.bf16"])
def test_wgmma(a_in_registers, n, types):
    rng = np.random.default_rng(n)
    if types == "e4m3.e4m3":
        k, (a, av), (b, bv) = 32, random_e4m3(rng, (64, 128)), random_e4m3(rng, (n, 128))
    else:
        k = 16
        stored = [
            torch.from_numpy(rng.standard_normal((r, 64))).to(torch.bfloat16) for r in (64, n)
        ]
        av, bv = (s.to(torch.float64).numpy() for s in stored)
        a, b = (s.view(torch.uint8).numpy() for s in stored)
    data = np.concatenate([swizzled(a), swizzled(b)])
    out = np.zeros((128, n // 2), np.float32)
    run_kernel(wgmma_source(n, a_in_registers, types, k), data, a_fragments(a), out, arch="sm_90a")
    expected = np.zeros((64, n), np.float32)
    for q in range(4):
        part = slice(k * q, k * q + k)
        expected = (av[:, part] @ bv[:, part].T + expected).astype(np.float32)
    got = accumulator_matrix(out, n)
    if types == "e4m3.e4m3":
        assert np.array_equal(got, expected)
    else:
        # Each of the four instructions cuts its 17 terms 25 bits below the largest, and their sum.
        bound = 4 * (17 * 2.0**-25 + 2.0**-23) * (np.abs(av) @ np.abs(bv).T)
        assert (np.abs(got - expected) <= bound).all()


@pytest.mark.parametrize("hopper", [False, True])
def test_low_bits_of_fp8_sums_can_be_dropped_as_on_hopper(hopper):
    a, b = np.zeros((64, 128), np.uint8), np.zeros((16, 128), np.uint8)
    a[:, 0], a[:, 1] = 0x38, 0x08  # 1 and 2^-6
    b[:, 0], b[:, 1] = 0x38, 0x02  # 1 and 2^-8: the second product is 2^-14
    out = np.zeros((128, 8), np.float32)
    run_kernel(
        wgmma_source(16, False, "e4m3.e4m3", 32),
        np.concatenate([swizzled(a), swizzled(b)]),
        a_fragments(a),
        out,
        arch="sm_90a",
        hopper_fp8_sums=hopper,
    )
    assert (out == (1.0 if hopper else 1 + 2.0**-14)).all()


def test_overwriting_a_wgmma_operand_before_the_wait_is_an_error():
    tail = (
        "__syncthreads();\nif (threadIdx.x == 0) dynamic_shared[8192 + 5] ^= 1;\n__syncthreads();"
    )
    source = wgmma_source(16, False, "e4m3.e4m3", 32, tail)
    data, fragments = np.ones((80, 128), np.uint8), np.zeros((128, 16), np.uint32)
    with pytest.raises(EmulatorError, match="race"):
        run_kernel(source, data, fragments, np.zeros((128, 8), np.float32), arch="sm_90a")


MATRIX = """
KERNEL()(const u32* in, u32* out) {
    u32 base = shared_address(dynamic_shared), row = base + 16 * threadIdx.x;
    u32* row_words = (u32*)dynamic_shared + 4 * threadIdx.x;
    for (int i = 0; i < 4; ++i) row_words[i] = in[128 + 4 * threadIdx.x + i];
    __syncwarp();
    u32 r[4];
    for (int i = 0; i < 4; ++i) r[i] = in[4 * threadIdx.x + i];
    BODY
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = row_words[i];
    for (int i = 0; i < 4; ++i) out[128 + 4 * threadIdx.x + i] = r[i];
}
"""
STORE = """
    asm volatile("INSTRUCTION [%0], {%1, %2, %3, %4};"
        :: "r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
"""
LOAD = """
    asm volatile("INSTRUCTION {%0, %1, %2, %3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row));
"""


def run_matrix(
    body: str, instruction: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    data = np.random.default_rng(5).integers(0, 2**32, (2, 128), dtype=np.uint32)
    out = np.zeros((2, 128), np.uint32)
    run_kernel(
        MATRIX.replace("BODY", body.replace("INSTRUCTION", instruction)), data, out, threads=32
    )
    return data[0].reshape(32, 4), data[1], out[0], out[1].reshape(32, 4)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_b16(transposed):
    trans = ".trans" if transposed else ""
    registers, _, stored, _ = run_matrix(STORE, f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16")
    rows = stored.view(np.uint16).reshape(32, 8)
    halves = registers.view(np.uint16).reshape(32, 4, 2)
    for t in range(32):
        for j in range(4):
            for h in range(2):
                at = (
                    (8 * j + 2 * (t % 4) + h, t // 4)
                    if transposed
                    else (8 * j + t // 4, 2 * (t % 4) + h)
                )
                assert rows[at] == halves[t, j, h]


def test_stmatrix_b8_stores_an_accumulator_fragment_by_columns():
    registers, _, stored, _ = run_matrix(STORE, "stmatrix.sync.aligned.m16n8.x4.trans.shared.b8")
    rows = stored.view(np.uint8).reshape(32, 16)
    bytes_ = registers.view(np.uint8).reshape(32, 4, 4)
    for t in range(32):
        for j in range(4):
            for e in range(4):
                assert rows[8 * j + 2 * (t % 4) + (e & 1), t // 4 + 8 * (e >> 1)] == bytes_[t, j, e]


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(transposed):
    trans = ".trans" if transposed else ""
    _, shared, _, loaded = run_matrix(LOAD, f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16")
    matrices = shared.view(np.uint16).reshape(4, 8, 8)
    halves = loaded.copy().view(np.uint16).reshape(32, 4, 2)
    for t in range(32):
        for j in range(4):
            matrix = matrices[j].T if transposed else matrices[j]
            assert halves[t, j].tolist() == matrix[t // 4, 2 * (t % 4) : 2 * (t % 4) + 2].tolist()


def test_mma_sync_f16():
    rng = np.random.default_rng(6)
    a = rng.integers(-4, 4, (16, 16)).astype(np.float16)
    b = rng.integers(-4, 4, (8, 16)).astype(np.float16)  # columns of B
    c = rng.integers(-9, 9, (16, 8)).astype(np.float32)
    registers = np.zeros((32, 10), np.uint32)
    for t in range(32):
        g, k = t // 4, 2 * (t % 4)
        for r in range(4):
            pair = a[g + 8 * (r & 1), k + 8 * (r >> 1) :][:2]
            registers[t, r] = pair.copy().view(np.uint32)[0]
        for r in range(2):
            registers[t, 4 + r] = b[g, k + 8 * r :][:2].copy().view(np.uint32)[0]
        for i in range(4):
            registers[t, 6 + i] = c[g + 8 * (i >> 1), k + (i & 1)].view(np.uint32)
    source = """
KERNEL()(const u32* in, u32* out) {
    const u32* r = in + 10 * threadIdx.x;
    u32 d[4];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7},"
        " {%8, %9}, {%10, %11, %12, %13};" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]),
          "r"(r[8]), "r"(r[9]));
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = d[i];
}
"""
    out = np.zeros((32, 4), np.float32)
    run_kernel(source, registers, out, threads=32, arch="sm_90a")
    expected = a.astype(np.float32) @ b.astype(np.float32).T + c
    for t in range(32):
        for i in range(4):
            assert out[t, i] == expected[t // 4 + 8 * (i >> 1), 2 * (t % 4) + (i & 1)]
