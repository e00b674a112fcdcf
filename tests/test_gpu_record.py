"""The record of what passed on GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gpu_record import GpuRecord


def finish(record: GpuRecord, *reports: tuple[str, str, str], chosen: tuple[str, ...] = ()) -> None:
    items: Any = SimpleNamespace(items=[SimpleNamespace(nodeid=nodeid) for nodeid in chosen])
    record.pytest_collection_finish(items)
    for nodeid, when, outcome in reports:
        report: Any = SimpleNamespace(
            nodeid=nodeid, when=when, outcome=outcome, passed=outcome == "passed"
        )
        record.pytest_runtest_logreport(report)
    session: Any = SimpleNamespace(config=SimpleNamespace())
    record.pytest_sessionfinish(session)


def test_files_in_which_a_test_fails_or_none_passes_are_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    passed = [("a.py::one", "setup", "passed"), ("a.py::one", "call", "passed")]
    finish(
        GpuRecord(path, "2 x GPU", "c1"),
        *passed,
        ("a.py::two[x]", "call", "passed"),
        ("b.py::one", "call", "passed"),
        ("b.py::two", "call", "failed"),
        ("c.py::one", "call", "passed"),
        ("c.py::one", "teardown", "failed"),
        ("d.py::one", "setup", "skipped"),
        ("e.py::one", "call", "passed"),
        ("e.py::two", "setup", "skipped"),
    )
    record = json.loads(path.read_text())
    assert set(record) == {"a.py", "e.py"}
    counts = {"a.py": (2, 0), "e.py": (1, 1)}
    for file, (ran, left) in counts.items():
        run = record[file]["2 x GPU"]
        assert (run["commit"], run["passed"], run["skipped"]) == ("c1", ran, left)


def test_a_failure_keeps_the_last_run_that_passed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    finish(GpuRecord(path, "GPU", "c1"), ("a.py::one", "call", "passed"))
    finish(GpuRecord(path, "GPU", "c2"), ("a.py::one", "call", "failed"))
    finish(GpuRecord(path, "2 x GPU", "c2"), ("a.py::one", "call", "passed"))
    record = json.loads(path.read_text())["a.py"]
    assert {machine: run["commit"] for machine, run in record.items()} == {
        "GPU": "c1",
        "2 x GPU": "c2",
    }


def test_a_file_whose_tests_did_not_all_have_their_turn_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    chosen = ("a.py::one", "b.py::one", "b.py::two")
    passed = [(nodeid, "call", "passed") for nodeid in chosen[:2]]
    finish(GpuRecord(path, "GPU", "c1"), *passed, chosen=chosen)
    assert set(json.loads(path.read_text())) == {"a.py"}


def test_a_record_of_a_run_with_workers_that_stops(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = GpuRecord(path, "GPU", "c1")
    record.pytest_xdist_node_collection_finished(["a.py::one", "b.py::one"])
    finish(record, ("a.py::one", "call", "passed"))
    assert set(json.loads(path.read_text())) == {"a.py"}
