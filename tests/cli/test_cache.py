"""`deep-moe cache`: what it lists, how it reports damage, and that it clears."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.jit import KernelCache

FILES = {"kernel.cubin": b"cubin", "kernel.ptx": b"ptx", "kernel.cu": b"source"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cache = KernelCache(tmp_path)
    for key in ("sm_100a-first", "sm_100a-second"):
        cache.load_or_compile(key, lambda: (FILES, {"arch": "sm_100a"}))
    return tmp_path


def run_cache(command: str, folder: Path, *options: str):
    return CliRunner().invoke(app, ["cache", command, "--folder", str(folder), *options])


def test_list_names_every_kernel(folder: Path):
    entries = json.loads(run_cache("list", folder, "--json").stdout)["entries"]
    assert [entry["key"] for entry in entries] == ["sm_100a-first", "sm_100a-second"]
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
    (folder / "sm_100a-first" / "kernel.cubin").write_bytes(b"cubxn")
    result = run_cache("verify", folder, "--json")
    assert result.exit_code == 1
    (damaged,) = json.loads(result.stdout)["damaged"]
    assert damaged["key"] == "sm_100a-first"
    assert "kernel.cubin" in damaged["problem"]


def test_clear_removes_every_kernel(folder: Path):
    assert json.loads(run_cache("clear", folder, "--json").stdout)["num_removed"] == 2
    assert list(KernelCache(folder).entries()) == []
