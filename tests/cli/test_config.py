"""`deep-moe config`: the design's worked cases, reproduced by options, and what it prints."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_moe import buffer_size
from deep_moe.cli import app
from deep_moe.fused.tuning_tables import add_to_table
from deep_moe.heuristics import preset_shape
from deep_moe.heuristics.tuning import TunedEntry, TunedLayer, TunedLayerKey
from deep_moe.targets import choose_config

WORKED_CASE = ["--model", "deepseek-v3", "--ranks", "8", "--tokens", "1024"]


def run_config(*options: str):
    return CliRunner().invoke(app, ["config", *options])


def explained(*options: str) -> dict:
    result = run_config(*options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fields(*options: str) -> dict:
    return {field["name"]: field["value"] for field in explained(*options)["fields"]}


def test_worked_case_of_the_stages_and_the_turns():
    chosen = fields(*WORKED_CASE, "--override", "block_m=128")
    assert chosen["num_stages"] == 7
    assert (chosen["num_turn_m_blocks"], chosen["num_lead_m_blocks"]) == (1, 14)
    assert chosen["num_sms"] == 148


def test_worked_case_of_the_pool():
    assert fields("--model", "deepseek-v3", "--tokens", "256")["num_pool_tokens"] == 22656


def test_a_bounded_pool_is_a_ring_and_takes_less():
    case = ["--model", "deepseek-v4-pro", "--tokens", "8192"]
    unbounded, bounded = explained(*case, "--pool-tokens", "0"), explained(*case)
    assert explained(*case, "--pool-tokens", "24576") == bounded
    chosen = {field["name"]: field["value"] for field in bounded["fields"]}
    assert (chosen["num_pool_tokens"], chosen["pool_wraps"]) == (24_576, True)
    assert bounded["symm_buffer_bytes"] == buffer_size(8, 384, 8192, 6, 7168, 3072)
    assert bounded["symm_buffer_bytes"] < 1.1 * 2**30
    assert bounded["symm_buffer_bytes"] < unbounded["symm_buffer_bytes"] / 4
    assert not {field["name"]: field["value"] for field in unbounded["fields"]}["pool_wraps"]
    refused = run_config(*case, "--pool-tokens", "100")
    assert refused.exit_code == 1
    assert "num_pool_tokens must be a positive multiple of 384" in str(refused.exception)


def test_shared_experts_take_slots_and_rows():
    case = ["--model", "deepseek-v4-pro", "--tokens", "256"]
    document = explained(*case, "--shared-experts", "1")
    chosen = {field["name"]: field["value"] for field in document["fields"]}
    assert (chosen["num_shared_experts"], chosen["num_experts_per_part"]) == (1, 6)
    assert document["symm_buffer_bytes"] == buffer_size(
        8, 384, 256, 6, 7168, 3072, num_shared_experts=1
    )


def test_the_printed_maps_add_up_to_the_declared_sizes():
    document = explained(*WORKED_CASE)
    assert sum(row["size"] for row in document["smem_map"]) == document["smem_bytes"]
    assert sum(row["size"] for row in document["symm_buffer_map"]) == document["symm_buffer_bytes"]
    assert sum(row["size"] for row in document["tmem_map"]) == document["tmem_columns"]


def test_every_field_has_a_reason_and_names_survive_a_narrow_terminal():
    document = explained(*WORKED_CASE)
    assert all(field["reason"] for field in document["fields"])
    printed = run_config(*WORKED_CASE).stdout
    for name in [field["name"] for field in document["fields"]] + ["src_token_topk_idx"]:
        assert name in printed


def test_uneven_routing_gets_a_tile_of_its_own():
    case = ["--model", "deepseek-v4-pro", "--ranks", "4", "--tokens", "2048", "--arch", "sm_90a"]
    even, uneven = fields(*case), fields(*case, "--uneven")
    assert (even["block_m"], even["block_m_step"]) == (152, 152)
    assert (uneven["block_m"], uneven["block_m_step"]) == (128, 32)


def test_an_override_is_marked_as_the_callers():
    reasons = {
        field["name"]: field["reason"]
        for field in explained(*WORKED_CASE, "--override", "num_stages=3")["fields"]
    }
    assert reasons["num_stages"] == "set by the caller"


def test_biases_reach_the_config():
    plain, with_biases = explained(), explained("--biases")
    assert (plain["biases"], with_biases["biases"]) == (False, True)
    assert "mxfp4 weights with biases" in run_config("--biases").stdout
    sm90 = explained("--biases", "--arch", "sm_90a")
    assert "biases" in [row["name"] for row in sm90["smem_map"]]


def test_weights_reach_the_config():
    assert explained()["weights"] == "mxfp4"
    assert explained("--weights", "fp8")["weights"] == "fp8"
    assert "fp8 weights" in run_config("--weights", "fp8").stdout
    sm90 = ("--arch", "sm_90a", "--weights", "fp8")
    assert fields(*sm90)["block_m"] <= 128
    segments = [row["name"] for row in explained(*sm90)["smem_map"]]
    assert "weight_scales" in segments
    assert "row_factors" not in segments
    assert run_config("--weights", "nvfp3").exit_code == 2


def test_a_clamp_reaches_the_config():
    assert fields("--clamp", "10")["activation_clamp"] == 10
    assert fields()["activation_clamp"] is None


def test_an_activation_reaches_the_config():
    oai = fields("--activation", "swiglu_oai:alpha=1.5", "--hidden", "256")
    assert (oai["activation"], oai["activation_alpha"], oai["activation_limit"]) == (
        "swiglu_oai",
        1.5,
        7.0,
    )
    situ = fields("--activation", "situ")
    assert (situ["activation"], situ["activation_beta"]) == ("situ", 4.0)
    assert fields("--activation", "swiglu_oai", "--clamp", "3")["activation_limit"] == 3.0


def test_an_impossible_override_fails_and_names_the_limit():
    result = run_config(*WORKED_CASE, "--override", "num_stages=30")
    assert result.exit_code != 0
    assert "232448" in str(result.exception)


def test_the_links_of_several_ranks_are_told():
    printed = run_config("--model", "deepseek-v4-flash", "--ranks", "4", "--tokens", "8192").stdout
    assert "results, by themselves" in printed
    assert (
        "links of one rank" not in run_config("--model", "deepseek-v4-flash", "--ranks", "1").stdout
    )


def test_other_architectures_have_their_own_defaults():
    document = explained(*WORKED_CASE, "--arch", "sm_90a")
    chosen = {field["name"]: field["value"] for field in document["fields"]}
    assert (chosen["num_sms"], chosen["cluster_size"], chosen["block_n"]) == (132, 1, 256)
    assert document["tmem_map"] == []
    assert "tensor memory:" not in run_config(*WORKED_CASE, "--arch", "sm_90a").stdout


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedEntry:
    """The user's table holds one entry, for 64 tokens per rank of a layer on two ranks."""
    shape = preset_shape("deepseek-v3", num_ranks=2, num_max_tokens_per_rank=64)
    config = choose_config(shape, 64, arch="sm_90a")
    faster = ("num_stages", config.candidates["num_stages"][0])
    formula = tuple(config.tunable.items())
    entry = TunedEntry(64, (faster,), formula, 90.0, 99.0, "2026-11-21", "abc")
    key = TunedLayerKey.of(shape, device="Some GPU", arch="sm_90a", num_sms=132)
    path = tmp_path / "table.json"
    monkeypatch.setenv("DEEP_MOE_TUNING_TABLE", str(path))
    add_to_table(path, TunedLayer(key, (64, 128), (entry,)))
    return entry


