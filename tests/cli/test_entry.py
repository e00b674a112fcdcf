"""The command line as a program: what it imports, and how it fails."""

import subprocess
import sys

COMMAND = [sys.executable, "-c", "from deep_moe.cli import main; main()"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


def test_nothing_heavy_is_imported_before_a_command_runs():
    heavy = "{'torch', 'cuda', 'numpy', 'jinja2', 'deep_moe.jit', 'deep_moe.emulator'}"
    check = f"import sys, deep_moe.cli; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_help_lists_the_commands():
    result = run("--help")
    assert result.returncode == 0
    for command in ("run", "trace", "config", "warmup", "cache", "doctor"):
        assert command in result.stdout


def test_what_the_library_refuses_is_one_line_on_stderr_and_a_failure():
    result = run("config", "--hidden", "100")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "error: hidden must be a positive multiple of 128; got 100\n"


def test_a_wrong_option_is_a_failure():
    assert run("config", "--no-such-option").returncode == 2
    assert run("no-such-command").returncode == 2
