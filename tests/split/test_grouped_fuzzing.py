"""Random sizes, counts, layouts and schedules of grouped experts, bit for bit in exact cases."""

from __future__ import annotations

import random

import pytest

from deep_moe.targets import TARGETS, target_of
from deep_moe.trial.comparison import compare

from .grouped_case import exact_case, run_behind_each_other, run_padded


def run_case(seed: int) -> None:
    """Three calls of one object, in either layout."""
    choose = random.Random(seed)
    arch = choose.choice(list(TARGETS))
    pair = choose.choice(target_of(arch).weights)
    weights, tiles = pair.weights, pair.fuzz_tiles
    num_experts = choose.choice([1, 2, 5, 33])
    pool = choose.choice([None, 384])
    shape = {
        "biases": choose.random() < 0.3,
        "num_pool_tokens": pool,
        "token_format": pair.token_format,
    }
    most = 1 + choose.randrange(300 // num_experts)
    counts = [
        tuple(choose.choice([0, 1, most, choose.randint(0, most)]) for _ in range(num_experts))
        for _ in range(3)
    ]
    cases = [exact_case(arch, own, weights, **shape) for own in counts]
    largest = max(cases, key=lambda case: case.shape.num_max_tokens_per_rank)
    overrides = choose.choice(tiles)
    with largest.experts(
        num_sms=choose.choice([2, 4]),
        overrides=overrides,
        schedule_seed=seed,
        num_pool_tokens=pool,
    ) as experts:
        for case in cases:
            if choose.random() < 0.5:
                y = run_padded(case, choose.randint(most, most + 9), experts)
            else:
                y = run_behind_each_other(case, choose.choice([1, 8, 128]), experts)
            assert compare(y, case.exact()).is_exact, (seed, case.counts)


@pytest.mark.parametrize("seed", range(3))
def test_cases(seed: int) -> None:
    run_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 11))
def test_more_cases(seed: int) -> None:
    run_case(seed)
