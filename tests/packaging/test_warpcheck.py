"""The emulator as a distribution of its own, in an environment without PyTorch and deep_moe."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .building import ROOT, build_once, copy_of

# It is built, which takes a minute, unless the machine is loaded.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EMULATOR = ROOT / "emulator"
# As nvcc writes it. Thread i of 64 in `shift` writes numbers[i + 1]; `race` writes one word by all.
PTX = """
.version 8.6
.target sm_90a
.address_size 64

.visible .entry shift(
\t.param .u64 shift_param_0
)
{
\t.reg .b32 \t%r<3>;
\t.reg .b64 \t%rd<5>;

\tld.param.u64 \t%rd1, [shift_param_0];
\tcvta.to.global.u64 \t%rd2, %rd1;
\tmov.u32 \t%r1, %tid.x;
\tmul.wide.u32 \t%rd3, %r1, 4;
\tadd.s64 \t%rd4, %rd2, %rd3;
\tst.global.u32 \t[%rd4+4], %r1;
\tret;
}

.visible .entry race(
\t.param .u64 race_param_0
)
{
\t.reg .b32 \t%r<3>;
\t.reg .b64 \t%rd<3>;

\tld.param.u64 \t%rd1, [race_param_0];
\tcvta.to.global.u64 \t%rd2, %rd1;
\tmov.u32 \t%r1, %tid.x;
\tshr.u32 \t%r2, %r1, 5;
\tst.global.u32 \t[%rd2], %r2;
\tret;
}
"""
LAUNCH = """
kernel = "KERNEL"
grid = [1, 1, 1]
block = [64, 1, 1]
args = ["numbers"]

