"""`deep-moe tune`: what it says without a GPU, and what it prints of measurements."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import deep_moe.fused.gpu
import deep_moe.trial.tuning
from deep_moe.activations import Situ, Swiglu, SwigluOai
from deep_moe.cli import app
from deep_moe.fused.gpu import Gpu
from deep_moe.heuristics.tuning import read_table
from deep_moe.targets.sm90 import SM90A
from deep_moe.trial import simulated_tuning
from deep_moe.trial.tuning import Finalist, Gain, SizeResult, TuningPlan


def run_tune(*options: str):
    return CliRunner().invoke(app, ["tune", *options])


def test_without_a_gpu_it_says_so_and_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run_tune("--model", "deepseek-v3")
    assert result.exit_code != 0
    assert "measures kernels on GPUs, and PyTorch finds none on this machine" in str(
        result.exception
    )


@pytest.mark.parametrize("tokens", ["", "0", "8,8", "8;64", "-1"])
def test_tokens_must_be_different_positive_numbers(tokens: str):
    result = run_tune("--tokens", tokens)
    assert result.exit_code == 2
    assert "--tokens must be different positive numbers" in result.output


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TuningPlan]:
    """As if there were four H200s, on which the second size gets an entry; the plans made."""
    made: list[TuningPlan] = []

    def measure(plan: TuningPlan) -> list[dict]:
        made.append(plan)
        finalist = Finalist({"block_m": 24}, 90.0, Gain(0.111, 0.004), 8, is_entry=True)
        results = [SizeResult(8, 11, {"block_m": 8}, 50.0)]
        results.append(SizeResult(64, 12, {"block_m": 16}, 100.0, finalist))
        return [asdict(result) for result in results if result.num_tokens in plan.tokens]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    h200 = Gpu(torch.device("cuda", 0), "NVIDIA H200", SM90A, 132)
    monkeypatch.setattr(deep_moe.fused.gpu, "gpu_of", lambda device: h200)
    monkeypatch.setattr(deep_moe.trial.tuning, "compile_candidates", lambda plan, on_built: 0)
    monkeypatch.setattr(deep_moe.trial.tuning, "tune", measure)
    monkeypatch.setenv("DEEP_MOE_TUNING_TABLE", str(tmp_path / "mine.json"))
    return made


def test_what_is_found_is_printed(plans: list[TuningPlan], monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    result = run_tune("--model", "deepseek-v3", "--tokens", "8,64", "--budget", "60")
    assert result.exit_code == 0, result.output
    assert "none of 11" in result.stdout
    row = next(line for line in result.stdout.splitlines() if "block_m 24" in line)
    assert row.split() == ["64", "100.0", "90.0", "+11.1%", "0.4%", "block_m", "24", "yes"]
    assert "1 entries, 2 sizes measured" in result.stdout
    assert "mine.json" in result.stdout


def test_options_reach_the_plan(plans: list[TuningPlan], tmp_path: Path):
    table = tmp_path / "other.json"
    options = ["--ranks", "2", "--topk", "4", "--clamp", "7", "--commit", "abc"]
    options += ["--pool-tokens", "768"]
    words = ["--model", "deepseek-v3", "--tokens", "8,64", *options, "--table", str(table)]
    document = json.loads(run_tune(*words, "--json").stdout)
    assert document["table"] == str(table)
    assert [result["num_tokens"] for result in document["results"]] == [8, 64]
    assert document["results"][1]["finalist"]["gain"]["median"] == 0.111
    (plan,) = plans
    assert plan.shape.num_ranks == 2
    assert plan.shape.num_topk == 4
    assert plan.shape.num_max_tokens_per_rank == 64
    assert plan.shape.num_pool_tokens == 768
    assert (plan.tokens, plan.arch, plan.num_sms) == ((8, 64), "sm_90a", 132)
    assert (plan.activation, plan.commit, plan.table) == (Swiglu(7.0), "abc", table)


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ((), Swiglu(10.0)),
        (("--activation", "swiglu_oai"), SwigluOai()),
        (("--activation", "swiglu_oai:alpha=2"), SwigluOai(alpha=2)),
        (("--activation", "swiglu:clamp=3"), Swiglu(3.0)),
        (("--activation", "swiglu"), Swiglu()),
        (("--model", "kimi-k3"), Situ()),
    ],
)
def test_the_activation_that_is_measured(plans: list[TuningPlan], options, activation):
    assert run_tune("--model", "deepseek-v3", "--tokens", "8", *options).exit_code == 0
    assert plans[0].activation == activation


def test_more_ranks_than_gpus_are_refused(plans: list[TuningPlan]):
    result = run_tune("--ranks", "5")
    assert result.exit_code == 2
    assert "--ranks must be 1 to the number of GPUs (4)" in result.output


def test_sizes_left_out_for_want_of_time_are_named_and_a_failure(plans: list[TuningPlan]):
    result = run_tune("--tokens", "8,64,512", "--budget", "5")
    assert result.exit_code == 1
    assert "2 sizes measured" in result.stdout
    assert "--budget 5 ended before these tokens were measured: 512" in result.stderr
    result = run_tune("--tokens", "8,64,512", "--budget", "5", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["not_measured"] == [512]


# ---- a chip that is not there

FASTER = (8, 5)  # stages; the formula has 10 and 7
SMALL = ["--experts", "2", "--topk", "1", "--hidden", "256", "--intermediate", "128"]


@pytest.mark.parametrize("words", [[], ["--device", "cpu", "--gpu", "My GPU"]])
def test_a_chips_clock_times_kernels_and_fills_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    """As if a kernel's time on the chip depended on its stages alone."""
    asked: list[tuple[list[int], str, int, dict[str, int]]] = []

    def simulate_call(shape, counts, chip, *, overrides, num_sms, **_):
        asked.append((counts, chip.name, num_sms, dict(overrides)))
        us = 100.0 if overrides.get("num_stages") in FASTER else 150.0
        return SimpleNamespace(us=us + counts[0])

    monkeypatch.setattr(simulated_tuning, "simulate_call", simulate_call)
    table = tmp_path / "table.json"
    options = ["--chip", "h200", "--table", str(table), "--ranks", "2", "--commit", "abc"]
    result = run_tune(*SMALL, *options, "--tokens", "8,64", "--json", *words)
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)["results"]
    assert [one["num_tokens"] for one in results] == [8, 64]
    for one, num_tokens in zip(results, (8, 64), strict=True):
        own = [overrides for counts, *_, overrides in asked if counts == [num_tokens] * 2]
        assert len(own) == len({tuple(sorted(kernel.items())) for kernel in own})  # each once
        assert one["finalist"]["us"] == pytest.approx(100 + num_tokens)
        assert one["formula_us"] == pytest.approx(150 + num_tokens)
        assert one["finalist"]["is_entry"]
    assert {(chip, num_sms) for _, chip, num_sms, _ in asked} == {("h200", 132)}
    (layer,) = read_table(table).layers
    assert layer.key.device == ("My GPU" if words else "NVIDIA H200")
    assert (layer.key.num_ranks, layer.key.arch) == (2, "sm_90a")
    assert layer.measured_tokens == (8, 64)
    assert {entry.commit for entry in layer.entries} == {"abc, simulated on h200"}
    assert [dict(entry.overrides)["num_stages"] for entry in layer.entries] == list(FASTER)


