"""An activation that is not part of deep_moe, from a folder of its own through everything: called,
compared with the reference, fuzzed, trained, run from the command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_moe.axes import VALUES_VARIABLE

# The first cases of each that have it.
FUZZ = """
import itertools, sys

from deep_moe.activations import ToyReglu
from deep_moe.trial.fuzzing import FuzzCase
from deep_moe.trial.training_fuzzing import TrainingCase

for kind, number in ((FuzzCase, 2), (TrainingCase, 3)):
    cases = map(kind.of, itertools.count())
    own = (case for case in cases if isinstance(case.values["activation"], ToyReglu))
    for case in itertools.islice(own, number):
        assert case.run() == "", case
"""


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with it alone."""
    folder = tmp_path_factory.mktemp("toy") / "values"
    for part in ("deep_moe/activations", "include/deep_moe/activations"):
        shutil.copytree(Path(__file__).parents[1] / "values" / part, folder / part)
    return folder


def run(values: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, VALUES_VARIABLE: str(values)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--arch", "sm_90a", "--activation", "toy_reglu:bound=1.5"),
        ("--arch", "sm_100a", "--activation", "toy_reglu", "--exact"),
        ("--arch", "sm_90a", "--activation", "toy_reglu", "--path", "split"),
    ],
    ids=lambda options: " ".join(options[1::2]),
)
def test_the_command_line_runs_it_as_the_reference_says(
    values: Path, options: tuple[str, ...]
) -> None:
    sizes = ("--hidden", "256", "--intermediate", "128", "--experts", "4", "--tokens", "9")
    report = json.loads(run(values, "-m", "deep_moe", "run", *options, *sizes, "--json"))
    assert report["passed"]


def test_fuzz_cases_of_it_are_right(values: Path) -> None:
    run(values, "-c", FUZZ)


def test_without_the_folder_nobody_knows_it(tmp_path: Path) -> None:
    (tmp_path / "deep_moe").mkdir()
    with pytest.raises(AssertionError, match=r"--activation must be one of .*; got 'toy_reglu'"):
        run(tmp_path, "-m", "deep_moe", "run", "--activation", "toy_reglu", "--tokens", "1")
