"""The family on a GPU: every format of weights and every activation, with a pool that holds a call
and with the smallest one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from deep_moe.activations import ACTIVATIONS, has_gate
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of, target_of_device
from deep_moe.trial.synthetic import exact_tokens, random_tokens
from deep_moe.weights import WEIGHTS
from tests.layer.rank_layer import RankLayer, this_gpu

if TYPE_CHECKING:
    from deep_moe.weights import WeightsName

pytestmark = pytest.mark.gpu

SMALLEST_POOL = 384
POOLS = [None, SMALLEST_POOL]


def one_rank(
    weights: WeightsName, num_tokens: int, num_pool_tokens: int | None, **more: Any
) -> MoEShape:
    target = target_of_device(this_gpu().device)
    if weights not in {own.weights for own in target.weights}:
        pytest.skip(f"there is no kernel for {weights} weights on {target.name}")
    more.setdefault("token_format", target.default_tokens(weights))
    return MoEShape(
        *(1, 8, 4, 1024, 512, num_tokens),
        num_pool_tokens=num_pool_tokens,
        weights=weights,
        **more,
    )


@pytest.mark.parametrize("num_pool_tokens", POOLS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_tile(weights: WeightsName, num_pool_tokens: int | None) -> None:
    """Exact layers, bit for bit, with the tile that fits each number of tokens; two calls each."""
    shape = one_rank(weights, 1100, num_pool_tokens)
    case = RankLayer(this_gpu(), shape, exact=True)
    for num_tokens in (0, 1, 7, 30, 90, 150, 250, 400, 1100):
        for seed in (0, 1):
            tokens = exact_tokens(shape, num_tokens, seed=seed, num_unused_slots=seed)
            result = case.compare_call(tokens)
            assert result.is_exact, (num_tokens, seed, result)


@pytest.mark.parametrize("num_pool_tokens", [None, 3 * SMALLEST_POOL])
@pytest.mark.parametrize("num_shared_experts", [1, 3])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_shared_experts(
    weights: WeightsName, num_shared_experts: int, num_pool_tokens: int | None
) -> None:
    shape = one_rank(weights, 600, num_pool_tokens, num_shared_experts=num_shared_experts)
    case = RankLayer(this_gpu(), shape, exact=True)
    for num_tokens in (0, 1, 40, 200, 600, 600):
        tokens = exact_tokens(shape, num_tokens, seed=num_tokens, num_unused_slots=1)
        result = case.compare_call(tokens)
        assert result.is_exact, (num_tokens, result)


@pytest.mark.parametrize("num_pool_tokens", POOLS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_biases(weights: WeightsName, num_pool_tokens: int | None) -> None:
    shape = one_rank(weights, 600, num_pool_tokens, biases=True)
    case = RankLayer(this_gpu(), shape, exact=True)
    for num_tokens in (0, 1, 40, 200, 600, 600):
        tokens = exact_tokens(shape, num_tokens, seed=num_tokens, num_unused_slots=1)
        result = case.compare_call(tokens)
        assert result.is_exact, (num_tokens, result)


@pytest.mark.parametrize("num_pool_tokens", POOLS)
@pytest.mark.parametrize("biases", [False, True])
def test_float_scales_of_tokens(biases: bool, num_pool_tokens: int | None) -> None:
    """With the tiles of one and of two sets of products; then scales that are no powers of two."""
    if "fp8_128" not in target_of(this_gpu().arch).token_formats("fp8"):
        pytest.skip("the kernel for this GPU takes no such scales")
    shape = one_rank("fp8", 1100, num_pool_tokens, biases=biases, token_format="fp8_128")
    case = RankLayer(this_gpu(), shape, exact=True)
    for num_tokens in (0, 1, 7, 30, 90, 150, 250, 400, 1100):
        tokens = exact_tokens(shape, num_tokens, seed=num_tokens, num_unused_slots=1)
        result = case.compare_call(tokens)
        assert result.is_exact, (num_tokens, result)
    case = RankLayer(this_gpu(), shape, exact=False)
    result = case.compare_call(random_tokens(shape, 300, seed=1))
    assert result.is_right, result


@pytest.mark.parametrize("hidden", [1056, 1120])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_sizes_off_128(weights: WeightsName, hidden: int) -> None:
    shape = replace(
        one_rank(weights, 300, None, biases=True), hidden=hidden, intermediate_hidden=544
    )
    case = RankLayer(this_gpu(), shape, exact=True)
    for num_tokens in (0, 1, 300):
        result = case.compare_call(exact_tokens(shape, num_tokens, seed=num_tokens))
        assert result.is_exact, (num_tokens, result)


@pytest.mark.parametrize("num_pool_tokens", POOLS)
@pytest.mark.parametrize("sizes", [(1024, 512), (768, 384)], ids=["even", "odd"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_sm90_clusters(
    weights: WeightsName, sizes: tuple[int, int], num_pool_tokens: int | None
) -> None:
    """Two CTAs that share weights; even and odd numbers of n-blocks; all tiles."""
    if target_of_device(this_gpu().device).kernel != "sm90":
        pytest.skip("clusters of SM100 are of another kind")
    hidden, intermediate_hidden = sizes
    shape = replace(
        one_rank(weights, 900, num_pool_tokens),
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
    )
    case = RankLayer(this_gpu(), shape, exact=True)
    for num_tokens in (0, 1, 30, 150, 250, 900):
        for seed in (0, 1):
            tokens = exact_tokens(shape, num_tokens, seed=seed, num_unused_slots=seed)
            result = case.compare_call(tokens, overrides={"cluster_size": 2})
            assert result.is_exact, (num_tokens, seed, result)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_all_tokens_to_one_expert(weights: WeightsName) -> None:
    shape = one_rank(weights, 700, SMALLEST_POOL)
    case = RankLayer(this_gpu(), shape, exact=True)
    tokens = exact_tokens(shape, 700, seed=1)
    tokens.topk_idx[:, 0], tokens.topk_idx[:, 1:] = 3, -1
    result = case.compare_call(tokens)
    assert result.is_exact, result


@pytest.mark.parametrize("num_pool_tokens", POOLS)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("weights", WEIGHTS)
def test_activations(weights: WeightsName, activation: str, num_pool_tokens: int | None) -> None:
    shape = one_rank(weights, 300, num_pool_tokens, has_gate=has_gate(activation))
    case = RankLayer(this_gpu(), shape, exact=False)
    for num_tokens in (5, 300):
        tokens = random_tokens(shape, num_tokens, seed=num_tokens)
        result = case.compare_call(tokens, activation=activation)
        assert result.is_right, (num_tokens, result)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_thousand_calls_in_the_smallest_pool(weights: WeightsName) -> None:
    shape = one_rank(weights, 500, SMALLEST_POOL)
    case = RankLayer(this_gpu(), shape, exact=True)
    tokens = exact_tokens(shape, 500, seed=3)
    y = case.call(tokens)
    for _ in range(1000):
        case.launch(y)
    case.finish()
    assert case.compare(y, tokens).is_exact
