"""The SM100 kernel of sgl-deep-gemm on the emulator, from the headers of its wheel: MXFP4 weights
with MXFP8 tokens, or NVFP4 weights with NVFP4 tokens.

Its headers are compiled as they are; nothing of them is in this repository. What its host code
chooses and lays out is done here again: tiles, stages, ring, the symmetric buffer, tensor maps.
That code is compiled into the wheel, and was read there. `headers` names the folder
`deep_gemm/include` of the unpacked wheel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from deep_moe.tokens import TokenFormatName
from deep_moe.trial.real_size import rank_tokens
from deep_moe.trial.synthetic import Tokens
from deep_moe.weights import WeightsName

VERSION = "0.2.5"  # whose template parameters, signals and choices these are
ARCH = "sm_100a"
_BLOCK_N = 128
_BLOCK_K_BYTES = 128  # of tokens in shared memory
_TILES = (8, 16, 32, 64, 96, 128, 192, 240)
_TOKEN_ALIGNMENT = math.lcm(*_TILES)
_SMEM_BYTES = 232448
_MAX_PULL_BYTES = 8192
_WHOLE_POOL_TOKENS = 6144  # from so many per rank on, the pool is no ring
_NUM_DISPATCH_WARPS, _NUM_EPILOGUE_WARPS = 4, 8
_NUM_THREADS = 128 + 128 + 256
_MAX_RANKS, _MAX_EXPERTS, _MAX_LOCAL_EXPERTS = 72, 2048, 512
_MAX_RING_BLOCKS, _MAX_SHARED_BLOCKS = 1 << 20, 1 << 15
_TENSOR_MAPS = 18
_CLAMP = 10.0  # the models'

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
class RivalFormat:
    """A kind of products of the rival.

    token_format: of tokens, as here. name, weights_type: how the rival's source names the kind, and
    the type of weights. bits: of a token's value. scale_values: values along K that share a scale.
    load_type: how copies bring weights. has_floats: whether each token has a float32 scale, and
    each matrix.
    """

    token_format: TokenFormatName
    name: str
    weights_type: str
    bits: int
    scale_values: int
    load_type: DataType
    has_floats: bool = False

    def num_bytes(self, num_values: int) -> int:
        """Of a token's values."""
        return num_values * self.bits // 8

    @property
    def block_k(self) -> int:
        return _BLOCK_K_BYTES * 8 // self.bits

    @property
    def scale_words(self) -> int:
        """Of a row's scales in a block along K; a word has four."""
        return self.block_k // (4 * self.scale_values)


FORMATS: dict[WeightsName, RivalFormat] = {
    "mxfp4": RivalFormat(
        "mxfp8",
        "MXFP8FP4",
        "cutlass::detail::float_e2m1_unpacksmem_t",
        bits=8,
        scale_values=32,
        load_type=DataType.PACKED_16U4_ALIGN16B,
    ),
    "nvfp4": RivalFormat(
        "nvfp4",
        "NVFP4",
        "cutlass::float_e2m1_t",
        bits=4,
        scale_values=16,
        load_type=DataType.UINT8,
        has_floats=True,
    ),
}


