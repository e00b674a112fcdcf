"""The emulated machine: ranks with global memory, PTX modules, launches, a run to completion."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, get_args

from .errors import BY_KIND, EmulatorError, LaunchError
from .findings import Finding, decode_finding
from .library import load

Size = tuple[int, int, int]
# Of a kernel: bytes, a number, or an array or tensor, which stands for its address.
Argument: TypeAlias = Any
Schedule = Literal["random", "round_robin", "late_copies", "slow_rank", "starved_role", "last_warp"]
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
    """PTX that a machine has loaded.

    kernels: its entry functions as the PTX calls them, with their C++ names less template
    arguments.
    """

    def __init__(self, machine: Machine, index: int, name: str, kernels: dict[str, str]) -> None:
        self.machine = machine
        self.index = index
        self.name = name
        self.kernels = kernels

    def find_kernel(self, name: str | None) -> str:
        """The PTX's name of the one kernel that is meant: as in the PTX, as in C++ with or without
        namespaces, or None for the only one."""
        if name in self.kernels:
            return str(name)
        meant = [
            mangled
            for mangled, readable in self.kernels.items()
            if name is None or f"::{readable}".endswith(f"::{name}")
        ]
        if len(meant) == 1:
            return meant[0]
        wanted = "more than one kernel" if name is None else f"{len(meant)} kernels {name!r}"
        listed = "".join(f"\n  {k} ({v})" for k, v in self.kernels.items())
        raise LaunchError(
            f"module {self.name} has {wanted if meant else f'no kernel {name!r}'};"
            f" it has{listed or ' none'}"
        )


class Machine:
    """Runs PTX for any number of ranks on one host thread.

    seed: picks the interleaving of warps and the moments at which asynchronous operations complete;
    the same seed gives the same run.
    schedule: "random"; "round_robin"; "late_copies" completes asynchronous operations only when
    nothing else can go on; "slow_rank" and "starved_role" hardly ever run one rank, or the warps of
    one index in all CTAs, which the seed picks; "last_warp" runs one warp, which the seed picks,
    only when nobody else can go on.
    checks: look for data races, missing fences, reads of memory that nobody wrote and the like.
    stop_at_findings: such a finding is an error; otherwise the run goes on and `findings` has them.
    strict_tcgen05: ask for tcgen05 fences also where a release and an acquire order finished
    tcgen05 operations, as PTX's canonical patterns have them and CUTLASS does not, and for the
    warp's quadrant in addresses of tensor memory.
    clock: "virtual" counts instructions, and time leaps when everything waits; "real" is the
    host's, for kernels that talk to other processes.
    max_resident_ctas: how many CTAs of one grid are there at once.
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

    def add_array(self, array: Any, name: str, *, rank: int = 0, writable: bool = True) -> None:
        """The same for the memory of a NumPy array or a CPU tensor. A peer's memory that a rank
        reaches through pointers is added to that rank, too."""
        num_bytes = array.nbytes
        if not array.flags.c_contiguous if hasattr(array, "flags") else not array.is_contiguous():
            raise ValueError(f"{name}: only contiguous arrays can be added")
        self.add_memory(rank, _address_of(array), num_bytes, name, writable=writable)

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
        listed = self._library.dm_kernels(self._handle, index).decode()
        kernels = dict(line.split("\t") for line in listed.splitlines())
        return Module(self, index.value, name, kernels)

    def launch(
        self,
        module: Module,
        kernel: str | None = None,
        *,
        grid: Size,
        block: Size,
        cluster: Size | None = None,
        shared_bytes: int = 0,
        args: bytes | Sequence[Argument] = b"",
        rank: int = 0,
        in_order: bool = False,
        registers: int | None = None,
        roles: Mapping[str, Iterable[int]] | None = None,
        shared_arrays: Iterable[NamedArray] = (),
    ) -> None:
        """Queue a kernel; `run` executes all queued ones together.

        kernel: by its name in the PTX, or its C++ name, which needs neither namespaces nor template
        arguments; by default the module's only one.
        in_order: after the rank's last queued one has ended, as in a stream.
        cluster: by default what the kernel was compiled for. shared_bytes: dynamic shared memory.
        args: one per parameter: a number, an array or tensor for its address, or the parameter's
        `bytes` (a struct, a tensor map); or all of them as one block of `bytes`.
        registers: per thread at the start, as the compiler reports them; by default as ptxas takes
        them: the most that launch bounds allow, but no more than its largest setmaxnreg.
        roles: which warps of a CTA do what, by name, for findings.
        shared_arrays: what lies in dynamic shared memory, for findings.
        """
        if module.machine is not self:
            raise LaunchError(f"module {module.name} belongs to another machine")
        name = module.find_kernel(kernel).encode()
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
        self, module: Module, kernel: bytes, size: int, count: int, args: Sequence[Argument]
    ) -> bytes:
        if len(args) != count:
            raise LaunchError(f"{kernel.decode()} takes {count} arguments, not {len(args)}")
        packed = bytearray(size)
        for index, value in enumerate(args):
            offset, num_bytes = ctypes.c_uint32(), ctypes.c_uint32()
            is_floating = ctypes.c_int()
            self._check(
                self._library.dm_kernel_parameter(
                    self._handle,
                    module.index,
                    kernel,
                    index,
                    ctypes.byref(offset),
                    ctypes.byref(num_bytes),
                    ctypes.byref(is_floating),
                )
            )
            try:
                argument = _argument_bytes(value, num_bytes.value, bool(is_floating.value))
            except (TypeError, ValueError, OverflowError) as error:
                raise LaunchError(f"argument {index} of {kernel.decode()}: {error}") from error
            packed[offset.value : offset.value + num_bytes.value] = argument
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
    def findings(self) -> list[Finding]:
        """What the checks found so far where `stop_at_findings` is off, each cause once: one check
        at one source line, or at one pair of them."""
        return [
            decode_finding(self._library.dm_finding(self._handle, index).decode(errors="replace"))
            for index in range(self._library.dm_num_findings(self._handle))
        ]

    def findings_as_json(self) -> str:
        """`findings` as a JSON list, see `Finding.as_dict`."""
        return json.dumps([finding.as_dict() for finding in self.findings])

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
            error = BY_KIND.get(status, EmulatorError)(text)
            found = self._library.dm_error_finding(self._handle).decode(errors="replace")
            error.finding = decode_finding(found)
            raise error


