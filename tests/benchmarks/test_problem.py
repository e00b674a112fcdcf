"""What the benchmark times: its weights, its reference, and the costs that floors come from."""

from dataclasses import replace

import pytest
import torch

from benchmarks.problem import (
    CallCosts,
    MachineRates,
    call_costs,
    fp8_weights,
    reference_sample,
)
from deep_moe.activations import Swiglu
from deep_moe.formats.block_scaled import dequantize_e2m1_ue8m0
from deep_moe.heuristics import MoEShape, preset_shape
from deep_moe.targets import target_of
from deep_moe.trial.real_size import rank_layer, rank_tokens
from deep_moe.trial.reference import reference_mega_moe
from tests.pairs import formats

SHAPE = MoEShape(2, 6, 2, 256, 128, 20)
CPU = torch.device("cpu")


@pytest.mark.parametrize("weights", ["mxfp4", "fp8"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_sample_is_what_the_reference_says_of_these_tokens(arch: str, weights: str):
    shape = replace(SHAPE, **formats(weights))
    on_target = target_of(arch).weights_of(weights)
    layers = [rank_layer(shape, rank, 3, CPU, on_target.scale_block) for rank in range(2)]
    l1, l2 = (
        tuple(torch.cat([getattr(layer, name)[i] for layer in layers]) for i in range(2))
        for name in ("l1", "l2")
    )
    tokens = rank_tokens(shape, 20, 1, 3, CPU)
    inputs = (tokens.x, tokens.x_sf, tokens.topk_idx, tokens.topk_weights)
    expected = reference_mega_moe(*inputs, l1, l2, numerics=on_target.numerics)
    rows = torch.tensor([0, 7, 19])
    sample = reference_sample(shape, tokens, rows, 3, on_target, Swiglu())
    assert torch.equal(sample.y, expected[rows])
    assert 0.05 < expected.float().std() < 5  # not lost in rounding, nor clamped away


def test_costs_of_the_anchor():
    """8192 tokens per rank of pro on 4 ranks: 9422 us are 689 TFLOPS."""
    shape = preset_shape("deepseek-v4-pro", num_ranks=4, num_max_tokens_per_rank=8192)
    costs = call_costs(shape, torch.full((4, 384), 8192 * 6 // 384), 17 / 32)
    assert round(costs.flops / 9422e-6 / 1e12) == 689
    # At 128 tokens per rank all experts are read: 0.76 ms.
    costs = call_costs(shape, torch.full((4, 384), 128 * 6 // 384), 17 / 32)
    assert costs.floor_s(MachineRates()) == pytest.approx(0.76e-3, abs=0.01e-3)


def test_the_floor_is_the_slowest_part():
    rates = MachineRates(weight_bytes_per_s=10, flops=20, link_bytes_per_s=30)
    assert CallCosts(20, busiest_flops=200, weight_bytes=10, link_bytes=30).floor_s(rates) == 10
    assert CallCosts(20, busiest_flops=20, weight_bytes=40, link_bytes=30).floor_s(rates) == 4
    assert CallCosts(20, busiest_flops=20, weight_bytes=10, link_bytes=90).floor_s(rates) == 3


def test_costs_of_skewed_routing_are_those_of_the_busiest():
    """All tokens of rank 0 go to an expert of rank 1."""
    sent = torch.zeros(2, 6, dtype=torch.int64)
    sent[0, 4] = 10
    costs = call_costs(SHAPE, sent, 0.75)
    weights = 3 * 256 * 128
    assert (costs.flops, costs.busiest_flops) == (10.0 * weights, 20.0 * weights)
    assert costs.weight_bytes == weights * 0.75  # of one expert
    assert costs.link_bytes == 10 * 256 * 2  # results, from rank 1; tokens to it are fewer bytes


@pytest.mark.parametrize("block", [(1, 0), (128, 128)])
def test_fp8_weights_are_near_the_fp4_ones(block: tuple[int, int]):
    layer = rank_layer(SHAPE, 0, 1, CPU)
    values, scales = fp8_weights("mxfp4", layer.l1, *block)
    dense = dequantize_e2m1_ue8m0(*layer.l1)
    if block[1] == 0:
        again = values.float() * scales
    else:
        again = values.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert (again - dense).norm() < 0.04 * dense.norm()


def test_fp8_weights_with_block_scales_keep_their_values():
    layer = rank_layer(replace(SHAPE, **formats("fp8")), 0, 1, CPU, (128, 128))
    values, scales = fp8_weights("fp8", layer.l1, 128, 128)
    again = values.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    known = layer.l1.sf.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert torch.equal(again, layer.l1.weight.float() * known)
