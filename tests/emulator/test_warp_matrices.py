"""wmma, whose fragments have no layout of their own, and mma.sync of doubles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .device import run_kernel

# One tile: shape, types of A and B, of C and D; registers of A, B and C.
TILES = {
    "f16": ("m16n16k16", "f16", "f32", 8, 8, 8),
    "f16 sums": ("m16n16k16", "f16", "f16", 8, 8, 4),
    "tall": ("m32n8k16", "f16", "f32", 8, 8, 8),
    "wide": ("m8n32k16", "f16", "f32", 8, 8, 8),
    "bf16": ("m16n16k16", "bf16", "f32", 4, 4, 8),
    "tall bf16": ("m32n8k16", "bf16", "f32", 8, 2, 8),
    "tf32": ("m16n16k8", "tf32", "f32", 4, 4, 8),
    "s8": ("m16n16k16", "s8", "s32", 2, 2, 8),
    "wide u8": ("m8n32k16", "u8", "s32", 1, 4, 8),
    "f64": ("m8n8k4", "f64", "f64", 1, 1, 2),
}
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "s8": torch.int8,
    "u8": torch.uint8,
    "f32": torch.float32,
    "s32": torch.int32,
    "f64": torch.float64,
}


def registers(name: str, count: int) -> str:
    return "{" + ", ".join(f"{name}{i}" for i in range(count)) + "}"


def wmma_source(tile: str, layouts: tuple[str, str, str], strides: tuple[int, int, int]) -> str:
    shape, operand, result, num_a, num_b, num_c = TILES[tile]
    width = "b64" if operand == "f64" else "b32"
    types = f"{result}.{result}"
    if operand != "f16":
        types = f"{result}.{operand}.{operand}.{result}"
    a, b, c = (registers(name, count) for name, count in (("a", num_a), ("b", num_b), ("c", num_c)))
    row_a, row_b, row_c = layouts
    rn = "rn." if operand == "f64" else ""
    return f"""
