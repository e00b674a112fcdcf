"""Addresses in buffers of more than 4 GiB: offsets have 64 bits. Nothing is read there, so that no
such buffer is needed; where something is, its memory is asked for and not touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deep_moe import jit
from deep_moe.emulator import Machine
from deep_moe.emulator.precompiled_headers import HEADER_STOP
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.low_latency import (
    LowLatencyConfig,
    LowLatencyShape,
    low_latency_buffer_layout,
)
from deep_moe.heuristics.segments import DTYPE_BYTES, Layout
from deep_moe.heuristics.throughput import (
    ThroughputConfig,
    ThroughputShape,
    throughput_buffer_layout,
)
from deep_moe.jit.render import render_kernel
from deep_moe.targets import choose_config

from .conftest import config_struct, foreign_headers

GIB = 1 << 30
BASE = 1 << 40  # nothing is there

KERNEL = r"""
extern "C" __global__ void kernel(unsigned long long* distances, unsigned long long base) {
    using namespace deep_moe;
    const BUFFER buffer(base);
STORES
}
"""


def places(layout: Layout, accessors: dict[str, tuple[str, int]]) -> dict[str, int]:
    """Byte of the last element that each accessor takes, by its call. accessors: by segment, with
    the number of indices; 1 of a segment of two dimensions with all of its elements: -1."""
    found = {}
    for name, (accessor, num_indices) in accessors.items():
        segment = layout[name]
        shape = segment.shape if num_indices > 0 else (int(np.prod(segment.shape)),)
        last = tuple(size - 1 for size in shape[: abs(num_indices)])
        idx = int(np.ravel_multi_index(last + (0,) * (len(shape) - len(last)), shape))
        call = f"{accessor}({', '.join(f'{i}u' for i in last)})"
        found[call] = segment.offset + idx * DTYPE_BYTES[segment.dtype]
    return found


def found_by_kernel(struct: str, buffer: str, calls: list[str]) -> list[int]:
    """What a kernel with this Config works out."""
    headers = f"#include <deep_moe/{buffer[0]}>\n"
    stores = "\n".join(
        f"    distances[{i}] = reinterpret_cast<unsigned long long>(buffer.{call}) - base;"
        for i, call in enumerate(calls)
    )
    text = KERNEL.replace("BUFFER", buffer[1]).replace("STORES", stores)
    begin, stop, rest = struct.partition(HEADER_STOP)
    text = begin + stop + headers + rest + text if stop else headers + struct + text
    compiled = jit.compile_cached(text, arch="sm_90a", kernel="kernel", for_emulator=True)
    distances = np.zeros(len(calls), np.uint64)
    machine = Machine()
    machine.add_array(distances, "distances")
    module = machine.load(compiled.ptx)
    machine.launch(module, "kernel", grid=(1, 1, 1), block=(1, 1, 1), args=[distances, BASE])
    machine.run()
    return distances.tolist()


def struct_of(rendered: str) -> str:
    return rendered[rendered.index("struct Config") : rendered.index("// The host has read")]


def check(struct: str, buffer: tuple[str, str], expected: dict[str, int]) -> None:
    assert max(expected.values()) > 4 * GIB
    found = found_by_kernel(struct, buffer, list(expected))
    assert dict(zip(expected, found, strict=True)) == expected


def test_the_symmetric_buffer() -> None:
    shape = MoEShape(2, 8, 8, 7168, 4096, 131_072, num_shared_experts=2)
    config = choose_config(shape, 64, arch="sm_90a", num_sms=4)
    rows = ("token_src_metadata", "input_x", "input_x_sf", "l1_tokens", "l2_tokens")
    accessors = {name: (name, 1) for name in rows}
    accessors |= {name: (name, 2) for name in ("src_token_topk_idx", "combine", "l2_token_sf")}
    accessors |= {name: (name, -1) for name in ("input_topk_idx", "input_topk_weights")}
    accessors |= {"l1_token_sf": ("l1_token_sf", 2), "l1_topk_weights": ("l1_topk_weights", 1)}
    buffer = ("layout/symm_buffer.cuh", "SymmBuffer<Config>")
    check(
        foreign_headers(config) + config_struct(config),
        buffer,
        places(config.symm_buffer_layout, accessors),
    )


@pytest.mark.parametrize("placement", ["ranks", "experts"])
def test_the_buffer_of_low_latency_calls(placement: str) -> None:
    sizes = {"num_ranks": 72, "num_experts": 2016, "num_topk": 32, "hidden": 7168}
    more = {"num_max_tokens_per_rank": 1024, "token_format": "bf16", "has_shared_rows": True}
    shape = LowLatencyShape(**sizes, **more, placement=placement)
    config = LowLatencyConfig(shape, "dispatch", num_ctas=2, arch="sm_90a")
    layout = low_latency_buffer_layout(shape)
    staged = {name: (name, 3) for name in ("staged_headers", "staged_values")}
    own = staged if placement == "ranks" else {"messages": ("message", 4)}
    accessors = {**own, "combine": ("combine", 3), "shared_rows": ("shared_rows", 1)}
    buffer = ("split/low_latency_buffer.cuh", "LowLatencyBuffer<Config>")
    check(struct_of(render_kernel(config)), buffer, places(layout, accessors))


def test_the_buffer_of_throughput_calls() -> None:
    shape = ThroughputShape(8, 256, 32, 7168, 32_768, 1 << 24)
    config = ThroughputConfig(shape, "dispatch", num_ctas=2, arch="sm_90a")
    accessors = {
        "rows": ("rows", 1),
        "scalars": ("scalars", 1),
        "token_scales": ("token_scales", 1),
        "slot_words": ("slot_words", -1),
        "slot_weights": ("slot_weights", -1),
        "tokens": ("tokens", -1),
    }
    buffer = ("split/throughput_buffer.cuh", "ThroughputBuffer<Config>")
    layout = throughput_buffer_layout(shape)
    check(struct_of(render_kernel(config)), buffer, places(layout, accessors))


COMBINE = r"""
#include <deep_moe/combine/combine.cuh>

