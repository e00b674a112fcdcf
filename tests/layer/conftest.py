"""Pools of rank processes for the tests of this folder, and what a machine can run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.layer.rank_pool import MAX_RANKS, Place, RankPool

RunRanks = Callable[..., list[Any]]

ALL = 0  # as many ranks as there are GPUs, at least two


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[tuple[Place, int], RankPool]]:
    """Pools by place and number of ranks, made when first used."""
    pools: dict[tuple[Place, int], RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def run_ranks(pools: dict[tuple[Place, int], RankPool]) -> RunRanks:
    """run_ranks(place, num_ranks, work, ...): see `RankPool.run`. Skips where GPUs are missing."""

    def run(place: Place, num_ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        num_gpus = min(torch.cuda.device_count(), MAX_RANKS)
        if num_ranks == ALL:
            num_ranks = max(num_gpus, 2)
        if place is Place.GPUS and num_gpus < num_ranks:
            pytest.skip(f"{num_ranks} ranks need as many GPUs; there are {num_gpus}")
        key = (place, num_ranks)
        if key not in pools:
            pools[key] = RankPool(num_ranks, place)
        return pools[key].run(work, *args)

    return run
