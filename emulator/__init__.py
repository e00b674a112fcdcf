"""Executes PTX on a CPU, warp by warp, and checks it while it runs.

The distribution `warpcheck` has this package by that name; deep_moe brings it along, as
`deep_moe.emulator`.
"""

from . import chips, machine_code
from .chips import Chip
from .errors import (
    BarrierMisuse,
    CompileError,
    Deadlock,
    DisassemblyError,
    EmulatorError,
    InvalidOperation,
    InvalidPtx,
    KernelTrap,
    LaunchError,
    MemoryLimit,
    Misaligned,
    MissingPackageError,
    OutOfBounds,
    RaceDetected,
    Uninitialized,
    Unsupported,
)
from .findings import Finding, Involved
from .launch_times import LaunchTime, WarpWait
from .machine import (
    EntriesBySource,
    Machine,
    Module,
    NamedArray,
    Statistics,
    supported_instructions,
)
from .nvrtc import compile_to_ptx
from .usage import GpuUsage, UnitUsage

__version__ = "0.1.0"

__all__ = [
    "BarrierMisuse",
    "Chip",
    "CompileError",
    "Deadlock",
    "DisassemblyError",
    "EmulatorError",
    "EntriesBySource",
    "Finding",
    "GpuUsage",
    "InvalidOperation",
    "InvalidPtx",
    "Involved",
    "KernelTrap",
    "LaunchError",
    "LaunchTime",
    "Machine",
    "MemoryLimit",
    "Misaligned",
    "MissingPackageError",
    "Module",
    "NamedArray",
    "OutOfBounds",
    "RaceDetected",
    "Statistics",
    "Uninitialized",
    "UnitUsage",
    "Unsupported",
    "WarpWait",
    "chips",
    "compile_to_ptx",
    "machine_code",
    "supported_instructions",
]
