"""The made-up layers: what the exact case promises, and that routing is what was asked for."""

import pytest
import torch

from deep_moe.formats.block_scaled import dequantize_e2m1_ue8m0, dequantize_e4m3_ue8m0, unpack_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens, random_layer, random_tokens

SHAPE = MoEShape(2, 8, 3, 256, 384, 64)


def test_the_exact_case_keeps_its_bounds():
    layer, tokens = exact_layer(SHAPE, seed=1), exact_tokens(SHAPE, 32, seed=2)
    x = dequantize_e4m3_ue8m0(tokens.x, tokens.x_sf, torch.float64)
    l1 = dequantize_e2m1_ue8m0(*layer.l1, torch.float64)
    gate, up = (x @ l1.transpose(1, 2)).chunk(2, dim=-1)
    assert x.unique().tolist() == [0, 1, 2]
    assert ((gate == 0) | (gate >= 32)).all()
    assert (gate % 32 == 0).all()
    assert gate.max() <= 32 * 32
    assert up.abs().max() <= 32
    assert (up < 0).any()
    l2 = dequantize_e2m1_ue8m0(*layer.l2, torch.float64)
    assert l2.unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]


def test_the_exact_case_for_short_sums_keeps_its_bounds():
    layer, tokens = exact_layer(SHAPE, seed=1, sum_bits=13), exact_tokens(SHAPE, 32, seed=2)
    x = dequantize_e4m3_ue8m0(tokens.x, tokens.x_sf, torch.float64)
    l1 = dequantize_e2m1_ue8m0(*layer.l1, torch.float64)
    gate, up = (x @ l1.transpose(1, 2)).chunk(2, dim=-1)
    units = (gate * up).abs() / 32
    assert units.max() <= 16
    assert units.unique().numel() > 5
    l2 = dequantize_e2m1_ue8m0(*layer.l2, torch.float64)
    assert (units @ l2.abs().transpose(1, 2)).max() < 2**13
    assert (l2 != 0).sum(dim=-1).max() <= 128
    # No other size than this is known to be exact.
    with pytest.raises(ValueError, match="sum_bits must be one of 24, 13; got 14"):
        exact_layer(SHAPE, sum_bits=14)


def test_scales_of_the_exact_case_differ_from_row_to_row_and_group_to_group():
    layer, tokens = exact_layer(SHAPE, seed=1), exact_tokens(SHAPE, 32, seed=2)
    for packed in (layer.l1.sf[0, : SHAPE.intermediate_hidden], layer.l2.sf[0], tokens.x_sf):
        scales = unpack_ue8m0(packed)
        for neighbours in (scales[1:] != scales[:-1], scales[:, 1:] != scales[:, :-1]):
            assert neighbours.float().mean() > 0.5


def test_the_exact_case_says_something():
    layer, tokens = exact_layer(SHAPE, seed=1), exact_tokens(SHAPE, 32, seed=2)
    y = reference_mega_moe(*layer.operands(tokens))
    assert (y != 0).float().mean() > 0.9
    assert y.unique().numel() > 100


def test_a_wide_exact_case_leaves_out_columns_to_stay_exact():
    layer = exact_layer(MoEShape(1, 1, 1, 128, 6144, 1))
    l2 = dequantize_e2m1_ue8m0(*layer.l2, torch.float64)
    used_columns = (l2 != 0).any(dim=1).sum(dim=-1)
    assert 5400 < used_columns.item() <= 5461


@pytest.mark.parametrize("make_tokens", [random_tokens, exact_tokens])
@pytest.mark.parametrize("num_unused_slots", [0, 1, 3])
def test_each_token_names_different_experts_and_the_unused_slots(make_tokens, num_unused_slots):
    idx = make_tokens(SHAPE, 50, num_unused_slots=num_unused_slots).topk_idx
    assert idx.dtype == torch.int64
    for row in idx.tolist():
        used = [expert for expert in row if expert != -1]
        assert len(used) == len(set(used)) == SHAPE.num_topk - num_unused_slots
        assert all(0 <= expert < SHAPE.num_experts for expert in used)
    if num_unused_slots == 1:
        assert len((idx == -1).nonzero()[:, 1].unique()) == SHAPE.num_topk


def test_a_seed_gives_the_same_again_and_another_something_else():
    assert torch.equal(random_layer(SHAPE, seed=3).l1.weight, random_layer(SHAPE, seed=3).l1.weight)
    one, two = random_tokens(SHAPE, 9, seed=3), random_tokens(SHAPE, 9, seed=4)
    assert not torch.equal(one.topk_idx, two.topk_idx)


def test_tokens_of_the_same_seed_are_no_rows_of_weights():
    shape = MoEShape(1, 2, 1, 1024, 128, 4)
    weights = random_layer(shape, seed=5).l1
    tokens = random_tokens(shape, 4, seed=5)
    products = dequantize_e4m3_ue8m0(tokens.x, tokens.x_sf) @ dequantize_e2m1_ue8m0(*weights).mT
    assert products.abs().max() < 6  # normally distributed; a row of its own would give 32


def test_ranks_hold_consecutive_experts():
    layer = random_layer(SHAPE)
    l1, l2 = layer.of_rank(1, 2)
    assert torch.equal(l1.weight, layer.l1.weight[4:])
    assert torch.equal(l2.sf, layer.l2.sf[4:])


def test_no_tokens_are_tokens():
    tokens = random_tokens(SHAPE, 0)
    assert tokens.num_tokens == 0
    assert tokens.topk_weights.shape == (0, 3)
