"""`deep-moe cache`: what it lists, how it reports damage, and that it clears."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_moe import jit
from deep_moe.cli import app
from deep_moe.jit import KernelCache
from deep_moe.jit.cache import make_key

FIRST, SECOND = sorted(make_key("sm_100a", {"source": name}) for name in ("first", "second"))
FILES = {"kernel.cubin": b"cubin", "kernel.ptx": b"ptx", "kernel.cu": b"source"}

MANIFEST = {
    "arch": "sm_100a",
    "kernel": "mega_moe_kernel",
    "created": "2026-11-26T10:00:00+00:00",
    "config": {
        "num_ranks": 2,
        "num_experts": 8,
        "num_topk": 3,
        "hidden": 256,
        "intermediate_hidden": 128,
        "weights": "fp8",
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cache = KernelCache(tmp_path)
    for key, manifest in ((FIRST, {"arch": "sm_100a"}), (SECOND, MANIFEST)):
        cache.load_or_compile(key, lambda manifest=manifest: (FILES, manifest))
    return tmp_path


def run_cache(command: str, folder: Path, *options: str):
    return CliRunner().invoke(app, ["cache", command, "--folder", str(folder), *options])


def test_list_names_every_kernel(folder: Path):
    entries = json.loads(run_cache("list", folder, "--json").stdout)["entries"]
    assert [entry["key"] for entry in entries] == [FIRST, SECOND]
    assert {entry["problem"] for entry in entries} == {None}
    assert "2 kernels" in run_cache("list", folder).stdout


def test_list_says_what_a_kernel_is_for(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = run_cache("list", folder).stdout
    for words in ("2 ranks, 8 experts, top-3, 256 x 128", "fp8", "2026-11-26", SECOND[:16]):
        assert words in printed
    entry = json.loads(run_cache("list", folder, "--json").stdout)["entries"][1]
    assert entry["config"] == MANIFEST["config"]
    assert entry["created"] == MANIFEST["created"]


def test_list_says_which_kernels_are_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    (folder / FIRST / "kernel.ptx").write_bytes(b"other")
    printed = run_cache("list", folder).stdout
    (line,) = (line for line in printed.splitlines() if FIRST[:16] in line)
    assert "kernel.ptx" in line
    (line,) = (line for line in printed.splitlines() if SECOND[:16] in line)
    assert "kernel.ptx" not in line


def test_prune_removes_what_no_call_takes(tmp_path: Path):
    """Of other headers, options or another compiler, of other versions, and damaged."""
    cache = KernelCache(tmp_path)
    current = jit._made_with()
    manifests = {
        "current": current,
        "headers": {**current, "headers": ["older", *current["headers"][1:]]},
        "options": {**current, "options": current["options"][1:]},
        "compiler": {**current, "compiler": "nvidia-cuda-nvrtc 13.99"},
        "damaged": current,
    }
    keys = {name: make_key("sm_90a", {"of": name}) for name in manifests}
    for name, manifest in manifests.items():
        made = {"arch": "sm_90a", **manifest}
        cache.load_or_compile(keys[name], lambda made=made: (FILES, made))
    (tmp_path / keys["damaged"] / "kernel.ptx").write_bytes(b"other")
    entries = json.loads(run_cache("list", tmp_path, "--json").stdout)["entries"]
    old = {entry["key"] for entry in entries if entry["is_outdated"]}
    assert old == {key for name, key in keys.items() if name != "current"}
    assert set(json.loads(run_cache("prune", tmp_path, "--json").stdout)["removed"]) == old
    assert [entry.key for entry in cache.entries()] == [keys["current"]]
    assert "removed 0 kernels" in run_cache("prune", tmp_path).stdout


def test_list_of_an_absent_folder_is_empty(tmp_path: Path):
    result = run_cache("list", tmp_path / "absent", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["entries"] == []


def test_verify_passes_on_intact_kernels(folder: Path):
    result = run_cache("verify", folder)
    assert result.exit_code == 0
    assert "2 of 2 kernels intact" in result.stdout


def test_verify_fails_on_a_damaged_kernel_and_names_it(folder: Path):
    (folder / FIRST / "kernel.cubin").write_bytes(b"cubxn")
    result = run_cache("verify", folder, "--json")
    assert result.exit_code == 1
    (damaged,) = json.loads(result.stdout)["damaged"]
    assert damaged["key"] == FIRST
    assert "kernel.cubin" in damaged["problem"]


def test_clear_removes_every_kernel(folder: Path):
    assert json.loads(run_cache("clear", folder, "--json").stdout)["num_removed"] == 2
    assert list(KernelCache(folder).entries()) == []


def test_clear_refuses_a_folder_that_is_not_a_cache(tmp_path: Path):
    for name in ("Documents", ".ssh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    for command in ("clear", "list", "prune", "verify"):
        result = run_cache(command, tmp_path)
        assert result.exit_code == 1
        assert f"{tmp_path} is not a kernel cache" in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ssh", "Documents"]
    assert (tmp_path / "Documents" / "file").read_text() == "mine"


def test_kernels_of_other_versions_are_told_from_damaged_ones(folder: Path):
    path = folder / FIRST / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    path.write_text(json.dumps({**manifest, "schema": 1}))
    result = run_cache("verify", folder)
    assert result.exit_code == 0
    assert "1 of 2 kernels intact, 1 of other versions" in result.stdout
    entries = json.loads(run_cache("list", folder, "--json").stdout)["entries"]
    assert [entry["is_of_other_version"] for entry in entries] == [True, False]
