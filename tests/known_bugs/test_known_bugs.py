"""What broke other fused MoE kernels, shown not to happen here.

The ids are those of docs/known-bugs.md, which also says where ids without a test in this file are
tested. Most cases run the SM100 kernel in the emulator with all its checks on.
"""

from __future__ import annotations

import pytest
import torch

from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
from deep_moe.trial.synthetic import (
    Layer,
    Tokens,
    exact_layer,
    exact_tokens,
    random_layer,
    random_tokens,
)
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize
from tests.kernels.layer_case import LayerCase

TILES = (16, 32, 64, 96, 128, 192)
SMALL = {"num_experts": 4, "num_topk": 2, "hidden": 256, "intermediate_hidden": 128}


def make_shape(max_tokens: int, num_ranks: int = 2, **sizes: int) -> MoEShape:
    return MoEShape(num_ranks=num_ranks, num_max_tokens_per_rank=max_tokens, **{**SMALL, **sizes})


def bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int16)


@pytest.mark.parametrize("block_m", TILES)
@pytest.mark.parametrize("num_experts", [8, 256, 1024])
def test_b1_shared_memory_of_hidden_8192_adds_up(block_m: int, num_experts: int):
    shape = MoEShape(8, num_experts, 8, 8192, 2048, 256)
    config = choose_config(shape, 256, overrides={"block_m": block_m})
    rows = config.explain().smem_map
    assert sum(row.size for row in rows) == config.smem_bytes <= 227 * 1024
    assert {"activation_sf", "weight_sf"} <= {row.name for row in rows}


@pytest.mark.parametrize("num_tokens", [1, 20])  # with a warp for each chunk, and without
@parametrize("num_chunks", [1, 2, 4], everyday=[2])
def test_b2_combine_in_chunks_reuses_its_buffers_only_after_they_were_read(
    num_chunks: int, num_tokens: int
):
    """Chunks are loaded into two buffers in turn; a load that comes too early changes the sum."""
    shape = make_shape(20, num_ranks=1, num_topk=4, hidden=1024)
    case = LayerCase(shape, exact_layer(shape))
    tokens = [exact_tokens(shape, num_tokens)]
    (result,) = case.compare_call(tokens, overrides={"num_combine_chunks": num_chunks}, num_sms=2)
    assert result.is_exact


@pytest.mark.parametrize("schedule_seed", range(3))
def test_b3_two_stages_are_not_refilled_while_they_are_read(schedule_seed: int):
    """With the fewest stages every one is reused at once, and copies complete at random times."""
    shape = make_shape(20, num_ranks=1, hidden=512)
    case = LayerCase(shape, exact_layer(shape))
    (result,) = case.compare_call(
        [exact_tokens(shape, 20)], overrides={"num_stages": 2}, schedule_seed=schedule_seed
    )
    assert result.is_exact


@pytest.mark.parametrize("counts", [(0, 7), (7, 0), (0, 0)], ids=str)
def test_b7_ranks_without_tokens(counts: tuple[int, int]):
    shape = make_shape(8)
    case = LayerCase(shape, exact_layer(shape))
    tokens = [exact_tokens(shape, n, seed=n) for n in counts]
    assert all(result.is_exact for result in case.compare_call(tokens))


@pytest.mark.slow
def test_b8_changing_counts_never_write_beside_the_buffer():
    """Every call compares the guard bands on both sides of every rank's buffer."""
    shape = make_shape(16)
    case = LayerCase(shape, exact_layer(shape))
    for call_idx in range(8):
        counts = (call_idx * 5 % 17, call_idx * 11 % 17)
        tokens = [exact_tokens(shape, n, seed=call_idx) for n in counts]
        assert all(result.is_exact for result in case.compare_call(tokens)), call_idx
    for buffer in case.ranks.buffers:
        assert buffer.memory.blocks[buffer.rank].damaged_guard() is None


