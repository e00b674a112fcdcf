"""`deep-moe run`: it passes where the kernel agrees with the reference, and only there."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import deep_moe.reference
from deep_moe.checkpoint import save_experts
from deep_moe.cli import app
from deep_moe.heuristics import MoEShape
from deep_moe.synthetic import random_layer

TINY = ["--hidden", "128", "--intermediate", "128"]


def invoke(*options: str):
    return CliRunner().invoke(app, ["run", *options])


def ran(*options: str) -> dict:
    result = invoke(*options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_random_layer_is_near_on_every_rank():
    document = ran(*TINY, "--tokens", "9", "--clamp", "10")
    assert document["passed"]
    assert [row["rank"] for row in document["ranks"]] == [0, 1]
    for row in document["ranks"]:
        assert row["num_values"] == 9 * 128
        assert row["num_near"] >= 0.999 * row["num_values"]
        assert row["cosine_distance"] < 1e-5


def test_an_exact_layer_is_equal_with_other_tokens_on_each_rank():
    document = ran(*TINY, "--exact", "--ranks", "3", "--tokens", "5,0,17")
    assert [row["num_tokens"] for row in document["ranks"]] == [5, 0, 17]
    assert all(row["num_equal"] == row["num_values"] for row in document["ranks"])
    assert sum(row["num_received"] for row in document["ranks"]) == 22 * 2


def test_seeds_and_overrides_reach_the_call():
    document = ran(
        *TINY, "--exact", "--override", "block_m=64", "--num-sms", "2", "--schedule-seed", "3"
    )
    assert document["passed"]
    refused = invoke(*TINY, "--override", "block_m=65")
    assert refused.exit_code == 1
    assert "block_m must be one of" in str(refused.exception)


@pytest.mark.parametrize("kind", ["--exact", "--seed=3"], ids=["exact", "random"])
def test_the_sm90_kernel_agrees_with_its_own_reference(kind: str):
    document = ran("--hidden", "384", "--intermediate", "256", kind, "--arch", "sm_90a")
    assert document["arch"] == "sm_90a"
    assert document["passed"]


def test_an_unknown_architecture_is_refused():
    result = invoke(*TINY, "--arch", "sm_80")
    assert result.exit_code == 2
    assert "sm_90a" in result.output


def test_the_table_gives_a_verdict_per_rank():
    result = invoke(*TINY, "--tokens", "2")
    assert result.exit_code == 0
    assert result.stdout.count(" ok") == 2


def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    correct = deep_moe.reference.reference_mega_moe

    def wrong_in_one_row(*inputs, **options):
        y = correct(*inputs, **options)
        y[0] += 1
        return y

    monkeypatch.setattr(deep_moe.reference, "reference_mega_moe", wrong_in_one_row)
    result = invoke(*TINY, "--tokens", "4")
    assert result.exit_code == 1
    assert result.stdout.count("DIFFERENT") == 2
    assert invoke(*TINY, "--tokens", "4", "--json").exit_code == 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    layer = random_layer(MoEShape(1, 4, 2, 256, 128, 1))
    save_experts(tmp_path, {3: (layer.l1, layer.l2)})
    return tmp_path


def test_a_checkpoint_gives_the_sizes(checkpoint: Path):
    document = ran("--checkpoint", str(checkpoint), "--layer", "3", "--tokens", "3")
    assert document["passed"]
    assert document["shape"]["num_experts"] == 4
    assert document["shape"]["hidden"] == 256
    assert document["shape"]["intermediate_hidden"] == 128


def test_a_checkpoint_refuses_other_sizes_and_absent_layers(checkpoint: Path):
    assert invoke("--checkpoint", str(checkpoint), "--hidden", "256").exit_code == 2
    absent = invoke("--checkpoint", str(checkpoint), "--layer", "4")
    assert absent.exit_code == 1
    assert "no experts of layer 4" in str(absent.exception)


@pytest.mark.slow
def test_a_process_per_rank():
    assert ran(*TINY, "--exact", "--tokens", "3", "--processes")["passed"]


def test_ranks_without_gpus_are_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = invoke(*TINY, "--device", "cuda")
    assert result.exit_code == 1
    assert "a GPU for each of 2 ranks; there are 1" in str(result.exception)
