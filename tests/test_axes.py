"""Folders of values that are not part of deep_moe."""

import os
from pathlib import Path

import pytest

from deep_moe.axes import VALUES_VARIABLE, further_folders, further_values
from deep_moe.jit.headers import find_headers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VALUES_VARIABLE, str(tmp_path))
    (tmp_path / "deep_moe/weights").mkdir(parents=True)
    return tmp_path


def make_value(folder: Path, name: str) -> Path:
    value = folder / "deep_moe/weights" / name
    value.mkdir(parents=True)
    (value / "__init__.py").touch()
    return value


def test_values_are_packages_of_the_axis_by_their_names(folder: Path) -> None:
    for name in ("toy", "another"):
        make_value(folder, name)
    (folder / "deep_moe/weights/__pycache__").mkdir()
    search_path: list[str] = []
    assert further_values("deep_moe.weights", search_path) == ("another", "toy")
    assert search_path == [str(folder / "deep_moe/weights")]
    assert further_values("deep_moe.tokens", search_path) == ()


def test_a_name_that_is_taken_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = make_value(folder, "toy")
    own = folder / "own"
    (own / "toy").mkdir(parents=True)
    with pytest.raises(ValueError, match=f"new names in deep_moe.weights; got {value}"):
        further_values("deep_moe.weights", [str(own)])
    other = folder / "other"
    again = make_value(other, "toy")
    monkeypatch.setenv(VALUES_VARIABLE, os.pathsep.join(map(str, (folder, other))))
    with pytest.raises(ValueError, match=f"got {again}"):
        further_values("deep_moe.weights", [])


def test_a_folder_that_holds_no_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VALUES_VARIABLE, "/none")
    with pytest.raises(FileNotFoundError, match="must name folders that hold a folder deep_moe"):
        further_folders()


def test_kernels_find_its_headers_and_their_keys_follow_them(folder: Path) -> None:
    header = folder / "include/deep_moe/weights/toy/sm90.cuh"
    header.parent.mkdir(parents=True)
    header.touch()
    found = find_headers()
    assert found.include_paths[1] == folder / "include"
    header.write_text("#pragma once\n")
    changed = find_headers()
    assert changed.identities[1] != found.identities[1]
    assert changed.identities[2:] == found.identities[2:]
