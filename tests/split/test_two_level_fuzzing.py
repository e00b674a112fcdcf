"""Random chunks, bounds, sizes and routing over several domains, on exact layers, bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.errors import ForeignTokensError
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.two_level import TwoLevelShape
from deep_moe.trial.calls import model_inputs, rank_operands
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import Tokens, exact_tokens, name_twice, put_nan
from deep_moe.trial.two_level import make_layer

from .test_two_level import ARCH, CPU, bounds_of, layer_of

NUM_RANKS = 4
MOST_TOKENS = 9


def tokens_of(shape: MoEShape, choose: random.Random, seed: int) -> Tokens:
    """One rank's, of a call."""
    count = choose.choice([0, 1, 2, MOST_TOKENS, choose.randint(0, MOST_TOKENS)])
    tokens = exact_tokens(shape, count, seed=seed, num_unused_slots=choose.randint(0, 2))
    kind = choose.choice(["as they are", "twice", "one expert", "one domain", "none", "NaN"])
    if kind == "twice":
        tokens = name_twice(tokens)
    elif kind == "one expert":
        tokens.topk_idx[tokens.topk_idx >= 0] = choose.randrange(shape.num_experts)
    elif kind == "one domain":
        tokens.topk_idx[tokens.topk_idx >= 0] %= shape.num_experts // 2
    elif kind == "none":
        tokens.topk_idx[-1:] = -1
    elif kind == "NaN" and count:
        tokens = put_nan(tokens, 1, seed=seed)
    return tokens


def rows_lack(shape: TwoLevelShape, given: list[Tokens]) -> bool:
    """Whether the bound on foreign tokens is too low for a call of all ranks."""
    own_experts = shape.num_experts_per_domain
    sent: Counter[tuple[int, ...]] = Counter()
    for rank, tokens in enumerate(given):
        from_domain, rank_there = divmod(rank, shape.num_ranks)
        chunk_size = max(1, -(-tokens.num_tokens // shape.num_chunks))
        for token, ids in enumerate(tokens.topk_idx.tolist()):
            for domain in {expert // own_experts for expert in ids if expert >= 0} - {from_domain}:
                # With exact sizes, what all other domains send has one room.
                source = -1 if shape.exact_sizes else from_domain
                sent[domain, rank_there, token // chunk_size, source] += 1
    room = shape.num_chunk_foreign if shape.exact_sizes else shape.num_pair_rows
    return max(sent.values(), default=0) > room


def run_case(rank: int, seed: int) -> list[bool]:
    """One layer, four calls in a row. Of which there was room for all foreign tokens."""
    choose = random.Random(seed)
    num_domains = choose.choice([2, 2, 4])
    shape = MoEShape(
        NUM_RANKS,
        NUM_RANKS * 3,
        3,
        256,
        128,
        MOST_TOKENS,
        num_shared_experts=choose.choice([0, 0, 1]),
    )
    arguments = {"num_chunks": choose.choice([1, 2, 3, 5]), "exact_sizes": choose.random() < 0.5}
    if choose.random() < 0.5:
        most = (num_domains - 1) * MOST_TOKENS
        arguments["num_max_foreign_tokens"] = choose.randint(most // 2, most)
    layer = layer_of(shape, exact=True)
    weights, _ = rank_operands(shape, layer, rank, CPU, ARCH)
    moe = make_layer(shape, num_domains, CPU, **arguments)
    had_room = []
    for call in range(4):
        given = [tokens_of(shape, choose, NUM_RANKS * call + other) for other in range(NUM_RANKS)]
        dtype = choose.choice([torch.int64, torch.int32])
        x, tokens = model_inputs(given[rank])
        options = {"arch": ARCH, "num_sms": 2, "checked": choose.random() < 0.5}
        had_room.append(not rows_lack(moe.shape, given))
        with nullcontext() if had_room[-1] else pytest.raises(ForeignTokensError):
            y = moe.call(x, tokens.topk_idx.to(dtype), tokens.topk_weights, weights, **options)
        if had_room[-1]:
            domain = rank * num_domains // NUM_RANKS
            expected = bounds_of(shape, num_domains, domain, layer, tokens).y
            assert compare(y, expected).is_right, (seed, call)  # bit for bit, and NaN where it is
    moe.check()
    dist.barrier()
    moe.close()
    return had_room


def check_cases(run_ranks: Any, seeds: range) -> None:
    """Some calls among them with room for all, and some without."""

    def work(rank: int) -> list[bool]:
        return [had_room for seed in seeds for had_room in run_case(rank, seed)]

    of_ranks = run_ranks(NUM_RANKS, work)
    assert all(calls == of_ranks[0] for calls in of_ranks)
    assert set(of_ranks[0]) == {True, False}


@pytest.mark.slow
def test_cases(run_ranks) -> None:
    check_cases(run_ranks, range(2))


@pytest.mark.slow
def test_more_cases(run_ranks) -> None:
    check_cases(run_ranks, range(2, 10))
