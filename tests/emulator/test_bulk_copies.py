"""cp.async.bulk and cp.async.bulk.tensor, as instructions of a running kernel."""

from __future__ import annotations

import numpy as np
import pytest
from warpcheck import (
    Deadlock,
    EmulatorError,
    InvalidOperation,
    Misaligned,
    RaceDetected,
)
from warpcheck.tensor_map import DataType, TensorMapSpec

from .device import aligned, run_kernel
from .tensor_images import tensor_map

SPANS = {0: (0, 0), 1: (32, 0x10), 2: (64, 0x30), 3: (128, 0x70)}
SHARED_START = 0x400

# Fills 8 KiB of shared memory with 0xEE, loads one box to byte DESTINATION, copies it all to `out`.
LOAD = """
KERNEL()(const __grid_constant__ Map map, u32* out, int x, int y, u32 num_bytes) {
    u32 base = shared_address(dynamic_shared), barrier = base + 8192;
    for (u32 i = threadIdx.x; i < 2048; i += blockDim.x) ((u32*)dynamic_shared)[i] = 0xEEEEEEEE;
    fence_async();
    if (threadIdx.x == 0) init_barrier(barrier, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        expect_bytes(barrier, num_bytes);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
                     ".mbarrier::complete_tx::bytes%s [%%0], [%%1, {%%2, %%3}], [%%4]%s;"
            :: "r"(base + DESTINATION), "l"(&map), "r"(x), "r"(y), "r"(barrier),
               "l"(0x1000000000000000ull) : "memory");
    }
    wait(barrier, 0);
    for (u32 i = threadIdx.x; i < 2048; i += blockDim.x) out[i] = ((u32*)dynamic_shared)[i];
}
"""


def load_source(destination: int, hint: bool = False) -> str:
    source = LOAD.replace("DESTINATION", str(destination))
    return source % ((".L2::cache_hint", ", %5") if hint else ("", ""))


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("corner", [(0, 0), (-8, 3), (40, -2)])
def test_tensor_load_swizzles_absolute_addresses(swizzle, corner):
    rng = np.random.default_rng(swizzle)
    tensor = aligned(rng.integers(1, 2**16, (32, 64)).astype(np.uint16))
    width = (SPANS[swizzle][0] or 32) // 2
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [width, 8], swizzle)
    out = np.zeros(8192, np.uint8)
    destination = 384
    source = load_source(destination, hint=swizzle == 3)
    run_kernel(source, image, out, *corner, width * 16, memory=(tensor,))
    expected = np.full(8192, 0xEE, np.uint8)
    pitch, mask = SPANS[swizzle][0] or width * 2, SPANS[swizzle][1]
    for j in range(8):
        for i in range(width):
            x, y = corner[0] + i, corner[1] + j
            value = tensor[y, x] if 0 <= x < 64 and 0 <= y < 32 else 0
            linear = SHARED_START + destination + j * pitch + 2 * i
            at = (linear ^ (linear >> 3 & mask)) - SHARED_START
            expected[at : at + 2] = np.array([value], np.uint16).view(np.uint8)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("stride", [0, 16, 48])
def test_rows_of_a_tensor_may_overlap(stride):
    row = aligned(np.random.default_rng(1).integers(1, 255, 64 + 15 * 48, dtype=np.uint8))
    spec = TensorMapSpec(DataType.UINT8, row.ctypes.data, (64, 16), (stride,), (64, 8))
    out = np.zeros(8192, np.uint8)
    run_kernel(load_source(0), spec.encode_emulated(), out, 0, 10, 512, memory=(row,))
    expected = np.zeros((8, 64), np.uint8)
    for j in range(6):  # the tensor ends there
        expected[j] = row[stride * (10 + j) :][:64]
    assert np.array_equal(out[:512].reshape(8, 64), expected)


def fp4_case() -> tuple[np.ndarray, bytes]:
    tensor = aligned(np.random.default_rng(1).integers(0, 256, (40, 128), dtype=np.uint8))
    return tensor, tensor_map(14, tensor.ctypes.data, [256, 40], [128], [128, 32], 3)


def test_fp4_load_leaves_padding_and_counts_packed_bytes():
    tensor, image = fp4_case()
    out = np.zeros(8192, np.uint8)
    run_kernel(load_source(0), image, out, 128, 0, 64 * 32, memory=(tensor,))
    for j in range(32):
        for chunk in range(8):
            linear = SHARED_START + 128 * j + 16 * chunk
            at = (linear ^ (linear >> 3 & 0x70)) - SHARED_START
            assert np.array_equal(out[at : at + 8], tensor[j, 64 + 8 * chunk : 72 + 8 * chunk])
            assert (out[at + 8 : at + 16] == 0xEE).all()


