"""The benchmark of engines' kernels: its options, its tables, and a run of it, emulated, beside
engines that are none. tests/serving has it make vLLM's layer."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engines import (
    engine_paths,
    exact_sample,
    markdown,
    model_tokens,
    parse_arguments,
    run_rank,
    show,
)
from benchmarks.vllm_layer import BACKENDS, AbsentError, require
from deep_moe.trial.rank_processes import run_on_ranks

SMALL = [
    "--experts",
    "4",
    "--topk",
    "2",
    "--hidden",
    "256",
    "--intermediate",
    "128",
    "--model",
    "deepseek-v4-flash",
]
BRIEF = ["--calls", "1", "--rounds", "1", "--warmup", "0", "--commit", "abc"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pairs", "0"], "--tokens, --calls, --rounds and --pairs must be at least 1"),
        (["--markdown", "a.md"], "--markdown needs --show"),
        (["--engines", "cutlas"], "invalid choice"),
        (["--transports", "nvlink"], "invalid choice: 'nvlink'"),
    ],
)
def test_impossible_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in capsys.readouterr().err


def test_a_kernel_whose_package_is_not_there_is_absent(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(AbsentError, match="vllm cannot be imported"):
        require(BACKENDS["marlin"])
    monkeypatch.setitem(sys.modules, "vllm", torch)  # any package
    require(BACKENDS["marlin"])
    monkeypatch.setitem(sys.modules, "humming", None)
    with pytest.raises(AbsentError, match="humming cannot be imported"):
        require(BACKENDS["humming_fp8"])


class _Engine:
    """The exact layer, or twice of it, or nothing."""

    def __init__(self, name: str, shape: Any, arguments: Any, device: torch.device) -> None:
        self.name = name
        self.label, self.tokens = f"engine that is {name}", "bf16"
        self.given = shape, arguments, device

    def step(self, tokens_of_ranks: list[int]) -> Any:
        assert tokens_of_ranks == [tokens_of_ranks[0]] * self.given[0].num_ranks
        return nullcontext()

    def __call__(self, x: Any, topk_idx: Any, topk_weights: Any) -> torch.Tensor:
        if self.name == "broken":
            raise OSError("no compiler\nat all")
        assert self.name != "refusing"
        shape, arguments, device = self.given
        rank = torch.distributed.get_rank()
        own_x, tokens = model_tokens(shape, x.shape[0], rank, arguments, device)
        assert torch.equal(own_x, x)
        assert torch.equal(tokens.topk_idx.int(), topk_idx)
        y = exact_sample(shape, x, tokens, arguments, device)
        return (-y if self.name == "wrong" else y).bfloat16()


def engines(shape: Any, layer: Any, arguments: Any, device: Any, absent: Any, stack: Any) -> Any:
    absent["far"] = "far away"
    names = ("exact", "wrong", "broken", "refusing")
    return {name: _Engine(name, shape, arguments, device) for name in names}


@pytest.mark.slow
def test_a_run_beside_engines_that_are_right_wrong_and_broken(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = [*SMALL, *BRIEF, "--tokens", "3", "5", "--json", str(path)]
    run_on_ranks(run_rank, 2, "cpu", parse_arguments(words), engines)
    report = json.loads(path.read_text())
    assert [result["tokens_per_rank"] for result in report["results"]] == [5, 3]
    for result in report["results"]:
        assert result["experts_per_rank"] == 2
        assert set(result["paths"]) == {"deep_moe", "deep_moe_bf16", "exact"}
        own, exact = result["paths"]["deep_moe"], result["paths"]["exact"]
        assert 1e-4 < own["distance"] < 5e-3  # tokens in E4M3
        assert exact["distance"] < 1e-5
        assert exact["times_slower"] == exact["us"] / own["us"]
        assert result["failed"]["wrong"].startswith(
            "RuntimeError: engine that is wrong is 2 away from the exact result"
        )
        assert result["failed"]["broken"] == "OSError: no compiler"
        assert result["failed"]["refusing"].startswith(
            'AssertionError: assert self.name != "refusing" (test_engines.py:'
        )
    text = markdown([report])
    assert text.count("\n| ") == 3
    assert "- far was not timed: far away\n" in text
    assert "- broken was not timed with deepseek-v4-flash, experts 4" in text


def on_emulated_hopper(device: torch.device, arguments: Any) -> None:
    import sys

    from deep_moe.targets import EMULATED, TARGETS

    for module in list(sys.modules.values()):
        if getattr(module, "EMULATED", None) is EMULATED:
            module.EMULATED = TARGETS["sm_90a"]
    run_rank(device, arguments, lambda *_: {})


def test_on_hopper_ours_runs_with_other_weights(tmp_path: Path) -> None:
    """And says of an engine's kernel that it is for others."""
    path = tmp_path / "report.json"
    words = [*SMALL, *BRIEF, "--weights", "nvfp4", "--tokens", "3", "--json", str(path)]
    run_on_ranks(on_emulated_hopper, 1, "cpu", parse_arguments(words))
    report = json.loads(path.read_text())
    (result,) = report["results"]
    (own,) = result["paths"].values()
    assert own["tokens"] == "bf16"
    assert own["distance"] < 1e-4
    assert "weights nvfp4" in result["model"]


