"""`deep-moe trace`: a table of phases and a trace file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.targets import TARGETS
from deep_moe.trial import calls as trial
from deep_moe.trial import synthetic
from deep_moe.trial.real_size import LayerMadeByRanks, rank_layer
from tests.pairs import formats, usual_pairs
from tests.traces.test_page import decoded

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
    assert document["unit"] == "1000 warp instructions"
    assert document["num_lost"] == 0
    assert len(document["ranks"]) == 2
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}


@pytest.mark.parametrize("path", ["fused", "throughput"])
def test_a_page_shows_what_the_file_holds(tmp_path: Path, path: str):
    file, page, converted = (tmp_path / name for name in ("layer.json.gz", "a.html", "layer.html"))
    words = ["--path", path, "--tokens", "5,3", "--arch", "sm_90a", "--num-sms", "2", "--json"]
    result = invoke(str(file), *TINY, *words, "--html", str(page))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["html"] == str(page)
    assert "<title>a small layer, 2 ranks, 5,3 tokens" in page.read_text()
    result = CliRunner().invoke(app, ["timeline", str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["page"] == str(converted)
    headers, columns, _ = zip(*(decoded(one.read_text()) for one in (page, converted)), strict=True)
    for name in ("unit", "lanes", "num_spans", "roles"):
        assert headers[0][name] == headers[1][name], name
    assert headers[0]["unit"] == "1000 warp instructions"
    assert ("all-to-all" in headers[0]["roles"]) == (path == "throughput")
    for name in ("duration", "expert", "m_block", "n_block", "rows", "awaited"):
        assert columns[0][name].tolist() == columns[1][name].tolist(), name
    assert (columns[0]["expert"] >= 0).any()


def test_a_page_must_have_a_folder(tmp_path: Path):
    words = ["--html", str(tmp_path / "none" / "a.html")]
    result = invoke(str(tmp_path / "layer.json"), *TINY, *words)
    assert result.exit_code == 2
    assert "--html must lie in a folder that exists" in result.output.replace("│", "")


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
    assert "1000 warp instructions" in result.stdout
    assert "microseconds" not in result.stdout
    assert str(file) in result.stdout
    assert file.stat().st_size > 0


def test_on_gpus_warm_up_calls_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def trace_processes(shape, layer, tokens, **call):
        asked.update(call)
        assert layer == LayerMadeByRanks(shape, 0, "cuda", layer.scale_block)
        made = rank_layer(replace(shape, num_ranks=1), 0, 0, torch.device("cpu"), layer.scale_block)
        return trial.trace_emulated_ranks(shape, made, tokens, arch="sm_90a")

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


def test_the_throughput_paths_steps_follow_each_other(tmp_path: Path):
    file = tmp_path / "layer.json"
    words = ["--path", "throughput", "--tokens", "5,3", "--arch", "sm_90a", "--num-sms", "2"]
    result = invoke(str(file), *TINY, *words, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["num_lost"] == 0
    assert list(document["kernels"]) == ["dispatch", "experts", "combine"]
    assert all(us > 0 for us in document["kernels"].values())
    dispatch = ["quant_and_put", "count_put", "wait", "postprocess"]
    combine = ["copy_and_put", "recv_wait", "topk_reduce"]
    assert sorted(document["phases"]) == sorted([*dispatch, *combine])
    events = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}  # experts, and all-to-all
    for rank in range(2):
        experts = [event for event in events if event["pid"] == rank]
        phases = [event for event in events if event["pid"] == 2 + rank]
        of_dispatch = [event for event in phases if event["name"] in dispatch]
        of_combine = [event for event in phases if event["name"] in combine]
        assert ends(of_dispatch) <= min(event["ts"] for event in experts) + 1e-3
        assert ends(experts) <= min(event["ts"] for event in of_combine) + 1e-3
        assert {event["name"] for event in experts} >= {"Linear1 main loop", "Linear2 main loop"}


def ends(events: list[dict]) -> float:
    return max(event["ts"] + event["dur"] for event in events)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--path", "split"], "--path must be fused or throughput"),
        (["--path", "throughput", "--shared-experts", "1"], "--shared-experts must be 0 with"),
    ],
)
def test_what_has_no_trace_of_its_own(tmp_path: Path, options: list[str], words: str):
    result = invoke(str(tmp_path / "layer.json"), *TINY, *options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


PAIRS = [(arch, pair) for arch in ("sm_90a", "sm_100a") for pair in usual_pairs(arch)]


@pytest.mark.parametrize(("arch", "pair"), PAIRS)
def test_weights_have_the_scale_blocks_of_their_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, pair: str
):
    """FP8 weights have one scale per row beside tokens with one scale, else one per block."""
    asked = {}

    def random_layer(shape, *, seed, scale_block):
        asked[shape.weights, shape.token_format] = scale_block
        raise ValueError("seen")

    monkeypatch.setattr(synthetic, "random_layer", random_layer)
    of_pair = formats(pair)
    words = ["--weights", of_pair["weights"], "--token-format", of_pair["token_format"]]
    invoke(str(tmp_path / "layer.json"), *TINY, *words, "--arch", arch)
    expected = TARGETS[arch].weights_of(**of_pair).scale_block
    assert asked == {(of_pair["weights"], of_pair["token_format"]): expected}


def test_tokens_are_by_default_those_that_the_target_takes_beside_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def random_layer(shape, **_):
        asked.append(shape.token_format)
        raise ValueError("seen")

    monkeypatch.setattr(synthetic, "random_layer", random_layer)
    for arch in ("sm_90a", "sm_100a"):
        invoke(str(tmp_path / "layer.json"), *TINY, "--weights", "nvfp4", "--arch", arch)
    assert asked == ["bf16", "nvfp4"]
