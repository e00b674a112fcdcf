"""The emulated machine: ranks with global memory, PTX modules, launches, a run to completion."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .errors import BY_KIND, EmulatorError, LaunchError
from .library import load

Size = tuple[int, int, int]
Schedule = Literal["random", "round_robin", "late_copies", "slow_rank", "starved_role"]
# In the order of the enum in machine.h.
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Statistics:
    """What a machine has executed so far."""

    warp_instructions: int
    lane_instructions: int
    virtual_ns: int


@dataclass(frozen=True)
class NamedArray:
    """An array inside a region of memory or dynamic shared memory; findings name its elements.

    offset: in bytes from the start.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    element_bytes: int = 1


class Module:
    """PTX that a machine has loaded."""

    def __init__(self, machine: Machine, index: int, name: str) -> None:
        self.machine = machine
        self.index = index
        self.name = name


class Machine:
    """Runs PTX for any number of ranks on one host thread.

    seed: picks the interleaving of warps and the moments at which asynchronous operations complete;
    the same seed gives the same run. schedule: "random"; "round_robin"; "late_copies" completes
    asynchronous operations only when nothing else can go on; "slow_rank" and "starved_role" hardly
    ever run one rank, or the warps of one index in all CTAs, which the seed picks. checks: look for
    data races, missing fences, reads of memory that nobody wrote and the like. stop_at_findings:
    such a finding is an error; otherwise the run goes on and `findings` has them, each pair of
    source lines once. strict_tcgen05: ask for tcgen05 fences also where a release and an acquire
    order finished tcgen05 operations, as PTX's canonical patterns have them and CUTLASS does not,
    and for the warp's quadrant in addresses of tensor memory.
    clock: "virtual"
    counts instructions, and time leaps when everything waits; "real" is the host's, for kernels
    that talk to other processes. max_resident_ctas: how many CTAs of one grid are there at once.
    hopper_fp8_sums: FP8 wgmma drops the low bits of its sums as an H200 was seen to do, instead of
    rounding the exact sum once.

    Global addresses in PTX are host addresses. A rank may touch only what `add_memory` named.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        schedule: Schedule = "random",
        checks: bool = True,
        stop_at_findings: bool = True,
        strict_tcgen05: bool = False,
        clock: Literal["virtual", "real"] = "virtual",
        max_resident_ctas: int = 4096,
        hopper_fp8_sums: bool = False,
    ) -> None:
        if clock not in ("virtual", "real"):
            raise ValueError(f"clock must be 'virtual' or 'real', not {clock!r}")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, not {schedule!r}")
        self._library = load()
        self._handle = self._library.dm_create(seed % 2**64, checks, clock == "real")
        self._library.dm_set_residency(self._handle, max_resident_ctas)
        self._library.dm_set_hopper_fp8_sums(self._handle, hopper_fp8_sums)
        self._library.dm_set_schedule(self._handle, SCHEDULES.index(schedule))
        self._library.dm_set_strict_tcgen05(self._handle, strict_tcgen05)
        self._library.dm_set_collects_findings(self._handle, not stop_at_findings)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.dm_destroy(self._handle)
            self._handle = None

    def add_memory(
        self,
        rank: int,
        address: int,
        num_bytes: int,
        name: str,
        *,
        writable: bool = True,
        arrays: Iterable[NamedArray] = (),
    ) -> None:
        """Let a rank's kernels access `num_bytes` bytes of host memory at `address`.

        The caller keeps the memory alive until `remove_memory` or the machine's end. arrays: names
        for parts of it, for findings.
        """
        self._check(
            self._library.dm_add_memory(
                self._handle, rank, address, num_bytes, name.encode(), writable
            )
        )

        for array in arrays:
            self._check(
                self._library.dm_name_memory(
                    self._handle, rank, address, array.name.encode(), *_place_of(array)
                )
            )

    def remove_memory(self, rank: int, address: int) -> None:
        """Forget the region that starts at `address`."""
        self._check(self._library.dm_remove_memory(self._handle, rank, address))

    def load(self, ptx: str, *, name: str = "module") -> Module:
        """Parse and decode PTX. What the emulator cannot do is an error here, not at run time."""
        text = ptx.encode()
        index = ctypes.c_uint32()
        self._check(
            self._library.dm_load(self._handle, text, len(text), name.encode(), ctypes.byref(index))
        )
        return Module(self, index.value, name)

    def launch(
        self,
        module: Module,
        kernel: str,
        *,
        grid: Size,
        block: Size,
        cluster: Size | None = None,
        shared_bytes: int = 0,
        args: bytes | Sequence[bytes] = b"",
        rank: int = 0,
        in_order: bool = False,
        registers: int | None = None,
        roles: Mapping[str, Iterable[int]] | None = None,
        shared_arrays: Iterable[NamedArray] = (),
    ) -> None:
        """Queue a kernel; `run` executes all queued ones together.

        in_order: after the rank's last queued one has ended, as in a stream.
        cluster: by default what the kernel was compiled for. shared_bytes: dynamic shared memory.
        args: the whole parameter block, or one `bytes` per parameter. registers: per thread at the
        start, as the compiler reports them; by default as ptxas takes them: the most that launch
        bounds allow, but no more than its largest setmaxnreg. For findings,
        roles: which warps of a CTA do what, by name; shared_arrays: what lies in dynamic shared
        memory.
        """
        if module.machine is not self:
            raise LaunchError(f"module {module.name} belongs to another machine")
        name = kernel.encode()
        size, count, declared = ctypes.c_uint32(), ctypes.c_uint32(), (ctypes.c_uint32 * 3)()
        self._check(
            self._library.dm_kernel(
                self._handle, module.index, name, ctypes.byref(size), ctypes.byref(count), declared
            )
        )
        block_of_bytes = (
            args
            if isinstance(args, bytes)
            else self._pack_parameters(module, name, size.value, count.value, args)
        )
        three = ctypes.c_uint32 * 3
        self._check(
            self._library.dm_launch(
                self._handle,
                module.index,
                name,
                rank,
                three(*grid),
                three(*block),
                three(*(cluster or (0, 0, 0))),
                shared_bytes,
                block_of_bytes,
                len(block_of_bytes),
                in_order,
            )
        )

        if registers is not None:
            self._check(self._library.dm_set_registers(self._handle, registers))
        for array in shared_arrays:
            self._check(
                self._library.dm_name_shared(self._handle, array.name.encode(), *_place_of(array))
            )
        for role, warps in (roles or {}).items():
            indices = list(warps)
            self._check(
                self._library.dm_name_warps(
                    self._handle,
                    role.encode(),
                    (ctypes.c_uint32 * len(indices))(*indices),
                    len(indices),
                )
            )

    def _pack_parameters(
        self, module: Module, kernel: bytes, size: int, count: int, args: Sequence[bytes]
    ) -> bytes:
        if len(args) != count:
            raise LaunchError(f"{kernel.decode()} takes {count} arguments, not {len(args)}")
        packed = bytearray(size)
        for index, value in enumerate(args):
            offset, num_bytes = ctypes.c_uint32(), ctypes.c_uint32()
            self._check(
                self._library.dm_kernel_parameter(
                    self._handle,
                    module.index,
                    kernel,
                    index,
                    ctypes.byref(offset),
                    ctypes.byref(num_bytes),
                )
            )
            if len(value) != num_bytes.value:
                raise LaunchError(
                    f"argument {index} of {kernel.decode()} has {num_bytes.value} bytes, "
                    f"not {len(value)}"
                )
            packed[offset.value : offset.value + num_bytes.value] = value
        return bytes(packed)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Execute all queued launches to completion.

        progress: called now and then with the number of warp instructions executed; what it raises
        (KeyboardInterrupt included) stops the run.
        """
        stopped: list[BaseException] = []

        def report(steps: int) -> int:
            try:
                if progress is not None:
                    progress(steps)
            except BaseException as error:
                stopped.append(error)
                return 0
            return 1

        callback_type = self._library.dm_run.argtypes[1]
        status = self._library.dm_run(self._handle, callback_type(report))
        if stopped:
            raise stopped[0]
        self._check(status)

    @property
    def findings(self) -> list[EmulatorError]:
        """What the checks found so far, where `stop_at_findings` is off."""
        kind, found = ctypes.c_int(), []
        for index in range(self._library.dm_num_findings(self._handle)):
            text = self._library.dm_finding(self._handle, index, ctypes.byref(kind))
            found.append(BY_KIND.get(kind.value, EmulatorError)(text.decode(errors="replace")))
        return found

    @property
    def stall(self) -> str:
        """Who waited for what when nothing changed for 10 ms of virtual time in the last run, even
        if a time limit of the kernel ended that; "" if it never happened."""
        return str(self._library.dm_stall(self._handle).decode(errors="replace"))

    @property
    def statistics(self) -> Statistics:
        warp, lane, ns = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        self._library.dm_statistics(
            self._handle, ctypes.byref(warp), ctypes.byref(lane), ctypes.byref(ns)
        )
        return Statistics(warp.value, lane.value, ns.value)

    def _check(self, status: int) -> None:
        if status:
            text = self._library.dm_error(self._handle).decode(errors="replace")
            raise BY_KIND.get(status, EmulatorError)(text)


def _place_of(array: NamedArray) -> tuple[int, int, ctypes.Array[ctypes.c_uint64], int]:
    shape = (ctypes.c_uint64 * len(array.shape))(*array.shape)
    return array.offset, array.element_bytes, shape, len(array.shape)


def supported_instructions() -> dict[str, str]:
    """Every mnemonic that the emulator decodes, with one line on what it does."""
    text = load().dm_supported_instructions().decode()
    return dict(line.split("\t") for line in text.splitlines())
