"""What may happen to the router's experts on their way: padding, places of copies, counting."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.fused.buffer import SymmBuffer

from .conftest import Target, routing

UNKNOWN = 2**63 - 1
NUM_TOKENS, NUM_TOPK = 11, 3


def prepared(
    target: Target, idx: torch.Tensor, **options: torch.Tensor
) -> tuple[SymmBuffer, torch.Tensor]:
    """The buffer, and the expert ids in it."""
    buffer = target.buffer(num_topk=NUM_TOPK)
    x = torch.randn(len(idx), 256).bfloat16()
    weights = torch.rand(idx.shape)
    on_device = [tensor.to(target.device) for tensor in (x, idx, weights)]
    deep_moe.prepare_inputs(*on_device, buffer, arch=target.arch, **options)
    kept = buffer.topk_weights[: len(idx)].cpu()
    assert torch.equal(kept, weights)
    return buffer, buffer.topk_idx[: len(idx)].cpu()


def copies(dtype: torch.dtype) -> torch.Tensor:
    """Of 20 experts in 64 places: one to three each, expert 7 nowhere."""
    table = torch.full((20, 3), -1, dtype=dtype)
    for expert in range(20):
        for copy in range(expert % 3 + 1):
            table[expert, copy] = (7 * expert + 20 * copy) % 64
    table[7] = -1
    return table


def places(idx: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(idx)
    for token, slots in enumerate(idx.tolist()):
        for slot, expert in enumerate(slots):
            place = expert
            if expert >= 0:
                own = [p for p in table[expert].tolist() if p >= 0] if expert < len(table) else []
                place = own[token % len(own)] if own else UNKNOWN
            result[token, slot] = place
    return result


def test_padded_tokens_lose_their_slots(target: Target) -> None:
    idx, _ = routing(NUM_TOKENS, NUM_TOPK)
    mask = torch.rand(NUM_TOKENS) < 0.5
    assert 0 < mask.sum() < NUM_TOKENS
    _, result = prepared(target, idx, token_mask=mask.to(target.device))
    assert torch.equal(result, idx.where(mask[:, None], -1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_experts_become_places(target: Target, dtype: torch.dtype, idx_dtype: torch.dtype) -> None:
    idx, _ = routing(NUM_TOKENS, NUM_TOPK)
    idx = (idx % 20).where(idx >= 0, -1)
    table = copies(dtype)
    _, result = prepared(target, idx.to(idx_dtype), expert_map=table.to(target.device))
    expected = places(idx, table)
    assert len({*expected.flatten().tolist()}) > 10
    assert torch.equal(result, expected)


def test_a_map_without_copies(target: Target) -> None:
    idx, _ = routing(NUM_TOKENS, NUM_TOPK)
    order = torch.randperm(64)
    _, result = prepared(target, idx, expert_map=order.to(target.device))
    assert torch.equal(result, order[idx].where(idx >= 0, -1))


def test_experts_that_the_map_does_not_know(target: Target) -> None:
    """The call refuses them."""
    idx = torch.tensor([[0, 7, 1], [19, 20, -1], [2, 2**31, 3]])
    table = copies(torch.int64)
    buffer, result = prepared(target, idx, expert_map=table.to(target.device))
    assert torch.equal(result, places(idx, table))
    assert (result == UNKNOWN).sum() == 3
    l1 = deep_moe.quantize_mxfp4(torch.randn(64, 256, 256))
    l2 = deep_moe.quantize_mxfp4(torch.randn(64, 256, 128))
    # On a GPU the kernel's layout is that of the GPU.
    l1, l2 = (type(pair)(*(tensor.to(target.device) for tensor in pair)) for pair in (l1, l2))
    l1, l2 = deep_moe.transform_weights_for_mega_moe(l1, l2, arch=target.arch)
    y = torch.empty(3, 256, dtype=torch.bfloat16, device=target.device)
    with pytest.raises(ValueError, match=rf"topk_idx.* got .*{UNKNOWN}"):
        deep_moe.fp8_fp4_mega_moe(y, l1, l2, buffer, arch=target.arch, checked=True)


def test_slots_are_counted_by_place(target: Target) -> None:
    idx, _ = routing(NUM_TOKENS, NUM_TOPK)
    idx[3, 1] = 64  # no place
    mask = torch.arange(NUM_TOKENS) != 5
    load = torch.arange(64, dtype=torch.int32)
    on_device = load.clone().to(target.device)
    for _ in range(2):
        prepared(target, idx, token_mask=mask.to(target.device), expert_load=on_device)
    sent = idx[mask]
    counted = torch.bincount(sent[(sent >= 0) & (sent < 64)], minlength=64)
    assert torch.equal(on_device.cpu(), load + 2 * counted)


def test_copies_are_counted_where_they_lie(target: Target) -> None:
    idx = torch.full((NUM_TOKENS, NUM_TOPK), -1)
    idx[:, 0] = 2  # three copies, at 14, 34 and 54
    load = torch.zeros(64, dtype=torch.int32, device=target.device)
    prepared(target, idx, expert_map=copies(torch.int32).to(target.device), expert_load=load)
    assert {p: n for p, n in enumerate(load.tolist()) if n} == {14: 4, 34: 4, 54: 3}


def test_no_tokens(target: Target) -> None:
    idx = torch.empty(0, NUM_TOPK, dtype=torch.int64)
    load = torch.zeros(64, dtype=torch.int32, device=target.device)
    mask = torch.empty(0, dtype=torch.bool, device=target.device)
    prepared(target, idx, token_mask=mask, expert_load=load)
    assert load.sum() == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"token_mask": [True]}, TypeError, "token_mask must be a tensor or None; got list"),
        ({"token_mask": torch.ones(10, dtype=torch.bool)}, ValueError, r"token_mask .*\(11,\)"),
        ({"token_mask": torch.ones(11)}, TypeError, "token_mask .*torch.bool"),
        ({"token_mask": torch.ones(22, dtype=torch.bool)[::2]}, ValueError, "token_mask .*contig"),
        ({"expert_map": 3}, TypeError, "expert_map must be a tensor or None; got int"),
        ({"expert_map": torch.zeros(4)}, TypeError, "expert_map .*torch.int64"),
        ({"expert_map": torch.zeros(2, 2, 2).int()}, ValueError, "expert_map must be .*2, 2, 2"),
        ({"expert_map": torch.zeros(4, 0).int()}, ValueError, "expert_map must be .* not empty"),
        ({"expert_map": torch.zeros(8, 4).int().t()}, ValueError, "expert_map .*contig"),
        ({"expert_load": torch.zeros(64)}, TypeError, "expert_load .*torch.int32"),
        ({"expert_load": torch.zeros(63).int()}, ValueError, r"expert_load .*\(64,\)"),
        ({"expert_load": torch.zeros(128).int()[::2]}, ValueError, "expert_load .*contig"),
    ],
)
def test_bad_arguments(options, error, words) -> None:
    idx, _ = routing(NUM_TOKENS, NUM_TOPK)
    with pytest.raises(error, match=words):
        prepared(Target("cpu", None), idx, **options)


def test_a_compiler_keeps_the_order() -> None:
    """It must know that the counts are written."""
    buffer = Target("cpu", None).buffer(num_topk=NUM_TOPK)
    idx, weights = routing(NUM_TOKENS, NUM_TOPK)
    x = torch.randn(NUM_TOKENS, 256).bfloat16()

    def count(load: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(NUM_TOKENS, dtype=torch.bool)
        deep_moe.prepare_inputs(x, idx, weights, buffer, token_mask=mask, expert_load=load)
        first = load + 0
        deep_moe.prepare_inputs(x, idx, weights, buffer, token_mask=mask, expert_load=load)
        return first, load + 0

    compiled = torch.compile(count, fullgraph=True, backend="aot_eager")
    first, second = compiled(torch.zeros(64, dtype=torch.int32))
    counted = torch.bincount(idx[idx >= 0], minlength=64)
    assert torch.equal(first, counted)
    assert torch.equal(second, 2 * counted)
