"""`deep-moe fuzz`: cases by number, and an exit status that tells."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.targets import target_of
from deep_moe.trial import fuzz_workers, fuzzing
from deep_moe.trial.adapter_fuzzing import AdapterCase
from deep_moe.trial.fuzzing import CASES_PER_KERNEL, FuzzCase
from deep_moe.trial.grouped_fuzzing import GroupedCase
from deep_moe.trial.product_fuzzing import ProductCase
from deep_moe.trial.split_fuzzing import SplitCase
from deep_moe.trial.throughput_fuzzing import ThroughputCase
from deep_moe.trial.training_fuzzing import TrainingCase
from deep_moe.trial.two_level_fuzzing import TwoLevelCase
from tests.everyday import parametrize

FUSED = ["fuzz", "--path", "fused"]


@parametrize("arch", ["sm_100a", "sm_90a"], everyday=["sm_90a"])
def test_some_cases_pass(arch: str) -> None:
    """Of each path that has architectures."""
    count = 4 * CASES_PER_KERNEL
    command = ["fuzz", "--count", str(count), "--arch", arch, "--workers", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"{count} cases, 0 failed" in result.output
    assert re.search(r"path +fused: \d+, split: 4, throughput: 4", result.output)


def test_two_workers_say_what_one_says() -> None:
    command = ["fuzz", "--count", str(3 * CASES_PER_KERNEL), "--path", "fused", "--json"]
    documents = [
        json.loads(CliRunner().invoke(app, [*command, "--workers", str(number)]).stdout)
        for number in (1, 2)
    ]
    for document in documents:
        assert document.pop("processor_seconds") > 0
    assert documents[0] == documents[1]


def test_a_case_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: FuzzCase) -> str:
        if case.number == 1:
            raise IndexError("of the host's side")
        return ""

    monkeypatch.setattr(FuzzCase, "run", run)
    result = CliRunner().invoke(app, [*FUSED, "--count", "3"])
    assert result.exit_code == 1
    assert "IndexError: of the host's side" in result.output
    assert "repeat: deep-moe fuzz --path fused --first 1 --count 1" in result.output
    assert "3 cases, 1 failed" in result.output


class EndsItsProcess(FuzzCase):
    def run(self) -> str:
        os._exit(1)


def test_a_worker_that_dies_is_a_failure_and_no_hang() -> None:
    (outcome,) = fuzz_workers.outcomes(map(EndsItsProcess.of, range(3)), num_workers=2)
    assert "a worker's process ended while cases 0, 1, 2 ran" in outcome.failure


class KillsWhoBegan(FuzzCase):
    def run(self) -> str:
        beginner = multiprocessing.parent_process()
        assert beginner is not None
        assert beginner.pid is not None
        Path(os.environ["WORKER"]).write_text(str(os.getpid()))
        os.kill(beginner.pid, signal.SIGKILL)
        time.sleep(600)
        return ""


def test_workers_of_a_killed_process_end(tmp_path: Path) -> None:
    script = (
        "from deep_moe.trial import fuzz_workers\n"
        "from tests.cli.test_fuzz import KillsWhoBegan\n"
        "list(fuzz_workers.outcomes(map(KillsWhoBegan.of, range(1)), num_workers=2))"
    )
    environment = {**os.environ, "WORKER": str(tmp_path / "worker")}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    worker = Path("/proc") / (tmp_path / "worker").read_text()
    for _ in range(600):
        if not worker.exists():
            return
        time.sleep(0.1)
    pytest.fail("a minute later the worker is still there")


def test_no_case_begins_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((10.0, 11.0, 12.0))
    monkeypatch.setattr(fuzz_workers.time, "time", lambda: next(times))
    monkeypatch.setattr(FuzzCase, "run", lambda _: "")
    cases = map(FuzzCase.of, itertools.count())
    assert len(list(fuzz_workers.outcomes(cases, ends_at=12.0))) == 2


def test_cases_of_one_format_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[FuzzCase] = []
    monkeypatch.setattr(FuzzCase, "run", lambda case: cases.append(case) or "broken")
    result = CliRunner().invoke(app, [*FUSED, "--count", "3", "--weights", "fp8"])
    assert [case.shape.weights for case in cases] == ["fp8"] * 3
    assert f"--first {cases[0].number} --count 1 --weights fp8" in result.output
    hopper = target_of("sm_90a")
    monkeypatch.setitem(vars(hopper), "weights", (hopper.weights_of("mxfp4"),))
    refused = CliRunner().invoke(
        app, ["fuzz", "--count", "1", "--weights", "fp8", "--arch", "sm_90a"]
    )
    assert "weights must be one of mxfp4 on sm_90a; got 'fp8'" in str(refused.exception)
    assert CliRunner().invoke(app, ["fuzz", "--count", "1", "--weights", "fp7"]).exit_code == 2


def test_cases_with_so_many_shared_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[FuzzCase] = []
    monkeypatch.setattr(FuzzCase, "run", lambda case: cases.append(case) or "broken")
    result = CliRunner().invoke(app, [*FUSED, "--count", "3", "--shared-experts", "3"])
    assert [case.shape.num_shared_experts for case in cases] == [3] * 3
    assert f"--first {cases[0].number} --count 1 --shared-experts 3" in result.output
    refused = CliRunner().invoke(app, ["fuzz", "--count", "1", "--shared-experts", "2"])
    assert refused.exit_code == 2
    assert "must be one of 0, 1, 3; got 2" in refused.output


def cases_until_all_pairs_have_met(arch: str) -> int:
    coverage = fuzzing.Coverage()
    cases = (case for case in map(FuzzCase.of, itertools.count()) if case.arch == arch)
    while coverage.num_cases == 0 or coverage.num_pairs < coverage.num_all_pairs:
        coverage.add(next(cases), "")
    return coverage.num_cases


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two minutes, unless the machine is loaded
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_a_round_passes_in_which_all_pairs_meet(arch: str) -> None:
    """As far as the case with which the last two have met: the rest of a round is by chance."""
    count = cases_until_all_pairs_have_met(arch)
    assert count <= fuzzing.FuzzCase.cases_per_round()
    result = CliRunner().invoke(app, [*FUSED, "--count", str(count), "--arch", arch])
    assert result.exit_code == 0, result.output
    num_pairs, num_all = re.search(r"(\d+) of (\d+) pairs", result.output).groups()
    assert num_pairs == num_all


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(12 * 3600)
def test_the_grid_passes() -> None:
    result = CliRunner().invoke(app, ["fuzz", "--grid"])
    assert result.exit_code == 0, result.output


def test_the_grid_is_all_kernels_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[FuzzCase] = []
    monkeypatch.setattr(FuzzCase, "run", lambda case: cases.append(case) or "")
    size = fuzzing.grid_size()
    first = size - 2 * fuzzing.CASES_PER_GRID_KERNEL
    result = CliRunner().invoke(app, ["fuzz", "--grid", "--first", str(first), "--workers", "1"])
    assert result.exit_code == 0
    assert [case.number for case in cases] == list(range(first, size))
    num_axes = fuzzing.NUM_KERNEL_AXES
    kernels = {tuple(map(str, list(case.values.values())[:num_axes])) for case in cases}
    assert len(kernels) == 2
    with pytest.raises(ValueError, match=f"must be below {size}"):
        FuzzCase.of_grid(size)


def test_a_failure_ends_with_the_line_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuzzCase, "run", lambda case: "broken" if case.number == 8 else "")
    result = CliRunner().invoke(app, [*FUSED, "--first", "7", "--count", "3"])
    assert result.exit_code == 1
    assert "repeat: deep-moe fuzz --path fused --first 8 --count 1" in result.output


def test_paths_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With numbers that share a kernel; one that fails in several is one line of the corpus."""
    cases: list[FuzzCase] = []
    kinds = (
        *(FuzzCase, SplitCase, ThroughputCase, GroupedCase),
        *(TwoLevelCase, AdapterCase, TrainingCase, ProductCase),
    )
    for kind in kinds:
        monkeypatch.setattr(kind, "run", lambda case: cases.append(case) or "broken")
    corpus = tmp_path / "corpus"
    command = ["fuzz", "--workers", "1", "--corpus", str(corpus)]
    count = 13 * CASES_PER_KERNEL - 9
    result = CliRunner().invoke(app, [*command, "--first", "1", "--count", str(count)])
    turns = [path for path, _ in itertools.groupby(case.path for case in cases)]
    assert turns == [
        *("fused", "split", "training", "fused", "throughput", "product", "training"),
        *("fused", "grouped", "adapters", "two_level", "product", "training"),
    ]
    numbers = [case.number for case in cases if case.path == "fused"]
    assert numbers == list(range(1, 3 * CASES_PER_KERNEL))
    assert "repeat: deep-moe fuzz --path split --first 3 --count 1" in result.output
    assert corpus.read_text().split() == list(map(str, numbers))
    cases.clear()
    corpus.write_text("6\n5\n")
    CliRunner().invoke(app, [*command, "--path", "split", "--count", "4"])
    assert [case.number for case in cases] == [6, 5, 0, 1]
    assert {case.path for case in cases} == {"split"}
    for options, words in (
        (
            ["--path", "two-level"],
            "--path must be one of fused, split, throughput, grouped, two_level, adapters, "
            "training, product; got 'two-level'",
        ),
        (["--path", "split", "--grid"], "--grid must be without --path split"),
    ):
        refused = CliRunner().invoke(app, ["fuzz", "--count", "1", *options])
        assert refused.exit_code == 2
        assert words in " ".join(refused.output.replace("│", " ").split())


