"""`deep-moe cache`: what it lists, how it reports damage, and that it clears."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.jit import KernelCache
from deep_moe.jit.cache import make_key

FIRST, SECOND = sorted(make_key("sm_100a", {"source": name}) for name in ("first", "second"))
FILES = {"kernel.cubin": b"cubin", "kernel.ptx": b"ptx", "kernel.cu": b"source"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cache = KernelCache(tmp_path)
    for key in (FIRST, SECOND):
        cache.load_or_compile(key, lambda: (FILES, {"arch": "sm_100a"}))
    return tmp_path


def run_cache(command: str, folder: Path, *options: str):
    return CliRunner().invoke(app, ["cache", command, "--folder", str(folder), *options])


def test_list_names_every_kernel(folder: Path):
    entries = json.loads(run_cache("list", folder, "--json").stdout)["entries"]
    assert [entry["key"] for entry in entries] == [FIRST, SECOND]
    assert {entry["problem"] for entry in entries} == {None}
    assert "2 kernels" in run_cache("list", folder).stdout


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
    for command in ("clear", "list", "verify"):
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
