"""DeepEP's `ElasticBuffer` by its names: rows by expert, prefix sums, scales by column."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.compat import deep_ep
from deep_moe.formats.block_scaled import quantize_e4m3_ue8m0
from deep_moe.formats.float_scaled import quantize_e4m3_float

from ..fused.conftest import run_ranks  # noqa: F401 (a fixture)

HIDDEN, TOPK, EXPERTS, TOKENS, ALIGNMENT = 256, 2, 4, 5, 8


def inputs(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS, (num_tokens, TOPK), generator=generator)
    return x, ids, torch.rand(num_tokens, TOPK, generator=generator)


def rows_of(rank: int, num_ranks: int, counts: list[int]) -> tuple[list[int], list[Any]]:
    """End of each local expert's rows, and of every row (source, token, slot), None of padding."""
    per_rank = EXPERTS // num_ranks
    ends, rows = [], []
    for expert in range(rank * per_rank, (rank + 1) * per_rank):
        for source, count in enumerate(counts):
            for token, slots in enumerate(inputs(source, count)[1].tolist()):
                rows += [(source, token, slot) for slot in range(TOPK) if slots[slot] == expert]
        ends.append(len(rows))
        rows += [None] * (-len(rows) % ALIGNMENT)
    return ends, rows


def quantized(x: torch.Tensor, kind: str) -> Any:
    if kind == "bf16":
        return x
    return quantize_e4m3_ue8m0(x) if kind == "mxfp8" else quantize_e4m3_float(x)


def check(rank: int, num_ranks: int, group: Any, kind: str, do_cpu_sync: bool) -> None:
    counts = [TOKENS, 3][:num_ranks]
    ep_buffer = deep_ep.ElasticBuffer(
        group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, device="cpu"
    )
    assert ep_buffer.num_bytes is not None
    assert ep_buffer.num_bytes % (2 << 20) == 0
    own, topk_idx, topk_weights = inputs(rank, counts[rank])
    x = quantized(own, kind)
    stats = torch.ones(EXPERTS // num_ranks, dtype=torch.int32)
    # As the unfused layer of a well-known document calls them.
    recv_x, _, recv_topk_weights, handle, _ = ep_buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        cumulative_local_expert_recv_stats=stats,
        num_experts=EXPERTS,
        expert_alignment=ALIGNMENT,
        do_cpu_sync=do_cpu_sync,
        do_handle_copy=False,
        do_expand=True,
        use_tma_aligned_col_major_sf=True,
    )
    assert handle.topk_idx is topk_idx
    ends, rows = rows_of(rank, num_ranks, counts)
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    assert torch.equal(stats - 1, handle.num_unaligned_recv_tokens_per_expert)
    values = recv_x if kind == "bf16" else recv_x[0]
    assert recv_topk_weights is not None
    if do_cpu_sync:
        assert values.shape[0] == recv_topk_weights.shape[0] == len(rows)
        assert sum(handle.num_recv_tokens_per_expert_list) == len(rows)
        assert all(count % ALIGNMENT == 0 for count in handle.num_recv_tokens_per_expert_list)
    for row, place in enumerate(rows):
        if place is None:
            assert not values[row].view(torch.uint8).any()
            assert recv_topk_weights[row] == 0
            continue
        source, token, slot = place
        given, _, weights = inputs(source, counts[source])
        expected = quantized(given, kind)
        sent = expected if kind == "bf16" else expected[0]
        assert torch.equal(values[row].view(torch.uint8), sent[token].view(torch.uint8))
        assert recv_topk_weights[row] == weights[token, slot]
        if kind != "bf16":
            assert torch.equal(recv_x[1][row], expected[1][token])
    if kind != "bf16":
        assert recv_x[1].stride(0) == 1
        assert recv_x[1].stride(1) % 4 == 0
    # The experts' rows with their weights, added.
    l2_y = torch.zeros(values.shape, dtype=torch.bfloat16)
    for row, place in enumerate(rows):
        if place is not None:
            l2_y[row] = 2 * inputs(place[0], counts[place[0]])[0][place[1]]
    combined = ep_buffer.combine(l2_y, handle=handle)[0]
    used = (topk_idx >= 0).sum(dim=1, keepdim=True)
    assert torch.equal(combined, (2 * used * own.float()).bfloat16())
    _, numbers, event = ep_buffer.combine(
        l2_y, handle, topk_weights=recv_topk_weights, async_with_compute_stream=True
    )
    event.current_stream_wait()
    assert numbers is not None
    assert torch.equal(numbers, topk_weights.where(topk_idx >= 0, 0.0))
    # Other rows the same ways.
    again, _, none, same, _ = ep_buffer.dispatch(-own, handle=handle, do_expand=True)
    assert none is None
    assert same is handle
    assert isinstance(again, torch.Tensor)
    for row, place in enumerate(rows):
        if place is not None:
            assert torch.equal(again[row], -inputs(place[0], counts[place[0]])[0][place[1]])
    ep_buffer.barrier()
    ep_buffer.destroy()


