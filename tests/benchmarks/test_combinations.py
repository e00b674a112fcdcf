"""The record of every combination: which there are, and what a second run does again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.combinations
from benchmarks.combinations import axes_of, combinations, main, name_of, page_of, real_config
from deep_moe.activations import ACTIVATIONS, has_gate
from deep_moe.targets import TARGETS
from deep_moe.trial.fuzzing import FuzzCase


class Work:
    """Stands for compiler and emulator, and keeps what they were asked for."""

    def __init__(self) -> None:
        self.built: list[Any] = []
        self.run: list[str] = []
        self.spill_bytes = 0
        self.failure = ""
        self.version = "1"

    def build(self, config: Any) -> Any:
        self.built.append(config)
        resources = {
            "num_registers": 128,
            "stack_bytes": self.spill_bytes,
            "spill_store_bytes": self.spill_bytes,
            "spill_load_bytes": 2 * self.spill_bytes,
        }
        manifest = {"resources": resources, "compile_seconds": 1.0}
        return SimpleNamespace(key=f"{hash(config)}-{self.version}", manifest=manifest)

    def run_case(self, case: FuzzCase) -> str:
        self.run.append(name_of(case))
        return self.failure


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    monkeypatch.setattr(benchmarks.combinations.jit, "build", work.build)
    monkeypatch.setattr(FuzzCase, "run", lambda case: work.run_case(case))
    return work


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["--json", str(tmp_path / "all.json"), "--table", str(tmp_path / "all.md")]


@pytest.mark.parametrize("arch", TARGETS)
def test_every_format_and_activation_is_there_with_every_other_axis(arch: str):
    found = [
        (
            (case.shape.weights, case.shape.token_format),
            case.values["activation"].name,
            case.shape.biases,
            case.shape.num_shared_experts > 0,
            case.shape.num_pool_tokens is not None,
        )
        for case in combinations(arch)
    ]
    formats = {(pair.weights, pair.token_format) for pair in TARGETS[arch].weights}
    asked = itertools.product(formats, ACTIVATIONS, *[(False, True)] * 3)
    assert sorted(found) == sorted(own for own in asked if has_gate(own[1]) or not own[2])


@pytest.mark.parametrize("arch", TARGETS)
def test_a_real_layer_has_the_axes_of_its_combination(arch: str):
    for case in combinations(arch):
        config = real_config(case)
        assert (config.arch, config.weights, config.biases, config.accumulate) == (
            arch,
            case.shape.weights,
            case.shape.biases,
            case.accumulates,
        )
        assert config.activation == case.values["activation"]
        assert config.pool_wraps == (case.values["pool"] is not None)
        assert config.num_shared_experts == case.shape.num_shared_experts


def test_a_second_run_repeats_only_what_is_of_another_kernel(work: Work, words: list[str]):
    words = [*words, "--arch", "sm_100a"]
    names = [name_of(case) for case in combinations("sm_100a")]
    assert main([*words, "--compile-only"]) == 0
    assert work.run == []
    assert main(words) == 0
    assert work.run == names
    assert main(words) == 0
    assert work.run == names
    work.version = "2"
    assert main(words) == 0
    assert work.run == names * 2


def test_the_table_tells_spills_and_failures(work: Work, words: list[str]):
    work.spill_bytes, work.failure = 8, "call 0, rank 1: wrong"
    assert main([*words, "--arch", "sm_100a"]) == 1
    work.spill_bytes, work.failure = 0, ""
    assert main([*words, "--arch", "sm_103a"]) == 0
    file, table = Path(words[1]), Path(words[3]).read_text()
    records = json.loads(file.read_text())["records"]
    own = [record for record in records if record["arch"] == "sm_100a"]
    assert {record["failure"] for record in own} == {"call 0, rank 1: wrong"}
    row = "mxfp4 x mxfp8 | swiglu"
    assert f"| sm_100a | {row} | 0 of 8 | 192 to 240 | 128 | 0 of 8 | 24 | 8 |" in table
    assert f"| sm_103a | {row} | 8 of 8 | 192 to 240 | 128 | 8 of 8 | 0 | 0 |" in table
    cases = list(combinations("sm_103a"))
    number = len(cases)
    assert f"The record has {2 * number}. Of these {number} have no spills." in table
    assert f"The emulator ran {2 * number}, and {number} were right." in table
    missing = sorted({axes_of(case)["weights"] for case in combinations("sm_90a")})
    assert f"Not in the record of sm_90a: the formats {', '.join(missing)}." in table
    assert "Not in the record of sm_100a" not in table
    assert "sm_103a: no kernel spills." in table
    with_biases = sum(case.shape.biases for case in cases)
    assert f"| biases | {with_biases} of {with_biases} | 24 |" in table


def test_the_committed_page_is_made_of_the_committed_record():
    folder = benchmarks.combinations.FOLDER
    report = json.loads((folder / "combinations.json").read_text())
    everything = [case for arch in TARGETS for case in combinations(arch)]
    page = page_of(report["records"], report["compiler"], everything)
    assert (folder / "COMBINATIONS.md").read_text() == page
