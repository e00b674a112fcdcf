"""`deep-moe trace`: a table of phases and a trace file."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.trial import calls as trial

TINY = ["--hidden", "128", "--intermediate", "128"]


def invoke(*options: str):
    return CliRunner().invoke(app, ["trace", *options])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_call_is_recorded_on_every_rank(tmp_path: Path, arch: str):
    file = tmp_path / "layer.json"
    result = invoke(str(file), *TINY, "--tokens", "5,3", "--arch", arch, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["tokens"] == [5, 3]
    assert document["num_lost"] == 0
    assert len(document["ranks"]) == 2
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


def test_a_small_pool_is_recorded(tmp_path: Path):
    file = tmp_path / "layer.json"
    words = ["--ranks", "1", "--experts", "2", "--tokens", "250", "--arch", "sm_90a"]
    result = invoke(str(file), *TINY, *words, "--pool-tokens", "384", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["shape"]["num_pool_tokens"] == 384
    assert document["num_lost"] == 0


def test_the_table_and_the_file_are_named(tmp_path: Path):
    file = tmp_path / "layer.json.gz"
    result = invoke(str(file), *TINY, "--tokens", "2", "--arch", "sm_90a", "--num-sms", "2")
    assert result.exit_code == 0, result.output
    assert "Linear1 main loop, of it waiting for stages" in result.stdout
    assert str(file) in result.stdout
    assert file.stat().st_size > 0


def test_on_gpus_warm_up_calls_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def trace_processes(shape, layer, tokens, **call):
        asked.update(call)
        return trial.trace_emulated_ranks(shape, layer, tokens, arch="sm_90a")

    monkeypatch.setattr(trial, "trace_processes", trace_processes)
    file = str(tmp_path / "layer.json")
    result = invoke(file, *TINY, "--tokens", "2", "--device", "cuda", "--warmup", "5")
    assert result.exit_code == 0, result.output
    assert asked["num_warmup"] == 5


def test_ranks_without_gpus_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    result = invoke(str(tmp_path / "layer.json"), *TINY, "--device", "cuda")
    assert result.exit_code == 1
    assert "a GPU for each of 2 ranks; there are 1" in str(result.exception)
