"""Sizes of a layer over several domains: what a chunk has room for, and what is refused."""

from __future__ import annotations

import pytest

from deep_moe.heuristics.two_level import TwoLevelShape

SIZES = {
    "num_domains": 4,
    "num_ranks": 2,
    "num_experts": 32,
    "num_topk": 3,
    "hidden": 256,
    "intermediate_hidden": 128,
    "num_max_tokens_per_rank": 10,
}


def shape_of(**changes) -> TwoLevelShape:
    return TwoLevelShape(**{**SIZES, **changes})


def test_without_a_bound_there_is_room_for_every_token_of_the_other_domains():
    for exact_sizes in (False, True):
        shape = shape_of(num_chunks=3, exact_sizes=exact_sizes)
        assert shape.num_chunk_tokens == 4
        assert shape.num_chunk_foreign == 3 * 4
        assert not shape.can_overflow
        assert shape.domain_shape.num_max_tokens_per_rank == 4 + 12
        assert shape.domain_shape.num_experts == 8


def test_a_bound_is_shared_by_chunks_and_with_fixed_sizes_by_domains():
    fixed = shape_of(num_chunks=2, num_max_foreign_tokens=13)
    assert (fixed.num_pair_rows, fixed.num_chunk_foreign, fixed.num_chunk_sent) == (3, 9, 9)
    exact = shape_of(num_chunks=2, num_max_foreign_tokens=13, exact_sizes=True)
    assert (exact.num_chunk_foreign, exact.num_chunk_sent) == (7, 5 * 3)
    assert fixed.can_overflow
    assert exact.can_overflow


def test_a_bound_beyond_what_can_come_takes_no_more_memory():
    for exact_sizes in (False, True):
        most = shape_of(exact_sizes=exact_sizes)
        more = shape_of(exact_sizes=exact_sizes, num_max_foreign_tokens=1000)
        assert more.buffer_bytes == most.buffer_bytes
        assert not more.can_overflow


def test_a_token_is_sent_to_no_more_domains_than_it_has_slots():
    assert shape_of(exact_sizes=True, num_topk=2).num_chunk_sent == 2 * 10


def test_one_domain_sends_nothing():
    shape = shape_of(num_domains=1, num_max_foreign_tokens=5)
    assert (shape.num_chunk_foreign, shape.num_chunk_sent, shape.can_overflow) == (0, 0, False)


def test_shared_experts_are_in_the_call_of_own_tokens_only():
    shape = shape_of(num_shared_experts=2, num_chunks=2)
    assert shape.own_shape is not None
    assert shape.own_shape.num_shared_experts == 2
    assert shape.own_shape.num_max_tokens_per_rank == 10
    assert shape.domain_shape.num_shared_experts == 0
    assert shape.domain_shape.num_max_tokens_per_rank == 3 * 5
    assert shape.num_partial_rows == 2 * (15 + 15) + 10 + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_domains": 0}, "num_domains must be 1 to 1024; got 0"),
        ({"num_chunks": 65}, "num_chunks must be 1 to 64; got 65"),
        ({"num_experts": 36}, "num_experts must be a positive multiple of the 8 ranks"),
        ({"num_experts": 8}, r"num_topk \(3\) or more for each of the 4 domains; got 8"),
        ({"num_max_foreign_tokens": -1}, "num_max_foreign_tokens must be at least 0; got -1"),
        ({"hidden": 100}, "hidden must be a positive multiple"),
        ({"num_shared_experts": 5}, "num_shared_experts must be 0 to 4; got 5"),
    ],
)
def test_sizes_that_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        shape_of(**changes)


def test_types_that_are_refused():
    with pytest.raises(TypeError, match="exact_sizes must be a bool; got 1"):
        shape_of(exact_sizes=1)
    with pytest.raises(TypeError, match="num_chunks must be an int"):
        shape_of(num_chunks=2.0)
