"""`deep-moe time` and `deep-moe trace --chip`: a call on a chip's clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.traces.chrome_reader import read_trace
from deep_moe.trial import simulated
from tests.traces.test_page import decoded

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


def test_each_phase_has_what_bounds_it(tmp_path: Path):
    page = tmp_path / "call.html"
    words = [*SMALL, "--tokens", "64", "--num-sms", "4"]
    result = invoke("time", *words, "--json", "--html", str(page))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    phases = found["phases"]
    assert [phase["name"] for phase in phases] == ["dispatch", "Linear1", "Linear2", "combine"]
    end = 0.0
    for phase in phases:
        assert phase["start_us"] == end
        end = phase["end_us"]
        assert phase["us"] == pytest.approx(end - phase["start_us"])
        assert set(phase["shares"]) == set(found["shares"])
        assert phase["bound_by"] in ("latencies", *phase["shares"])
        for spent in phase["roles"].values():
            assert sum(spent.values()) <= phase["us"] + 1e-6
        assert phase["longest_wait"]["us"] <= phase["us"]
    assert end == pytest.approx(found["kernel_us"], rel=0.25)
    assert phases[1]["shares"]["tensor cores"] > phases[0]["shares"]["tensor cores"]
    assert "Linear1 main loop" in phases[1]["roles"]["math"]
    assert "pull" in phases[0]["roles"]["dispatch"]
    header, _, series = decoded(page.read_text())
    assert {one["name"] for one in header["series"]} >= {"memory", "L2", "links in", "links out"}
    assert header["facts"]["chip"] == "h100"
    assert all(0 <= share <= 1.001 for one in series for share in one)
    assert "phases, and what bounds them" in invoke("time", *words).stdout
    assert "phases" not in json.loads(invoke("time", *words, "--no-phases", "--json").stdout)
    assert invoke("time", *words, "--no-phases", "--html", str(page)).exit_code == 2


def test_machine_code_needs_nvdisasm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WARPCHECK_NVDISASM", "")
    result = invoke("time", *SMALL, "--tokens", "4", "--num-sms", "4", "--machine-code")
    assert result.exit_code == 2
    assert "nvidia-cuda-nvdisasm" in result.output


def test_the_call_is_told_to_read_machine_code(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def simulate(*arguments: Any, machine_code: bool, **options: Any) -> simulated.SimulatedCall:
        asked.append(machine_code)
        return simulate_call(*arguments, **options)

    simulate_call = simulated.simulate_call
    monkeypatch.setattr(simulated, "simulate_call", simulate)
    monkeypatch.setenv("WARPCHECK_NVDISASM", "named")
    words = ["time", *SMALL, "--tokens", "4", "--num-sms", "4", "--no-phases", "--json"]
    for more in ([], ["--machine-code"]):
        result = invoke(*words, *more)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["machine_code"] is bool(more)
    assert asked == [False, True]


def test_phases_of_mirrored_ranks_are_those_of_one():
    words = [*SMALL, "--ranks", "4", "--tokens", "16", "--num-sms", "4", "--json"]
    found = json.loads(invoke("time", *words).stdout)
    assert len(found["us_of_ranks"]) == 1  # its peers do the same
    assert found["phases"][-1]["end_us"] == pytest.approx(found["kernel_us"], rel=0.25)


def test_a_trace_of_a_chip_is_in_microseconds(tmp_path: Path):
    file, page = tmp_path / "call.json", tmp_path / "call.html"
    words = ["--tokens", "4", "--num-sms", "4", "--chip", "h100", "--json"]
    result = invoke("trace", str(file), *SMALL, *words, "--html", str(page))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["unit"] == "microseconds"
    assert 5 < found["timeline"]["kernel ends"] < 60
    assert 1500 < found["sm_clock_mhz"] < 2000
    read = read_trace(file)
    header, columns, series = decoded(page.read_text())
    assert [one["name"] for one in header["series"]] == [one.name for one in read.series]
    for ours, theirs in zip(series, read.series, strict=True):
        assert ours == pytest.approx(theirs.shares, abs=1e-3)
    assert columns["awaited"].tolist() == [
        0 if other < 0 else other - i for i, other in enumerate(read.spans["awaited"].tolist())
    ]


def test_what_a_chip_cannot_do_is_refused(tmp_path: Path):
    refused = [
        (["time", "--chip", "a100"], "a100"),
        (["trace", str(tmp_path / "f.json"), "--chip", "h100", "--arch", "sm_100a"], "sm_90a"),
        (["trace", str(tmp_path / "f.json"), "--chip", "h100", "--biases"], "no --biases"),
        (["time", "--biases"], "--biases must be left out"),
    ]
    for words, text in refused:
        result = invoke(*words, *SMALL)
        assert result.exit_code != 0
        assert text in result.output + str(result.exception)