def test_a_corpus_comes_first_and_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers: list[int] = []

    def run(case: FuzzCase) -> str:
        numbers.append(case.number)
        return "broken" if case.number in (1, 40) else ""

    monkeypatch.setattr(FuzzCase, "run", run)
    corpus = tmp_path / "corpus"
    command = [*FUSED, "--corpus", str(corpus), "--count", "3"]
    assert CliRunner().invoke(app, command).exit_code == 1
    assert (numbers, corpus.read_text()) == ([0, 1, 2], "1\n")
    corpus.write_text("40\n1\n")
    numbers.clear()
    assert CliRunner().invoke(app, command).exit_code == 1
    assert (numbers, corpus.read_text()) == ([40, 1, 0], "40\n1\n")
    corpus.write_text("-3\n")
    assert CliRunner().invoke(app, command).exit_code == 2


def test_it_ends_with_what_the_cases_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FuzzCase, "run", lambda case: "broken" if case.number == 3 else "")
    cases = [FuzzCase.of(number) for number in range(20)]
    result = CliRunner().invoke(app, [*FUSED, "--workers", "1", "--count", "20", "--json"])
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["num_cases"] == 20
    (failure,) = document["failures"]
    assert failure["failure"] == "broken"
    assert failure["repeat"] == "deep-moe fuzz --path fused --first 3 --count 1"
    covered = document["covered"]
    assert covered["arch"] == Counter(case.arch for case in cases)
    assert covered["slots"] == Counter(case.values["slots"] for case in cases)
    assert 0 < document["num_pairs"] < document["num_all_pairs"]
    printed = CliRunner().invoke(app, [*FUSED, "--first", "4", "--count", "2"]).stdout
    assert "what the cases were" in printed
    assert "schedule" in printed
    assert "2 cases, 0 failed" in printed


def test_only_cases_with_or_without_biases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases: list[FuzzCase] = []
    monkeypatch.setattr(FuzzCase, "run", lambda case: cases.append(case) or "wrong")
    for option, has_biases in (("--biases", True), ("--no-biases", False)):
        cases.clear()
        result = CliRunner().invoke(app, [*FUSED, "--count", "3", option])
        assert [case.shape.biases for case in cases] == [has_biases] * 3
        assert f"--count 1 {option}" in " ".join(result.output.split())


def test_a_number_names_one_case() -> None:
    assert FuzzCase.of(5) == FuzzCase.of(5) != FuzzCase.of(6)


def test_without_a_limit_it_refuses() -> None:
    assert CliRunner().invoke(app, ["fuzz"]).exit_code == 2


def test_an_unknown_architecture_is_refused() -> None:
    assert CliRunner().invoke(app, ["fuzz", "--count", "1", "--arch", "sm_80"]).exit_code == 2