def test_expecting_unpacked_fp4_bytes_never_completes():
    tensor, image = fp4_case()
    with pytest.raises(Deadlock):
        run_kernel(
            load_source(0), image, np.zeros(8192, np.uint8), 128, 0, 128 * 32, memory=(tensor,)
        )


def test_reading_outside_of_registered_memory_is_an_error():
    tensor = aligned(np.zeros((32, 128), np.uint8))
    image = tensor_map(0, tensor.ctypes.data, [128, 64], [128], [32, 8])
    with pytest.raises(EmulatorError, match="tensor load"):
        run_kernel(load_source(0), image, np.zeros(8192, np.uint8), 0, 28, 256, memory=(tensor,))


@pytest.mark.parametrize("corner", [(1, 0), (4, 0), (-1, 0), (65, 0), (4, 40)])
def test_boxes_start_at_multiples_of_16_bytes(corner):
    """Also outside of the tensor: an H200 takes that for an illegal instruction."""
    tensor = aligned(np.zeros((32, 64), np.uint16))
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [32, 8])
    message = rf"coordinate 0 is {corner[0]}, .* 16 bytes, which are 8 elements of UINT16"
    with pytest.raises(InvalidOperation, match=message):
        run_kernel(load_source(0), image, np.zeros(8192, np.uint8), *corner, 512, memory=(tensor,))


def test_prefetched_boxes_start_there_too():
    tensor = aligned(np.zeros((32, 64), np.uint16))
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [32, 8])
    source = """
KERNEL()(const __grid_constant__ Map map, int x) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, 0}];"
        :: "l"(&map), "r"(x));
}
"""
    run_kernel(source, image, 8, threads=1, memory=(tensor,))
    with pytest.raises(InvalidOperation, match="coordinate 0 is 4, not a multiple of 16 bytes"):
        run_kernel(source, image, 4, threads=1, memory=(tensor,))


def test_prefetched_bytes_are_there():
    tensor = aligned(np.zeros(4096, np.uint8))
    source = """
KERNEL()(const u8* src, u32 offset, u32 num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
        :: "l"(src + offset), "r"(num_bytes));
}
"""

    def prefetch(offset: int, num_bytes: int) -> None:
        run_kernel(source, tensor, offset, num_bytes, threads=1)

    prefetch(16, 4080)
    for offset, num_bytes, message in (
        (8, 16, "bulk prefetch: source 0x.* is not a multiple of 16"),
        (0, 24, "bulk prefetch: size 24 is not a multiple of 16"),
        (16, 4096, "bulk prefetch of 4096 bytes at 0x.*: not all of them are there"),
    ):
        with pytest.raises(EmulatorError, match=message):
            prefetch(offset, num_bytes)


@pytest.mark.parametrize("data_type", ["16U4_ALIGN8B", "16U4_ALIGN16B", "16U6_ALIGN16B"])
def test_packed_types_are_not_for_sm90(data_type):
    number = 13 + ["16U4_ALIGN8B", "16U4_ALIGN16B", "16U6_ALIGN16B"].index(data_type)
    tensor = aligned(np.zeros((8, 128), np.uint8))
    image = tensor_map(number, tensor.ctypes.data, [128, 8], [128], [128, 8])
    with pytest.raises(InvalidOperation, match=f"data type {data_type} does not exist on sm_90"):
        run_kernel(
            load_source(0),
            image,
            np.zeros(8192, np.uint8),
            0,
            0,
            512,
            arch="sm_90a",
            memory=(tensor,),
        )


@pytest.mark.parametrize("destination", [16, 64])
def test_tiles_lie_at_multiples_of_128_bytes(destination):
    tensor = aligned(np.zeros((32, 64), np.uint16))
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [32, 8])
    out = np.zeros(8192, np.uint8)
    with pytest.raises(Misaligned, match="is not a multiple of 128"):
        run_kernel(load_source(destination), image, out, 0, 0, 512, memory=(tensor,))