def _argument_bytes(value: Argument, num_bytes: int, is_floating: bool) -> bytes:
    """What a parameter of this size holds."""
    if isinstance(value, Real):
        if is_floating:
            return struct.pack({2: "<e", 4: "<f", 8: "<d"}[num_bytes], float(value))
        if not isinstance(value, Integral):
            raise TypeError(f"{value!r} for an integer of {num_bytes} bytes")
        if num_bytes > 8:
            raise TypeError(f"a number for {num_bytes} bytes: pass the struct's bytes")
        return int(value).to_bytes(num_bytes, "little", signed=int(value) < 0)
    is_array = hasattr(value, "data_ptr") or hasattr(value, "__array_interface__")
    content = _address_of(value).to_bytes(8, "little") if is_array else bytes(value)
    if len(content) != num_bytes:
        raise ValueError(f"the parameter has {num_bytes} bytes, not {len(content)}")
    return content


def _address_of(array: Any) -> int:
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.__array_interface__["data"][0])


def _place_of(array: NamedArray) -> tuple[int, int, ctypes.Array[ctypes.c_uint64], int]:
    shape = (ctypes.c_uint64 * len(array.shape))(*array.shape)
    return array.offset, array.element_bytes, shape, len(array.shape)


def supported_instructions() -> dict[str, str]:
    """Every mnemonic that the emulator decodes, with one line on what it does."""
    text = load().dm_supported_instructions().decode()
    return dict(line.split("\t") for line in text.splitlines())
