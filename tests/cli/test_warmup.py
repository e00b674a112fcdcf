"""`deep-moe warmup`: it compiles what a deployment needs, once."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import deep_moe.fused.deployment
import deep_moe.targets
from deep_moe.cli import app
from deep_moe.fused.gpu import Gpu
from deep_moe.fused.tuning_tables import add_to_table
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.tuning import TunedEntry, TunedLayer, TunedLayerKey
from deep_moe.jit import KernelCache
from deep_moe.targets import MegaMoEConfig, choose_config, target_of

TWO_KERNELS = ["--ranks", "2", "--max-tokens", "12", "--experts", "4", "--num-sms", "4"]


def run_warmup(folder: Path, *options: str):
    return CliRunner().invoke(app, ["warmup", "--folder", str(folder), *options])


@pytest.fixture(scope="module")
def warm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    result = run_warmup(folder, *TWO_KERNELS, "--json")
    assert result.exit_code == 0, result.output
    kernels = json.loads(result.stdout)
    assert len(kernels) == 2
    assert not any(kernel["was_cached"] for kernel in kernels)
    return folder


def test_every_kernel_is_in_the_cache_and_intact(warm_folder: Path):
    entries = list(KernelCache(warm_folder).entries())
    assert len(entries) == 2
    assert all(entry.problem is None for entry in entries)
    assert {entry.manifest["config"]["block_m"] for entry in entries} == {16, 32}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("sm_90a", 78)),
        (["--num-sms", "6"], ("sm_90a", 6)),
        (["--arch", "sm_100a"], ("sm_100a", 148)),
        (["--gpu", "NVIDIA H200"], ("sm_90a", 132)),
    ],
)
def test_kernels_are_for_the_gpu_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: tuple[str, int]
):
    gpu = Gpu(torch.device("cuda", 0), "NVIDIA H20", target_of("sm_90a"), 78)
    warmup = importlib.import_module("deep_moe.cli.warmup")  # the package's name is the command
    monkeypatch.setattr(warmup, "gpu_of_this_machine", lambda: gpu)
    asked: list[MegaMoEConfig] = []

    def build_nothing(configs, **_):
        asked.extend(config for _, _, config in configs)
        return []

    monkeypatch.setattr(deep_moe.fused.deployment, "build_deployment", build_nothing)
    result = run_warmup(tmp_path, "--experts", "8", "--max-tokens", "4", *words)
    assert result.exit_code == 0, result.output
    assert {(config.arch, config.num_sms) for config in asked} == {expected}


@pytest.mark.slow
def test_kernels_for_uneven_routing_are_compiled_too(tmp_path: Path):
    sizes = ["--ranks", "1", "--max-tokens", "96", "--experts", "4", "--topk", "2"]
    sizes += ["--hidden", "128", "--intermediate", "128", "--num-sms", "4", "--arch", "sm_90a"]
    result = run_warmup(tmp_path, *sizes, "--json")
    assert result.exit_code == 0, result.output
    shape = MoEShape(1, 4, 2, 128, 128, 96)
    uneven = choose_config(shape, 96, is_uneven=True, arch="sm_90a", num_sms=4)
    assert uneven != choose_config(shape, 96, arch="sm_90a", num_sms=4)
    assert uneven.block_m in {kernel["config"]["block_m"] for kernel in json.loads(result.stdout)}


@pytest.mark.parametrize(("arch", "num_times"), [("sm_100a", 1), ("sm_90a", 2)])
def test_configs_are_chosen_for_uneven_routing_only_where_that_matters(
    arch: str, num_times: int, monkeypatch: pytest.MonkeyPatch
):
    asked, pools = [], set()

    def choose(shape: MoEShape, num_tokens: int, **options):
        asked.append(num_tokens)
        pools.add(shape.num_pool_tokens)
        return choose_config(shape, num_tokens, **options)

    monkeypatch.setattr(deep_moe.targets, "choose_config", choose)
    monkeypatch.setattr(deep_moe.fused.deployment, "build_deployment", lambda *_, **options: [])
    words = ["warmup", "--max-tokens", "20", "--pool-tokens", "384", "--arch", arch]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert pools == {384}
    assert sorted(asked) == sorted([*range(21)] * num_times)


def test_a_second_run_finds_everything_in_the_cache(warm_folder: Path):
    kernels = json.loads(run_warmup(warm_folder, *TWO_KERNELS, "--json").stdout)
    assert all(kernel["was_cached"] for kernel in kernels)
    assert [kernel["first_num_tokens"] for kernel in kernels] == [0, 8]
    assert kernels[-1]["last_num_tokens"] == 12
    assert "2 of them were cached" in run_warmup(warm_folder, *TWO_KERNELS).stdout


def test_kernels_of_a_tuning_table_are_compiled_too(tmp_path: Path, monkeypatch):
    """An entry holds around 4 tokens only, so the formula's kernel comes back behind it."""
    sizes = ["--ranks", "2", "--max-tokens", "7", "--experts", "4", "--num-sms", "4"]
    shape = MoEShape(2, 4, 2, 256, 256, 7)
    formula = choose_config(shape, 4, num_sms=4).tunable
    entry = TunedEntry(
        4, (("num_stages", 3),), tuple(formula.items()), 1.0, 2.0, "2026-11-21", "abc"
    )
    key = TunedLayerKey.of(shape, device="Some GPU", arch="sm_100a", num_sms=4)
    add_to_table(tmp_path / "table.json", TunedLayer(key, (4,), (entry,)))
    monkeypatch.setenv("DEEP_MOE_TUNING_TABLE", str(tmp_path / "table.json"))
    cache = tmp_path / "cache"
    result = run_warmup(cache, *sizes, "--gpu", "Some GPU", "--json")
    kernels = json.loads(result.stdout)
    assert [kernel["first_num_tokens"] for kernel in kernels] == [0, 3, 6]
    assert kernels[0]["key"] == kernels[2]["key"] != kernels[1]["key"]
    assert kernels[1]["config"]["num_stages"] == 3
    assert len(list(KernelCache(cache).entries())) == 2


def test_an_impossible_override_fails_before_compiling(tmp_path: Path):
    result = run_warmup(tmp_path, "--override", "num_stages=90")
    assert result.exit_code == 1
    assert "num_stages" in str(result.exception)
    assert list(KernelCache(tmp_path).entries()) == []
