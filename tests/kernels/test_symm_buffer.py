"""The accessors of the symmetric buffer lead to where the layout says, under its names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deep_moe.heuristics.segments import DTYPE_BYTES

# Accessors that take one index for two dimensions, for who goes through all slots of all tokens.
FLAT = ("input_topk_idx", "input_topk_weights")
# Accessors that take none, of one word.
COUNTERS = ("grid_gather_counter", "rank_barrier_counter", "num_claimed_blocks")
# Accessors that lead to the start of a row.
ROWS = ("token_src_metadata", "input_x", "input_x_sf", "l1_tokens", "l2_tokens", "combine")

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/layout/rank_buffers.cuh>

using namespace deep_moe;

// y: the distance of each element from the start of the buffer.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* const distances = static_cast<uint64_t*>(args.y);
    const SymmBuffer<Config> local = RankBuffers<Config>(args).local();
    const uint64_t base = args.rank_buffers[args.rank_idx];
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
STORES
}
"""


def num_indices(name: str, shape: tuple[int, ...]) -> int:
    """How many an accessor takes: rows are read as a whole."""
    if name in FLAT:
        return 1
    return len(shape) - (name in ROWS or name in COUNTERS)


def last_place(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The last indices that the accessor takes."""
    if name in FLAT:
        return (int(np.prod(shape)) - 1,)
    return tuple(size - 1 for size in shape[: num_indices(name, shape)])


@pytest.mark.parametrize(("num_ranks", "num_pool_tokens"), [(1, None), (3, None), (3, 384)])
def test_every_segment_is_reached_by_its_name(
    make_config: Any, make_ranks: Any, num_ranks: int, num_pool_tokens: int | None
) -> None:
    config = make_config(
        13,
        num_ranks=num_ranks,
        num_experts=5 * num_ranks,
        num_topk=3,
        hidden=384,
        intermediate_hidden=4224,
        num_pool_tokens=num_pool_tokens,
    )
    segments = config.symm_buffer_layout.segments
    expected = {}  # byte by accessor and its last arguments
    for segment in segments:
        place = last_place(segment.name, segment.shape)
        if segment.name in FLAT:
            idx = place[0]
        else:
            rest = (0,) * (len(segment.shape) - len(place))
            idx = int(np.ravel_multi_index(place + rest, segment.shape))
        call = f"{segment.name}({', '.join(map(str, place))})"
        expected[call] = segment.offset + idx * DTYPE_BYTES[segment.dtype]
    stores = "\n".join(
        f"    distances[{i}] = reinterpret_cast<uint64_t>(local.{call}) - base;"
        for i, call in enumerate(expected)
    )
    ranks = make_ranks(config, output_bytes=8 * len(segments))

    ranks.run(KERNEL.replace("STORES", stores), only=[0])

    found = ranks.output(0, np.uint64, len(segments)).tolist()
    assert dict(zip(expected, found, strict=True)) == expected
    assert config.symm_buffer_layout["l2_arrival_mask"].shape[1] == 2
