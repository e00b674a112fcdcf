"""What benchmarks/training_sharded.py times, in small, on two ranks and on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import Model
from benchmarks.training_sharded import PATHS, check, parse_arguments, run_rank
from deep_moe.trial.rank_processes import run_on_ranks

MODELS = {"qwen3-235b": Model(hidden=128, intermediate=128, num_experts=2, num_topk=2)}


@pytest.mark.parametrize("option", ["--tokens", "--layers", "--calls", "--rounds"])
def test_impossible_options_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([option, "0"])
    assert "--tokens, --layers, --calls and --rounds must be" in capsys.readouterr().err


def test_all_paths_are_compared_and_timed(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["--tokens", "5", "--layers", "2", "--calls", "1", "--rounds", "1", "--warmup", "0"]
    arguments = parse_arguments([*words, "--commit", "abc", "--json", str(report)])
    run_on_ranks(run_rank, 2, "cpu", arguments, MODELS)
    read = json.loads(report.read_text())
    assert (read["num_ranks"], read["machine"]["commit"]) == (2, "abc")
    (result,) = read["results"]
    assert (result["model"], result["layers"], result["tokens_per_rank"]) == ("qwen3-235b", 2, 5)
    assert list(result["paths"]) == list(PATHS)
    assert all(path["ms"] > 0 and path["gather_ms"] > 0 for path in result["paths"].values())


class Results:
    """For a case: what each path's layers give."""

    def results(self, values: list[float]) -> list[torch.Tensor]:
        return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize("gathered", [[1.0, 2.5], [1.0, 0.0]])
def test_other_bits_are_not_timed(gathered: list[float]) -> None:
    layers: Any = {"fp8-wgrad": [1.0, gathered[1] and 2.0], "gathered": gathered}
    case: Any = Results()
    with pytest.raises(RuntimeError, match="fp8-wgrad and gathered must have the same bits"):
        check(case, layers)