@dataclass(frozen=True)
class RivalConfig:
    """What the rival's host code chooses for a call of `num_tokens` per rank."""

    shape: MoEShape
    num_tokens: int
    num_sms: int

    @property
    def format(self) -> RivalFormat:
        return FORMATS[self.shape.weights]

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
        if self.block_m == 240 and self.format.bits == 8:
            return 24, 8
        rows = {16: 8, 32: 16, 64: 16, 128: 32, 192: 48, 240: 40}[self.block_m]
        return rows, rows

    @property
    def sf_block_m(self) -> int:
        return align_up(self.block_m, 128)

    @property
    def num_pool_tokens(self) -> int:
        """Rows that a call may bring, and what fills up blocks."""
        local = self.shape.num_experts_per_rank
        return align_up(self._num_received + local * (_TILES[-1] - 1), _TOKEN_ALIGNMENT)

    @property
    def _num_received(self) -> int:
        shape = self.shape
        most_of_token = min(shape.num_topk, shape.num_experts_per_rank)
        return self.max_tokens * shape.num_ranks * most_of_token

    @property
    def num_ring_tokens(self) -> int:
        """Rows of the pools: as many as may be in use at once, whatever the tile. With many tokens
        as many as a call may bring."""
        if self.max_tokens >= _WHOLE_POOL_TOKENS:
            return self.num_pool_tokens
        local, num_rows = self.shape.num_experts_per_rank, self._num_received
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
        """Rows of scales in the pools, whatever the tile."""
        return max(self.num_ring_tokens // m * align_up(m, 128) for m in _TILES)

    @property
    def pull_bytes(self) -> int:
        num_bytes = self.format.num_bytes(self.shape.hidden)
        while num_bytes > _MAX_PULL_BYTES:
            num_bytes //= 2
        return num_bytes

    @property
    def num_stages(self) -> int:
        return (_SMEM_BYTES - self._fixed_smem_bytes) // self._stage_bytes

    @property
    def smem_bytes(self) -> int:
        return self._fixed_smem_bytes + self.num_stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        """Values, scales and two barriers."""
        values = (self.block_m // 2 + _BLOCK_N) * _BLOCK_K_BYTES
        return values + 4 * (self.sf_block_m + _BLOCK_N) * self.format.scale_words + 2 * 8

    @property
    def _fixed_smem_bytes(self) -> int:
        """Counts, pulled tokens, output; largest magnitudes; barriers; a table of inverses."""
        rows1, rows2 = self.store_blocks
        of_output = 2 * max(2 * rows1 * self.format.num_bytes(_BLOCK_N // 2), 2 * rows2 * _BLOCK_N)
        sizes = (4 * self.shape.num_experts, _NUM_DISPATCH_WARPS * self.pull_bytes, of_output)
        num_bytes = sum(align_up(size, 1024) for size in sizes)
        num_bytes += 4 * _NUM_EPILOGUE_WARPS * rows1
        num_bytes += 8 * (_NUM_DISPATCH_WARPS + 4 + 2 * _NUM_EPILOGUE_WARPS) + 100
        return num_bytes + (1024 if self.format.has_floats else 0)

    def source(self, clamp: float = _CLAMP) -> str:
        """A translation unit with the one kernel."""
        shape, form = self.shape, self.format
        numbers = (
            *(self.max_tokens, shape.hidden, shape.intermediate_hidden, shape.num_experts, 0),
            *(shape.num_topk, self.block_m, _BLOCK_N, form.block_k, *self.store_blocks),
            *(self.sf_block_m, _BLOCK_N, f"MmaKind::{form.name}", self.num_ring_tokens),
            *(self.num_sf_ring_tokens, self.num_stages, self.pull_bytes, 128, 128, 256),
            *(self.num_sms, shape.num_ranks, f"{clamp}f", "0.0f", "false", "true"),
            # Float32 scales of tokens, of matrices of both layers, and of Linear1's output.
            *(("true" if form.has_floats else "false",) * 4),
            *("false", form.weights_type),  # no FP8 in the combine
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
        shape, form = config.shape, config.format
        topk, local = shape.num_topk, shape.num_experts_per_rank
        tokens, ring, sf_ring = config.max_tokens, config.num_ring_tokens, config.num_sf_ring_tokens
        lists = shape.num_experts * tokens * 4
        self.by_source = [
            *(EntriesBySource(at, shape.num_ranks, 8) for at in self._GRID_INDICES),
            EntriesBySource(self._RECV_COUNT, shape.num_ranks, 8 * local),
            EntriesBySource(self.SIGNAL_BYTES, shape.num_experts, 4 * tokens),
        ]
        metadata = 12 * config.num_pool_tokens + 4 * tokens * topk
        at = align_up(self.SIGNAL_BYTES + lists + metadata, 16)
        self.offsets = {}
        for name, num_bytes in (
            ("x", tokens * form.num_bytes(shape.hidden)),
            ("x_sf", tokens * shape.hidden // form.scale_values),
            ("topk_idx", tokens * topk * 8),
            ("topk_weights", tokens * topk * 4),
            ("l1_acts", ring * form.num_bytes(shape.hidden)),
            ("l1_sf", sf_ring * shape.hidden // form.scale_values),
            ("l1_weights", ring * 4),
            ("l2_acts", ring * form.num_bytes(shape.intermediate_hidden)),
            ("l2_sf", sf_ring * shape.intermediate_hidden // form.scale_values),
            ("combine", topk * tokens * shape.hidden * 2),
            ("x_scales", tokens * 4),
            ("l1_x_scales", ring * 4),
        ):
            self.offsets[name] = at
            at += num_bytes
        self.num_bytes = at


def compile_rival(config: RivalConfig, headers: Path, clamp: float = _CLAMP) -> str:
    """PTX of the kernel. headers: the wheel's `deep_gemm/include`. clamp: of its activation."""
    if not (headers / "deep_gemm" / "impls" / "sm100_fp8_fp4_mega_moe.cuh").exists():
        raise ValueError(f"headers must be deep_gemm/include of the unpacked wheel; got {headers}")
    found = find_headers()
    return compile_to_ptx(
        config.source(clamp),
        arch=ARCH,
        include_paths=[headers, found.cuda.path, found.cccl.path / "cccl", found.cccl.path],
        headers=_HEADERS,
        options=["--device-int128"],
    )


@dataclass(frozen=True)
class RivalWeights:
    """One rank's, as the kernel reads them: values and scales of Linear1 and of Linear2. With
    NVFP4 the scales of matrices: float32 of gate and up for each expert, and of Linear2; and one by
    which an expert's Linear1 output is multiplied before it is quantized."""

    layers: tuple[np.ndarray, ...]
    floats: tuple[np.ndarray, ...] = ()


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
    machine = Machine(clock=chip, checks=False, products=False, keep_waits=keep_waits)
    ranks = range(1 if mirrored else shape.num_ranks)
    tokens = [rank_tokens(shape, num_tokens, rank, seed, torch.device("cpu")) for rank in ranks]
    weights = [_no_weights(shape) for _ in ranks]
    run_rival(machine, config, headers, tokens, weights, mirrored=mirrored)
    return tuple(machine.launch_times)


def run_rival(
    machine: Machine,
    config: RivalConfig,
    headers: Path,
    tokens: Sequence[Tokens],
    weights: Sequence[RivalWeights],
    *,
    mirrored: bool = False,
    clamp: float = _CLAMP,
) -> list[np.ndarray]:
    """One call of the ranks whose tokens these are: each one's output, bits of bfloat16 [tokens,
    hidden]. clamp: of the activation."""
    shape, num_ranks = config.shape, config.shape.num_ranks
    buffer = RivalBuffer(config)
    module = machine.load(compile_rival(config, headers, clamp), name="rival.ptx")
    buffers = [_zeros(buffer.num_bytes) for _ in range(num_ranks)]
    addresses = [array.ctypes.data for array in buffers]
    # Two halves of L2, each with half of the clusters.
    domains = np.arange(config.num_sms, dtype=np.uint8) // 2 % 2
    ys = []
    for rank, (own_tokens, own_weights) in enumerate(zip(tokens, weights, strict=True)):
        num_tokens = own_tokens.num_tokens
        y = _zeros(num_tokens * shape.hidden * 2)
        ys.append(y.view(np.uint16).reshape(num_tokens, shape.hidden))
        for peer, array in enumerate(buffers):
            machine.add_memory(
                rank, array.ctypes.data, array.nbytes, f"buffer of rank {peer}", home=peer
            )
        machine.add_array(y, "y", rank=rank)
        for index, array in enumerate((*own_weights.layers, *own_weights.floats)):
            machine.add_array(array, f"weights {index}", rank=rank, writable=False)
        machine.add_array(domains, "domains", rank=rank, writable=False)
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
        _fill(own_tokens, buffers[rank], buffer, config.format)
        layers = [array.ctypes.data for array in own_weights.layers]
        machine.launch(
            module,
            grid=(config.num_sms, 1, 1),
            block=(_NUM_THREADS, 1, 1),
            cluster=(2, 1, 1),
            shared_bytes=config.smem_bytes,
            args=[
                *(y, 0),  # no counts of received tokens
                *(own_weights.floats or (0, 0, 0)),
                *(0, num_tokens),  # no norm
                _peers(addresses, rank),
                *_tensor_maps(config, buffer, addresses[rank], layers),
                domains,
            ],
            rank=rank,
        )
    machine.run()
    return ys


def _zeros(num_bytes: int) -> np.ndarray:
    """At a multiple of 1024 bytes; what nobody writes takes no memory."""
    storage = np.zeros(num_bytes + 1024, np.uint8)
    begin = -storage.ctypes.data % 1024
    return storage[begin : begin + num_bytes]


def _no_weights(shape: MoEShape) -> RivalWeights:
    form, local = FORMATS[shape.weights], shape.num_experts_per_rank
    layers = []
    for rows, columns in (
        (2 * shape.intermediate_hidden, shape.hidden),
        (shape.hidden, shape.intermediate_hidden),
    ):
        count = local * rows * columns
        layers += [_zeros(count // 2), _zeros(count // form.scale_values)]
    sizes = (2 * local, local, local) if form.has_floats else ()
    return RivalWeights(tuple(layers), tuple(np.ones(size, np.float32) for size in sizes))


def _fill(tokens: Tokens, array: np.ndarray, buffer: RivalBuffer, form: RivalFormat) -> None:
    parts = {"x": tokens.x, "topk_idx": tokens.topk_idx, "topk_weights": tokens.topk_weights}
    parts["x_sf"] = tokens.x_sf
    if form.has_floats:
        parts["x_scales"], parts["x_sf"] = tokens.x_sf[:, :1], tokens.x_sf[:, 1:]
    for name, values in parts.items():
        flat = values.contiguous().view(torch.uint8).numpy().reshape(-1)
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
    shape, form, local = config.shape, config.format, config.shape.num_experts_per_rank
    hidden, intermediate = shape.hidden, shape.intermediate_hidden
    at = {name: base + offset for name, offset in buffer.offsets.items()}
    ring, sf_ring = config.num_ring_tokens, config.num_sf_ring_tokens

    def rows(address: int, num_values: int, box: tuple[int, int]) -> TensorMapSpec:
        columns, swizzle = form.num_bytes(num_values), Swizzle.of_row_bytes(box[0])
        return TensorMapSpec(
            DataType.UINT8, address, (columns, ring), (columns,), box, swizzle=swizzle
        )

    def fp4(address: int, num_values: int, num_rows: int) -> TensorMapSpec:
        """Half of an expert's rows for each half of L2."""
        row_bytes = num_values // 2
        half = num_rows // 2 * row_bytes
        is_packed = form.load_type == DataType.UINT8
        return TensorMapSpec(
            form.load_type,
            address,
            (row_bytes if is_packed else num_values, num_rows // 2, 2, local),
            (row_bytes, half, 2 * half),
            (_BLOCK_K_BYTES, _BLOCK_N, 1, 1),
            swizzle=Swizzle.B128,
        )

    def scales(
        address: int, num_rows: int, num_values: int, block: int, groups: int = 1
    ) -> TensorMapSpec:
        dims = (num_rows, num_values // (4 * form.scale_values) * groups)
        box = (block, form.scale_words)
        return TensorMapSpec(DataType.INT32, address, dims, (4 * num_rows,), box)

    load = (_BLOCK_K_BYTES, config.block_m // 2)
    output = (form.num_bytes(_BLOCK_N // 2), config.store_blocks[0])
    sf_m = config.sf_block_m
    l1 = [
        rows(at["l1_acts"], hidden, load),
        scales(at["l1_sf"], sf_ring, hidden, sf_m),
        fp4(weights[0], hidden, 2 * intermediate),
        scales(weights[1], 2 * intermediate, hidden, _BLOCK_N, local),
        rows(at["l2_acts"], intermediate, output),
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
