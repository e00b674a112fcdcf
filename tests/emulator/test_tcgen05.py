"""tcgen05.* as instructions of a running kernel, against numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest
from warpcheck import EmulatorError, InvalidOperation, Machine, Uninitialized

from .device import aligned, ptx_of, run_kernel

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(
        exponent > 0, (8 + fraction) * np.exp2(exponent - 10.0), fraction * np.exp2(-9.0)
    )
    return np.where(codes & 0x80, -magnitude, magnitude)


# Both CTAs copy their tiles (A 16 KiB, B 16 KiB, SFA 512 B, SFB 1 KiB) to shared memory; one thread
# of the even CTA brings the scales to tensor memory and multiplies four times.
PAIR_MMA = """
KERNEL(__cluster_dims__(2))(const u32* in, u32* out, u32 n, u32 sfb_groups) {
    constexpr u32 tile_words = (16384 + 16384 + 512 + 1024) / 4;
    u32 base = shared_address(dynamic_shared);
    u32 rank = cluster_rank(), warp = threadIdx.x / 32;
    u32 a = base + 1024, b = a + 16384, sfa = b + 16384, sfb = sfa + 512;
    for (u32 i = threadIdx.x; i < tile_words; i += blockDim.x)
        ((u32*)dynamic_shared)[256 + i] = in[rank * tile_words + i];
    fence_async();
    if (threadIdx.x == 0) init_barrier(base, 1);
    if (warp == 0) {
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 512;"
            :: "r"(base + 8) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }
    cluster_sync();
    u32 tmem = ((u32*)dynamic_shared)[2];
    if (rank == 0 && threadIdx.x == 32) {
        u64 none = 0x0000400800000000ull, swizzled = 0x4000404000000000ull;
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;"
            :: "r"(tmem + 300), "l"(none | ((sfa & 0x3FFFF) >> 4)) : "memory");
        for (u32 i = 0; i < sfb_groups; ++i)
            asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;"
                :: "r"(tmem + 304 + 4 * i),
                   "l"(none | (((sfb + 512 * i) & 0x3FFFF) >> 4)) : "memory");
        for (u32 q = 0; q < 4; ++q) {
            u32 idesc = 0x10800280 | (n >> 3) << 17 | q << 29 | q << 4;
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %6, 0;"
                "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale"
                " [%0], %1, %2, %3, [%4], [%5], p; }"
                :: "r"(tmem), "l"(swizzled | (((a + 32 * q) & 0x3FFFF) >> 4)),
                   "l"(swizzled | (((b + 32 * q) & 0x3FFFF) >> 4)), "r"(idesc),
                   "r"(tmem + 300), "r"(tmem + 304), "r"(q) : "memory");
        }
        asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
            ".multicast::cluster.b64 [%0], %1;" :: "r"(base), "h"((u16)3) : "memory");
    }
    __syncwarp();
    WAIT
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (u32 column = 0; column < n; ++column) {
        u32 value;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];"
            : "=r"(value) : "r"(tmem + (warp * 32 << 16) + column));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        out[(rank * 128 + threadIdx.x) * n + column] = value;
    }
    cluster_sync();
    if (warp == 0) {
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 512;" :: "r"(tmem));
    }
}
"""


def swizzled_rows(rows: np.ndarray, num_bytes: int) -> np.ndarray:
    """128-byte rows as the 128-byte swizzle places them in a 1024-aligned tile."""
    tile = np.zeros(num_bytes, np.uint8)
    for r in range(rows.shape[0]):
        for chunk in range(8):
            at = 128 * r + (16 * chunk ^ (r % 8) * 16)
            tile[at : at + 16] = rows[r, 16 * chunk : 16 * chunk + 16]
    return tile


def scale_bytes(scales: np.ndarray, num_bytes: int) -> np.ndarray:
    out = np.full(num_bytes, 127, np.uint8)
    for r, row in enumerate(scales):
        at = r // 128 * 512 + r % 32 * 16 + r % 128 // 32 * 4
        out[at : at + 4] = row
    return out


def pair_case(n: int, seed: int):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 16, (256, 128), dtype=np.uint8)
    tokens = (
        rng.integers(0, 0x7F, (n, 128), dtype=np.uint8)
        | rng.integers(0, 2, (n, 128), dtype=np.uint8) << 7
    )
    sfa, sfb = rng.integers(118, 130, (256, 4)), rng.integers(118, 130, (n, 4))
    tiles = []
    for cta in range(2):
        own = weights[128 * cta : 128 * cta + 128]
        spread = np.zeros((128, 8, 16), np.uint8)
        spread[:, :, :8] = (own[:, ::2] | own[:, 1::2] << 4).reshape(128, 8, 8)
        tiles += [
            swizzled_rows(spread.reshape(128, 128), 16384),
            swizzled_rows(tokens[n // 2 * cta : n // 2 * (cta + 1)], 16384),
            scale_bytes(sfa[128 * cta : 128 * cta + 128], 512),
            scale_bytes(sfb, 1024),
        ]
    d = np.zeros((256, n), np.float32)
    for q in range(4):
        k = slice(32 * q, 32 * q + 32)
        left = E2M1_VALUES[weights[:, k]] * np.exp2(sfa[:, q, None] - 127.0)
        right = e4m3_values(tokens[:, k].astype(np.int64)) * np.exp2(sfb[:, q, None] - 127.0)
        d = (left @ right.T + d).astype(np.float32)
    return np.concatenate(tiles), d


@pytest.mark.parametrize("n", [16, 32, 80, 192])
def test_pair_block_scaled_mma_is_exact(n):
    for seed in range(2):
        tiles, expected = pair_case(n, seed)
        out = np.zeros((256, n), np.float32)
        run_kernel(
            PAIR_MMA.replace("WAIT", "wait(base, 0);"),
            tiles, out, n, (n + 127) // 128, ctas=2, cluster=2, seed=seed,
        )  # fmt: skip
        assert np.array_equal(out, expected)


def test_reading_an_accumulator_before_the_commit_is_seen_by_some_schedule():
    tiles, expected = pair_case(16, 0)
    failures = 0
    for seed in range(4):
        out = np.zeros((256, 16), np.float32)
        try:
            run_kernel(
                PAIR_MMA.replace("WAIT", ""), tiles, out, 16, 1, ctas=2, cluster=2, seed=seed
            )
        except EmulatorError:  # cells that nobody has written, or tensor memory freed in flight
            failures += 1
        else:
            failures += int(not np.array_equal(out, expected))
    assert failures > 0


# One warpgroup that owns all of tensor memory: BODY runs in every warp.
ONE_CTA = """
KERNEL()(u32* in, u32* out) {
    u32 base = shared_address(dynamic_shared);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;"
                                :: "r"(base) : "memory");
    __syncthreads();
    u32 tmem = ((u32*)dynamic_shared)[0];
    u32 own = tmem + (warp * 32 << 16);
    BODY
    __syncthreads();
    if (warp == 0)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" :: "r"(tmem));
}
"""


def registers(count: int, direction: str) -> tuple[str, str]:
    """The vector of an instruction and the constraint list for an array r[]."""
    vector = "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
    return vector, ", ".join(f'"{direction}"(r[{i}])' for i in range(count))


def fill_and_load(shape: str, repeat: int, count: int, extra: str = "", offset: int = 0) -> str:
    vector, outputs = registers(count, "=r")
    put, inputs = registers(32, "r")
    return ONE_CTA.replace(
        "BODY",
        f"""
    {{
        u32 r[32];
        for (int half = 0; half < 2; ++half) {{
            for (int i = 0; i < 32; ++i) r[i] = in[threadIdx.x * 64 + 32 * half + i];
            asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {put};"
                :: {inputs}, "r"(own + 32 * half) : "memory");
        }}
        asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
    }}
    u32 r[{count}];
    asm volatile("tcgen05.ld.sync.aligned.{shape}.x{repeat}{extra}.b32"
        " {vector}, [%{count}]{", 8" if offset else ""};"
        : {outputs} : "r"(own + (16 << 16) * {int(shape != "32x32b")} + 4));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int i = 0; i < {count}; ++i) out[threadIdx.x * {count} + i] = r[i];