@pytest.mark.parametrize(
    ("swizzle", "name"), [(4, "128B_ATOM_32B"), (5, "128B_ATOM_32B_FLIP_8B"), (6, "128B_ATOM_64B")]
)
def test_swizzles_of_larger_atoms_are_not_for_sm90(swizzle, name):
    tensor = aligned(np.zeros((32, 64), np.uint16))
    image = tensor_map(1, tensor.ctypes.data, [64, 32], [128], [64, 8], swizzle)
    arguments = (load_source(0), image, np.zeros(8192, np.uint8), 0, 0, 1024)
    with pytest.raises(InvalidOperation, match=f"swizzle {name} does not exist on sm_90"):
        run_kernel(*arguments, arch="sm_90a", memory=(tensor,))
    if swizzle != 5:
        run_kernel(*arguments, arch="sm_100a", memory=(tensor,))


STORE = """
KERNEL()(const __grid_constant__ Map map, const u32* in, int x, int y) {
    u32 base = shared_address(dynamic_shared);
    for (u32 i = threadIdx.x; i < 1024; i += blockDim.x) ((u32*)dynamic_shared)[i] = in[i];
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("INSTRUCTION [%0, {%1, %2}], [%3];"
            :: "l"(&map), "r"(x), "r"(y), "r"(base) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
"""
PLAIN_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


def test_tensor_store_undoes_the_swizzle_and_clips():
    rng = np.random.default_rng(2)
    target = aligned(np.zeros((24, 128), np.uint8))
    image = tensor_map(0, target.ctypes.data, [112, 20], [128], [64, 16], 2)
    tile = rng.integers(1, 255, (16, 64), dtype=np.uint8)
    shared = np.zeros(4096, np.uint8)
    for j in range(16):
        for i in range(64):
            linear = SHARED_START + 64 * j + i
            shared[(linear ^ (linear >> 3 & 0x30)) - SHARED_START] = tile[j, i]
    source = STORE.replace("INSTRUCTION", PLAIN_STORE)
    run_kernel(source, image, shared, 64, 12, memory=(target,))
    expected = np.zeros_like(target)
    expected[12:20, 64:112] = tile[:8, :48]
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("fence", ["", "if (threadIdx.x < 32) fence_async();"])
def test_ordinary_stores_need_a_proxy_fence_in_every_writing_warp(fence):
    target = aligned(np.zeros((16, 64), np.uint8))
    image = tensor_map(0, target.ctypes.data, [64, 16], [64], [64, 16], 0)
    source = STORE.replace("INSTRUCTION", PLAIN_STORE).replace("fence_async();", fence)
    with pytest.raises(RaceDetected, match=r"no fence\.proxy\.async|has not executed fence"):
        run_kernel(source, image, np.zeros(4096, np.uint8), 0, 0, memory=(target,))


def test_tensor_reduction_adds_floats():
    target = aligned(np.ones((16, 32), np.float32))
    image = tensor_map(7, target.ctypes.data, [32, 16], [128], [32, 16], 0)
    shared = np.arange(1024, dtype=np.float32)
    instruction = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    run_kernel(STORE.replace("INSTRUCTION", instruction), image, shared, 0, 0, memory=(target,))
    assert np.array_equal(target.ravel(), 1 + shared[:512])


STORES = {
    "store": PLAIN_STORE,
    "add": "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group",
}


@pytest.mark.parametrize("instruction", STORES)
@pytest.mark.parametrize(
    ("corner", "message"),
    [
        ((-8, 0), r"coordinate 0 is negative \(-8\)"),
        ((0, -3), r"coordinate 1 is negative \(-3\)"),
        ((4, 0), "coordinate 0 is 4, not a multiple of 16 bytes"),
    ],
)
def test_stores_start_inside_or_behind_the_tensor(instruction, corner, message):
    """Loads may start before it, but an H200 ends a kernel that stores there."""
    target = aligned(np.zeros((32, 64), np.float16))
    image = tensor_map(6, target.ctypes.data, [64, 32], [128], [32, 8])
    source = STORE.replace("INSTRUCTION", STORES[instruction])
    with pytest.raises(InvalidOperation, match=message):
        run_kernel(source, image, np.zeros(4096, np.uint8), *corner, memory=(target,))


@pytest.mark.parametrize("instruction", STORES)
def test_tiles_to_store_lie_at_multiples_of_128_bytes(instruction):
    target = aligned(np.zeros((32, 64), np.float16))
    image = tensor_map(6, target.ctypes.data, [64, 32], [128], [32, 8])
    source = STORE.replace("INSTRUCTION", STORES[instruction]).replace(
        '"r"(base)', '"r"(base + 64)'
    )
    with pytest.raises(Misaligned, match="is not a multiple of 128"):
        run_kernel(source, image, np.zeros(4096, np.uint8), 0, 0, memory=(target,))


