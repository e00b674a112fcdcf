"""`warpcheck` and `deep-moe check`: exit status, findings by cause, suppressions, documents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from .building import host_program, kernels_ptx

LAUNCH = """
kernel = "add"
grid = [2, 1, 1]
block = [64, 1, 1]
args = ["a", {size}]

[arrays.a]
dtype = "int32"
shape = [100]
fill = 3
save = "out.npy"
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "kernels.ptx"
    path.write_text(kernels_ptx())
    return path


def check(*words: object, command: str = "warpcheck") -> subprocess.CompletedProcess[str]:
    module, first = {
        "warpcheck": ("deep_moe.emulator.cuda.command", []),
        "deep-moe": ("deep_moe.cli", ["check"]),
    }[command]
    code = f"import sys; sys.argv[0] = {command!r}; from {module} import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *first, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, "COLUMNS": "200"},
    )


def program(scenario: str, image: Path) -> tuple[Path, str, Path]:
    return host_program("driver.cpp"), scenario, image


@pytest.mark.parametrize("command", ["warpcheck", "deep-moe"])
def test_a_program_without_findings_ends_with_its_own_status(command: str, image: Path):
    result = check(*program("adds", image), command=command)
    assert (result.returncode, result.stdout) == (0, "ok\n")
    assert "0 errors, 0 refusals, 0 warnings; 1 launches" in result.stderr
    result = check("--exit-code", "9", *program("exits_with_3", image), command=command)
    assert result.returncode == 3


@pytest.mark.parametrize("command", ["warpcheck", "deep-moe"])
def test_help_flows(command: str):
    """A line is as long as the terminal is wide, not as long as in the source."""
    assert (
        "driver and runtime, and the emulator executes" in check("--help", command=command).stdout
    )


def test_findings_have_a_status_of_their_own(image: Path):
    result = check("--exit-code", "9", *program("race", image))
    assert result.returncode == 9
    assert "error: race: data race at byte 0 of 'allocation 1" in result.stderr
    assert "1 errors" in result.stderr
    assert check("--fail-on", "never", *program("race", image)).returncode == 0


def test_runs_with_several_seeds_count_a_cause_once(image: Path):
    result = check("--runs", "2", "--json", *program("race", image))
    assert result.returncode == 1
    document = json.loads(result.stdout)
    (cause,) = document["causes"]
    assert (cause["kind"], cause["count"]) == ("race", 2)
    assert document["launches"] == 6


# Waits until as many runs as there are jobs are there, and prints its seed, the first one last.
MEETS = """
import os, re, sys, time
from pathlib import Path
seed = int(re.search(r"seed=(\\d+)", os.environ["WARPCHECK_OPTIONS"])[1])
folder = Path(sys.argv[1])
(folder / str(seed)).touch()
end = time.monotonic() + 60
while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(0.5 * (seed == 0))
print(seed, len(list(folder.iterdir())) >= 2, flush=True)
"""


def test_runs_side_by_side_print_in_their_order(tmp_path: Path):
    words = ("--runs", "3", "--jobs", "2", sys.executable, "-c", MEETS, tmp_path)
    result = check(*words)
    assert (result.returncode, result.stdout) == (0, "0 True\n1 True\n2 True\n")


def test_runs_side_by_side_find_what_others_find(image: Path):
    result = check("--runs", "2", "--jobs", "2", "--json", *program("race", image))
    (cause,) = json.loads(result.stdout)["causes"]
    assert (result.returncode, cause["kind"], cause["count"]) == (1, "race", 2)