def test_on_hopper_ours_runs_with_both_kinds_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    words = [*SMALL, *BRIEF, "--tokens", "3", "--json", str(path)]
    run_on_ranks(on_emulated_hopper, 1, "cpu", parse_arguments(words))
    report = json.loads(path.read_text())
    (result,) = report["results"]
    quantized, unquantized = (result["paths"][name] for name in ("deep_moe", "deep_moe_bf16"))
    assert (quantized["tokens"], unquantized["tokens"]) == ("fp8", "bf16")
    assert unquantized["distance"] < 1e-4 < quantized["distance"] < 5e-3
    assert report["absent"] == {}
    table = markdown([report])
    assert "| tokens | deep_moe, FP8 | deep_moe, BF16 | times |" in table


def test_without_vllm_the_report_says_so(monkeypatch, tmp_path):
    import sys
    from contextlib import ExitStack

    monkeypatch.setitem(sys.modules, "vllm.config", None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    absent: dict[str, str] = {}
    shape = type("Shape", (), {"num_max_tokens_per_rank": 8})
    arguments = parse_arguments(["--engines", "marlin", "humming"])
    device = torch.device("cpu")
    assert engine_paths(shape, None, arguments, device, absent, ExitStack()) == {}
    assert set(absent) == {"marlin", "humming"}
    assert absent["marlin"].startswith("vllm cannot be imported")


def timed_path(us: float, slower: float, tokens: str, distance: float) -> dict[str, Any]:
    return {"us": us, "times_slower": slower, "tokens": tokens, "distance": distance}


def test_tables(capsys, tmp_path):
    """By tokens; a path that failed with some has an empty cell there."""

    def result(num_tokens: int, **paths: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": "deepseek-v4-pro",
            "num_ranks": 2,
            "experts_per_rank": 192,
            "tokens_per_rank": num_tokens,
            "paths": {"deep_moe": timed_path(100.0, 1.0, "fp8", 0.001), **paths},
            "failed": {} if "marlin" in paths else {"marlin": "out of memory"},
        }

    report = {
        "machine": {"gpu": "a GPU"},
        "labels": {"deep_moe": "deep_moe", "marlin": "Marlin", "humming": "Humming"},
        "absent": {},
        "results": [
            result(8, humming=timed_path(300.0, 3.0, "fp8", 0.002)),
            result(
                1,
                marlin=timed_path(150.0, 1.5, "bf16", 1e-6),
                humming=timed_path(200.0, 2.0, "fp8", 0.002),
            ),
        ],
    }
    path = tmp_path / "tables.md"
    show([report], path)
    lines = path.read_text().splitlines()
    assert lines[0] == "**deepseek-v4-pro, a GPU, EP2, 192 experts per GPU, µs**"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6]]
    columns = ["tokens", "deep_moe, FP8", "Marlin, BF16", "Humming, FP8"]
    assert rows[0] == [*columns, "times", "distance", "other's"]
    assert rows[2] == ["1", "100.0", "150.0", "200.0", "1.50", "1.0e-03", "1.0e-06"]
    assert rows[3] == ["8", "100.0", "", "300.0", "3.00", "1.0e-03", "2.0e-03"]
    failure = "marlin was not timed with deepseek-v4-pro, EP2, 8 tokens: out of memory"
    assert lines[-1] == f"- {failure}"
    assert failure in " ".join(capsys.readouterr().out.split())