@pytest.mark.slow
def test_a_chips_clock_really_times_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (deep_moe.trial.tuning, simulated_tuning):
        monkeypatch.setattr(module, "candidates", lambda plan, num_tokens: [{"num_stages": 2}])
    table = tmp_path / "table.json"
    words = [*SMALL, "--chip", "h100", "--table", str(table), "--tokens", "4", "--json"]
    result = run_tune(*words)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["results"]
    assert 5 < found["formula_us"] < 100
    (layer,) = read_table(table).layers
    assert (layer.key.device, layer.measured_tokens) == ("NVIDIA H100 80GB HBM3", (4,))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--chip", "h100"], "--table must name a file with --chip"),
        (["--device", "cpu"], "--device cpu needs --chip"),
        (["--chip", "h100", "--device", "cuda"], "--chip must be with --device cpu"),
        (["--chip", "h100", "--biases"], "--chip must be without --biases"),
        (["--gpu", "NVIDIA B200"], "--gpu must be with --chip"),
    ],
)
def test_a_chip_goes_with_a_table_and_without_gpus(words: list[str], text: str):
    result = run_tune(*SMALL, *words)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())


def test_a_chip_without_a_file_is_refused(tmp_path: Path):
    result = run_tune(*SMALL, "--chip", "a100", "--table", str(tmp_path / "table.json"))
    assert result.exit_code == 1
    assert "a100" in str(result.exception)
