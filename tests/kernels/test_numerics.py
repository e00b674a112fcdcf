"""Each target's kernel in the emulator on random layers and on awkward values."""

from __future__ import annotations

import pytest
import torch

from deep_moe.formats.block_scaled import pack_ue8m0, quantize_e2m1_ue8m0, quantize_e4m3_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Layer, Tokens, random_layer, random_tokens
from deep_moe.weights.layers import LayerWeights
from tests.everyday import parametrize

from .layer_case import FEW, FITTED, LayerCase

SHAPE = MoEShape(
    num_ranks=1,
    num_experts=4,
    num_topk=2,
    hidden=512,
    intermediate_hidden=384,
    num_max_tokens_per_rank=50,
)


@pytest.fixture(scope="module")
def cases() -> dict[str, LayerCase]:
    return {
        arch: LayerCase(SHAPE, random_layer(SHAPE), arch=arch) for arch in ("sm_90a", "sm_100a")
    }


@pytest.fixture(params=["sm_90a", "sm_100a"])
def case(request: pytest.FixtureRequest, cases: dict[str, LayerCase]) -> LayerCase:
    return cases[request.param]


@pytest.fixture
def sm90_case(cases: dict[str, LayerCase]) -> LayerCase:
    return cases["sm_90a"]


def with_routing(x: torch.Tensor, sf: torch.Tensor, seed: int) -> Tokens:
    routing = random_tokens(SHAPE, x.shape[0], seed=seed)
    return Tokens(x, sf, routing.topk_idx, routing.topk_weights)


def random_values(num_tokens: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, SHAPE.hidden, generator=generator)


@pytest.mark.parametrize("fast_math", [True, False])
@parametrize("activation_clamp", [None, 0.3, 10.0], everyday=[0.3])
def test_random_layer_is_right(
    case: LayerCase, activation_clamp: float | None, fast_math: bool
) -> None:
    tokens = random_tokens(SHAPE, 50, seed=3)
    (result,) = case.compare_call([tokens], activation_clamp=activation_clamp, fast_math=fast_math)
    assert result.is_right, result


@pytest.mark.parametrize("tile", [{"block_m": 8}, {"block_m": 32}, {"block_m": 128}, FITTED])
def test_random_layer_is_right_with_every_kind_of_tile(
    sm90_case: LayerCase, tile: dict[str, int]
) -> None:
    tokens = random_tokens(SHAPE, 50, seed=2)
    (result,) = sm90_case.compare_call([tokens], overrides=tile)
    assert result.is_right, result


def test_hopper_sums_stay_within_their_bounds(sm90_case: LayerCase) -> None:
    tokens = random_tokens(SHAPE, 50, seed=1)
    (result,) = sm90_case.compare_call([tokens], hopper_fp8_sums=True)
    assert result.is_right, result
    assert not result.is_exact


def test_clamp_is_applied(case: LayerCase) -> None:
    tokens = random_tokens(SHAPE, FEW, seed=2)
    (free,) = case.call([tokens])
    (clamped,) = case.call([tokens], activation_clamp=0.3)
    assert not torch.equal(free, clamped)


@pytest.mark.parametrize("exponent", [-120, -60, 40])
def test_tokens_of_any_size(case: LayerCase, exponent: int) -> None:
    """Maxima so small that their reciprocal would overflow, and ones far above E4M3's range."""
    x, _ = quantize_e4m3_ue8m0(random_values(FEW, seed=3))
    sf = torch.full((FEW, SHAPE.hidden // 32), 127 + exponent, dtype=torch.uint8)
    (result,) = case.compare_call([with_routing(x, pack_ue8m0(sf), seed=3)])
    assert result.is_right, result


def test_groups_that_lose_bits_to_the_largest(sm90_case: LayerCase) -> None:
    """Values of some groups become subnormal, round to even, or vanish."""
    values = random_values(FEW, seed=8)
    spread = torch.randint(-16, 1, (FEW, SHAPE.hidden // 32), generator=torch.Generator())
    values *= torch.exp2(spread.float()).repeat_interleave(32, dim=1)
    (result,) = sm90_case.compare_call([with_routing(*quantize_e4m3_ue8m0(values), seed=8)])
    assert result.is_right, result


@pytest.mark.parametrize("tile", [{"block_m": 40}, {"block_m": 128}, FITTED])
def test_blocks_of_linear2_with_very_different_scales(tile: dict[str, int]) -> None:
    """Sums are rescaled on the way from block to block, up and down."""
    generator = torch.Generator().manual_seed(9)
    l1 = torch.randn(4, 2 * 384, 512, generator=generator) * 512**-0.5
    sizes = torch.tensor([2.0**-9, 2.0**11, 2.0**-3]).repeat_interleave(128)
    l1[:, 384:] *= sizes.unsqueeze(1)
    l2 = torch.randn(4, 512, 384, generator=generator) * 384**-0.5 / sizes
    layer = Layer(LayerWeights(*quantize_e2m1_ue8m0(l1)), LayerWeights(*quantize_e2m1_ue8m0(l2)))
    case = LayerCase(SHAPE, layer, arch="sm_90a")
    (result,) = case.compare_call([random_tokens(SHAPE, 50, seed=9)], overrides=tile)
    assert result.is_right, result


def test_zero_tokens_give_zero(case: LayerCase) -> None:
    x, sf = quantize_e4m3_ue8m0(torch.zeros(FEW, SHAPE.hidden))
    (y,) = case.call([with_routing(x, sf, seed=4)])
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("activation_clamp", [None, 0.3])
@pytest.mark.parametrize("in_scale", [False, True], ids=["value", "scale"])
def test_nan_stays_in_its_token(
    case: LayerCase, activation_clamp: float | None, in_scale: bool
) -> None:
    tokens = random_tokens(SHAPE, FEW, seed=5)
    (clean,) = case.call([tokens], activation_clamp=activation_clamp)
    poisoned = Tokens(tokens.x.clone(), tokens.x_sf.clone(), tokens.topk_idx, tokens.topk_weights)
    if in_scale:
        poisoned.x_sf.view(torch.uint8)[7, 5] = 0xFF
    else:
        poisoned.x.view(torch.uint8)[7, 100] = 0x7F
    (y,) = case.call([poisoned], activation_clamp=activation_clamp)
    assert y[7].isnan().all()
    others = torch.arange(FEW) != 7
    assert torch.equal(y[others], clean[others])


def test_nan_left_in_padding_rows_spoils_nothing(case: LayerCase) -> None:
    """A second call with fewer tokens finds NaN of the first one behind its valid rows."""
    poisoned = random_tokens(SHAPE, 50, seed=6)
    poisoned.x.view(torch.uint8)[:, :] = 0x7F
    case.call([poisoned])
    (result,) = case.compare_call([random_tokens(SHAPE, 21, seed=7)])
    assert result.is_right, result
