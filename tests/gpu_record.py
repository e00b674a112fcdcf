"""Which tests last passed on which GPUs: a plugin of pytest for `run_on_gpus.sh`, which keeps
`tests/gpu_record.json`.

For each test file, by the GPUs of the machine: the commit and the date of the last run in which
none of its tests failed and all that were chosen had their turn, how many passed, and how many were
skipped, for example for want of a second GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"


class GpuRecord:
    """path: the record. machine: the GPUs, in words. commit: what is tested."""

    def __init__(self, path: Path, machine: str, commit: str) -> None:
        self.path = path
        self.machine = machine
        self.commit = commit
        self._outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._waiting: set[str] = set()  # chosen tests that had no turn yet

    def pytest_report_header(self) -> str:
        return f"commit {self.commit} on {self.machine}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._waiting.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._waiting.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._waiting.discard(report.nodeid)
        # A test that passes has three reports, of which the call's counts; others fail in any.
        if report.when == "call" or not report.passed:
            file = report.nodeid.partition("::")[0]
            self._outcomes[file][report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # the process that collects the workers' reports writes
        record: dict[str, Any] = {}
        if self.path.exists():
            record = json.loads(self.path.read_text())
        unfinished = {nodeid.partition("::")[0] for nodeid in self._waiting}
        for file, outcomes in self._outcomes.items():
            if outcomes["passed"] and not outcomes["failed"] and file not in unfinished:
                of_file = record.setdefault(file, {})
                of_file[self.machine] = {
                    "commit": self.commit,
                    "date": time.strftime("%Y-%m-%d", time.gmtime()),
                    "passed": outcomes["passed"],
                    "skipped": outcomes["skipped"],
                }
        self.path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def commit() -> str:
    """Of the checkout, and whether anything differs from it. DEEP_MOE_COMMIT says it where there is
    no git."""
    if "DEEP_MOE_COMMIT" in os.environ:
        return os.environ["DEEP_MOE_COMMIT"]
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip() or "unknown"


def machine() -> str:
    import torch

    names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(GpuRecord(RECORD, machine(), commit()), "gpu_record_writer")
