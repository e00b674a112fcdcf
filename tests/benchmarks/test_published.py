"""What a result is compared with: the best peer at its size, and what is asked there."""

import json

import pytest

from benchmarks import published
from benchmarks.mega_moe import TOKENS
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
        "best_peer": "FlashInfer pull, published",
        "best_peer_us": 1686,
        "times_slower": 1.686,
    }
    assert words(comparison) == "best peer 1686.0 us (1.69x)"
    assert compared(result(8192, 6935.0), GPU)["best_peer"] == "FlashInfer pull, published"


def test_a_faster_peer_of_the_same_run_counts():
    comparison = compared(result(512, 1000.0, peer={"us": 1500.0}), GPU)
    assert (comparison["best_peer"], comparison["times_slower"]) == (published.PEER_HERE, 1.5)
    slower = compared(result(512, 1000.0, peer={"us": 1700.0}), GPU)
    assert slower["best_peer_us"] == 1686


def test_what_is_asked_follows_from_the_peer_of_the_same_run():
    """Also of a model with other sizes than published, if it is asked of that one."""
    two = {"num_ranks": 2, "tokens_of_ranks": [512] * 2, "layer": PRO | {"num_experts": 192}}
    here = result(512, 900.0, model="deepseek-v4-pro, experts 192", peer={"us": 1665.0}, **two)
    comparison = compared(here, GPU)
    assert (comparison["asked_times"], comparison["goal_us"]) == (1.85, pytest.approx(900.0))
    assert words(comparison) == "best peer 1665.0 us (1.85x of 1.85x)  goal 900 us (+0%)"
    assert compared({**here, "routing": "zipf"}, GPU) is None
    assert (
        compared({**here, "peer": {"us": 1665.0}, "model": "deepseek-v4-pro, topk 8"}, GPU) is None
    )


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
    assert compared(old, GPU)["best_peer_us"] == 760


def test_the_file_is_whole():
    for model in ("deepseek-v4-flash", "deepseek-v4-pro"):
        for curve in figures(model, GPU, 4):
            assert curve.source
            assert curve.formats
            assert all(us > 0 for us in curve.us.values())
            assert list(curve.us) == sorted(curve.us)
    for model in ("deepseek-v4-pro, experts 192", "deepseek-v4-flash, experts 128"):
        goal = asked(model, GPU, 2)
        assert goal is not None
        assert all(goal.times_at(num_tokens) > 1 for num_tokens in TOKENS)
    json.loads(FILE.read_text())