DATA_TYPES = ("UINT8", "UINT16", "UINT32", "INT32", "UINT64", "INT64")
DATA_TYPES += ("FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16")
DATA_TYPES += ("FLOAT32_FTZ", "TFLOAT32", "TFLOAT32_FTZ")
# As an H200 has them.
TENSOR_REDUCTIONS = {
    "add": {2, 3, 4, 6, 7, 8, 9, 10, 11, 12},
    "min": {2, 3, 4, 5, 6, 9},
    "max": {2, 3, 4, 5, 6, 9},
    "inc": {2},
    "dec": {2},
    "and": {2, 3, 4},
    "or": {2, 3, 4},
    "xor": {2, 3, 4},
}


@pytest.mark.parametrize("operation", TENSOR_REDUCTIONS)
def test_a_reduction_that_a_type_lacks_is_an_error(operation):
    instruction = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group"
    source = STORE.replace("INSTRUCTION", instruction)
    for data_type, name in enumerate(DATA_TYPES):
        target = aligned(np.zeros((8, 64), np.uint8))
        size = {"8": 1, "6": 2, "2": 4, "4": 8}[name.removesuffix("_FTZ")[-1]]
        image = tensor_map(data_type, target.ctypes.data, [64 // size, 8], [64], [64 // size, 8])
        arguments = (source, image, np.zeros(4096, np.uint8), 0, 0)
        if data_type in TENSOR_REDUCTIONS[operation]:
            run_kernel(*arguments, memory=(target,))
            continue
        with pytest.raises(
            InvalidOperation, match=rf"no tensor reduction \.{operation} of {name}\n"
        ):
            run_kernel(*arguments, memory=(target,))


# Copies through shared memory: global -> shared -> global, thread by thread.
ROUND_TRIP = """
KERNEL()(const u8* in, u8* out) {
    u32 base = shared_address(dynamic_shared), barrier = base + 4096 + 8 * threadIdx.x;
    u32 mine = base + 512 * threadIdx.x;
    init_barrier(barrier, 1);
    expect_bytes(barrier, 512);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1], 512, [%2];"
            :: "r"(mine), "l"(in + 512 * threadIdx.x), "r"(barrier) : "memory");
    wait(barrier, 0);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;"
        :: "l"(out + 512 * threadIdx.x), "r"(mine) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    for (u32 i = 0; i < 512; ++i) dynamic_shared[512 * threadIdx.x + i] = 0;
    asm volatile("WAIT" ::: "memory");
    u32 seen = *(volatile u32*)(out + 512 * threadIdx.x);
    *(u32*)(out + 4096 + 4 * threadIdx.x) = seen;
}
"""


def test_sources_may_be_overwritten_after_wait_read_and_results_seen_after_wait():
    data = aligned(np.random.default_rng(3).integers(1, 255, 4096, dtype=np.uint8))
    heads = data.reshape(8, 512)[:, :4]
    early_reads = 0
    for seed in range(6):
        for wait in ("cp.async.bulk.wait_group 0;", ""):
            out = aligned(np.zeros(4096 + 32, np.uint8))
            source = ROUND_TRIP.replace("WAIT", wait)
            if not wait:
                with pytest.raises(RaceDetected, match="asynchronous write"):
                    run_kernel(source, data, out.copy(), threads=8, seed=seed)
            run_kernel(source, data, out, threads=8, seed=seed, checks=bool(wait))
            assert np.array_equal(out[:4096], data)
            seen = out[4096:].reshape(8, 4)
            if wait:
                assert np.array_equal(seen, heads)
            else:
                early_reads += int((seen != heads).any())
    # Without the full wait some schedule shows that the data may not be there yet.
    assert early_reads > 0


def test_misaligned_bulk_copy_is_an_error():
    data = aligned(np.zeros(4096 + 16, np.uint8))
    source = ROUND_TRIP.replace("WAIT", "").replace("in + 512", "in + 8 + 512")
    with pytest.raises(EmulatorError, match=r"source 0x.* is not a multiple of 16"):
        run_kernel(source, data, aligned(np.zeros(4128, np.uint8)), threads=8)


# Rank 0 loads a tile for both CTAs; each waits on a barrier of its own, or both on rank 0's.
MULTICAST = """
KERNEL(__cluster_dims__(2))(const __grid_constant__ Map map, u32* out) {
    u32 base = shared_address(dynamic_shared), barrier = base + 4096;
    u32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        init_barrier(barrier, 1);
        if (PAIR == 0 || rank == 0) expect_bytes(barrier, PAIR ? 2048 : 1024);
    }
    cluster_sync();
    if (threadIdx.x == 0 && (PAIR || rank == 0)) {
        u32 target = PAIR ? barrier & 0xFEFFFFFF : barrier;
        asm volatile("INSTRUCTION [%0], [%1, {%2, %3}], [%4]MASK;"
            :: "r"(base), "l"(&map), "r"(PAIR ? rank * 64 : 0), "r"(0), "r"(target) : "memory");
    }
    if (PAIR == 0 || rank == 0) wait(barrier, 0);
    cluster_sync();
    for (u32 i = threadIdx.x; i < 256; i += blockDim.x)
        out[256 * rank + i] = ((u32*)dynamic_shared)[i];
}
"""


def test_multicast_signals_every_receiver():
    tensor = aligned(np.random.default_rng(4).integers(0, 255, (16, 128), dtype=np.uint8))
    image = tensor_map(0, tensor.ctypes.data, [128, 16], [128], [64, 16])
    out = np.zeros((2, 1024), np.uint8)
    instruction = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster"
    )
    source = MULTICAST.replace("INSTRUCTION", instruction).replace("MASK", ", 3")
    run_kernel(source.replace("PAIR", "0"), image, out, ctas=2, cluster=2, memory=(tensor,))
    assert np.array_equal(out[0].reshape(16, 64), tensor[:, :64])
    assert np.array_equal(out[1], out[0])


PAIR_FORMS = [
    "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2",
]


@pytest.mark.parametrize("instruction", PAIR_FORMS)
def test_both_ctas_of_a_pair_signal_the_even_ones_barrier(instruction):
    tensor = aligned(np.random.default_rng(5).integers(0, 255, (16, 128), dtype=np.uint8))
    image = tensor_map(0, tensor.ctypes.data, [128, 16], [128], [64, 16])
    out = np.zeros((2, 1024), np.uint8)
    source = MULTICAST.replace("INSTRUCTION", instruction).replace("MASK", "")
    run_kernel(source.replace("PAIR", "1"), image, out, ctas=2, cluster=2, memory=(tensor,))
    for rank in range(2):
        expected = tensor[:, 64 * rank : 64 * rank + 64]
        assert np.array_equal(out[rank].reshape(16, 64), expected)


def test_a_remote_barrier_needs_the_pair_form():
    tensor = aligned(np.zeros((16, 128), np.uint8))
    image = tensor_map(0, tensor.ctypes.data, [128, 16], [128], [64, 16])
    plain = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    source = MULTICAST.replace("INSTRUCTION", plain).replace("MASK", "").replace("PAIR", "1")
    with pytest.raises(EmulatorError, match="mbarrier in rank 0"):
        run_kernel(source, image, np.zeros(2048, np.uint8), ctas=2, cluster=2, memory=(tensor,))


def test_exit_with_a_copy_in_flight_is_an_error():
    source = """
KERNEL()(const u8* in) {
    u32 base = shared_address(dynamic_shared);
    init_barrier(base + 1024, 1);
    asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
        " [%0], [%1], 512, [%2];" :: "r"(base), "l"(in), "r"(base + 1024) : "memory");
}
"""
    # Exactly the schedules that complete the copy before the thread exits are fine.
    texts = []
    for seed in range(8):
        try:
            run_kernel(source, aligned(np.zeros(512, np.uint8)), threads=1, seed=seed)
        except EmulatorError as error:
            texts.append(str(error))
    assert texts
    assert all("copies that need its shared memory" in text for text in texts)


REDUCTIONS = """
KERNEL()(u32* sums) {
    __shared__ __align__(16) u32 own[4];
    if (threadIdx.x < 4) own[threadIdx.x] = blockIdx.x + threadIdx.x;
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.OPERATION.async.bulk.global.shared::cta.bulk_group.ADD [%0], [%1], 16;"
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
            :: "l"(sums), "r"(shared_address(own)) : "memory");
    }
}
"""


@pytest.mark.parametrize("seed", range(3))
def test_bulk_reductions_are_atomic(seed):
    sums = aligned(np.zeros(4, np.uint32))
    source = REDUCTIONS.replace("OPERATION", "reduce").replace("ADD", "add.u32")
    run_kernel(source, sums, ctas=4, threads=32, seed=seed)
    assert sums.tolist() == [6, 10, 14, 18]
    # Stores to one place race.
    source = REDUCTIONS.replace("cp.OPERATION", "cp").replace(".ADD", "")
    with pytest.raises(RaceDetected):
        run_kernel(source, sums, ctas=4, threads=32, seed=seed)