KERNEL()(const void* a, const void* b, void* c) {{
    asm volatile("{{ .reg .{width} a<{num_a}>, b<{num_b}>, c<{num_c}>;"
        "wmma.load.a.sync.aligned.{row_a}.{shape}.{operand} {a}, [%0], {strides[0]};"
        "wmma.load.b.sync.aligned.{row_b}.{shape}.{operand} {b}, [%1], {strides[1]};"
        "wmma.load.c.sync.aligned.{row_c}.{shape}.{result} {c}, [%2], {strides[2]};"
        "wmma.mma.sync.aligned.{row_a}.{row_b}.{shape}.{rn}{types} {c}, {a}, {b}, {c};"
        "wmma.store.d.sync.aligned.{row_c}.{shape}.{result} [%2], {c}, {strides[2]}; }}"
        :: "l"(a), "l"(b), "l"(c) : "memory");
}}
"""


@pytest.mark.parametrize("layouts", [("row", "col", "row"), ("col", "row", "col")])
@pytest.mark.parametrize("tile", TILES)
def test_wmma(tile, layouts):
    shape, operand, result, *_ = TILES[tile]
    m, n, k = (int(x) for x in shape.replace("m", "").replace("n", " ").replace("k", " ").split())
    rng = np.random.default_rng(len(tile))
    low = 0 if operand == "u8" else -4
    a, b, c = (torch.from_numpy(rng.integers(low, 5, s)) for s in ((m, k), (k, n), (m, n)))
    padding = 8

    def stored(values: torch.Tensor, layout: str, dtype: torch.dtype) -> torch.Tensor:
        matrix = values if layout == "row" else values.T
        memory = torch.zeros(matrix.shape[0], matrix.shape[1] + padding, dtype=dtype)
        memory[:, : matrix.shape[1]] = matrix.to(dtype)
        return memory

    memories = [
        stored(values, layout, DTYPES[kind])
        for values, layout, kind in zip((a, b, c), layouts, (operand, operand, result), strict=True)
    ]
    arrays = [memory.view(torch.uint8).numpy() for memory in memories]
    source = wmma_source(tile, layouts, tuple(memory.shape[1] for memory in memories))
    run_kernel(source, *arrays, threads=32)
    out = memories[2][:, :-padding]
    expected = a @ b + c
    assert (out.to(torch.int64) == (expected if layouts[2] == "row" else expected.T)).all()


MMA_SYNC = """
// The same product by two mma.sync, the right half of the columns after the left one.
KERNEL()(const WORD* a, const WORD* b, const float* c, float* d) {
    constexpr u32 k = K, per_register = 4 / sizeof(WORD);
    u32 group = threadIdx.x / 4, own = threadIdx.x % 4;
    for (u32 half = 0; half < 16; half += 8) {
        u32 fa[4] = {}, fb[2] = {};
        float sums[4];
        for (u32 i = 0; i < 4; ++i) {
            for (u32 e = 0; e < per_register; ++e)
                fa[i] |= u32(a[(group + i % 2 * 8) * k + (own + i / 2 * 4) * per_register + e])
                         << 16 * e;
            sums[i] = c[(group + i / 2 * 8) * 16 + half + own * 2 + i % 2];
        }
        for (u32 i = 0; i < 2; ++i)
            for (u32 e = 0; e < per_register; ++e)
                fb[i] |= u32(b[((own + i * 4) * per_register + e) * 16 + half + group]) << 16 * e;
        asm volatile("mma.sync.aligned.m16n8kK.row.col.f32.TYPE.TYPE.f32 {%0, %1, %2, %3},"
            " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
        for (u32 i = 0; i < 4; ++i)
            d[(group + i / 2 * 8) * 16 + half + own * 2 + i % 2] = sums[i];
    }
}
"""


@pytest.mark.parametrize("tile", ["f16", "bf16", "tf32"])
def test_wmma_rounds_like_mma_sync(tile):
    shape, operand, *_ = TILES[tile]
    k = int(shape.split("k")[1])
    generator = torch.Generator().manual_seed(k)
    a, b, c = (torch.randn(s, generator=generator) for s in ((16, k), (k, 16), (16, 16)))
    operands = [x.to(DTYPES[operand]).view(torch.uint8).numpy() for x in (a, b)]
    by_wmma, by_mma = c.numpy().copy(), np.zeros((16, 16), np.float32)
    run_kernel(wmma_source(tile, ("row",) * 3, (k, 16, 16)), *operands, by_wmma, threads=32)
    word = "u32" if operand == "tf32" else "u16"
    source = MMA_SYNC.replace("kK", f"k{k}").replace("= K,", f"= {k},")
    source = source.replace("WORD", word).replace("TYPE", operand)
    run_kernel(source, *operands, c.numpy(), by_mma, threads=32)
    assert (by_wmma.view(np.uint32) == by_mma.view(np.uint32)).all()
    # .tf32 ignores the low bits of a float.
    kept = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) if k == 8 else x for x in (a, b)]
    left, right = (x.to(DTYPES[operand]).to(torch.float64) for x in kept)
    np.testing.assert_allclose(by_wmma, (left @ right + c).numpy(), atol=2e-6)


@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_mma_of_doubles(m, k):
    num_a, num_b, num_c = m * k // 32, 8 * k // 32, m // 4
    rng = np.random.default_rng(k)
    a, b, c = rng.normal(size=(m, k)), rng.normal(size=(8, k)), rng.normal(size=(m, 8))
    numbers = iter(range(num_c + num_a + num_b))
    d, x, y = (
        ", ".join(f"%{next(numbers)}" for _ in range(count)) for count in (num_c, num_a, num_b)
    )
    source = f"""
KERNEL()(const double* a, const double* b, double* c) {{
    u32 group = threadIdx.x / 4, own = threadIdx.x % 4;
    double fa[{num_a}], fb[{num_b}], fc[{num_c}];
    for (u32 i = 0; i < {num_a}; ++i)
        fa[i] = a[(group + ({m} == 16 ? i % 2 * 8 : 0)) * {k} + own
                  + ({m} == 16 ? i / 2 : i) * 4];
    for (u32 i = 0; i < {num_b}; ++i) fb[i] = b[group * {k} + own + i * 4];
    for (u32 i = 0; i < {num_c}; ++i) fc[i] = c[(group + i / 2 * 8) * 8 + own * 2 + i % 2];
    asm volatile("mma.sync.aligned.m{m}n8k{k}.row.col.f64.f64.f64.f64 {{{d}}}, {{{x}}}, {{{y}}},"
        " {{{d}}};" : {", ".join(f'"+d"(fc[{i}])' for i in range(num_c))}
        : {
        ", ".join([f'"d"(fa[{i}])' for i in range(num_a)] + [f'"d"(fb[{i}])' for i in range(num_b)])
    });
    for (u32 i = 0; i < {num_c}; ++i) c[(group + i / 2 * 8) * 8 + own * 2 + i % 2] = fc[i];
}}
"""
    out = c.copy()
    run_kernel(source, a, b, out, threads=32)
    np.testing.assert_allclose(out, a @ b.T + c, rtol=1e-13, atol=1e-13)
