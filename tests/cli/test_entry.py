"""The command line as a program: what it imports, and how it fails."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import deep_moe
from deep_moe import cli
from deep_moe.cli.packages import REQUIREMENTS
from deep_moe.heuristics import PRESETS
from tests.everyday import parametrize

COMMAND = [sys.executable, "-c", "from deep_moe.cli import main; main()"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


class Outcome:
    """What a command line came to: its exit status and what it printed."""

    def __init__(self, status: int, stdout: str, stderr: str) -> None:
        self.status, self.stdout, self.stderr = status, stdout, stderr


class Refuser:
    """Lets the import of a package fail a test."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] == self.package:
            pytest.fail(f"{name} is imported")


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the entry point in this process: a command line of its own would import PyTorch anew."""

    def call(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["deep-moe", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


def test_nothing_heavy_is_imported_before_a_command_runs():
    heavy = "{'torch', 'cuda', 'numpy', 'jinja2', 'deep_moe.jit', 'deep_moe.emulator'}"
    check = f"import sys, deep_moe.cli; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "words",
    [
        ["trace"],
        ["trace", "/nowhere/trace.json"],
        ["trace", "trace.json", "--weights", "fp7"],
        ["trace", "trace.json", "--tokens", "a"],
        ["trace", "trace.json", "--hidden", "100"],
        ["trace", "trace.json", "--arch", "sm_1"],
        ["trace", "trace.json", "--override", "zz=1"],
        ["trace", "trace.json", "--activation", "relu"],
        ["trace", "trace.json", "--path", "split"],
        ["tune", "--tokens", "a"],
        ["tune", "--weights", "fp7"],
        ["tune", "--activation", "relu"],
        ["tune", "--ranks", "2", "--hidden", "100"],
        ["tune", "--table", "/dev/zero"],
        ["config", "--hidden", "100"],
        ["config", "--gpu", "nothing"],
        ["warmup", "--arch", "sm_1"],
        ["warmup", "--override", "zz=1"],
        ["cache", "list", "--folder", "/dev/null"],
    ],
    ids=" ".join,
)
def test_what_is_refused_is_refused_before_pytorch_is_imported(
    main, words: list[str], monkeypatch: pytest.MonkeyPatch
):
    """That takes 10 to 24 s on a loaded machine."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refuser("torch"), *sys.meta_path])
    for name in [name for name in sys.modules if name.startswith("deep_moe.trial")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(*words).status in (1, 2)


def test_help_lists_the_commands():
    result = run("--help")
    assert result.returncode == 0
    for command in ("run", "trace", "config", "warmup", "cache", "doctor"):
        assert command in result.stdout


def test_what_the_library_refuses_is_one_line_on_stderr_and_a_failure():
    result = run("config", "--hidden", "100")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "error: hidden must be a positive multiple of 32; got 100\n"


@pytest.mark.parametrize(
    "words", [["trace"], ["warmup"], ["tune"], ["cache", "prune"]], ids=" ".join
)
def test_help_flows(main, words: list[str], monkeypatch: pytest.MonkeyPatch):
    """A line is as long as the terminal is wide, not as long as in the source."""
    monkeypatch.setenv("COLUMNS", "400")
    lines = [line.strip() for line in main(*words, "--help").stdout.splitlines()]
    usage = next(number for number, line in enumerate(lines) if line.startswith("Usage"))
    assert lines[usage + 2].endswith(".")
    assert lines[usage + 3] == ""


def test_the_version_is_printed(main):
    outcome = main("--version")
    assert (outcome.status, outcome.stdout) == (0, f"deep-moe {deep_moe.__version__}\n")


@pytest.mark.parametrize("command", [[], ["run"], ["config"], ["warmup"], ["trace"], ["tune"]])
def test_help_lists_the_models(main, command: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    printed = "".join(re.findall(r"[\w-]", main(*command, "--help").stdout))
    for model in PRESETS:
        assert "".join(re.findall(r"[\w-]", model)) in printed


HUGE = "99999999999999999999999999"
REFUSED = {
    "config --clamp 1e300": "activation_clamp must be None or a positive number that float32 holds",
    "config --clamp 1e-46": "activation_clamp must be None or a positive number that float32 holds",
    "config --clamp nan": "activation_clamp must be",
    "config --activation gelu": "--activation must be one of gelu_tanh, relu2, situ, swiglu, ",
    "config --activation situ:alpha=1": "of beta, linear_beta at most once; got 'alpha=1'",
    "config --activation situ:beta=one": "--activation situ must have PARAMETER=NUMBER",
    "config --activation situ:beta=1,beta=2": "--activation situ must have PARAMETER=NUMBER",
    "config --activation situ:": "--activation situ must have PARAMETER=NUMBER",
    "config --activation situ:beta=-1": "beta must be a positive number that float32 holds",
    "config --activation situ --clamp 7": "activation_clamp must be None with activation 'situ'",
    "config --activation swiglu:clamp=3 --clamp 7": "activation_clamp must be None beside Swiglu",
    "warmup --activation gelu": "--activation must be one of",
    "tune --activation gelu": "--activation must be one of",
    "config --ranks 0": "'--ranks'",
    "config --tokens 99999999999999": "must be below 2^31; got",
    "config --max-tokens 0": "'--max-tokens'",
    "config --hidden 100": "hidden must be a positive multiple of 32; got 100",
    "config --gpu 'NVIDIA H2000'": "of, NVIDIA H200; got 'NVIDIA H2000'",
    "config --gpu ''": "--gpu must name a GPU",
    "config --gpu 'NVIDIA H200' --arch sm_100a": "--arch must be sm_90a with --gpu NVIDIA H200",
    "config --model nothing": "--model must be one of deepseek",
    "config --override block_m=16 --override block_m=64": "block_m again",
    f"config --override block_m={HUGE}": "--override must be a number of 64 bits",
    "config --no-such": "No such option: --no-such",
    "config extra": "unexpected extra argument",
    "warmup --gpu 'NVIDIA H2000'": "of, NVIDIA H200; got 'NVIDIA H2000'",
    "warmup --max-tokens 0": "'--max-tokens'",
    "run --ranks 0": "'--ranks'",
    "run --tokens 99999999999999": "must be below 2^31; got",
    "run --tokens 2,x": "--tokens must be one number, or 2 separated by commas; got '2,x'",
    "run --max-tokens 1 --tokens 5": "num_tokens must be 0 to num_max_tokens_per_rank (1); got 5",
    "run --hidden 4096 --intermediate 12800000": "GiB, and this machine has",
    "run --experts 999999998": "num_experts must be a positive multiple of num_ranks (2), at most",
    "run --activation gelu": "--activation must be one of",
    "trace trace.json --activation gelu": "--activation must be one of",
    "run --clamp 1e300": "activation_clamp must be None or a positive number that float32 holds",
    f"run --seed {HUGE}": "'--seed'",
    "run --seed -1": "'--seed'",
    f"run --schedule-seed {HUGE}": "'--schedule-seed'",
    f"run --override num_stages={HUGE}": "--override must be a number of 64 bits",
    "run --device cuda --ranks 72 --experts 72": "a GPU for each of 72 ranks; there are 0",
    "run --checkpoint /nowhere": "/nowhere must be a .safetensors file or a folder",
    "trace": "Missing argument",
    "trace /nowhere/trace.json": "FILE must lie in a folder that exists; got /nowhere/trace.json",
    "trace trace.json --ranks 0": "'--ranks'",
    f"trace trace.json --seed {HUGE}": "'--seed'",
    "trace trace.json --tokens 99999999999999": "must be below 2^31; got",
    "trace trace.json --clamp 1e300": "activation_clamp must be",
    f"fuzz --first {HUGE} --count 1": "'--first'",
    "fuzz --hours nan": "'--hours'",
    "fuzz": "say how long",
    "fuzz --count 1 --corpus /nowhere/corpus": "--corpus must lie in a folder that exists",
    f"fuzz --count 1 --corpus {sys.executable}": "--corpus must hold one case number per line",
    "tune --tokens 0": "--tokens must be different positive numbers",
    "tune": "measures kernels on GPUs, and PyTorch finds none",
    "cache list --folder /dev/null": "/dev/null is not a kernel cache",
    "cache clear --folder /usr": "/usr is not a kernel cache",
    "cache nothing": "No such command 'nothing'",
    "doctor --no-such": "No such option",
    "nothing": "No such command 'nothing'",
}


@pytest.mark.parametrize(("line", "words"), REFUSED.items(), ids=REFUSED.keys())
def test_what_is_refused_is_said_in_words_and_as_json(
    main, line: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    outcome = main(*shlex.split(line))
    assert outcome.status in (1, 2)
    assert outcome.stdout == ""
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    as_json = main(*shlex.split(line), "--json")
    assert as_json.status == outcome.status
    assert words in json.loads(as_json.stdout)["error"]


@parametrize(
    ("package", "line"),
    [
        ("jinja2", "run --hidden 128 --intermediate 128 --tokens 1 --device cpu"),
        ("filelock", "run --hidden 128 --intermediate 128 --tokens 1 --device cpu"),
        ("safetensors", "run --checkpoint ."),
        ("torch", "run"),
    ],
    everyday=[("torch", "run")],
)
def test_a_missing_package_is_named(
    package: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """In a process of its own: this one has imported the package, and has compiled kernels."""
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    hidden = f"import sys; sys.modules[{package!r}] = None; from deep_moe.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", hidden, *line.split()], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "is not installed; run: pip install" in result.stderr
    assert REQUIREMENTS[package] in result.stderr
    assert "Traceback" not in result.stderr


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object):
        raise AssertionError("a fault")

    monkeypatch.setattr(sys, "argv", ["deep-moe", "config"])
    monkeypatch.setattr("deep_moe.targets.choose_config", fail)
    with pytest.raises(AssertionError, match="a fault"):
        cli.main()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
)
def test_too_little_memory_is_said_in_words(
    main, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object):
        raise error

    monkeypatch.setattr("deep_moe.targets.choose_config", fail)
    outcome = main("config")
    assert (outcome.status, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error: not enough memory")


def test_a_reader_that_has_gone_is_no_traceback():
    command = " ".join([sys.executable, "-m", "deep_moe", "config", "--json"])
    result = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, "")


def test_a_wrong_option_is_a_failure():
    assert run("config", "--no-such-option").returncode == 2
    assert run("no-such-command").returncode == 2


PACKAGES = ["deep_moe", "deep_moe.heuristics", "deep_moe.compat", "deep_moe.integrations"]


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_see_public_names_and_no_others(name: str):
    """Names that are imported on use are imported for them, and `__getattr__`, by which any name
    would be there, is not."""
    package = importlib.import_module(name)
    tree = ast.parse(Path(str(package.__file__)).read_text())
    seen: set[str] = set()
    for node in tree.body:
        is_hidden = isinstance(node, ast.If) and ast.unparse(node.test) == "not TYPE_CHECKING"
        for part in [] if is_hidden else ast.walk(node):
            if isinstance(part, ast.ImportFrom):
                seen.update(alias.asname or alias.name for alias in part.names)
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                seen.add(part.id)
    assert set(package.__all__) <= seen
    assert "__getattr__" not in seen
