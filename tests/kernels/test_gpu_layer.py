"""The kernel on a GPU of any architecture: exact layers bit for bit, random ones as near as its
sums allow, graphs, awkward values, and a control part that every call leaves as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.formats.block_scaled import pack_ue8m0
from deep_moe.heuristics import MoEShape, sm90_tiles, sm100
from deep_moe.targets import target_of_device
from deep_moe.trial.calls import fill_inputs
from deep_moe.trial.synthetic import Tokens, exact_tokens, random_tokens
from tests.layer.rank_layer import RankLayer, this_gpu

pytestmark = pytest.mark.gpu


def one_rank(num_tokens: int, **sizes: int) -> MoEShape:
    defaults: dict[str, Any] = {"num_experts": 8, "num_topk": 2}
    defaults |= {"hidden": 512, "intermediate_hidden": 384}
    return MoEShape(num_ranks=1, num_max_tokens_per_rank=num_tokens, **{**defaults, **sizes})


# As overrides.
TILES: dict[str, list[dict[str, int]]] = {
    "sm_90a": [{"block_m": block_m, "block_m_step": step} for block_m, step in sm90_tiles.TILES],
    "sm_100a": [{"block_m": tile.block_m} for tile in sm100.TILES],
}


def test_every_tile() -> None:
    tiles = TILES[target_of_device(torch.device("cuda")).name]
    shape = one_rank(3 * max(tile["block_m"] for tile in tiles))
    case = RankLayer(this_gpu(), shape, exact=True)
    for tile in tiles:
        block_m = tile["block_m"]
        for num_tokens in (1, block_m, 2 * block_m + 3, 3 * block_m):
            tokens = exact_tokens(shape, num_tokens, seed=num_tokens)
            result = case.compare_call(tokens, overrides=tile)
            assert result.is_exact, (tile, num_tokens, result)


@pytest.mark.parametrize(
    ("hidden", "intermediate_hidden"), [(128, 128), (384, 128), (640, 384), (7168, 2048)]
)
def test_sizes(hidden: int, intermediate_hidden: int) -> None:
    shape = one_rank(200, hidden=hidden, intermediate_hidden=intermediate_hidden, num_experts=4)
    case = RankLayer(this_gpu(), shape, exact=True)
    for num_tokens in (0, 7, 200):
        result = case.compare_call(exact_tokens(shape, num_tokens, seed=num_tokens))
        assert result.is_exact, (num_tokens, result)


@pytest.mark.parametrize("num_unused_slots", [0, 1, 3, 4])
def test_unused_slots(num_unused_slots: int) -> None:
    shape = one_rank(100, num_topk=4)
    case = RankLayer(this_gpu(), shape, exact=True)
    tokens = exact_tokens(shape, 100, seed=1, num_unused_slots=num_unused_slots)
    result = case.compare_call(tokens)
    assert result.is_exact, result


def test_all_tokens_to_one_expert() -> None:
    shape = one_rank(1000)
    case = RankLayer(this_gpu(), shape, exact=True)
    tokens = exact_tokens(shape, 1000, seed=1)
    tokens.topk_idx[:, 0], tokens.topk_idx[:, 1] = 3, -1
    result = case.compare_call(tokens)
    assert result.is_exact, result


@pytest.mark.parametrize("num_sms", [2, 30])
def test_fewer_ctas(num_sms: int) -> None:
    shape = one_rank(150)
    case = RankLayer(this_gpu(), shape, exact=True)
    result = case.compare_call(exact_tokens(shape, 150, seed=2), num_sms=num_sms)
    assert result.is_exact, result


def test_a_thousand_calls_without_a_pause_give_the_same_bits() -> None:
    """And leave the control part as a new buffer has it, but for the barriers' phases."""
    shape = one_rank(64)
    case = RankLayer(this_gpu(), shape, exact=True)
    tokens = exact_tokens(shape, 64, seed=3)
    expected = case.expected(tokens)
    fill_inputs(case.buffer, tokens)
    ys = [torch.full_like(expected, torch.nan) for _ in range(50)]
    for _ in range(20):
        for y in ys:
            case.launch(y)
    torch.cuda.synchronize()
    case.buffer.raise_if_failed()
    assert all(torch.equal(y, expected) for y in ys)
    layout = case.buffer.layout
    words = case.buffer.memory.tensor[layout.mark("zeroed_begin") : layout.mark("zeroed_end")]
    assert not words.any()


