"""What this package raises beside ValueError and TypeError. Of what a run found, texts name the
instruction, its PTX and source line, rank, CTA, warp and lane."""

# ruff: noqa: N818 (named after what went wrong)

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .findings import Finding


class EmulatorError(RuntimeError):
    """Base of the errors below; raised itself for faults of the emulator.

    finding: the same as data, if it came from the emulator's library.
    """

    finding: Finding | None = None


class CompileError(EmulatorError):
    """NVRTC refused a source. The text holds the compiler's log."""


class MissingPackageError(EmulatorError):
    """A package that is needed is not installed; the text says how to get it."""


class DisassemblyError(EmulatorError):
    """nvdisasm cannot be run, or its listing does not have what was asked for."""


class InvalidPtx(EmulatorError):
    """The text is not PTX as the emulator's parser knows it."""


class Unsupported(EmulatorError):
    """The PTX uses something that the emulator does not implement."""


class OutOfBounds(EmulatorError):
    """An access outside the registered regions, a CTA's shared or a lane's local memory."""


class Misaligned(EmulatorError):
    """An address that is not a multiple of the access size."""


class Uninitialized(EmulatorError):
    """A read of shared or tensor memory that nobody wrote."""


class BarrierMisuse(EmulatorError):
    """A barrier used against its rules."""


class Deadlock(EmulatorError):
    """No warp can go on. The text says where each stands and what it waits for."""


class KernelTrap(EmulatorError):
    """The kernel executed trap."""


class InvalidOperation(EmulatorError):
    """An instruction was given operands that the architecture does not allow."""


class LaunchError(EmulatorError):
    """A launch or memory region that cannot be."""


class MemoryLimit(EmulatorError):
    """The emulator needs more of the host's memory than it may take (`max_memory_bytes`)."""


class RaceDetected(EmulatorError):
    """Two accesses to the same memory without an order between them."""


# By FaultKind of emulator/src/fault.h.
BY_KIND: dict[int, type[EmulatorError]] = {
    1: InvalidPtx,
    2: Unsupported,
    3: OutOfBounds,
    4: Misaligned,
    5: Uninitialized,
    6: BarrierMisuse,
    7: Deadlock,
    8: KernelTrap,
    9: InvalidOperation,
    10: LaunchError,
    11: RaceDetected,
    12: EmulatorError,
    13: MemoryLimit,
}

# Of the same numbers, as findings call them.
KIND_NAMES: dict[int, str] = {
    1: "invalid_ptx",
    2: "unsupported",
    3: "out_of_bounds",
    4: "misaligned",
    5: "uninitialized",
    6: "barrier_misuse",
    7: "deadlock",
    8: "trap",
    9: "invalid_operation",
    10: "launch",
    11: "race",
    12: "internal",
    13: "memory",
}
