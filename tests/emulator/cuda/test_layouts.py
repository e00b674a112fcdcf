"""Structures that programs pass have the layout of CUDA's headers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from deep_moe.emulator.library import STAND_IN_SOURCES
from deep_moe.jit.headers import find_headers

from .building import PROGRAMS

# Stands in for headers of CUDA's that come in a package of their own.
HOST_HEADERS = Path(__file__).parents[1] / "cutlass" / "host"


def test_layouts_are_those_of_cudas_headers():
    includes = [
        f"-I{path}" for path in (STAND_IN_SOURCES, HOST_HEADERS, *find_headers().include_paths)
    ]
    result = subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            "-std=c++20",
            "-fsyntax-only",
            "-Wno-invalid-offsetof",
            *includes,
            str(PROGRAMS / "layouts.cpp"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
