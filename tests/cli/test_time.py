"""`deep-moe time` and `deep-moe trace --chip`: a call on a chip's clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app

SMALL = ["--experts", "4", "--topk", "2", "--hidden", "256", "--intermediate", "128"]


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, [*words])


@pytest.mark.parametrize("chip", ["h100", "b200"])
def test_a_call_takes_time_on_a_chip(chip: str):
    result = invoke("time", *SMALL, "--tokens", "5,3", "--chip", chip, "--num-sms", "4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 5 < found["kernel_us"] < found["us"] < 60
    assert found["bound_by"] == "latencies"
    assert all(0 <= share < 1 for share in found["shares"].values())
    assert {"dispatch", "weight loader"} <= set(found["roles"])
    text = invoke("time", *SMALL, "--tokens", "5,3", "--chip", chip, "--num-sms", "4").stdout
    assert f"us on {chip}" in text
    assert "weight loader" in text


def test_a_measured_clock_takes_the_place_of_the_chips():
    def found(*words: str) -> Any:
        result = invoke("time", *SMALL, "--tokens", "4", "--num-sms", "4", "--json", *words)
        return json.loads(result.stdout)

    slow = found("--clock-mhz", "900")
    assert slow["clock_mhz"] == pytest.approx(900)
    assert slow["kernel_us"] > found()["kernel_us"]


def test_a_trace_of_a_chip_is_in_microseconds(tmp_path: Path):
    file = tmp_path / "call.json"
    words = ["--tokens", "4", "--num-sms", "4", "--chip", "h100", "--json"]
    result = invoke("trace", str(file), *SMALL, *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["unit"] == "microseconds"
    assert 5 < found["timeline"]["kernel ends"] < 60
    assert 1500 < found["sm_clock_mhz"] < 2000
    assert file.stat().st_size > 1000


def test_what_a_chip_cannot_do_is_refused(tmp_path: Path):
    refused = [
        (["time", "--chip", "a100"], "a100"),
        (["trace", str(tmp_path / "f.json"), "--chip", "h100", "--arch", "sm_100a"], "sm_90a"),
        (["trace", str(tmp_path / "f.json"), "--chip", "h100", "--biases"], "no --biases"),
    ]
    for words, text in refused:
        result = invoke(*words, *SMALL)
        assert result.exit_code != 0
        assert text in result.output + str(result.exception)