def test_b10_more_tokens_than_the_buffer_holds_are_refused():
    shape = make_shape(4)
    case = LayerCase(shape, exact_layer(shape))
    ys = [torch.empty(5, shape.hidden, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(ValueError, match=r"ys\[0\] .*4.*got .*5"):
        case.ranks.call(ys, case.weights)


def test_b11_permuted_experts_give_the_plain_result():
    shape = make_shape(12)
    layer = random_layer(shape)
    order = torch.tensor([2, 0, 3, 1])  # the expert that moves to each place
    permuted = Layer(
        LayerWeights(layer.l1.weight[order], layer.l1.sf[order]),
        LayerWeights(layer.l2.weight[order], layer.l2.sf[order]),
    )
    place_of = order.argsort()
    plain = [random_tokens(shape, n, seed=n) for n in (12, 5)]
    moved = [Tokens(own.x, own.x_sf, place_of[own.topk_idx], own.topk_weights) for own in plain]
    for y, moved_y in zip(
        LayerCase(shape, layer).call(plain), LayerCase(shape, permuted).call(moved), strict=True
    ):
        assert torch.equal(bits(y), bits(moved_y))


def test_b12_nan_duplicate_and_unused_slots_change_no_valid_row():
    shape = make_shape(12, num_topk=3)
    case = LayerCase(shape, random_layer(shape))
    valid = [random_tokens(shape, 8, seed=rank) for rank in range(2)]
    expected = case.call(valid)

    mixed = []
    for own in valid:
        x = torch.cat([own.x, own.x[:4]])
        x.view(torch.uint8)[8] = 0x7F  # a token of NaN
        topk_idx = torch.cat([own.topk_idx, own.topk_idx[:4]])
        topk_idx[9] = topk_idx[9, 0]  # one expert in every slot
        topk_idx[10, 1:] = -1
        topk_idx[11] = -1
        mixed.append(
            Tokens(
                x,
                torch.cat([own.x_sf, own.x_sf[:4]]),
                topk_idx,
                torch.cat([own.topk_weights, own.topk_weights[:4]]),
            )
        )
    for y, mixed_y, reference in zip(expected, case.call(mixed), case.expected(mixed), strict=True):
        assert torch.equal(bits(y), bits(mixed_y[:8]))
        assert mixed_y[8].isnan().all()
        assert torch.allclose(mixed_y[9:].float(), reference[9:].float(), rtol=1e-2, atol=1e-3)
        assert not mixed_y[11].any()


@pytest.mark.parametrize("garbage", [4, -7, 2**40])
def test_b13_ids_out_of_range_are_refused_or_taken_as_unused(garbage: int):
    shape = make_shape(6)
    case = LayerCase(shape, exact_layer(shape))
    tokens = [exact_tokens(shape, 6, seed=rank) for rank in range(2)]
    unused = [Tokens(t.x, t.x_sf, t.topk_idx.clone(), t.topk_weights) for t in tokens]
    for own, bare in zip(tokens, unused, strict=True):
        own.topk_idx[::2, 1] = garbage
        bare.topk_idx[::2, 1] = -1
    with pytest.raises(ValueError, match="topk_idx"):
        case.call(tokens)
    for y, expected in zip(
        case.call(tokens, checked=False), case.call(unused, checked=False), strict=True
    ):
        assert torch.equal(bits(y), bits(expected))


def test_b17_skewed_ranks_dirty_pools_and_new_addresses_change_no_bit():
    shape = make_shape(24, num_topk=3)
    layer = random_layer(shape)
    tokens = [random_tokens(shape, n, seed=n) for n in (24, 10)]
    case = LayerCase(shape, layer)
    first = case.call(tokens)

    data_begin = case.ranks.buffers[0].layout.mark("control_bytes")
    for buffer in case.ranks.buffers:
        buffer.memory.tensor[data_begin:] = 0x7F  # NaN wherever a call does not write first
    dirty = case.call(tokens, schedule_seed=1)

    elsewhere = LayerCase(shape, layer)
    assert elsewhere.ranks.buffers[0].x.data_ptr() != case.ranks.buffers[0].x.data_ptr()
    moved = elsewhere.call(tokens, schedule_seed=2)
    for y, *others in zip(first, dirty, moved, strict=True):
        assert all(torch.equal(bits(y), bits(other)) for other in others)


def test_b18_denormal_and_zero_rows_stay_finite():
    shape = make_shape(6, num_ranks=1)
    case = LayerCase(shape, random_layer(shape))
    tokens = random_tokens(shape, 6)
    tokens.x_sf[0] = 0  # every scale 2^-127: products far below FP32's normal numbers
    tokens.x.view(torch.uint8)[1] = 0
    tokens.x.view(torch.uint8)[2] = 1  # the smallest E4M3 number
    (y,), (expected,) = case.call([tokens]), case.expected([tokens])
    assert y.isfinite().all()
    assert not y[1].any()
    assert torch.equal(bits(y[:2]), bits(expected[:2]))


def test_b24_ranks_with_other_token_counts_and_tiles_run_together():
    """A rank's tile follows from its own tokens: what the ranks share must not depend on it."""
    shape = make_shape(80, num_experts=2)
    case = LayerCase(shape, exact_layer(shape))
    tokens = [exact_tokens(shape, n, seed=n) for n in (80, 2)]
    tiles = {choose_config(shape, own.num_tokens, num_sms=4).block_m for own in tokens}
    assert len(tiles) == 2
    assert all(result.is_exact for result in case.compare_call(tokens))
