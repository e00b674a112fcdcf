"""An environment for aarch64 on an x86-64 machine: another processor's Python, PyTorch and our
wheel, run by user-mode emulation.

Everything lies below build/aarch64, and nothing is installed on this machine but the cross compiler
and the emulator of the processor, and those only if they are missing:

    sysroot-packages/   what Debian packages for arm64 are downloaded as
    sysroot/            what they hold: libc, Python 3.11
    venv/               its python is a script, which runs the sysroot's Python under the emulator;
                        so processes that a test starts run there, too
    dist/               our wheel, made with the cross compiler
    run/                the tests, without the sources of the package
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..packaging.debian import unpack

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "aarch64"
SYSROOT = FOLDER / "sysroot"
VENV = FOLDER / "venv"
SITE_PACKAGES = VENV / "lib" / "python3.11" / "site-packages"
RUN = FOLDER / "run"
PYTHON = VENV / "bin" / "python"
EMULATOR = "qemu-aarch64-static"
COMPILER = "aarch64-linux-gnu-g++"
TOOLS = {EMULATOR: "qemu-user-static", COMPILER: "g++-aarch64-linux-gnu"}  # Debian's packages
DEBIAN_PACKAGES = ("python3.11", "libstdc++6")
PLATFORMS = [f"manylinux_2_{minor}_aarch64" for minor in range(17, 29)] + ["manylinux2014_aarch64"]


class MissingToolError(RuntimeError):
    """What this machine lacks, and cannot be given here."""


def prepare() -> None:
    """Everything but the wheel, from nothing; what is there stays."""
    _install_tools()
    if not (SYSROOT / "usr" / "bin" / "python3.11").exists():
        _make_sysroot()
    requirements = Path(__file__).with_name("requirements.txt")
    wanted = requirements.read_text() + (ROOT / "constraints.txt").read_text()
    installed = VENV / "installed.txt"
    if not installed.exists() or installed.read_text() != wanted:
        shutil.rmtree(VENV, ignore_errors=True)
        _make_venv()
        _install_requirements(requirements)
        installed.write_text(wanted)


def _install_tools() -> None:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if not missing:
        return
    command = f"apt-get install {' '.join(missing)}"
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise MissingToolError(f"no {' and no '.join(missing)} here; as root on Debian: {command}")
    try:
        run(["apt-get", "-qq", "update"])
        run(["apt-get", "-qq", "-y", "install", *missing])
    except subprocess.CalledProcessError as error:
        raise MissingToolError(f"{command} failed: {error.stderr}") from error


def _make_sysroot() -> None:
    unpack(DEBIAN_PACKAGES, SYSROOT, "arm64")


def _make_venv() -> None:
    """A venv is a file pyvenv.cfg beside the folder that argument 0 of Python lies in."""
    SITE_PACKAGES.mkdir(parents=True)
    PYTHON.parent.mkdir()
    python = SYSROOT / "usr" / "bin" / "python3.11"
    PYTHON.write_text(f'#!/bin/sh\nexec {EMULATOR} -L {SYSROOT} -0 "$0" {python} "$@"\n')
    PYTHON.chmod(0o755)
    (VENV / "pyvenv.cfg").write_text(f"home = {python.parent}\nversion = 3.11\n")


def _install_requirements(requirements: Path) -> None:
    """By this machine's pip, ten times as fast as under emulation. It takes each package for the
    other processor, but would evaluate conditions on dependencies for this one: hence --no-deps."""
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    where = ["--target", str(SITE_PACKAGES), "--python-version", "3.11", "--implementation", "cp"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *where, *platforms]
    only = ["--only-binary=:all:", "-r", str(requirements)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        constraints.write("\n".join(line for line in lines if not line.startswith("torch==")))
        constraints.flush()
        run([*pip, *only, "-c", constraints.name])


def build_wheel() -> Path:
    """Our wheel for aarch64, through the source distribution."""
    output = FOLDER / "dist"
    shutil.rmtree(output, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output)]
    run([*build, str(ROOT)], CXX=COMPILER)
    (wheel,) = output.glob("*.whl")
    return wheel


def install(wheel: Path) -> None:
    """By the other processor's pip: it refuses a tag that is not for it, and missing packages."""
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-index", "--force-reinstall", "--no-deps", str(wheel)])
    run([str(PYTHON), "-m", "pip", "--disable-pip-version-check", "check"])


def copy_tests() -> None:
    """The tests and what they read, apart from the sources: only the wheel has the package."""
    shutil.rmtree(RUN, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, RUN / name, ignore=ignored)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, RUN / name)


def run(command: Sequence[str], *, cwd: Path = ROOT, **variables: str) -> str:
    """The output; CalledProcessError with it if the command fails."""
    result = subprocess.run(
        command,
        env={**os.environ, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise subprocess.CalledProcessError(
            result.returncode, command, result.stdout, result.stdout + result.stderr
        )
    return result.stdout