[arrays.numbers]
dtype = "uint32"
shape = [SIZE]
fill = 0
save = "numbers.npy"
"""
# On the driver's API, as any binding of it calls it.
PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")

def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status:
        sys.exit(f"{name}: {status}")

device, context, module, function = (ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3)))
memory = ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuModuleLoadData", ctypes.byref(module), open(sys.argv[1], "rb").read())
call("cuModuleGetFunction", ctypes.byref(function), module, sys.argv[2].encode())
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * 65))
parameters = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
call("cuLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, parameters, None)
call("cuCtxSynchronize")
numbers = (ctypes.c_uint32 * 65)()
call("cuMemcpyDtoH_v2", numbers, memory, ctypes.c_size_t(4 * 65))
if sys.argv[2] == "shift" and list(numbers[1:]) != list(range(64)):
    sys.exit(f"wrong: {list(numbers)}")
"""
TESTS = """
import sys

def test_shift(warpcheck):
    assert warpcheck([sys.executable, "program.py", "kernels.ptx", "shift"]).launches == 1

def test_race(warpcheck):
    warpcheck([sys.executable, "program.py", "kernels.ptx", "race"])
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_of(EMULATOR, tmp_path_factory.mktemp("source") / "warpcheck")
    return build_once(source, "dist-warpcheck", tmp_path_factory)


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


def with_dependencies(names: set[str]) -> set[str]:
    """Packages of this environment and all that they need, by normal names."""
    found: set[str] = set()
    while left := names - found:
        name = left.pop()
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names = names | {re.sub(r"[-_.]+", "-", requirement.name).lower()}
    return found


def link_packages(names: set[str], folder: Path) -> None:
    """Each file of packages of this environment, in another folder."""
    for name in names:
        for file in importlib.metadata.files(name) or ():
            source, target = Path(str(file.locate())), folder / file
            if ".." not in file.parts and source.suffix != ".pyc" and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, what it asks for, pytest, and NVRTC."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python3.*/site-packages")
    install = ["install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    (own,) = importlib.metadata.distributions(name="warpcheck", path=[str(site_packages)])
    needed = {Requirement(line) for line in own.requires or ()}
    packages = {each.name for each in needed if each.marker is None}
    extra = {
        each.name for each in needed if each.marker and each.marker.evaluate({"extra": "nvrtc"})
    }
    assert packages == {"numpy", "typer"}
    link_packages(with_dependencies({*packages, *extra, "pytest"}), site_packages)
    return folder / "bin"


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    (tmp_path / "kernels.ptx").write_text(PTX)
    return tmp_path


def run(
    commands: Path, folder: Path, command: str, *words: str
) -> subprocess.CompletedProcess[str]:
    """No g++ and nothing else of this machine: of the path only the environment's own commands."""
    variables = {name: text for name, text in os.environ.items() if not name.startswith("PY")}
    return subprocess.run(
        [str(commands / command), *words],
        env={**variables, "PATH": str(commands)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def launch_file(folder: Path, kernel: str, size: int) -> str:
    path = folder / "launch.toml"
    path.write_text(LAUNCH.replace("KERNEL", kernel).replace("SIZE", str(size)))
    return path.name


def test_the_wheel_is_of_this_platform_and_of_deep_moes_version(wheel: Path):
    version = importlib.metadata.version("deep-moe")
    tag = f"py3-none-manylinux_2_28_{platform.machine()}"
    assert wheel.name == f"warpcheck-{version}-{tag}.whl"


def test_the_source_distribution_holds_every_file(distributions: Path):
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=EMULATOR,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("git says what the folder holds, and this is no checkout")
    files = {name for name in listing.stdout.splitlines() if (EMULATOR / name).is_file()}
    assert "library.py" in files
    assert files - names == set()


def test_it_brings_the_licence():
    assert (EMULATOR / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_neither_deep_moe_nor_torch_is_there(commands: Path, tmp_path: Path):
    for name in ("torch", "deep_moe", "cutlass_library", "jinja2"):
        result = run(commands, tmp_path, "python", "-c", f"import {name}")
        assert f"No module named '{name}'" in result.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
def test_the_command_runs_a_kernel(commands: Path, kernels: Path):
    result = run(commands, kernels, "warpcheck", "kernels.ptx", launch_file(kernels, "shift", 65))
    assert result.returncode == 0, result.stderr
    read = "import numpy; print(*numpy.load('numbers.npy')[1:])"
    numbers = run(commands, kernels, "python", "-c", read).stdout
    assert list(map(int, numbers.split())) == list(range(64))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TOML needs Python 3.11")
@pytest.mark.parametrize(
    ("kernel", "size", "found"), [("race", 65, "race"), ("shift", 64, "out_of_bounds")]
)
def test_the_command_finds_a_fault(
    commands: Path, kernels: Path, kernel: str, size: int, found: str
):
    words = ("kernels.ptx", launch_file(kernels, kernel, size), "--sarif", "found.sarif")
    result = run(commands, kernels, "warpcheck", *words[2:], *words[:2])
    assert result.returncode == 1, result.stderr
    assert f"warpcheck: error: {found}: " in result.stderr
    assert found in (kernels / "found.sarif").read_text()


def test_the_command_runs_a_program(commands: Path, kernels: Path):
    (kernels / "program.py").write_text(PROGRAM)
    for kernel, status in (("shift", 0), ("race", 1)):
        words = ("python", "program.py", "kernels.ptx", kernel)
        result = run(commands, kernels, "warpcheck", *words)
        assert result.returncode == status, result.stdout + result.stderr


def test_the_fixture_runs_a_program(commands: Path, kernels: Path):
    (kernels / "program.py").write_text(PROGRAM)
    (kernels / "test_it.py").write_text(TESTS)
    result = run(commands, kernels, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert "error: race: data race at byte 0" in result.stdout


def test_the_readmes_code_runs(commands: Path, tmp_path: Path):
    """With NVRTC, which is there as an extra."""
    text = (EMULATOR / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]
    assert "compile_to_ptx" in code
    result = run(commands, tmp_path, "python", "-W", "error", "-c", code)
    assert result.returncode == 0, result.stderr


# Of the others some take longer or need PyTorch, or headers of CUDA and CUTLASS.
OWN_TESTS = ("findings", "memory", "multimem", "races", "stochastic_rounding")


def test_its_own_tests_pass(commands: Path, tmp_path: Path):
    source, target = ROOT / "tests" / "emulator", tmp_path / "tests" / "emulator"
    target.mkdir(parents=True)
    (tmp_path / "tests" / "__init__.py").touch()
    for file in source.glob("*.py"):
        shutil.copy(file, target)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\naddopts = --import-mode=importlib\nmarkers =\n    slow: x\n"
    )
    files = [f"tests/emulator/test_{name}.py" for name in OWN_TESTS]
    result = run(commands, tmp_path, "python", "-m", "pytest", "-q", "-m", "not slow", *files)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr
    assert "skipped" not in result.stdout