def test_receive_statistics_accumulate() -> None:
    shape = one_rank(77)
    case = RankLayer(this_gpu(), shape, exact=True)
    stats = torch.zeros(shape.num_experts, dtype=torch.int32, device="cuda")
    tokens = exact_tokens(shape, 77, seed=4, num_unused_slots=1)
    for _ in range(3):
        case.call(tokens, cumulative_local_expert_recv_stats=stats)
    named = tokens.topk_idx[tokens.topk_idx >= 0]
    counts = torch.bincount(named, minlength=shape.num_experts).int()
    assert torch.equal(stats.cpu(), 3 * counts)


def test_a_graph_replays_with_other_tokens_and_routings() -> None:
    shape = one_rank(96)
    case = RankLayer(this_gpu(), shape, exact=True)
    y = torch.empty(96, shape.hidden, dtype=torch.bfloat16, device="cuda")
    case.launch(y)  # compiled and loaded outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.launch(y)
    for seed in range(4):
        tokens = exact_tokens(shape, 96, seed=seed, num_unused_slots=seed % 2)
        fill_inputs(case.buffer, tokens)
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        case.buffer.raise_if_failed()
        assert torch.equal(y, case.expected(tokens)), seed


RANDOM_SHAPE = MoEShape(
    num_ranks=1,
    num_experts=16,
    num_topk=4,
    hidden=2048,
    intermediate_hidden=1024,
    num_max_tokens_per_rank=600,
)


@pytest.fixture(scope="module")
def random_case() -> RankLayer:
    return RankLayer(this_gpu(), RANDOM_SHAPE, exact=False)


@pytest.mark.parametrize("num_tokens", [1, 16, 130, 600])
@pytest.mark.parametrize(("activation_clamp", "fast_math"), [(None, True), (10.0, False)])
def test_random_layer(
    random_case: RankLayer, num_tokens: int, activation_clamp: float | None, fast_math: bool
) -> None:
    tokens = random_tokens(RANDOM_SHAPE, num_tokens, seed=num_tokens)
    result = random_case.compare_call(
        tokens, activation_clamp=activation_clamp, fast_math=fast_math
    )
    assert result.is_right, result


def test_repeated_random_calls_give_the_same_bits(random_case: RankLayer) -> None:
    tokens = random_tokens(RANDOM_SHAPE, 300, seed=9)
    first = random_case.call(tokens)
    for _ in range(20):
        assert torch.equal(random_case.call(tokens).view(torch.int16), first.view(torch.int16))


def test_groups_of_a_token_with_different_scales(random_case: RankLayer) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = random_tokens(RANDOM_SHAPE, 100, seed=5)
    sf = torch.randint(105, 128, (100, RANDOM_SHAPE.hidden // 32), generator=generator)
    spread = Tokens(tokens.x, pack_ue8m0(sf.to(torch.uint8)), tokens.topk_idx, tokens.topk_weights)
    result = random_case.compare_call(spread)
    assert result.is_right, result


def test_nan_stays_in_its_token(random_case: RankLayer) -> None:
    tokens = random_tokens(RANDOM_SHAPE, 60, seed=6)
    clean = random_case.call(tokens)
    poisoned = Tokens(tokens.x.clone(), tokens.x_sf, tokens.topk_idx, tokens.topk_weights)
    poisoned.x.view(torch.uint8)[7, 100] = 0x7F
    y = random_case.call(poisoned)
    others = torch.arange(60) != 7
    assert y[7].isnan().all()
    assert torch.equal(y[others.cuda()], clean[others.cuda()])


def test_nan_left_in_padding_rows_spoils_nothing(random_case: RankLayer) -> None:
    poisoned = random_tokens(RANDOM_SHAPE, 600, seed=7)
    poisoned.x.view(torch.uint8)[:, :] = 0x7F
    random_case.call(poisoned)
    result = random_case.compare_call(random_tokens(RANDOM_SHAPE, 33, seed=8))
    assert result.is_right, result
