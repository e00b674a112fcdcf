"""Unmodified CUDA programs on a machine without a GPU, checked while they run.

A stand-in for CUDA's driver and runtime (`src/`) gives a program emulated GPUs. `run_program` runs
a program under it and gathers what the checks found; `warpcheck` is the command:

    from warpcheck.cuda import GpuOptions, run_program

    run = run_program(["./saxpy"], GpuOptions(chip="h100", seed=1))
    for cause in run.causes:
        print(cause)
"""

from __future__ import annotations

from .causes import Cause, Suppression, group_findings, read_suppressions, split_suppressed
from .options import CHIP_NAMES, GpuOptions
from .programs import ProgramRun, RefusedCall, run_program
from .sarif import sarif_log

__all__ = [
    "CHIP_NAMES",
    "Cause",
    "GpuOptions",
    "ProgramRun",
    "RefusedCall",
    "Suppression",
    "group_findings",
    "read_suppressions",
    "run_program",
    "sarif_log",
    "split_suppressed",
]