@pytest.mark.parametrize(
    ("kind", "do_cpu_sync"), [("bf16", True), ("mxfp8", False), ("fp8_128", True)]
)
def test_one_rank(kind: str, do_cpu_sync: bool) -> None:
    check(0, 1, None, kind, do_cpu_sync)


def test_two_ranks(run_ranks) -> None:  # noqa: F811
    run_ranks(2, lambda rank: check(rank, 2, dist.group.WORLD, "mxfp8", True))


def test_memory_of_other_sizes() -> None:
    buffer = deep_ep.ElasticBuffer(None, num_max_tokens_per_rank=4, device="cpu")
    x, ids, _ = inputs(0, 4)
    _, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=4, do_expand=True)
    buffer.dispatch(x, ids, num_experts=8, do_expand=True)
    with pytest.raises(ValueError, match="handle must be of a dispatch since the memory was made"):
        buffer.combine(torch.zeros(8, HIDDEN).bfloat16(), handle)
    buffer.destroy()
    with pytest.raises(ValueError, match="this one was destroyed"):
        buffer.dispatch(x, ids, num_experts=4, do_expand=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"do_expand": False}, "do_expand must be True"),
        ({"num_experts": None}, "num_experts must be"),
        ({"num_experts": 0}, "num_experts must be at least 1; got 0"),
        ({"topk_idx": None}, "topk_idx must be a tensor"),
        ({"num_max_tokens_per_rank": 3}, r"x must have at most num_max_tokens_per_rank|max_tokens"),
        ({"expert_alignment": 3}, "expert_alignment must be a power of two, 1 to 4096; got 3"),
        ({"x": torch.zeros(4)}, "x must be"),
        ({"x": (torch.zeros(4, 256), torch.zeros(4, 2, dtype=torch.int8))}, r"x\[1\] must be"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], text: str) -> None:
    buffer = deep_ep.ElasticBuffer(None, num_max_tokens_per_rank=4, device="cpu")
    x, ids, _ = inputs(0, 4)
    arguments = {"x": x, "topk_idx": ids, "num_experts": 4, "do_expand": True, **changes}
    with pytest.raises((ValueError, TypeError), match=text):
        buffer.dispatch(**arguments)
    buffer.destroy()


def test_what_is_refused_behind_a_dispatch() -> None:
    buffer = deep_ep.ElasticBuffer(None, num_max_tokens_per_rank=4, device="cpu")
    x, ids, weights = inputs(0, 4)
    rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=4, do_expand=True)
    assert isinstance(rows, torch.Tensor)
    for given in ({"topk_idx": ids}, {"topk_weights": weights}, {"do_cpu_sync": True}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} must be"):
            buffer.dispatch(x, handle=handle, do_expand=True, **given)
    with pytest.raises(ValueError, match="bias must be None"):
        buffer.combine(rows, handle, bias=x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x must be .* at most 8 rows"):
        buffer.combine(torch.zeros(9, HIDDEN).bfloat16(), handle)
    with pytest.raises(TypeError, match="handle must be what a dispatch returned"):
        buffer.combine(rows, "handle")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="without Engram, pipelines and all-gathers"):
        buffer.engram_write  # noqa: B018
    with pytest.raises(ValueError, match="num_cpu_bytes must be 0"):
        deep_ep.ElasticBuffer(None, num_cpu_bytes=8, device="cpu")
    buffer.destroy()
