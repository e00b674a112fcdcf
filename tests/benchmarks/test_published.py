"""What a result is compared with: the best peer at its size, and what is asked there."""

import json

import pytest

from benchmarks import published
from benchmarks.published import FILE, asked, compared, figures, is_standard, words
from deep_moe.heuristics import PRESETS

GPU = "NVIDIA H200"
PRO = dict(
    zip(
        ("num_experts", "num_topk", "hidden", "intermediate_hidden"),
        PRESETS["deepseek-v4-pro"],
        strict=True,
    )
)


def result(num_tokens: int, us: float, **changes) -> dict:
    return {
        "model": "deepseek-v4-pro",
        "layer": PRO,
        "num_ranks": 4,
        "tokens_per_rank": num_tokens,
        "tokens_of_ranks": [num_tokens] * 4,
        "routing": "uniform",
        "us": us,
        **changes,
    }


def test_the_best_published_figure_at_the_size_counts():
    comparison = compared(result(512, 1000.0), GPU)
    assert comparison == {
        "best_peer": "sgl-deep-gemm 0.1.4, earlier run",
        "best_peer_us": 1673,
        "times_slower": 1.673,
        "asked_times": 1.8,
        "goal_us": 920,
    }
    assert words(comparison) == "best peer 1673.0 us (1.67x of 1.8x)  goal 920 us (+9%)"
    assert compared(result(8192, 6935.0), GPU)["best_peer"] == "FlashInfer pull, published"


def test_a_faster_peer_of_the_same_run_counts():
    comparison = compared(result(512, 1000.0, peer={"us": 1500.0}), GPU)
    assert (comparison["best_peer"], comparison["times_slower"]) == (published.PEER_HERE, 1.5)
    slower = compared(result(512, 1000.0, peer={"us": 1700.0}), GPU)
    assert slower["best_peer_us"] == 1673


def test_where_no_goal_is_said_it_follows_from_the_best_peer():
    assert compared(result(64, 800.0), GPU)["goal_us"] == pytest.approx(1495 / 1.8)


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": "zipf"},
        {"tokens_of_ranks": [512, 512, 512, 0]},
        {"layer": PRO | {"num_topk": 8}},
        {"model": "deepseek-v4-pro, topk 8"},
        {"num_ranks": 2},
        {"tokens_per_rank": 100, "tokens_of_ranks": [100] * 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_problems_are_not_compared(changes):
    assert compared(result(512, 1000.0, **changes), GPU) is None


def test_another_gpu_has_its_own_figures():
    assert compared(result(512, 1000.0), "NVIDIA H100 NVL") is None
    eight = result(128, 1000.0, num_ranks=8, tokens_of_ranks=[128] * 8)
    assert words(compared(eight, "NVIDIA H20")) == "best peer 1190.0 us (1.19x)"


def test_results_before_there_were_options_are_of_the_plain_model():
    old = {"model": "deepseek-v4-pro", "num_ranks": 4, "tokens_per_rank": 8, "us": 372.0}
    assert is_standard(old)
    assert compared(old, GPU)["goal_us"] == 410


def test_the_file_is_whole():
    for model in ("deepseek-v4-flash", "deepseek-v4-pro"):
        for curve in figures(model, GPU, 4):
            assert curve.source
            assert curve.formats
            assert all(us > 0 for us in curve.us.values())
            assert list(curve.us) == sorted(curve.us)
    goal = asked(GPU, 4)
    assert goal is not None
    for model, goals in goal.us.items():
        for num_tokens, us in goals.items():
            best = min(c.us.get(num_tokens, 1e9) for c in figures(model, GPU, 4))
            # At least as hard as the factor asks, up to the rounding of the goals.
            assert us <= 1.02 * best / goal.times_at(num_tokens)
    json.loads(FILE.read_text())