MEASURED_CASE = ["--model", "deepseek-v3", "--ranks", "2", "--tokens", "64", "--arch", "sm_90a"]


def test_a_measured_field_says_so_and_by_how_much_it_won(measured: TunedEntry):
    document = explained(*MEASURED_CASE, "--gpu", "Some GPU")
    reasons = {field["name"]: field["reason"] for field in document["fields"]}
    made_with = "measured on Some GPU with 2 ranks x 256 experts, top-8, 64 tokens/rank: 90.0 µs"
    assert made_with in reasons[measured.overrides[0][0]]
    assert "(+10.0%)" in document["tuning"]["outcome"]
    assert [row["num_tokens"] for row in document["tuning"]["rows"]] == [64, 128]
    chosen = fields(*MEASURED_CASE, "--gpu", "Some GPU")
    assert dict(measured.overrides).items() <= chosen.items()


def test_what_was_measured_of_the_layer_is_printed(measured: TunedEntry, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    printed = run_config(*MEASURED_CASE, "--gpu", "Some GPU").stdout
    assert "measured on Some GPU with as many experts per rank" in printed
    assert "2 x 256, top-8" in printed
    assert "+10.0%" in printed
    assert f"num_stages {measured.overrides[0][1]}" in printed
    assert "none: the formula's" in printed  # at 128 tokens


def test_without_a_gpu_the_formula_is_printed_and_named(measured: TunedEntry):
    document = explained(*MEASURED_CASE)
    assert document["tuning"] == {
        "device": None,
        "outcome": "formula: no device is named",
        "rows": [],
    }
    assert "tuning: formula: no device is named (--gpu)" in run_config(*MEASURED_CASE).stdout


def test_the_architecture_is_that_of_the_measured_gpu(measured: TunedEntry):
    assert explained(*MEASURED_CASE[:-2], "--gpu", "Some GPU")["arch"] == "sm_90a"


def test_a_gpu_without_measurements_is_refused(measured: TunedEntry):
    result = run_config(*MEASURED_CASE, "--gpu", "Another GPU")
    assert result.exit_code == 2
    assert "NVIDIA H200, Some GPU; got" in " ".join(re.findall(r"[^\s│]+", result.output))


def test_of_another_number_of_ranks_it_is_said_what_was_measured(measured: TunedEntry, monkeypatch):
    """Four ranks with as many experts each; the schedule and the maps are of the call's layer."""
    case = [*MEASURED_CASE, "--ranks", "4", "--experts", "512", "--gpu", "Some GPU"]
    document = explained(*case)
    made_with = "measured on Some GPU with 2 ranks x 256 experts, top-8, 64 tokens/rank: 90.0 µs"
    assert made_with in document["tuning"]["outcome"]
    assert [row["num_ranks"] for row in document["tuning"]["rows"]] == [2, 2]
    assert document["tuning"]["rows"][0]["tokens_per_expert"] == 4.0
    chosen = {field["name"]: field["value"] for field in document["fields"]}
    assert dict(measured.overrides).items() <= chosen.items()
    assert chosen["num_experts"] == 512
    monkeypatch.setenv("COLUMNS", "160")
    assert f"tuning: {made_with}" in " ".join(run_config(*case).stdout.split())


def test_a_model_brings_its_activation():
    kimi = ("--model", "kimi-k3", "--ranks", "8", "--tokens", "8")
    assert fields(*kimi)["activation"] == "situ"
    assert fields(*kimi, "--activation", "swiglu")["activation"] == "swiglu"
    minimax = fields("--model", "minimax-m3", "--clamp", "5")
    assert (minimax["activation"], minimax["activation_limit"]) == ("swiglu_oai", 5.0)
    assert fields("--model", "glm-5")["activation"] == "swiglu"