using namespace deep_moe;

// The last token alone, by one warp.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const uint32_t shared_memory = ptx::shared_address(shared_bytes);
    if (threadIdx.x < 2) {
        ptx::mbarrier_init(shared_memory + Config::Smem::combine_barriers_offset + 8 * threadIdx.x,
                           1);
    }
    __syncthreads();
    if (blockIdx.x != 0) return;
    Waiter waiter(args);
    Combine<Config>(args, shared_memory, 0)
        .run(args.num_tokens - 1, args.num_tokens, CallRanks<Config>(nullptr), waiter);
}
"""


def test_combine_of_the_last_token_of_many(make_config: Any, make_ranks: Any) -> None:
    """In y of more than 4 GiB; a token's last chunk is shorter than the others."""
    num_tokens, hidden = 306_000, 7168
    config = make_config(
        num_tokens,
        num_topk=1,
        hidden=hidden,
        num_pool_tokens=384,
        overrides={"num_combine_chunks": 5},
    )
    assert hidden % (config.num_combine_chunks * 8) != 0
    y_bytes = num_tokens * hidden * 2
    assert y_bytes > 4 * GIB
    ranks = make_ranks(config, output_bytes=y_bytes)
    ranks.segment(0, "input_topk_idx")[-1] = 0
    row = np.arange(hidden, dtype=np.uint16)
    ranks.segment(0, "combine")[0, -1] = row
    ranks.run(COMBINE, arch="sm_100a", shared_bytes=config.smem_bytes, num_tokens=[num_tokens])
    y = ranks.output(0, np.uint16, num_tokens, hidden)
    np.testing.assert_array_equal(y[-1], row)
    first_wrong = (num_tokens - 1) * hidden * 2 % (1 << 32) // 2  # where 32 bits would lead
    assert not y.reshape(-1)[first_wrong : first_wrong + hidden].any()
