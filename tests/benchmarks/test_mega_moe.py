"""The benchmark script: its options, and a run of it on two emulated ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.mega_moe import line, parse_arguments, run_rank, summary, tokens_of_ranks
from benchmarks.problem import CallCosts, MachineRates
from deep_moe.trial.rank_processes import run_on_ranks

SMALL = ["--experts", "8", "--topk", "3", "--hidden", "256", "--intermediate", "256"]


def test_shares_are_given_out_in_turn():
    assert tokens_of_ranks(64, [1.0], 3) == [64, 64, 64]
    assert tokens_of_ranks(64, [2, 0, 0.5], 5) == [128, 0, 32, 128, 0]
    assert tokens_of_ranks(1, [0.4], 1) == [0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calls", "0"], "--calls and --rounds must be at least 1"),
        (["--rounds", "0"], "--calls and --rounds must be at least 1"),
        (["--tokens", "0"], "--tokens must be positive"),
        (["--shares", "0", "0"], "--shares not negative and not all 0"),
        (["--shares", "1", "-1"], "--shares not negative and not all 0"),
        (["--routing", "random"], "invalid choice"),
        (
            ["--shared-experts", "1", "--peer"],
            "--unfused and --peer time layers without them",
        ),
    ],
)
def test_impossible_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in capsys.readouterr().err


def test_a_summary_is_of_the_slowest_rank():
    costs = CallCosts(flops=2e9, busiest_flops=4e9, weight_bytes=1e6, link_bytes=0)
    fast, slow = [1e-4] * 20, [1e-4 * (10 + i) for i in range(20)]
    rates = MachineRates(weight_bytes_per_s=1e9, flops=8e12)
    found = summary([fast, slow, fast], costs, rates)
    assert found["slowest_rank"] == 1
    assert found["us"] == pytest.approx(1950)
    assert (found["us_p10"], found["us_p90"]) == pytest.approx((1200, 2700))
    assert found["tflops"] == pytest.approx(2e9 / 1.95e-3 / 1e12)
    assert found["weight_tb_per_s"] == pytest.approx(1e6 / 1.95e-3 / 1e12)
    # Reading takes a millisecond, the busiest rank's products half of one.
    assert (found["floor_us"], found["floor_share"]) == pytest.approx((1000, 1000 / 1950))
    assert summary([[1e-3]], costs, rates)["us_p90"] == pytest.approx(1000)


def test_a_line_names_what_was_measured():
    times = {"us": 100.0, "us_p10": 99.0, "us_p90": 107.0, "tflops": 900.0}
    times |= {"weight_tb_per_s": 3.5, "floor_share": 0.75}
    text = line(
        {
            "model": "deepseek-v3",
            "tokens_per_rank": 8,
            "config": {"block_m": 16},
            **times,
            "peer": {"us": 250.0, "times_slower": 2.5},
            "published": {
                "best_peer_us": 200.0,
                "times_slower": 2.0,
                "asked_times": 1.5,
                "goal_us": 125.0,
            },
        }
    )
    assert "100.0 us (99.0 to 107.0)" in text
    assert "75% of floor" in text
    assert "peer 250.0 us (2.50x)" in text
    assert text.endswith("best peer 200.0 us (2.00x of 1.5x)  goal 125 us (-20%)")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["mxfp4", "fp8"])
def test_a_run_checks_and_times_every_path(tmp_path: Path, weights: str):
    """Skewed routing, and a rank without tokens."""
    words = ["--weights", weights, "--pool-tokens", "384"]
    words += ["--model", "deepseek-v3", *SMALL, "--tokens", "4", "24", "--routing", "zipf"]
    words += ["--shares", "0", "1", "--unfused", "--override", "block_m=32", "--commit", "abc"]
    words += ["--calls", "2", "--rounds", "2", "--warmup", "0"]
    arguments = parse_arguments([*words, "--json", str(tmp_path / "out.json")])
    run_on_ranks(run_rank, 2, "cpu", arguments)
    report = json.loads((tmp_path / "out.json").read_text())
    named = {"mxfp4": "", "fp8": ", weights fp8"}
    assert report["machine"]["commit"] == "abc"
    assert report["peer"] is None
    assert [result["tokens_per_rank"] for result in report["results"]] == arguments.tokens
    for result in report["results"]:
        num_tokens = result["tokens_per_rank"]
        assert result["model"].startswith("deepseek-v3, experts 8, topk 3, hidden 256, ")
        assert result["model"].endswith(f"pool tokens 384{named[weights]}")
        assert result["layer"]["num_topk"] == 3
        assert result["tokens_of_ranks"] == [0, num_tokens]
        assert result["cosine_distance"] < 1e-5
        assert result["unfused"]["cosine_distance"] < 0.005
        assert len(result["us_of_ranks"]) == 2
        assert "published" not in result
        assert result["config"]["block_m"] == 32
        assert result["tuning"] == "formula: no device is named"
