"""Which token goes where between domains, and where its partial sums are found again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deep_moe.heuristics.two_level import TwoLevelShape
from deep_moe.split.domain_groups import describe_lost, make_domain_groups
from deep_moe.split.domain_routes import (
    Routes,
    add_in_domain_order,
    domains_of,
    others,
    partial_rows,
    route_chunks,
)

NUM_TOKENS = 11


def shape_of(num_domains: int, **changes) -> TwoLevelShape:
    sizes = {"num_experts": 4 * num_domains, "num_topk": 3, "hidden": 128}
    more = {"num_ranks": 1, "intermediate_hidden": 128, "num_max_tokens_per_rank": 12}
    return TwoLevelShape(num_domains, **{**sizes, **more, "num_chunks": 3, **changes})


def random_ids(shape: TwoLevelShape, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, shape.num_experts, (NUM_TOKENS, shape.num_topk), generator=generator)


def routed(shape: TwoLevelShape, ids: torch.Tensor, own: int):
    goes = domains_of(ids, shape)
    return goes, route_chunks(others(goes, own), shape)


def chunks_of(routes: Routes) -> list[SimpleNamespace]:
    """Each chunk's part, without tokens that are nobody's."""
    return [
        SimpleNamespace(
            begin=begin,
            end=end,
            counts=routes.counts[chunk],
            token_of_row=routes.token_of_row[chunk],
            row_of_token=routes.row_of_token[chunk, : end - begin],
        )
        for chunk, (begin, end) in enumerate(routes.bounds)
    ]


def test_ids_that_name_no_expert_name_no_domain():
    shape = shape_of(2)
    ids = torch.tensor([[0, 3, -1], [4, 7, 8], [-1, -5, 2**63 - 1]])
    assert domains_of(ids, shape).tolist() == [[True, False], [False, True], [False, False]]


@pytest.mark.parametrize("exact_sizes", [False, True])
@pytest.mark.parametrize(("num_domains", "own"), [(2, 0), (2, 1), (5, 2)])
def test_a_token_has_one_row_in_each_other_domain_of_its_experts(num_domains, own, exact_sizes):
    shape = shape_of(num_domains, exact_sizes=exact_sizes)
    ids = random_ids(shape)
    _, routes = routed(shape, ids, own)
    found = []
    for route in chunks_of(routes):
        counts = route.counts.tolist()
        first = 0
        for other, count in enumerate(counts):
            begin = first if exact_sizes else other * shape.num_pair_rows
            rows = route.token_of_row[begin : begin + count].tolist()
            assert rows == sorted(rows)
            assert all(route.begin <= token < route.end for token in rows)
            domain = other + (other >= own)
            for row, token in enumerate(rows, begin):
                assert route.row_of_token[token - route.begin, other] == row
                found.append((token, domain))
            first += count
        used = int((route.token_of_row < shape.num_max_tokens_per_rank).sum())
        assert used == sum(counts)  # all other rows are nobody's
    expected = {
        (token, int(expert) // shape.num_experts_per_domain)
        for token, slots in enumerate(ids)
        for expert in slots
        if expert >= 0
    }
    assert sorted(found) == sorted(pair for pair in expected if pair[1] != own)


def test_tokens_without_a_row_are_counted_and_spoil_no_other_row():
    shape = shape_of(2, num_max_foreign_tokens=6)  # 2 in each of 3 chunks
    ids = torch.tensor([[0, 4, -1]] * 3 + [[0, -1, -1], [5, -1, -1]] + [[-1, -1, -1]] * 5)
    routes = chunks_of(routed(shape, ids, 0)[1])
    assert [route.counts.tolist() for route in routes] == [[3], [1], [0]]
    assert routes[0].token_of_row.tolist() == [0, 1]
    assert routes[0].row_of_token[:, 0].tolist() == [0, 1, 2, 2]
    assert routes[1].token_of_row.tolist() == [4, 12]
    assert routes[2].token_of_row.tolist() == [12, 12]


def test_a_layer_without_room_has_no_rows():
    shape = shape_of(2, num_max_foreign_tokens=0)
    routes = chunks_of(routed(shape, torch.tensor([[4, -1, -1]] * 4), 0)[1])
    assert [route.counts.tolist() for route in routes] == [[2], [2], [0]]
    assert all(route.token_of_row.numel() == 0 for route in routes)
    assert all((route.row_of_token == shape.num_chunk_sent).all() for route in routes)


@pytest.mark.parametrize("num_shared_experts", [0, 1])
@pytest.mark.parametrize("exact_sizes", [False, True])
@pytest.mark.parametrize("num_domains", [1, 2, 6])
def test_partial_sums_are_found_in_domain_order(num_domains, exact_sizes, num_shared_experts):
    """Domains answer with small numbers and with large ones that cancel, so that the order of
    FP32's additions shows in BF16, and a row too many or too few."""
    shape = shape_of(num_domains, exact_sizes=exact_sizes, num_shared_experts=num_shared_experts)
    own = num_domains // 2
    ids = random_ids(shape, seed=16)  # any two neighbouring domains have a token behind a third
    goes, routes = routed(shape, ids, own)
    generator = torch.Generator().manual_seed(2)
    sizes = torch.tensor([1.0, 3.0, 2.0**26, -(2.0**26)])
    which = torch.randint(4, (num_domains, 256), generator=generator)
    values = sizes[which].bfloat16()
    table = torch.full((shape.num_partial_rows, 256), torch.nan, dtype=torch.bfloat16)
    table[-1] = 0
    for chunk, route in enumerate(chunks_of(routes)):
        first = chunk * shape.num_chunk_rows
        if shape.is_own_apart:
            apart = shape.num_chunks * shape.num_chunk_rows
            table[apart + route.begin : apart + route.end] = values[own]
        else:
            table[first : first + route.end - route.begin] = values[own]
        for other in range(num_domains - 1):
            rows = route.row_of_token[:, other]
            rows = rows[rows < shape.num_chunk_sent]
            came_back = first + shape.num_chunk_rows - shape.num_chunk_sent
            table[came_back + rows] = values[other + (other >= own)]
    rows = partial_rows(goes, routes, own, shape)
    assert rows.shape[1] == min(num_domains, shape.num_topk + (num_shared_experts > 0))
    out = torch.empty(NUM_TOKENS, 256, dtype=torch.bfloat16)
    add_in_domain_order(table, rows, out)
    has_part = goes.clone()
    has_part[:, own] |= num_shared_experts > 0

    def sums(order: list[int]) -> torch.Tensor:
        total = torch.zeros(NUM_TOKENS, 256)
        for domain in order:
            total += values[domain].float() * has_part[:, domain : domain + 1]
        return total.bfloat16()

    in_order = list(range(num_domains))
    assert torch.equal(out, sums(in_order))
    for i in range(1, num_domains - 1):  # the first two are the same in either order
        swapped = [*in_order[:i], i + 1, i, *in_order[i + 2 :]]
        assert not torch.equal(out, sums(swapped))


def test_nccl_between_domains_is_held_to_the_sms_that_calls_leave(monkeypatch):
    """Of rank 3 of 4 in 2 domains; NCCL is not on every machine."""
    made = []
    options = lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None))  # noqa: E731
    fakes = {
        "get_world_size": lambda: 4,
        "get_rank": lambda: 3,
        "get_backend": lambda: "nccl",
        "new_group": lambda members, **given: made.append((members, given)) or tuple(members),
        "ProcessGroupNCCL": SimpleNamespace(Options=options),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake, raising=False)
    groups = make_domain_groups(2, num_transport_sms=16, timeout=5)
    assert groups == ((2, 3), (1, 3))
    assert [members for members, _ in made] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert all(given["timeout"] == 5 for _, given in made)
    limits = [given["pg_options"].config.max_ctas for _, given in made if "pg_options" in given]
    assert limits == [16, 16]
    made.clear()
    make_domain_groups(4, pg_options="mine")
    assert [given for _, given in made] == [{"pg_options": "mine"}]


def test_lost_domains_are_named():
    assert describe_lost([1], 0) == "domain 1 is lost: its rank 0 does not answer"
    assert describe_lost([], 0) == ""
