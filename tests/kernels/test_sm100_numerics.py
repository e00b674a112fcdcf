"""The SM100 kernel in the emulator on random layers and on awkward values."""

from __future__ import annotations

import pytest
import torch

from deep_moe.formats.block_scaled import pack_ue8m0, quantize_e4m3_ue8m0
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Tokens, random_layer, random_tokens
from tests.everyday import parametrize

from .layer_case import LayerCase

SHAPE = MoEShape(
    num_ranks=1,
    num_experts=4,
    num_topk=2,
    hidden=512,
    intermediate_hidden=256,
    num_max_tokens_per_rank=50,
)


@pytest.fixture(scope="module")
def case() -> LayerCase:
    return LayerCase(SHAPE, random_layer(SHAPE))


@pytest.mark.parametrize("fast_math", [True, False])
@parametrize("activation_clamp", [None, 0.3, 10.0], everyday=[0.3])
def test_random_layer_is_right(
    case: LayerCase, activation_clamp: float | None, fast_math: bool
) -> None:
    tokens = random_tokens(SHAPE, 50, seed=1)
    (result,) = case.compare_call([tokens], activation_clamp=activation_clamp, fast_math=fast_math)
    assert result.is_right, result


def test_clamp_is_applied(case: LayerCase) -> None:
    tokens = random_tokens(SHAPE, 20, seed=2)
    (free,) = case.call([tokens])
    (clamped,) = case.call([tokens], activation_clamp=0.3)
    assert not torch.equal(free, clamped)


@pytest.mark.parametrize("exponent", [-120, -60, 40])
def test_tokens_of_any_size(case: LayerCase, exponent: int) -> None:
    """Maxima so small that their reciprocal would overflow, and ones far above E4M3's range."""
    x, _ = quantize_e4m3_ue8m0(random_values(17, seed=3))
    sf = torch.full((17, SHAPE.hidden // 32), 127 + exponent, dtype=torch.uint8)
    routing = random_tokens(SHAPE, 17, seed=3)
    tokens = Tokens(x, pack_ue8m0(sf), routing.topk_idx, routing.topk_weights)
    (result,) = case.compare_call([tokens])
    assert result.is_right, result


def test_zero_tokens_give_zero(case: LayerCase) -> None:
    routing = random_tokens(SHAPE, 9, seed=4)
    x, sf = quantize_e4m3_ue8m0(torch.zeros(9, SHAPE.hidden))
    (y,) = case.call([Tokens(x, sf, routing.topk_idx, routing.topk_weights)])
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("activation_clamp", [None, 10.0])
def test_nan_stays_in_its_token(case: LayerCase, activation_clamp: float | None) -> None:
    tokens = random_tokens(SHAPE, 30, seed=5)
    (clean,) = case.call([tokens], activation_clamp=activation_clamp)
    poisoned = Tokens(tokens.x.clone(), tokens.x_sf, tokens.topk_idx, tokens.topk_weights)
    poisoned.x.view(torch.uint8)[7, 100] = 0x7F
    (y,) = case.call([poisoned], activation_clamp=activation_clamp)
    assert y[7].isnan().all()
    others = torch.arange(30) != 7
    assert torch.equal(y[others], clean[others])


def test_nan_left_in_padding_rows_spoils_nothing(case: LayerCase) -> None:
    """A second call with fewer tokens finds NaN of the first one behind its valid rows."""
    poisoned = random_tokens(SHAPE, 50, seed=6)
    poisoned.x.view(torch.uint8)[:, :] = 0x7F
    case.call([poisoned])
    tokens = random_tokens(SHAPE, 21, seed=7)
    (result,) = case.compare_call([tokens])
    assert result.is_right, result


def random_values(num_tokens: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, SHAPE.hidden, generator=generator)
