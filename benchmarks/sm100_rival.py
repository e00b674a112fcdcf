"""The SM100 kernel of sgl-deep-gemm on the emulator's clock, from the headers of its wheel.

Its headers are compiled as they are; nothing of them is in this repository. What its host code
chooses and lays out is done here again: tiles, stages, ring, the symmetric buffer, tensor maps.
`headers` names the folder `deep_gemm/include` of the unpacked wheel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deep_moe.emulator import Chip, EntriesBySource, LaunchTime, Machine
from deep_moe.emulator.tensor_map import DataType, Swizzle, TensorMapSpec
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.segments import align_up, ceil_div
from deep_moe.jit.headers import find_headers
from deep_moe.jit.nvrtc import compile_to_ptx
from deep_moe.trial.real_size import rank_tokens

VERSION = "0.2.5"  # whose template parameters, signals and choices these are
ARCH = "sm_100a"
_BLOCK_N = _BLOCK_K = 128
_TILES = (8, 16, 32, 64, 96, 128, 192, 240)
_TOKEN_ALIGNMENT = math.lcm(*_TILES)
_SMEM_BYTES = 232448
_MAX_PULL_BYTES = 8192
_NUM_DISPATCH_WARPS, _NUM_EPILOGUE_WARPS = 4, 8
_NUM_THREADS = 128 + 128 + 256
_MAX_RANKS, _MAX_EXPERTS, _MAX_LOCAL_EXPERTS = 72, 2048, 512
_MAX_RING_BLOCKS, _MAX_SHARED_BLOCKS = 1 << 20, 1 << 15
_TENSOR_MAPS = 18

# NVRTC has no standard library, and its own offsetof is no constant.
_STANDARD_HEADER = """\
#pragma once
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
namespace std { using namespace cuda::std; }
using namespace cuda::std;
#undef offsetof
#define offsetof(type, member) (size_t)__INTADDR__(&(((type*)0)->member))
__device__ __forceinline__ void cudaGridDependencySynchronize() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
"""
_HEADERS = {
    "cstdint": _STANDARD_HEADER,
    **dict.fromkeys(("algorithm", "cstddef", "exception", "string", "type_traits", "utility"), ""),
}


@dataclass(frozen=True)
class RivalConfig:
    """What the rival's host code chooses for a call of `num_tokens` per rank, MXFP4 weights and
    MXFP8 tokens."""

    shape: MoEShape
    num_tokens: int
    num_sms: int

    @property
    def max_tokens(self) -> int:
        return align_up(self.num_tokens, _TOKEN_ALIGNMENT)

    @property
    def block_m(self) -> int:
        """The fewest blocks of an expert that hold its tokens, and one deviation more."""
        shape = self.shape
        expected = self.num_tokens * shape.num_ranks * shape.num_topk / shape.num_experts
        if expected <= 24:
            return 16 if expected <= 10 else 32
        covered = expected + math.sqrt(expected)
        num_blocks = math.ceil(covered / 240)
        if num_blocks == 1 and covered > 192 and shape.num_experts_per_rank < 14:
            num_blocks = 2
        return next((m for m in (64, 128, 192, 240) if num_blocks * m >= covered), 240)

    @property
    def store_blocks(self) -> tuple[int, int]:
        """Rows that an epilogue of Linear1 and of Linear2 stores at once."""
        if self.block_m == 240:
            return 24, 8
        rows = 8 if self.block_m <= 16 else 16 if self.block_m <= 64 else 32
        return rows, rows

    @property
    def sf_block_m(self) -> int:
        return align_up(self.block_m, 128)

    @property
    def num_ring_tokens(self) -> int:
        """Rows of the pools: as many as may be in use at once, whatever the tile."""
        shape = self.shape
        local = shape.num_experts_per_rank
        num_rows = self.max_tokens * shape.num_ranks * min(shape.num_topk, local)
        most = max(m * self._num_live_blocks(ceil_div(num_rows, m) + local) for m in _TILES)
        return align_up(most, _TOKEN_ALIGNMENT)

    def _num_live_blocks(self, num_blocks: int) -> int:
        clusters = self.num_sms // 2
        l1 = self.shape.intermediate_hidden * 2 // (2 * _BLOCK_N)
        l2 = self.shape.hidden // (2 * _BLOCK_N)
        first_wave = ceil_div(ceil_div(clusters, l2) * l1, clusters)
        interleaved = ceil_div(l1 + (num_blocks - 1) * max(l1 - l2, 0), clusters) + 1
        num_waves = min(max(first_wave, interleaved), ceil_div(num_blocks * l1, clusters))
        after_warmup = ceil_div(min(num_waves * clusters, num_blocks * l1), l1)
        growth = ceil_div(num_blocks * (l2 - l1), l2) if l2 > l1 else 0
        return min(num_blocks, after_warmup + growth + ceil_div(clusters, min(l1, l2)))

    @property
    def num_sf_ring_tokens(self) -> int:
        return self.num_ring_tokens // self.block_m * self.sf_block_m

    @property
    def pull_bytes(self) -> int:
        num_bytes = self.shape.hidden
        while num_bytes > _MAX_PULL_BYTES:
            num_bytes //= 2
        return num_bytes

    @property
    def num_stages(self) -> int:
        return next(n for n in range(32, 1, -1) if self._smem_bytes(n) <= _SMEM_BYTES)

    @property
    def smem_bytes(self) -> int:
        return self._smem_bytes(self.num_stages)

    def _smem_bytes(self, num_stages: int) -> int:
        """The members of the kernel's storage one after the other."""
        rows1, rows2 = self.store_blocks
        at = align_up(4 * self.shape.num_experts, 1024)
        at = align_up(at + _NUM_DISPATCH_WARPS * self.pull_bytes, 1024)
        at = align_up(at + 2 * max(2 * rows1 * _BLOCK_N // 2, 2 * rows2 * _BLOCK_N), 1024)
        at += num_stages * (self.block_m // 2 + _BLOCK_N) * _BLOCK_K
        at += num_stages * 4 * (self.sf_block_m + _BLOCK_N)
        at = align_up(align_up(at, 8) + _NUM_EPILOGUE_WARPS * rows1 // 2 * 8, 16) + 2 * 32
        at += 8 * (_NUM_DISPATCH_WARPS + 2 * num_stages + 4 + 2 * _NUM_EPILOGUE_WARPS + 4) + 8
        return align_up(at, 1024)

    def source(self, clamp: float = 10.0) -> str:
        """A translation unit with the one kernel."""
        shape = self.shape
        numbers = (
            (self.max_tokens, shape.hidden, shape.intermediate_hidden, shape.num_experts, 0)
            + (shape.num_topk, self.block_m, _BLOCK_N, _BLOCK_K, *self.store_blocks)
            + (self.sf_block_m, _BLOCK_N, "MmaKind::MXFP8FP4", self.num_ring_tokens)
            + (self.num_sf_ring_tokens, self.num_stages, self.pull_bytes, 128, 128, 256)
            + (self.num_sms, shape.num_ranks, f"{clamp}f", "0.0f", "false", "true")
            + ("false",) * 5  # scales and alphas of other formats, an FP8 combine
            + ("cutlass::detail::float_e2m1_unpacksmem_t",)
        )
        return (
            "#include <deep_gemm/impls/sm100_fp8_fp4_mega_moe.cuh>\n"
            "using namespace deep_gemm;\n"
            f"static_assert(sizeof(layout::MegaMoESignals) == {RivalBuffer.SIGNAL_BYTES});\n"
            "static void instantiate() {\n"
            "    auto kernel = reinterpret_cast<void*>(&sm100_fp8_fp4_mega_moe_impl<"
            f"{', '.join(map(str, numbers))}>);\n}}\n"
        )


class RivalBuffer:
    """Offsets of the rival's symmetric buffer, and which entries of it are of source ranks."""

    _GRID_INDICES = (128, 768)  # combine_ready, peer_grid: a word of each rank
    _RECV_COUNT = 1408 + 8 * _MAX_EXPERTS
    SIGNAL_BYTES = (
        _RECV_COUNT
        + 8 * (_MAX_EXPERTS + _MAX_LOCAL_EXPERTS)
        + 20 * _MAX_RING_BLOCKS
        + 4 * _MAX_SHARED_BLOCKS
    )

    def __init__(self, config: RivalConfig) -> None:
        shape = config.shape
        topk, local = shape.num_topk, shape.num_experts_per_rank
        tokens, ring, sf_ring = config.max_tokens, config.num_ring_tokens, config.num_sf_ring_tokens
        pool = align_up(
            shape.num_ranks * tokens * min(topk, local) + local * (_TILES[-1] - 1), _TOKEN_ALIGNMENT
        )
        lists = shape.num_experts * tokens * 4
        self.by_source = [
            *(EntriesBySource(at, shape.num_ranks, 8) for at in self._GRID_INDICES),
            EntriesBySource(self._RECV_COUNT, shape.num_ranks, 8 * local),
            EntriesBySource(self.SIGNAL_BYTES, shape.num_experts, 4 * tokens),
        ]
        at = align_up(self.SIGNAL_BYTES + lists + 12 * pool + 4 * tokens * topk, 16)
        self.offsets = {}
        for name, num_bytes in (
            ("x", tokens * shape.hidden),
            ("x_sf", tokens * shape.hidden // 32),
            ("topk_idx", tokens * topk * 8),
            ("topk_weights", tokens * topk * 4),
            ("l1_acts", ring * shape.hidden),
            ("l1_sf", sf_ring * shape.hidden // 32),
            ("l1_weights", ring * 4),
            ("l2_acts", ring * shape.intermediate_hidden),
            ("l2_sf", sf_ring * shape.intermediate_hidden // 32),
            ("combine", topk * tokens * shape.hidden * 2),
            ("x_scales", tokens * 4),
            ("l1_x_scales", ring * 4),
        ):
            self.offsets[name] = at
            at += num_bytes
        self.num_bytes = at


def compile_rival(config: RivalConfig, headers: Path) -> str:
    """PTX of the kernel. headers: the wheel's `deep_gemm/include`."""
    if not (headers / "deep_gemm" / "impls" / "sm100_fp8_fp4_mega_moe.cuh").exists():
        raise ValueError(f"headers must be deep_gemm/include of the unpacked wheel; got {headers}")
    found = find_headers()
    return compile_to_ptx(
        config.source(),
        arch=ARCH,
        include_paths=[headers, found.cuda.path, found.cccl.path / "cccl", found.cccl.path],
        headers=_HEADERS,
        options=["--device-int128"],
    )


def simulate_rival(
    shape: MoEShape,
    num_tokens: int,
    chip: Chip,
    headers: Path,
    *,
    mirrored: bool,
    num_sms: int | None = None,
    seed: int = 0,
    keep_waits: bool = False,
) -> tuple[LaunchTime, ...]:
    """Each rank's kernel, of rank 0 alone if its peers mirror it. Tokens name the experts that
    `deep_moe.trial.simulated.simulate_call` has them name."""
    config = RivalConfig(shape, num_tokens, num_sms or int(chip.value("num_sms")))
    buffer = RivalBuffer(config)
    machine = Machine(clock=chip, checks=False, products=False, keep_waits=keep_waits)
    module = machine.load(compile_rival(config, headers), name="rival.ptx")
    num_ranks, running = shape.num_ranks, 1 if mirrored else shape.num_ranks
    buffers = [_zeros(buffer.num_bytes) for _ in range(num_ranks)]
    addresses = [array.ctypes.data for array in buffers]
    kept = []
    for rank in range(running):
        weights = [_zeros(size) for size in _weight_bytes(shape)]
        y = _zeros(num_tokens * shape.hidden * 2)
        # Two halves of L2, each with half of the clusters.
        domains = np.arange(config.num_sms, dtype=np.uint8) // 2 % 2
        kept.append((weights, y, domains))
        for peer, array in enumerate(buffers):
            machine.add_memory(
                rank, array.ctypes.data, array.nbytes, f"buffer of rank {peer}", home=peer
            )
        for name, array in (("y", y), ("domains", domains)):
            machine.add_array(array, name, rank=rank)
        for index, array in enumerate(weights):
            machine.add_array(array, f"weights {index}", rank=rank, writable=False)
        if mirrored:
            for peer in range(1, num_ranks):
                machine.mirror_memory(
                    rank,
                    addresses[peer],
                    onto=addresses[0],
                    num_ranks=num_ranks,
                    shift=num_ranks - peer,
                    by_source=buffer.by_source,
                )
        _fill(shape, num_tokens, rank, seed, buffers[rank], buffer)
        maps = _tensor_maps(config, buffer, addresses[rank], [w.ctypes.data for w in weights])
        machine.launch(
            module,
            grid=(config.num_sms, 1, 1),
            block=(_NUM_THREADS, 1, 1),
            cluster=(2, 1, 1),
            shared_bytes=config.smem_bytes,
            args=[y, 0, 0, 0, 0, 0, num_tokens, _peers(addresses, rank), *maps, domains],
            rank=rank,
        )
    machine.run()
    return tuple(machine.launch_times)


def _zeros(num_bytes: int) -> np.ndarray:
    """At a multiple of 1024 bytes; what nobody writes takes no memory."""
    storage = np.zeros(num_bytes + 1024, np.uint8)
    begin = -storage.ctypes.data % 1024
    return storage[begin : begin + num_bytes]


def _weight_bytes(shape: MoEShape) -> list[int]:
    """Of Linear1, its scales, Linear2 and its scales."""
    sizes = []
    for rows, columns in (
        (2 * shape.intermediate_hidden, shape.hidden),
        (shape.hidden, shape.intermediate_hidden),
    ):
        count = shape.num_experts_per_rank * rows * columns
        sizes += [count // 2, count // 32]
    return sizes


def _fill(
    shape: MoEShape, num_tokens: int, rank: int, seed: int, array: np.ndarray, buffer: RivalBuffer
) -> None:
    tokens = rank_tokens(shape, num_tokens, rank, seed, torch.device("cpu"))
    for name, values in (("topk_idx", tokens.topk_idx), ("topk_weights", tokens.topk_weights)):
        flat = values.numpy().reshape(-1).view(np.uint8)
        at = buffer.offsets[name]
        array[at : at + flat.size] = flat


def _peers(addresses: list[int], rank: int) -> bytes:
    """The kernel's view of all buffers: its own, and how far the others are from it."""
    base = addresses[rank]
    numbers = np.zeros(_MAX_RANKS + 2, np.int64)
    numbers[0] = base
    numbers[1 : 1 + len(addresses)] = [address - base for address in addresses]
    numbers[_MAX_RANKS + 1] = rank
    return numbers.tobytes()


def _tensor_maps(
    config: RivalConfig, buffer: RivalBuffer, base: int, weights: list[int]
) -> list[bytes]:
    """Of tokens, weights and their scales of both layers, and those of shared experts, of which
    there are none."""
    shape, local = config.shape, config.shape.num_experts_per_rank
    hidden, intermediate = shape.hidden, shape.intermediate_hidden
    at = {name: base + offset for name, offset in buffer.offsets.items()}
    ring, sf_ring = config.num_ring_tokens, config.num_sf_ring_tokens

    def rows(address: int, columns: int, box: tuple[int, int]) -> TensorMapSpec:
        swizzle = Swizzle.of_row_bytes(box[0])
        return TensorMapSpec(
            DataType.UINT8, address, (columns, ring), (columns,), box, swizzle=swizzle
        )

    def fp4(address: int, columns: int, num_rows: int) -> TensorMapSpec:
        """Half of an expert's rows for each half of L2."""
        half = num_rows // 2 * columns // 2
        return TensorMapSpec(
            DataType.PACKED_16U4_ALIGN16B,
            address,
            (columns, num_rows // 2, 2, local),
            (columns // 2, half, 2 * half),
            (128, _BLOCK_N, 1, 1),
            swizzle=Swizzle.B128,
        )

    def scales(address: int, rows: int, columns: int, block: int, groups: int = 1) -> TensorMapSpec:
        dims = (rows, columns // 128 * groups)
        return TensorMapSpec(DataType.INT32, address, dims, (4 * rows,), (block, 1))

    load = (_BLOCK_K, config.block_m // 2)
    sf_m = config.sf_block_m
    l1 = [
        rows(at["l1_acts"], hidden, load),
        scales(at["l1_sf"], sf_ring, hidden, sf_m),
        fp4(weights[0], hidden, 2 * intermediate),
        scales(weights[1], 2 * intermediate, hidden, _BLOCK_N, local),
        rows(at["l2_acts"], intermediate, (_BLOCK_N // 2, config.store_blocks[0])),
    ]
    l2 = [
        rows(at["l2_acts"], intermediate, load),
        scales(at["l2_sf"], sf_ring, intermediate, sf_m),
        fp4(weights[2], intermediate, hidden),
        scales(weights[3], hidden, intermediate, _BLOCK_N, local),
    ]
    encoded = [spec.encode_emulated() for spec in l1 + l2] * 2
    assert len(encoded) == _TENSOR_MAPS
    return encoded
