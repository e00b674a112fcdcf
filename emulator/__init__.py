"""Executes PTX on a CPU, warp by warp, and checks it while it runs. Knows nothing about MoE."""

from . import chips, machine_code
from .chips import Chip
from .errors import (
    BarrierMisuse,
    Deadlock,
    DisassemblyError,
    EmulatorError,
    InvalidOperation,
    InvalidPtx,
    KernelTrap,
    LaunchError,
    MemoryLimit,
    Misaligned,
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
from .usage import GpuUsage, UnitUsage

__all__ = [
    "BarrierMisuse",
    "Chip",
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
    "machine_code",
    "supported_instructions",
]
