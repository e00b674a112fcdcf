"""Tokens with one float32 scale: every byte is that of the reference cast, whatever the width."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.heuristics.prepare_inputs import whole_token_fields

from .conftest import bits, routing

BF16_PATTERNS = 1 << 16


def prepared(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, hidden = x.shape
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None,
        64,
        num_tokens + 1,
        2,
        hidden,
        128,
        weights="fp8",
        token_format="fp8_token",
        device="cpu",
    )
    for view in (buffer.x, buffer.x_sf):
        view.view(torch.uint8).fill_(0x5A)
    idx, weights = routing(num_tokens, 2)
    deep_moe.prepare_inputs(x, idx, weights, buffer, arch="sm_90a", **options)
    assert torch.equal(buffer.topk_idx[:num_tokens], idx)
    assert bool((bits(buffer.x[num_tokens:]) == 0x5A).all())
    assert bool((bits(buffer.x_sf[num_tokens:]) == 0x5A).all())
    return buffer.x[:num_tokens], buffer.x_sf[:num_tokens]


def check(x: torch.Tensor) -> None:
    for got, expected in zip(prepared(x), quantize_e4m3_float(x, whole_tokens=True), strict=True):
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("hidden", [128, 384, 1152, 7168])
def test_tokens_of_every_width(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    sizes = torch.exp2(torch.randint(-30, 30, (5, 1), generator=generator).float())
    check((torch.randn(5, hidden, generator=generator) * sizes).bfloat16())


def test_very_wide_tokens() -> None:
    """With more loads of each thread than usually."""
    hidden = 33 * 1024
    assert whole_token_fields(hidden)["num_chunks_per_lane"] == 5
    check(torch.randn(2, hidden, generator=torch.Generator().manual_seed(0)).bfloat16())


def test_every_value_as_the_largest() -> None:
    """In a place of its own: the scales, and what smaller values beside it become."""
    patterns = torch.arange(0, BF16_PATTERNS, 37, dtype=torch.int32)
    values = patterns.to(torch.uint16).view(torch.bfloat16)
    x = torch.zeros(len(values), 256, dtype=torch.bfloat16)
    places = torch.arange(len(values))
    x[places, (places + 1) % 256] = values / 3
    x[places, places % 256] = values
    check(x)


def test_nan_infinity_and_zeros() -> None:
    x = torch.randn(6, 640, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0] = 0
    x[1, 639] = torch.nan
    x[2, 5] = torch.inf
    x[3] = -0.0
    x[4] = torch.finfo(torch.bfloat16).max
    check(x)
    values, scales = prepared(x)
    assert bool(values[1].float().isnan().all())
    assert bool(values[2].float().isnan().all())
    assert scales[1].item() == scales[2].item() == 1


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scale_of_all_tokens(shape: tuple[int, ...]) -> None:
    """Larger values than it allows become 448 of it. Before and behind, tokens' own scales."""
    x = torch.randn(6, 640, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[0], x[1, 639], x[2, 5], x[3] = 0, torch.nan, -torch.inf, x[3] * 1000
    scale = torch.full(shape, 0.0017)
    for _ in range(2):
        check(x)
        values, scales = prepared(x, token_scale=scale)
        expected = quantize_e4m3_float(x, whole_tokens=True, token_scale=0.0017)
        for got, own in zip((values, scales), expected, strict=True):
            assert torch.equal(bits(got), bits(own))
    assert scales.flatten().tolist() == [scale.max().item(), 1, 1, *[scale.max().item()] * 3]
    assert values[3].float().abs().max() == 448
    assert values[2].float().isnan().all()
