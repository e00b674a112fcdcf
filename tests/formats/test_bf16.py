"""BF16 weights: what is taken, how SM90 and SM100 lay them out, and the way back."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.targets import TARGETS
from deep_moe.tokens import token_format
from deep_moe.weights.bf16.format import FORMAT
from deep_moe.weights.layers import LayerWeights

BLOCK_K = token_format("bf16").block_k


def layer(num_experts: int = 2, hidden: int = 384, intermediate: int = 256) -> list[torch.Tensor]:
    """Every value another one, as far as there are so many."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_experts, 2 * intermediate, hidden), (num_experts, hidden, intermediate)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


@pytest.mark.parametrize("arch", TARGETS)
def test_there_and_back(arch: str) -> None:
    l1, l2 = layer()
    weights = deep_moe.transform_weights_for_mega_moe(l1, l2, arch, weights="bf16")
    assert not torch.equal(weights.l1.weight.flatten(), l1.flatten())
    back = deep_moe.inverse_transform_weights(*weights, arch, weights="bf16")
    assert torch.equal(back.l1.weight, l1)
    assert torch.equal(back.l2.weight, l2)
    assert back.l1.sf.shape == back.l2.sf.shape == (2, 0)


@pytest.mark.parametrize("arch", TARGETS)
def test_expert_by_expert(arch: str) -> None:
    l1, l2 = layer()
    whole = deep_moe.transform_weights_for_mega_moe(l1, l2, arch, weights="bf16")
    weights = deep_moe.empty_weights_for_mega_moe(2, 384, 256, arch=arch, weights="bf16")
    for i in range(2):
        one = slice(i, i + 1)
        deep_moe.transform_weights_for_mega_moe(
            l1[one], l2[one], arch, weights="bf16", out=weights.expert(i)
        )
    assert torch.equal(weights.l1.weight, whole.l1.weight)
    assert torch.equal(weights.l2.weight, whole.l2.weight)


@pytest.mark.parametrize(("is_l1", "row"), [(True, 3), (True, 256 + 77), (False, 300)])
def test_where_a_row_stands_on_sm90(is_l1: bool, row: int) -> None:
    """By the formulas of targets/sm90/plain_blocks.py."""
    l1, l2 = layer(num_experts=1)
    weights = deep_moe.transform_weights_for_mega_moe(l1, l2, "sm_90a", weights="bf16")
    k_block_idx, k = 1, 21
    if is_l1:
        h, value = divmod(row, 256)
        n_block_idx, value = divmod(value, 128)
        (g, value), source, blocks = divmod(value, 64), l1, weights.l1.weight
        w, r, b = value // 16, value % 16 // 2, value % 2
    else:
        n_block_idx, own = divmod(row, 256)
        (g, own), source, blocks = divmod(own, 128), l2, weights.l2.weight
        w, r, b, h = own // 32, own % 32 // 4, own % 4 // 2, own % 2
    slot = 128 * g + 64 * b + 16 * w + 8 * h + r
    chunk = (k // 8) ^ (slot % 8)
    placed = blocks[0, n_block_idx, k_block_idx, slot * BLOCK_K + 8 * chunk + k % 8]
    assert placed == source[0, row, k_block_idx * BLOCK_K + k]


def test_rows_that_do_not_exist_are_zero_on_sm90() -> None:
    l1, l2 = layer(num_experts=1)
    weights = deep_moe.transform_weights_for_mega_moe(l1, l2, "sm_90a", weights="bf16")
    assert weights.l2.weight.shape == (1, 2, 4, 256 * BLOCK_K)
    assert not weights.l2.weight[0, 1, :, 128 * BLOCK_K :].any()


def test_pairs_are_taken_too() -> None:
    l1, l2 = layer()
    pairs = [LayerWeights(own, torch.empty(2, 0)) for own in (l1, l2)]
    one, other = (
        deep_moe.transform_weights_for_mega_moe(*given, weights="bf16")
        for given in ((l1, l2), pairs)
    )
    assert torch.equal(one.l1.weight, other.l1.weight)


def test_refusals() -> None:
    l1, l2 = layer()
    transform = deep_moe.transform_weights_for_mega_moe
    with pytest.raises(TypeError, match=r"l1_weights\[0\] must be bfloat16 for bf16 weights; got"):
        transform(l1.float(), l2, weights="bf16")
    with pytest.raises(ValueError, match=r"l2_weights\[1\] must be empty, float32 \(2, 0\)"):
        transform(l1, (l2, torch.ones(2, 1)), weights="bf16")
    with pytest.raises(ValueError, match="requantize must be False for bf16 weights"):
        transform(l1, l2, weights="bf16", requantize=True)
    with pytest.raises(TypeError, match=r"l1_weights must be a pair .* got one tensor of"):
        transform(l1, l2)


def test_quantizing_is_rounding() -> None:
    x = torch.randn(2, 128, 256)
    values, sf = FORMAT.quantize(x)
    assert torch.equal(values, x.bfloat16())
    assert sf.shape == (2, 0)
    assert torch.equal(FORMAT.dequantize((values[0], sf[0])), x[0].bfloat16().double())
