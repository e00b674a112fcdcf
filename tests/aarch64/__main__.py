"""Tests the wheel for aarch64 on this machine: `make test-aarch64`.

    python -m tests.aarch64 [--quick] [--or-skip] [-- PYTEST-ARGUMENTS]

--quick: recorded results of an H200 and small layers; without it also the emulator's and the
formats' own tests. --or-skip: succeed where the tools are missing and cannot be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from . import environment
from .environment import FOLDER, PYTHON, ROOT, RUN

QUICK = ("tests/hardware/test_hardware.py", "tests/aarch64")
# Compiled by the other processor's NVRTC.
MORE = (
    "tests/formats",
    *(
        f"tests/emulator/test_{name}.py"
        for name in (
            "arithmetic",
            "bulk_copies",
            "calls",
            "matrix_instructions",
            "mbarrier",
            "memory",
            "ptx_text",
            "tcgen05_fp4",
        )
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.aarch64")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--or-skip", action="store_true")
    parser.add_argument("pytest", nargs="*", metavar="PYTEST-ARGUMENT")
    options = parser.parse_args()
    try:
        environment.prepare()
        environment.install(environment.build_wheel())
        environment.copy_tests()
        variables = record_layers()
        # Not in the checkout, whose package would come before the installed one.
        print(environment.run([str(PYTHON), "-m", "deep_moe", "doctor"], cwd=RUN, **variables))
    except environment.MissingToolError as error:
        print(f"aarch64: {error}")
        return 0 if options.or_skip else 1
    except subprocess.CalledProcessError as error:
        print(f"aarch64: {error}\n{error.stderr}")
        return 1
    tests = QUICK if options.quick else QUICK + MORE
    command = [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options.pytest, *tests]
    return subprocess.run(command, env={**os.environ, **variables}, cwd=RUN, check=False).returncode


def record_layers() -> dict[str, str]:
    """Run the layers on this processor; what their test on the other one has to know."""
    record, cache = FOLDER / "layers.pt", FOLDER / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    variables = {"DEEP_MOE_CACHE_DIR": str(cache)}
    environment.run([sys.executable, "-m", "tests.aarch64.layers", str(record)], **variables)
    kernels = sorted(path.name for path in cache.glob("sm_*"))
    return {
        **variables,
        "DEEP_MOE_OTHER_PROCESSOR": str(record),
        "DEEP_MOE_OTHER_KERNELS": " ".join(kernels),
    }


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
