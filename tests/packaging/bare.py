"""Both wheels in a bare environment of each Python that is here: `make test-wheel`.

    python -m tests.packaging.bare [PYTHON ...]

Each gets a new environment and the wheel by `pip install -c constraints.txt`. There
`deep-moe doctor` must find nothing missing, and a layer must run in the emulator, without a C++
compiler on the path. Where pip would take a PyTorch with CUDA of several gigabytes, everything but
PyTorch is installed instead; there all files must compile and the emulator must run a kernel. The
wheel of `warpcheck`, with what it asks for, must run that kernel in an environment of its own.
`--cuda-torch` installs it all the same. Pythons are sought on the path and among pyenv's;
`--debian` takes the others from Debian's packages, into build/pythons, the newest one with Debian's
PyTorch, which has no CUDA, so that a layer runs there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import debian
from .building import ROOT, copy_of

PYTHONS = ROOT / "build" / "pythons"
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
LAYER = ["run", "--exact", "--ranks", "2", "--tokens", "2", "--hidden", "128"]
LAYER += ["--intermediate", "128", "--experts", "2", "--topk", "1"]
# On numbers in memory, without PyTorch.
KERNEL = '''
import numpy as np
from deep_moe.emulator import Machine
ptx = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    mad.lo.u32 %r2, %r1, %r1, 7;
    st.global.u32 [%rd3], %r2;
    ret;
}
"""
array = np.zeros(64, np.uint32)
machine = Machine(seed=0, checks=True)
machine.add_memory(0, array.ctypes.data, array.nbytes, "out")
module = machine.load(ptx, name="squares")
address = array.ctypes.data.to_bytes(8, "little")
machine.launch(module, "kernel", grid=(1, 1, 1), block=(64, 1, 1), shared_bytes=0, args=[address])
machine.run()
assert (array == np.arange(64, dtype=np.uint32) ** 2 + 7).all()
'''


def main(arguments: list[str]) -> int:
    with_cuda = "--cuda-torch" in arguments
    named = [argument for argument in arguments if not argument.startswith("--")]
    pythons: list[tuple[str, Path | None]] = [(name, None) for name in named]
    if not named:
        pythons = [found(version, "--debian" in arguments) for version in VERSIONS]
    failed = False
    with tempfile.TemporaryDirectory(prefix="deep_moe_wheel_") as folder:
        emulator = copy_of(ROOT / "emulator", Path(folder, "warpcheck"))
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
        for source in (ROOT, emulator):
            subprocess.run([*build, str(source)], check=True, capture_output=True)
        (wheel,) = Path(folder).glob("deep_moe-*.whl")
        (warpcheck,) = Path(folder).glob("warpcheck-*.whl")
        for python, torch in pythons:
            if not works(python):
                print(f"{python:12} not here", flush=True)
                continue
            try:
                venv = Path(folder, "venv")
                result = check(python, wheel, venv, with_cuda, torch)
                result += "; " + check(python, warpcheck, venv, with_cuda)
            except subprocess.CalledProcessError as error:
                failed = True
                output = f"{error.stdout or ''}{error.stderr or ''}"[-4000:]
                result = f"FAILED: {' '.join(map(str, error.cmd))[:200]}\n{output}"
            print(f"{python:12} {result}", flush=True)
    return int(failed)


def found(version: str, at_debian: bool) -> tuple[str, Path | None]:
    """A Python, and a folder with a PyTorch for it, where pip has none without CUDA."""
    name = f"python{version}"
    newest = version == VERSIONS[-1]  # which Debian's PyTorch may be made for
    if not (at_debian and newest):
        if works(name):
            return name, None
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        for path in pyenv.glob(f"{version}.*/bin/{name}"):
            if works(str(path)):
                return str(path), None
        if not at_debian:
            return name, None
    try:
        PYTHONS.mkdir(parents=True, exist_ok=True)
        script = debian.python(version, PYTHONS, with_torch=newest)
        return str(script), debian.torch_for(script) if newest else None
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{name:12} not among Debian's packages: {getattr(error, 'stderr', '') or error}")
        return name, None


def works(python: str) -> bool:
    command = [python, "-c", "import venv, ensurepip"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def check(python: str, wheel: Path, venv: Path, with_cuda: bool, torch: Path | None = None) -> str:
    """What was found in a new environment. torch: a folder that has it, in place of pip's."""
    subprocess.run([python, "-m", "venv", str(venv)], check=True, capture_output=True)
    constraints = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    if torch is not None:
        (packages,) = venv.glob("lib/python3.*/site-packages")
        (packages / "torch.pth").write_text(f"{torch}\n")
        constraints = [line for line in constraints if not line.startswith("torch==")]
    (venv / "constraints.txt").write_text("".join(constraints))
    try:
        return check_in(venv, wheel, with_cuda)
    finally:
        shutil.rmtree(venv)


def check_in(venv: Path, wheel: Path, with_cuda: bool) -> str:
    commands = venv / "bin"
    # No g++ and nothing else of this machine: of the path only the environment's own commands.
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": str(commands),
        "DEEP_MOE_CACHE_DIR": str(venv / "cache"),
    }

    def run(*command: str) -> str:
        result = subprocess.run(
            [str(commands / command[0]), *command[1:]],
            env=environment,
            cwd=venv,
            capture_output=True,
            text=True,
            check=True,
        )
        return result.stdout

    if wheel.name.startswith("warpcheck"):
        run("pip", "install", "--quiet", str(wheel))
        run("python", "-c", KERNEL.replace("deep_moe.emulator", "warpcheck"))
        run("warpcheck", "--help")
        return "warpcheck: emulates"
    version = run("python", "-c", "import platform; print(platform.python_version())").strip()
    install = ("pip", "install", "--quiet", "-c", str(venv / "constraints.txt"))
    report = run(*install, "--dry-run", "--report", "-", str(wheel))
    packages = {
        item["metadata"]["name"].lower(): item["metadata"] for item in json.loads(report)["install"]
    }
    packages.pop("torch", None)
    of_cuda = [name for name in packages if name.startswith(("nvidia-cublas", "nvidia-cudnn"))]
    if of_cuda and not with_cuda:
        needed = [
            f"{name}=={package['version']}"
            for name, package in packages.items()
            if name.startswith(("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl"))
            or not name.startswith(("nvidia-", "triton", "deep-moe", "cuda-toolkit"))
        ]
        run(*install, "--no-deps", *needed, str(wheel))
        run("python", "-W", "error", "-m", "compileall", "-q", *installed_packages(venv))
        run("python", "-c", KERNEL)
        return f"{version}: without PyTorch (pip takes one with CUDA): compiles, emulates"
    run(*install, str(wheel))
    missing = [row for row in json.loads(run("deep-moe", "doctor", "--json")) if row["remedy"]]
    compiler = {"host compiler"}  # a wheel needs none
    assert {row["name"] for row in missing} <= compiler, missing
    assert "ok" in run("deep-moe", *LAYER)
    torch = run("python", "-c", "import torch; print(torch.__version__)").strip()
    return f"{version}: with PyTorch {torch}: doctor and a layer"


def installed_packages(venv: Path) -> list[str]:
    return [str(path) for path in venv.glob("lib/python3.*/site-packages/deep_moe")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
