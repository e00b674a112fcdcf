"""`deep-moe config`: the design's worked cases, reproduced by options, and what it prints."""

import json

from typer.testing import CliRunner

from deep_moe.cli import app

WORKED_CASE = ["--model", "deepseek-v3", "--ranks", "8", "--tokens", "1024"]


def run_config(*options: str):
    return CliRunner().invoke(app, ["config", *options])


def explained(*options: str) -> dict:
    result = run_config(*options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fields(*options: str) -> dict:
    return {field["name"]: field["value"] for field in explained(*options)["fields"]}


def test_worked_case_of_the_stages_and_the_wave():
    chosen = fields(*WORKED_CASE, "--override", "block_m=128")
    assert chosen["num_stages"] == 7
    assert chosen["num_experts_per_wave"] == 8
    assert chosen["num_sms"] == 148


def test_worked_case_of_the_pool():
    assert fields("--model", "deepseek-v3", "--tokens", "256")["num_max_pool_tokens"] == 22656


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


def test_an_override_is_marked_as_the_callers():
    reasons = {
        field["name"]: field["reason"]
        for field in explained(*WORKED_CASE, "--override", "num_stages=3")["fields"]
    }
    assert reasons["num_stages"] == "set by the caller"


def test_a_clamp_reaches_the_config():
    assert fields("--clamp", "10")["activation_clamp"] == 10
    assert fields()["activation_clamp"] is None


def test_an_impossible_override_fails_and_names_the_limit():
    result = run_config(*WORKED_CASE, "--override", "num_stages=30")
    assert result.exit_code != 0
    assert "232448" in str(result.exception)


def test_other_architectures_have_their_own_defaults():
    document = explained(*WORKED_CASE, "--arch", "sm_90a")
    chosen = {field["name"]: field["value"] for field in document["fields"]}
    assert (chosen["num_sms"], chosen["cluster_size"], chosen["block_n"]) == (132, 1, 256)
    assert document["tmem_map"] == []
    assert "tensor memory:" not in run_config(*WORKED_CASE, "--arch", "sm_90a").stdout
