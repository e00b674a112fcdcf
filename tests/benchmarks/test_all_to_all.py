"""The benchmark of the all-to-all: its options, what it counts, and a run on two emulated ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.all_to_all
from benchmarks.all_to_all import add_models, line, parse_arguments, run_rank
from deep_moe.trial.rank_processes import run_on_ranks
from tests.everyday import parametrize

SMALL = ["--hidden", "128", "--topk", "2", "--experts", "4", "--sms", "2"]
BRIEF = ["--calls", "2", "--rounds", "1", "--warmup", "0", "--commit", "abc"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calls", "0"], "--tokens, --calls, --rounds and --pairs must be at least 1"),
        (["--tokens", "0"], "--tokens, --calls, --rounds and --pairs must be at least 1"),
        (["--link-share", "0"], "--link-share must be in (0, 1]; got 0"),
        (["--token-format", "fp4"], "invalid choice"),
    ],
)
def test_impossible_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in capsys.readouterr().err


def test_the_model_is_of_one_token_and_the_links() -> None:
    def result(us: float, num_bytes: int) -> dict[str, object]:
        return {"us": us, "us_p10": us, "us_p90": us, "link_bytes": num_bytes, "library_us": 50.0}

    results = [
        {"tokens_per_rank": n, "dispatch": result(us, 1000 * n), "combine": result(us, 2000 * n)}
        for n, us in ((1, 10.0), (101, 11.0))
    ]
    report = {"rates": {"link_bytes_per_s": 2e11}, "results": results}
    add_models(report, 0.5)
    assert results[0]["dispatch"]["model_us"] == 10.0
    assert results[1]["dispatch"]["model_us"] == pytest.approx(10 + 1e5 / 1e11 * 1e6)
    assert results[1]["combine"]["model_us"] == pytest.approx(10 + 2e5 / 1e11 * 1e6)
    assert "dispatch   11.0 us (11.0 to 11.0; 0.10 MB; model 11.0; library 50.0)" in line(
        results[1]
    )


@parametrize(
    "options",
    [
        [],
        ["--zero-copy", "--token-format", "bf16"],
        ["--path", "throughput"],
        ["--path", "throughput", "--zero-copy", "--token-format", "bf16"],
    ],
    everyday=[["--path", "throughput"]],
)
def test_a_run_checks_and_times_every_step(tmp_path: Path, options: list[str]) -> None:
    words = [*SMALL, *BRIEF, *options, "--tokens", "1", "3", "--json", str(tmp_path / "out.json")]
    run_on_ranks(run_rank, 2, "cpu", parse_arguments(words))
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["machine"]["commit"] == "abc"
    assert report["num_ranks"] == 2
    assert [result["tokens_per_rank"] for result in report["results"]] == [1, 3]
    for result in report["results"]:
        assert 0 <= result["relative_error"] < 0.05
        for step in ("dispatch", "combine"):
            found = result[step]
            assert min(found["us"], found["library_us"], found["model_us"]) > 0
            assert len(found["us_of_ranks"]) == 2
            row_bytes = 256 if "bf16" in options or step == "combine" else 132
            assert found["link_bytes"] % row_bytes == 0


def test_a_wrong_result_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = deep_moe_layer()
    routes = benchmarks.all_to_all.Routes.drawn(layer.shape, 3, 0, 0)
    steps = benchmarks.all_to_all.LowLatencySteps(layer, routes, False)
    assert steps.check() < 0.01
    wrong = torch.zeros_like(steps.out)
    monkeypatch.setattr(layer, "combine", lambda *_, **__: steps.out.copy_(wrong))
    with pytest.raises(RuntimeError, match=r"combined tokens are off by 1\.0 of the largest value"):
        steps.check()
    layer.close()


def deep_moe_layer() -> benchmarks.all_to_all.LowLatencyAllToAll:
    return benchmarks.all_to_all.LowLatencyAllToAll(
        None, 4, 128, 4, 2, token_format="bf16", device="cpu", num_sms=2
    )
