"""Which source rank a pool token comes from, against a model that hands out tokens one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

KERNEL = r"""
#include <deep_moe/layout/kernel_args.cuh>
#include <deep_moe/dispatch/min_peeling.cuh>

using namespace deep_moe;

// y: list lengths of num_ranks ranks, then a (rank, position) pair per token.
extern "C" __global__ void kernel(const __grid_constant__ KernelArgs args) {
    auto* words = static_cast<uint32_t*>(args.y);
    uint32_t lengths[ceil_div(Config::num_ranks, warp_size)];
#pragma unroll
    for (uint32_t i = 0; i < ceil_div(Config::num_ranks, warp_size); ++i) {
        const uint32_t rank_idx = i * warp_size + threadIdx.x;
        lengths[i] = rank_idx < Config::num_ranks ? words[rank_idx] : 0;
    }
    for (uint32_t token_idx = blockIdx.x; token_idx < args.num_tokens; token_idx += gridDim.x) {
        const RankToken source = find_source_rank<Config::num_ranks>(lengths, token_idx);
        if (threadIdx.x == token_idx % warp_size) {  // any lane has the answer
            words[Config::num_ranks + 2 * token_idx] = source.rank_idx;
            words[Config::num_ranks + 2 * token_idx + 1] = source.list_idx;
        }
    }
}
"""


def in_turn(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """One token from each rank that has any left, round after round."""
    for position in range(max(lengths, default=0)):
        for rank, length in enumerate(lengths):
            if position < length:
                yield rank, position


@pytest.mark.parametrize("num_ranks", [1, 3, 32, 33, 72])
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_alternate_between_ranks_that_have_any_left(
    make_config: Any, make_ranks: Any, num_ranks: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 6, num_ranks) * generator.integers(0, 2, num_ranks)
    lengths[-1] = 9  # one long list, on the last rank
    expected = list(in_turn(lengths.tolist()))
    config = make_config(num_ranks=num_ranks, num_experts=num_ranks, num_topk=1)
    ranks = make_ranks(config, output_bytes=4 * num_ranks + 8 * len(expected))
    ranks.output(0, np.uint32, num_ranks)[:] = lengths

    ranks.run(KERNEL, only=[0], num_tokens=[len(expected)] * num_ranks)

    words = ranks.output(0, np.uint32, num_ranks + 2 * len(expected))
    assert [tuple(pair) for pair in words[num_ranks:].reshape(-1, 2).tolist()] == expected