""",
    )


def expected_cell(shape: str, t: int, i: int) -> tuple[int, int]:
    return {
        "32x32b": (t, i),
        "16x64b": (t // 4 + 8 * (t & 1), (t >> 1 & 1) + 2 * i),
        "16x128b": (t // 4 + 8 * (i & 1), t % 4 + 4 * (i >> 1)),
        "16x256b": (t // 4 + 8 * (i >> 1 & 1), 2 * (t % 4) + (i & 1) + 8 * (i >> 2)),
        "16x32bx2": (t % 16, i + t // 16 * 8),
    }[shape]


@pytest.mark.parametrize(
    ("shape", "repeat", "count"),
    [
        ("32x32b", 16, 16),
        ("16x64b", 8, 8),
        ("16x128b", 4, 8),
        ("16x256b", 2, 8),
        ("16x32bx2", 8, 8),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_loads_give_each_thread_its_cells(shape, repeat, count, packed):
    cells = np.random.default_rng(1).integers(0, 2**32, (128, 64), dtype=np.uint32)
    out = np.zeros((128, count), np.uint32)
    extra = ".pack::16b" if packed else ""
    run_kernel(fill_and_load(shape, repeat, count, extra, offset=shape == "16x32bx2"), cells, out)
    for thread in range(128):
        warp, t = divmod(thread, 32)
        for i in range(count):
            row, column = expected_cell(shape, t, i)
            row += 32 * warp + (0 if shape == "32x32b" else 16)
            if packed:
                low, high = cells[row, 4 + 2 * column : 6 + 2 * column] & 0xFFFF
                expected = int(low) | int(high) << 16
            else:
                expected = cells[row, 4 + column]
            assert out[thread, i] == expected


def load_one(address: str) -> str:
    return ONE_CTA.replace(
        "BODY",
        f"""
    u32 value;
    asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {{%1}};"
        :: "r"(own), "r"(lane) : "memory");
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%0}}, [%1];" : "=r"(value)
        : "r"({address}));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    out[threadIdx.x] = value;