def test_an_interrupt_ends_all_runs(tmp_path: Path):
    lives = "import os, sys, time; open(sys.argv[1] + '/' + str(os.getpid()), 'w'); time.sleep(300)"
    code = "from deep_moe.emulator.cuda.command import main; main()"
    words = ["--runs", "2", "--jobs", "2", sys.executable, "-c", lives, str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        # As a shell that runs this in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while len(pids := [int(path.name) for path in tmp_path.iterdir()]) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_what_is_suppressed_does_not_fail(image: Path, tmp_path: Path):
    known = tmp_path / "known.txt"
    known.write_text("# what we know\nrace rac*  # benign\nrace nowhere\n")
    result = check("--suppressions", known, *program("race", image))
    assert result.returncode == 0
    assert "1 suppressed" in result.stderr
    assert f"{known}:3: nothing was suppressed by 'race nowhere'" in result.stderr
    known.write_text("race\n")
    result = check("--suppressions", known, *program("race", image))
    assert result.returncode == 2
    assert f"{known}:1 must be a kind and a place; got 'race'" in result.stderr


def test_sarif_names_rule_level_and_place(image: Path, tmp_path: Path):
    log = tmp_path / "log.sarif"
    document = tmp_path / "log.json"
    check("--sarif", log, "--json-file", document, *program("race", image))
    (run,) = json.loads(log.read_text())["runs"]
    assert run["tool"]["driver"]["name"] == "warpcheck"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["race"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("race", "error")
    (place,) = result["locations"]
    assert place["logicalLocations"][0]["fullyQualifiedName"] == "race"
    assert len(result["relatedLocations"]) == 1
    assert json.loads(document.read_text())["causes"][0]["kernels"] == ["race"]


def test_what_cannot_be_emulated_fails(tmp_path: Path):
    image = tmp_path / "kernels.cubin"
    image.write_bytes(b"\x7fELF" + bytes(64))
    result = check(*program("adds", image))
    assert result.returncode == 10
    assert "refused: cuModuleLoadData: it is a cubin" in result.stderr
    assert "0 warnings, 1 refused calls" in result.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--chip", "h99", "true"], "chip must be one of h100, h200"),
        (["--fail-on", "x", "true"], "--fail-on must be one of error, warning, never; got 'x'"),
        (["no-such-program"], "no-such-program"),
        ([], "Missing argument"),
    ],
)
def test_wrong_options_are_said(words: list[str], text: str):
    result = check(*words)
    assert result.returncode == 2
    assert text in result.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the standard library has no TOML")
def test_a_kernel_runs_from_a_launch_file(image: Path, tmp_path: Path):
    launch = tmp_path / "launch.toml"
    launch.write_text(LAUNCH.format(size=100))
    result = check(image, launch)
    assert result.returncode == 0, result.stderr
    assert (np.load(tmp_path / "out.npy") == 4).all()
    launch.write_text(LAUNCH.format(size=120))
    result = check(image, launch)
    assert result.returncode == 1
    assert "out of bounds: 0 bytes past the end of 'a' (400 bytes" in result.stderr


def test_a_launch_file_may_be_json_and_hold_several_launches(image: Path, tmp_path: Path):
    launch = tmp_path / "launch.json"
    one = {"kernel": "twice", "grid": [1, 1, 1], "block": [32, 1, 1], "args": ["a", 32]}
    arrays = {"a": {"dtype": "int32", "shape": [32], "fill": 1, "save": "out.npy"}}
    launch.write_text(json.dumps({"launch": [one, one], "arrays": arrays}))
    result = check(image, launch)
    assert result.returncode == 0, result.stderr
    assert (np.load(tmp_path / "out.npy") == 4).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"grid": None}, "has no grid"),
        ({"gird": [1, 1, 1]}, "'gird' must be one of kernel, grid, block"),
        ({"args": ["b", 1]}, "there is no array 'b', only a"),
        ({"arrays": {"a": {"dtype": "int32"}}}, "arrays.a needs a dtype and a shape"),
        (
            {"arrays": {"a": {"dtype": "int32", "shape": [1], "fill": "ones"}}},
            "fill must be a number, random, zeros or a .npy; got 'ones'",
        ),
    ],
)
def test_a_wrong_launch_file_is_said(
    change: dict[str, object], text: str, image: Path, tmp_path: Path
):
    content: dict[str, object] = {
        "kernel": "add",
        "grid": [1, 1, 1],
        "block": [32, 1, 1],
        "args": ["a", 32],
        "arrays": {"a": {"dtype": "int32", "shape": [32]}},
    }
    content.update(change)
    launch = tmp_path / "launch.json"
    launch.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    result = check(image, launch)
    assert result.returncode == 2
    assert text in result.stderr
