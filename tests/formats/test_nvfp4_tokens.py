"""Activations in NVFP4: the rule of deep_moe/formats/nvfp4.py, beside one that is written with
numbers of float64 and nearest codes."""

from __future__ import annotations

import pytest
import torch

import deep_moe
from deep_moe.formats import nvfp4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def values_of_any_size(num_tokens: int, num_values: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_values)
    sizes = torch.randint(-60, 60, (num_tokens, 1), generator=generator)
    groups = torch.randint(-8, 1, (num_tokens, num_values // 16), generator=generator)
    values = torch.randn(num_tokens, num_values, generator=generator)
    spread = torch.exp2(groups.float()).repeat_interleave(16, dim=1)
    return (values * spread * torch.exp2(sizes.float())).bfloat16()


def parts(packed: torch.Tensor, sf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of tokens [tokens, 1] and of groups [tokens, groups], float64."""
    own = sf[:, :1].contiguous().view(torch.float32).double()
    scale_bytes = sf[:, 1:].contiguous().view(torch.uint8)[:, : packed.shape[1] // 8]
    return own, nvfp4.e4m3_to_double(scale_bytes)


@pytest.mark.parametrize("token_scale", [None, 2.0**-11])
@pytest.mark.parametrize("num_values", [32, 352, 512])
def test_scales_and_values_are_the_nearest(num_values: int, token_scale: float | None) -> None:
    x = values_of_any_size(40, num_values)
    packed, sf = deep_moe.quantize_nvfp4_tokens(x, token_scale)
    assert packed.shape == (40, num_values // 2)
    assert sf.shape == (40, 1 + -(-num_values // 64))
    own, scales = parts(packed, sf)
    groups = x.double().unflatten(1, (-1, 16))
    largest = groups.abs().amax(dim=(1, 2), keepdim=True).squeeze(2)
    if token_scale is None:
        assert torch.allclose(own, largest / 2688, rtol=2.0**-22, atol=0)
    else:
        assert bool((own == token_scale).all())
    # Nearest, but for what float32 makes of numbers halfway between two.
    wanted = (groups.abs().amax(dim=2) / (6 * own)).clamp(max=448)
    distance = (wanted - scales).abs()
    nearest = (wanted.unsqueeze(-1) - E4M3).abs().amin(dim=-1)
    assert bool((distance <= nearest * (1 + 2.0**-18) + wanted * 2.0**-21).all())
    exact = groups.abs() / (scales * own).unsqueeze(-1)
    codes = deep_moe.dequantize_nvfp4_tokens(packed, sf, torch.float64).unflatten(1, (-1, 16)).abs()
    rounded = codes / (scales * own).unsqueeze(-1)
    used = (scales > 0).unsqueeze(-1)
    best = (exact.unsqueeze(-1) - E2M1).abs().amin(dim=-1)
    error = (exact - rounded).abs()
    assert bool((error <= best + exact * 2.0**-20)[used.expand_as(error)].all())
    assert bool((codes[~used.expand_as(codes)] == 0).all())


def test_the_token_scale_holds_the_largest_value() -> None:
    """Its group has the largest scale, and the value the largest code."""
    x = values_of_any_size(200, 256)
    packed, sf = deep_moe.quantize_nvfp4_tokens(x)
    own, scales = parts(packed, sf)
    assert bool((scales.amax(dim=1) == 448).all())
    largest = deep_moe.dequantize_nvfp4_tokens(packed, sf, torch.float64).abs().amax(dim=1)
    assert torch.allclose(largest, 2688 * own[:, 0])


def test_tokens_that_are_no_numbers_have_a_scale_that_is_none() -> None:
    x = torch.ones(4, 64)
    x[1, 3], x[2, 40], x[3] = torch.inf, torch.nan, 0
    values = deep_moe.dequantize_nvfp4_tokens(*deep_moe.quantize_nvfp4_tokens(x))
    assert values[1:3].isnan().all()
    assert torch.allclose(values[0], x[0], rtol=1e-6)
    assert bool((values[3] == 0).all())


def test_linear1_output_has_an_error_of_a_tenth_over_twelve_powers_of_two() -> None:
    """What docs/numerics.md says of the constant beside its scales."""
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 64, 2048, generator=generator)
    h = torch.nn.functional.silu(gate) * up
    h /= h.square().mean().sqrt()

    def error(size: float) -> float:
        groups = (h * size).unflatten(1, (-1, 16))
        inverse = torch.full_like(groups[..., 0], 1 / nvfp4.LINEAR2_SCALE)
        scale_bytes = nvfp4.group_scale_bytes(groups.abs().amax(dim=2), inverse)
        codes = nvfp4.quantize_groups(groups, scale_bytes, inverse)
        scales = nvfp4.e4m3_to_double(scale_bytes) * nvfp4.LINEAR2_SCALE
        signs = 1 - 2 * (codes >> 3).double()
        rounded = E2M1[(codes & 7).long()] * signs * scales.unsqueeze(-1)
        return float((rounded - groups).norm() / groups.norm())

    assert all(error(2.0**e) < 0.095 for e in range(-7, 6))
    assert error(2.0**-9) < 0.15
    assert error(2.0**7) < 0.2


@pytest.mark.parametrize(
    ("x", "token_scale", "error", "text"),
    [
        (torch.ones(2, 64, dtype=torch.float64), None, TypeError, "x must be float32, bfloat16"),
        (torch.ones(2, 48), None, ValueError, "multiple of 32 columns"),
        (torch.ones(2, 64), 0.0, ValueError, "token_scale must be positive and finite; got 0.0"),
        (torch.ones(2, 64), float("nan"), ValueError, "token_scale must be positive"),
    ],
)
def test_bad_input_is_named(x, token_scale, error, text) -> None:
    with pytest.raises(error, match=text):
        deep_moe.quantize_nvfp4_tokens(x, token_scale)
