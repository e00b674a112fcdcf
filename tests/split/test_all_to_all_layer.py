"""The all-to-all for many tokens under the other layer's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.split.all_to_all_layer import EPAll2AllLayer

# How that layer's document uses it.
EXAMPLE = """
rank, world_size = initialize_distributed()
ep_layer = EPAll2AllLayer(
    ep_group=dist.group.WORLD,
    max_tokens=4,
    hidden=128,
    topk=2,
    rank=rank,
    num_tot_experts=16,
    local_world_size=PER_NODE,
    world_size=4,
    dtype=torch.bfloat16,
    weight_dtype=torch.float32,
    num_sm=2,
)
tokens = torch.randn(3, 128, dtype=torch.bfloat16)
expert_ids = torch.randint(0, 16, (3, 2), dtype=torch.int32)
routing_weights = torch.softmax(torch.randn(3, 2), dim=-1).float()
recv_tokens, recv_weights, layout_desc = ep_layer.dispatch(
    input=tokens, exp_indices=expert_ids, weight=routing_weights
)
expert_output = your_expert_ffn(recv_tokens)
combined = ep_layer.combine(expert_output, layout_desc)
ep_layer.finalize()
"""


def place(rank: int, world_size: int, **changes: Any) -> EPAll2AllLayer:
    arguments: dict[str, Any] = {
        "max_tokens": 4,
        "hidden": 128,
        "topk": 2,
        "rank": rank,
        "num_tot_experts": 2 * world_size,
        "local_world_size": world_size,
        "world_size": world_size,
        "num_sm": 2,
        "device": "cpu",
    }
    group = None if world_size == 1 else dist.group.WORLD
    return EPAll2AllLayer(group, **{**arguments, **changes})


@pytest.mark.parametrize("per_node", [4, 2])
def test_the_documented_use(run_ranks, per_node: int) -> None:
    def work(rank: int) -> None:
        names: dict[str, Any] = {
            "torch": torch,
            "dist": dist,
            "PER_NODE": per_node,
            "EPAll2AllLayer": deep_moe.EPAll2AllLayer,
            "initialize_distributed": lambda: (rank, 4),
            "your_expert_ffn": lambda rows: 2 * rows,
        }
        torch.manual_seed(rank)
        exec(EXAMPLE, names)
        assert names["recv_weights"].shape == names["recv_tokens"].shape[:1]
        # Twice each token for each of two slots; doubling is exact.
        assert torch.equal(names["combined"], 4 * names["tokens"])
        layout = names["layout_desc"]
        assert layout.num_dispatch_token_cur_rank == 3
        assert layout.topk_indices_tensor is names["expert_ids"]

    run_ranks(4, work)


def test_rows_by_expert_with_their_weights_in_fp16(run_ranks) -> None:
    def work(rank: int) -> None:
        layer = place(rank, 2, local_world_size=1, dtype=torch.float16)
        x = torch.full((2, 128), 1.0 + rank, dtype=torch.float16)
        ids = torch.tensor([[0, 3], [2, -1]])
        weights = torch.tensor([[0.25, 0.5], [0.75, 0.0]])
        for _ in range(2):
            rows, row_weights, layout = layer.dispatch(x, ids, weights)
            assert row_weights is not None
            # Of experts 0 and 1, then of 2 and 3: own tokens first, since numbers are equal.
            expected = {0: [0.25, 0.25], 1: [0.75, 0.75, 0.5, 0.5]}[rank]
            assert row_weights.tolist() == expected
            own, other = 1.0 + rank, 2.0 - rank
            assert rows[:, 0].tolist() == [own, other] * (len(expected) // 2)
            y = (rows.float() * row_weights[:, None]).half()
            out = layer.combine(y, layout)
            assert out.dtype == torch.float16
            assert torch.equal(out, 0.75 * x)
            layer.ep_barrier_all()
            layer.ep_barrier_all(intra_node_only=True)
        rows, row_weights, _ = layer.dispatch(x, ids)
        assert row_weights is None
        dist.barrier()
        layer.finalize()

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight_dtype": torch.bfloat16}, r"weight_dtype must be torch\.float32"),
        ({"local_world_size": 3}, r"local_world_size must divide world_size \(1\); got 3"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"num_tot_experts": 0}, "num_tot_experts must be 1 to 2048; got 0"),
        ({"max_recv_tokens": 0}, "max_recv_tokens must be 1 to 16777216; got 0"),
        ({"dtype": torch.float32}, r"dtype must be torch\.bfloat16 or"),
    ],
)
def test_what_it_is_made_with(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        place(0, 1, **changes)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="rank and world_size must be those of the group, 0 and 1"):
        place(1, 1)


def test_what_it_is_called_with() -> None:
    layer = place(0, 1)
    x, ids = torch.zeros(2, 128).bfloat16(), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="full_scatter_indices must be None"):
        layer.dispatch(x, ids, None, ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input must have shape"):
        layer.dispatch(x[:, :64], ids)
    with pytest.raises(TypeError, match="exp_indices must be a tensor"):
        layer.dispatch(x, "ids")  # type: ignore[arg-type]
    rows, _, layout = layer.dispatch(x, ids)
    assert rows.shape == (4, 128)
    with pytest.raises(ValueError, match="input must"):
        layer.combine(rows[:3], layout)
    with pytest.raises(TypeError, match="ep_a2a_layout_desc must be what a dispatch returned"):
        layer.combine(rows, "layout")  # type: ignore[arg-type]
    layer.combine(rows, layout)
    with pytest.raises(ValueError, match="get_combine_buffer must follow a dispatch"):
        layer.combine(rows, layout)
    layer.finalize()