""",
    )


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("own + 1", "nobody has written"),
        ("own + 64", "not allocated"),
        ("tmem + ((warp ^ 2) << 21)", r"may only touch lanes (0|32)\.\."),
        ("own + lane", "differs from lane"),
    ],
)
def test_wrong_tensor_memory_accesses_are_named(address, text):
    with pytest.raises(EmulatorError, match=text):
        run_kernel(load_one(address), np.zeros(1, np.uint32), np.zeros(128, np.uint32))


def test_the_quadrant_may_be_left_out_of_an_address():
    """Hardware takes it from the warp; a strict machine asks for it, as PTX does."""
    out = np.zeros(128, np.uint32)
    run_kernel(load_one("tmem"), np.zeros(1, np.uint32), out)
    assert (out == np.arange(128) % 32).all()
    with pytest.raises(EmulatorError, match=r"may only touch lanes (32|64|96)\.\."):
        run_kernel(load_one("tmem"), np.zeros(1, np.uint32), out, strict_tcgen05=True)


def test_memory_must_be_given_back():
    source = load_one("own").replace(
        'if (warp == 0)\n        asm volatile("tcgen05.dealloc',
        'if (warp == 9)\n        asm volatile("tcgen05.dealloc',
    )
    with pytest.raises(EmulatorError, match="without giving back 64 columns"):
        run_kernel(source, np.zeros(1, np.uint32), np.zeros(128, np.uint32))


# Kernels load whole warps' lanes where a smaller tile has left some unwritten.
def test_a_run_can_go_on_behind_a_load_of_unwritten_memory():
    source = ONE_CTA.replace(
        "BODY",
        """
    u32 value;
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(value) : "r"(own));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    out[threadIdx.x] = 7;
""",
    )
    given, out = np.zeros(1, np.uint32), np.zeros(128, np.uint32)
    machine = Machine(stop_at_findings=False)
    machine.add_array(given, "given")
    machine.add_array(out, "out")
    module = machine.load(ptx_of(source, "sm_100a"))
    shape = {"grid": (1, 1, 1), "block": (128, 1, 1)}
    machine.launch(module, **shape, shared_bytes=4096, args=[given, out])
    machine.run()
    (found,) = machine.findings
    assert found.error is Uninitialized
    assert "column 0 is read but nobody has written it" in str(found)
    assert (out == 7).all()


COPY_SHAPES = {
    "32x128b.warpx4": (32, 1, lambda row: [row, row + 32, row + 64, row + 96]),
    "64x128b.warpx2::02_13": (64, 1, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (
        64,
        1,
        lambda row: [row % 32 + 64 * (row // 32) + i for i in (0, 32)],
    ),
    "128x128b": (128, 1, lambda row: [row]),
    "128x256b": (128, 2, lambda row: [row]),
}


def run_copy(shape: str, *, constants: int = 0x0000400000000000, **options):
    """What one tcgen05.cp brings to 8 columns, its source, and the findings.

    constants: the bits of the descriptor that PTX fixes.
    """
    vector, outputs = registers(8, "=r")
    zeros = ", ".join(["%1"] * 8)
    source = ONE_CTA.replace(
        "BODY",
        f"""
    asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {{{zeros}}};"
        :: "r"(own), "r"(0) : "memory");
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    for (u32 i = threadIdx.x; i < 1024; i += blockDim.x) ((u32*)dynamic_shared)[256 + i] = in[i];
    fence_async();
    if (threadIdx.x == 0) init_barrier(base + 8, 1);
    __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    if (threadIdx.x == 0) {{
        // Rows of 16 bytes; 8 of them 128 bytes; the second chunk of a row 2048 bytes on.
        u64 descriptor = {constants}ull | 8ull << 32 | 128ull << 16;
        descriptor |= ((base + 1024) & 0x3FFFF) >> 4;
        asm volatile("tcgen05.cp.cta_group::1.{shape} [%0], %1;"
            :: "r"(tmem), "l"(descriptor) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(base + 8) : "memory");
    }}
    __syncwarp();
    wait(base + 8, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    u32 r[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {vector}, [%8];" : {outputs} : "r"(own));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int i = 0; i < 8; ++i) out[threadIdx.x * 8 + i] = r[i];
""",
    )
    data = np.random.default_rng(2).integers(1, 2**32, 1024, dtype=np.uint32)
    out = np.zeros((128, 8), np.uint32)
    return out, data, run_kernel(source, data, out, **options)


def copied(shape: str, data: np.ndarray) -> np.ndarray:
    num_rows, num_chunks, lanes_of = COPY_SHAPES[shape]
    expected = np.zeros((128, 8), np.uint32)
    for row in range(num_rows):
        for chunk in range(num_chunks):
            for lane in lanes_of(row):
                expected[lane, 4 * chunk : 4 * chunk + 4] = data[512 * chunk + 4 * row :][:4]
    return expected


@pytest.mark.parametrize("shape", COPY_SHAPES)
def test_copies_to_tensor_memory(shape):
    out, data, _ = run_copy(shape)
    assert np.array_equal(out, copied(shape, data))


@pytest.mark.parametrize(
    ("constants", "text"),
    [
        (0, r"bits \[48:46\] must be 0b001"),
        (1 << 46 | 1 << 53, r"bits \[60:53\] must be 0"),
    ],
)
def test_a_run_can_go_on_behind_a_descriptor_without_its_constants(constants, text):
    with pytest.raises(InvalidOperation, match=text):
        run_copy("128x128b", constants=constants)
    out, data, (found,) = run_copy("128x128b", constants=constants, stop_at_findings=False)
    assert np.array_equal(out, copied("128x128b", data))
    assert found.error is InvalidOperation
    assert re.search(text, str(found))
    assert "tcgen05.cp" in str(found)
    run_copy("128x128b", constants=constants, checks=False)


# 64 rows, of A and of the accumulator, take the lower half of each warp's 32 lanes.
@pytest.mark.parametrize("num_rows", [64, 128])
def test_dense_mma_with_a_in_tensor_memory(num_rows):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-8, 8, (rows, 16)).astype(np.float16) for rows in (128, 32))
    lanes = [lane for lane in range(128) if num_rows == 128 or lane % 32 < 16]
    zeros = ", ".join(["%1"] * 32)
    vector, inputs = registers(8, "r")
    back, outputs = registers(32, "=r")
    source = ONE_CTA.replace(
        "BODY",
        f"""
    asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], {{{zeros}}};"
        :: "r"(own), "r"(0) : "memory");
    {{
        u32 r[8];
        for (int i = 0; i < 8; ++i) r[i] = in[threadIdx.x * 8 + i];
        asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%8], {vector};"
            :: {inputs}, "r"(own + 32) : "memory");
        asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
        asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    }}
    // B, K-major without swizzle: chunk (row, c) at row * 16 + c * 512.
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x)
        ((u32*)dynamic_shared)[256 + i % 8 / 4 * 128 + i / 8 * 4 + i % 4] = in[1024 + i];
    fence_async();
    if (threadIdx.x == 0) init_barrier(base + 8, 1);
    __syncthreads();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    if (threadIdx.x == 0) {{
        u64 b = 0x0000400800000000ull | 32ull << 16 | ((base + 1024) & 0x3FFFF) >> 4;
        u32 idesc = 1 << 4 | 32 / 8 << 17 | {num_rows} / 16 << 24;
        asm volatile("{{ .reg .pred p; setp.ne.u32 p, 0, 0;"
            "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p; }}"
            :: "r"(tmem), "r"(tmem + 32), "l"(b), "r"(idesc) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(base + 8) : "memory");
    }}
    __syncwarp();
    wait(base + 8, 0);
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    u32 r[32];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {back}, [%32];" : {outputs} : "r"(own));
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    for (int i = 0; i < 32; ++i) out[threadIdx.x * 32 + i] = r[i];
""",
    )
    words = np.concatenate([a.view(np.uint32).ravel(), b.view(np.uint32).ravel()])
    out = aligned(np.zeros((128, 32), np.float32))
    run_kernel(source, words, out)
    expected = np.zeros_like(out)
    expected[lanes] = a[lanes].astype(np.float32) @ b.astype(np.float32).T
    assert np.array_equal(out, expected)


COMMIT = """
KERNEL()(u32* out) {
    __shared__ u64 barrier;
    u32 at = shared_address(&barrier);
    if (threadIdx.x == 0) {
        init_barrier(at, 1);
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%0];"
            :: "l"(ADDRESS) : "memory");
    }
    __syncthreads();
    wait(at, 0);
    out[threadIdx.x] = 1;
}
"""


@pytest.mark.parametrize(("address", "strict"), [("&barrier", True), ("u64(at)", False)])
def test_commit_without_a_state_space(address, strict):
    """PTX asks for a generic address; unless strict, a shared one does, as Triton gives it."""
    out = np.zeros(32, np.uint32)
    run_kernel(COMMIT.replace("ADDRESS", address), out, threads=32, strict_tcgen05=strict)
    assert out.all()


def test_strict_commit_wants_a_generic_address():
    source = COMMIT.replace("ADDRESS", "u64(at)")
    with pytest.raises(InvalidOperation, match="does not lead to shared memory"):
        run_kernel(source, np.zeros(32, np.uint32), threads=32, strict_tcgen05=True)


DEALLOC = """
KERNEL()(u32* out) {
    u32 base = shared_address(dynamic_shared);
    ((u32*)dynamic_shared)[256 + threadIdx.x] = threadIdx.x;
    for (u32 i = 0; i < 256; ++i) ((u32*)dynamic_shared)[256 + 32 * i + threadIdx.x] = i;
    fence_async();
    if (threadIdx.x == 0) init_barrier(base, 1);
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;"
        :: "r"(base + 8) : "memory");
    __syncwarp();
    u32 tmem = ((u32*)dynamic_shared)[2];
    if (threadIdx.x == 0) {
        COPY
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
            :: "r"(base) : "memory");
    }
    __syncwarp();
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" :: "r"(tmem));
    wait(base, 0);
    out[threadIdx.x] = 7;
}
"""
COPY = """asm volatile("tcgen05.cp.cta_group::1.128x256b [%0], %1;" :: "r"(tmem),
    "l"(0x0000400800800000ull | (((base + 1024) & 0x3FFFF) >> 4)) : "memory");"""


def run_dealloc(copy: str, seed: int) -> tuple[Machine, np.ndarray]:
    out = np.zeros(32, np.uint32)
    machine = Machine(seed=seed, stop_at_findings=False, schedule="late_copies")
    machine.add_array(out, "out")
    module = machine.load(ptx_of(DEALLOC.replace("COPY", copy), "sm_100a"))
    machine.launch(module, grid=(1, 1, 1), block=(32, 1, 1), shared_bytes=64 * 1024, args=[out])
    machine.run()
    return machine, out


def test_an_arrival_on_its_way_does_not_use_tensor_memory() -> None:
    machine, out = run_dealloc("", 0)
    assert not machine.findings
    assert (out == 7).all()


def test_a_run_can_go_on_behind_memory_that_is_given_back_too_early() -> None:
    machine, out = run_dealloc(COPY, 0)
    assert [finding.error for finding in machine.findings] == [InvalidOperation]
    assert "dealloc while 1 tcgen05 operation(s) are in flight" in str(machine.findings[0])
    assert (out == 7).all()
