"""The emulated machine: ranks with global memory, PTX modules, launches, a run to completion."""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import operator
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from .chips import CHIPS, Chip
from .errors import BY_KIND, EmulatorError, LaunchError
from .findings import Finding, decode_finding
from .launch_times import KINDS, LaunchTime, WarpWait, decode_launch_times
from .library import interruptible_run, load
from .machine_code import LineCost
from .usage import GpuUsage, decode_usage

if TYPE_CHECKING:
    import numpy as np

Size = tuple[int, int, int]
# What an argument of the library may be; whether a launch fits a GPU is looked at there.
MAX_U32, MAX_U63 = 2**32 - 1, 2**63 - 1
MAX_RANK = 2**16 - 1
# Of a kernel: bytes, a number, or an array or tensor, which stands for its address.
Argument: TypeAlias = Any
Schedule = Literal["random", "round_robin", "late_copies", "slow_rank", "starved_role", "last_warp"]
# In the order of the enum in machine.h.
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Statistics:
    """What a machine has executed so far.

    Attributes:
        warp_instructions: instructions, one for each warp that executed it.
        lane_instructions: the same, one for each lane that was active.
        virtual_ns: virtual time that has passed.
    """

    warp_instructions: int
    lane_instructions: int
    virtual_ns: int


@dataclass(frozen=True)
class NamedArray:
    """An array inside a region of memory or dynamic shared memory; findings name its elements.

    Args:
        name: what findings call it.
        offset: in bytes from the start.
        shape: elements along each axis.
        element_bytes: size of an element.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    element_bytes: int = 1


@dataclass(frozen=True)
class EntriesBySource:
    """An array in a rank's memory whose entries are written by the ranks in turn: entry i by rank
    i % ranks.

    Args:
        offset: in bytes from the region's start.
        num_entries: a multiple of the number of ranks.
        entry_bytes: size of an entry.
    """

    offset: int
    num_entries: int
    entry_bytes: int


class Module:
    """PTX that a machine has loaded.

    Attributes:
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
        namespaces, or None for the only one.

        Args:
            name: of the kernel, or None.
        """
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

    Args:
        seed: picks the interleaving of warps and the moments at which asynchronous operations
            complete; the same seed gives the same run.
        schedule: "random"; "round_robin"; "late_copies" completes asynchronous operations only when
            nothing else can go on; "slow_rank" and "starved_role" hardly ever run one rank, or the
            warps of one index in all CTAs, which the seed picks; "last_warp" runs one warp, which
            the seed picks, only when nobody else can go on.
        checks: look for data races, missing fences, reads of memory that nobody wrote and the like.
        stop_at_findings: such a finding is an error; otherwise the run goes on and `findings` has
            them.
        strict_tcgen05: ask for tcgen05 fences also where a release and an acquire order finished
            tcgen05 operations, as PTX's canonical patterns have them and CUTLASS does not, and for
            the warp's quadrant in addresses of tensor memory.
        clock: "virtual" counts instructions, and time leaps when everything waits; "real" is the
            host's, for kernels that talk to other processes. The name of a chip, such as "h100", or
            a `Chip`: time is simulated, warps run in the order that it gives whatever seed and
            schedule are, and `launch_times` says how long each launch took. Results are those of
            any other schedule.
        products: False leaves the products of matrices out where only time is asked for; what is
            made of them is then arbitrary. It needs a chip as clock and checks=False.
        keep_waits: with a chip, `waits` lists every wait of every warp.
        max_resident_ctas: how many CTAs of one grid are there at once.
        max_memory_bytes: of the host, which the machines of this process may take together. By
            default nine tenths of what the process may have.
        hopper_fp8_sums: FP8 wgmma drops the low bits of its sums as an H200 was seen to do, instead
            of rounding the exact sum once.

    Global addresses in PTX are host addresses. A rank may touch only what `add_memory` named.

    Raises:
        ValueError: an argument has a value that is not allowed; the text names it.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        schedule: Schedule = "random",
        checks: bool = True,
        stop_at_findings: bool = True,
        strict_tcgen05: bool = False,
        clock: str | Chip = "virtual",
        products: bool = True,
        keep_waits: bool = False,
        max_resident_ctas: int = 4096,
        max_memory_bytes: int | None = None,
        hopper_fp8_sums: bool = False,
    ) -> None:
        chip = CHIPS.get(clock) if isinstance(clock, str) else clock
        if not isinstance(chip, Chip) and clock not in ("virtual", "real"):
            raise ValueError(
                f"clock must be 'virtual', 'real', a chip ({', '.join(CHIPS)}) or a Chip, "
                f"not {clock!r}"
            )
        if not products and (chip is None or checks):
            raise ValueError("products=False needs a chip as clock, and checks=False")
        if keep_waits and chip is None:
            raise ValueError("keep_waits=True needs a chip as clock")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, not {schedule!r}")
        residency = _whole("max_resident_ctas", max_resident_ctas, 1, MAX_U32)
        if max_memory_bytes is None:
            max_memory_bytes = default_memory_limit()
        memory_limit = _whole("max_memory_bytes", max_memory_bytes, 1, MAX_U63)
        self._library = load()
        self._handle = self._library.dm_create(seed % 2**64, checks, clock == "real")
        self._library.dm_set_residency(self._handle, residency)
        self._library.dm_set_memory_limit(self._handle, memory_limit)
        self._library.dm_set_hopper_fp8_sums(self._handle, hopper_fp8_sums)
        self._library.dm_set_schedule(self._handle, SCHEDULES.index(schedule))
        self._library.dm_set_strict_tcgen05(self._handle, strict_tcgen05)
        self._library.dm_set_collects_findings(self._handle, not stop_at_findings)
        self._library.dm_leave_out_products(self._handle, not products)
        self.chip = chip
        self._checks = checks
        # By rank and address: what `add_array` was given, which must not go before its region.
        self._arrays: dict[tuple[int, int], Any] = {}
        self._reserved: list[mmap.mmap] = []
        if chip is not None:
            text = chip.as_text().encode()
            self._check(self._library.dm_set_clock(self._handle, text, keep_waits))

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
        home: int | None = None,
    ) -> None:
        """Let a rank's kernels access `num_bytes` bytes of host memory at `address`.

        The caller keeps the memory alive until `remove_memory` or the machine's end.

        Args:
            rank: the rank.
            address: of the first byte, on the host.
            num_bytes: size of the region.
            name: of the region, for findings.
            writable: whether kernels may write there.
            arrays: names for parts of it, for findings.
            home: the rank in whose GPU it lies, for a simulated clock; by default `rank`.
        """
        home = rank if home is None else _whole("home", home, 0, MAX_RANK)
        rank = _whole("rank", rank, 0, MAX_RANK)
        address = _whole(f"{name}: address", address, 1, MAX_U63)
        num_bytes = _whole(f"{name}: num_bytes", num_bytes, 1, MAX_U63)
        places = [(array.name.encode(), *_place_of(array)) for array in arrays]
        self._check(
            self._library.dm_add_memory(
                self._handle, rank, address, num_bytes, name.encode(), writable
            )
        )
        for place in places:
            self._check(self._library.dm_name_memory(self._handle, rank, address, *place))
        if home != rank:
            self._library.dm_set_home(self._handle, rank, address, home)

    def add_array(self, array: Any, name: str, *, rank: int = 0, writable: bool = True) -> None:
        """The same for the memory of a NumPy array or a CPU tensor, which the machine keeps alive.
        A peer's memory that a rank reaches through pointers is added to that rank, too.

        Args:
            array: a contiguous NumPy array or CPU tensor.
            name: of the region, for findings.
            rank: the rank.
            writable: whether kernels may write there.
        """
        _check_storage(array, name)
        num_bytes = array.nbytes
        if not array.flags.c_contiguous if hasattr(array, "flags") else not array.is_contiguous():
            raise ValueError(f"{name}: only contiguous arrays can be added")
        address = _address_of(array)
        self.add_memory(rank, address, num_bytes, name, writable=writable)
        self._arrays[rank, address] = array

    def add_multicast(
        self, members: Sequence[int], num_bytes: int, name: str, *, ranks: Iterable[int] = (0,)
    ) -> int:
        """Make multicast memory, as `cuMulticastCreate` does: one address for the same bytes of
        several GPUs, which `multimem` instructions store to, update and reduce.

        Args:
            members: addresses where it begins in each GPU's memory. Every rank of `ranks` must have
                been given that memory, by `add_memory` or `add_array`.
            num_bytes: of each member.
            name: for findings.
            ranks: whose kernels may use it.

        Returns:
            The multicast address, for kernels' arguments. Nothing else may access it.

        Raises:
            ValueError: there is no member, or an argument is out of range.
        """
        places = [_whole(f"{name}: member", member, 1, MAX_U63) for member in members]
        if not places:
            raise ValueError(f"{name}: multicast memory needs at least one member")
        num_bytes = _whole(f"{name}: num_bytes", num_bytes, 1, MAX_U63)
        reserved = mmap.mmap(-1, num_bytes)  # for its addresses: untouched, it takes no memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
        self._reserved.append(reserved)
        for rank in ranks:
            self._check(
                self._library.dm_add_multicast(
                    self._handle,
                    _whole("rank", rank, 0, MAX_RANK),
                    address,
                    num_bytes,
                    name.encode(),
                    (ctypes.c_uint64 * len(places))(*places),
                    len(places),
                )
            )
        return address

    def mirror_memory(
        self,
        rank: int,
        address: int,
        *,
        onto: int,
        num_ranks: int = 1,
        shift: int = 0,
        by_source: Iterable[EntriesBySource] = (),
    ) -> None:
        """Let a region of a peer's memory stand for a peer that does not run, because it does to
        this rank what this rank does to it, at the same time: accesses go to the rank's own memory,
        over the link, and load both directions of the rank's own links.

        Only with a chip as clock and `checks=False`.

        Args:
            rank: the rank.
            address: of the peer's region, as `add_memory` was given it. The process must have the
                addresses, and nobody touches what is there.
            onto: address of the rank's own region, at least as large.
            num_ranks: of the group that is symmetric.
            shift: how many entries further than the rank's own the peer's are that mirror them.
            by_source: arrays in which each source rank has entries of its own.
        """
        if self.chip is None or self._checks:
            raise ValueError("mirror_memory needs a chip as clock, and checks=False")
        rank = _whole("rank", rank, 0, MAX_RANK)
        places = [
            _whole(what, value, 0, MAX_U63)
            for what, value in (("address", address), ("onto", onto))
        ]
        num_ranks = _whole("num_ranks", num_ranks, 1, MAX_RANK)
        shift = _whole("shift", shift, 0, num_ranks - 1)
        numbers = [
            _whole(f"by_source: {name}", getattr(array, name), 0, MAX_U63)
            for array in by_source
            for name in ("offset", "num_entries", "entry_bytes")
        ]
        flat = (ctypes.c_uint64 * len(numbers))(*numbers)
        self._check(
            self._library.dm_mirror_memory(
                self._handle, rank, *places, num_ranks, shift, flat, len(numbers) // 3
            )
        )

    def remove_memory(self, rank: int, address: int) -> None:
        """Forget the region that starts at `address`.

        Args:
            rank: the rank.
            address: what `add_memory` was given.
        """
        rank = _whole("rank", rank, 0, MAX_RANK)
        address = _whole("address", address, 0, MAX_U63)
        self._check(self._library.dm_remove_memory(self._handle, rank, address))
        self._arrays.pop((rank, address), None)

    def load(
        self,
        ptx: str,
        *,
        name: str = "module",
        costs: Mapping[str, Mapping[int, LineCost]] | None = None,
    ) -> Module:
        """Parse and decode PTX. What the emulator cannot do is an error here, not at run time.

        Args:
            ptx: the text of one module.
            name: of the module, for findings.
            costs: with a chip as clock, for kernels by their names in the PTX: what each line of it
                costs, such as `machine_code.read_costs` finds. Of such a kernel, lines that are not
                named cost nothing; other kernels have the costs of a table.

        Raises:
            ValueError: `costs` without a chip as clock, or of a kernel that is not there.
            InvalidPtx: the text is not PTX.
            Unsupported: the PTX has an instruction that the emulator does not implement; the text
                has its line.
        """
        if costs and self.chip is None:
            raise ValueError("costs need a chip as clock")
        text = ptx.encode()
        index = ctypes.c_uint32()
        self._check(
            self._library.dm_load(self._handle, text, len(text), name.encode(), ctypes.byref(index))
        )
        listed = self._library.dm_kernels(self._handle, index).decode()
        kernels = dict(line.split("\t") for line in listed.splitlines())
        for kernel, lines in (costs or {}).items():
            if kernel not in kernels:
                there = ", ".join(kernels) or "none"
                raise ValueError(f"costs: module {name} has no kernel {kernel!r}; it has {there}")
            self._set_costs(index.value, kernel, lines)
        return Module(self, index.value, name, kernels)

    def variable(self, module: Module, name: str, *, rank: int = 0) -> np.ndarray:
        """The bytes of a module's `__device__` or `__constant__` variable, as an array of uint8 on
        the memory that kernels see: what is written there before a launch they read, and what they
        wrote is there after `run`.

        Args:
            module: what `load` returned.
            name: of the variable, as the PTX has it. C++ names in namespaces are mangled there;
                `extern "C"` keeps a name as it is.
            rank: each rank has its own.

        Raises:
            LaunchError: the module has no such variable.
        """
        if module.machine is not self:
            raise LaunchError(f"module {module.name} belongs to another machine")
        rank = _whole("rank", rank, 0, MAX_RANK)
        address, num_bytes = ctypes.c_uint64(), ctypes.c_uint64()
        self._check(
            self._library.dm_variable(
                self._handle,
                module.index,
                rank,
                name.encode(),
                ctypes.byref(address),
                ctypes.byref(num_bytes),
            )
        )
        storage: Any = (ctypes.c_uint8 * num_bytes.value).from_address(address.value)
        storage.machine = self  # whose memory it is
        import numpy as np  # a machine without variables does without it

        return np.frombuffer(storage, np.uint8)

    def _set_costs(self, module: int, kernel: str, lines: Mapping[int, LineCost]) -> None:
        numbers = [
            float(n)
            for one in lines.values()
            for n in (one.issue, one.alu, one.fma, one.xu, one.cycles, one.has_branch)
        ]
        self._check(
            self._library.dm_set_line_costs(
                self._handle,
                module,
                kernel.encode(),
                len(lines),
                (ctypes.c_uint32 * len(lines))(*lines),
                (ctypes.c_double * len(numbers))(*numbers),
            )
        )

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

        Args:
            module: what `load` returned.
            kernel: by its name in the PTX, or its C++ name, which needs neither namespaces nor
                template arguments; by default the module's only one.
            grid: CTAs, one to three numbers.
            block: threads of a CTA, one to three numbers.
            cluster: by default what the kernel was compiled for.
            shared_bytes: dynamic shared memory.
            args: one per parameter: a number, an array or tensor for its address, or the
                parameter's `bytes` (a struct, a tensor map); or all of them as one block of
                `bytes`.
            rank: whose memory the kernel may touch.
            in_order: after the rank's last queued one has ended, as in a stream.
            registers: per thread at the start, as the compiler reports them; by default as ptxas
                takes them: the most that launch bounds allow, but no more than its largest
                setmaxnreg.
            roles: which warps of a CTA do what, by name, for findings.
            shared_arrays: what lies in dynamic shared memory, for findings.

        Raises:
            LaunchError: the kernel, its sizes or its arguments do not fit.
        """
        if module.machine is not self:
            raise LaunchError(f"module {module.name} belongs to another machine")
        geometry = [
            _size(what, size)
            for what, size in (("grid", grid), ("block", block), ("cluster", cluster or (0, 0, 0)))
        ]
        shared_bytes = _whole("shared_bytes", shared_bytes, 0, MAX_U32)
        rank = _whole("rank", rank, 0, MAX_RANK)
        num_registers = 0 if registers is None else _whole("registers", registers, 1, 255)
        places = [(array.name.encode(), *_place_of(array)) for array in shared_arrays]
        role_warps = {role: _warps(role, warps) for role, warps in (roles or {}).items()}
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
        self._check(
            self._library.dm_launch(
                self._handle,
                module.index,
                name,
                rank,
                *geometry,
                shared_bytes,
                block_of_bytes,
                len(block_of_bytes),
                in_order,
                num_registers,
            )
        )
        try:
            for place in places:
                self._check(self._library.dm_name_shared(self._handle, *place))
            for role, warps in role_warps.items():
                self._check(
                    self._library.dm_name_warps(self._handle, role.encode(), warps, len(warps))
                )
        except BaseException:
            self._library.dm_withdraw_launch(self._handle)
            raise

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

        Args:
            progress: called several times a second with the number of warp instructions executed;
                what it raises stops the run, and so does what the handler of a signal raises, such
                as Ctrl-C's KeyboardInterrupt. The launches are then forgotten, and the machine can
                be used again.

        Raises:
            EmulatorError: a check found a mistake, or the program cannot go on; the class says
                which.
        """
        report = None
        if progress is not None:
            report = functools.partial(_report, progress, self)
        self._check(interruptible_run()(self._handle, report))

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
    def launch_times(self) -> list[LaunchTime]:
        """The last run's launches in the order in which they ended, if the clock is a chip's; else
        none."""
        return decode_launch_times(self._library.dm_launch_times(self._handle).decode())

    @property
    def usage(self) -> list[GpuUsage]:
        """How busy each GPU's memory, L2, links and tensor cores were during the last run, if the
        clock is a chip's; else none."""
        return decode_usage(self._library.dm_usage(self._handle).decode())

    @property
    def waits(self) -> list[WarpWait]:
        """Every wait of the last run, where `keep_waits` is on, in the order of their ends."""
        count = self._library.dm_num_waits(self._handle)
        if not count:
            return []
        flat = (ctypes.c_int64 * (6 * count))()
        self._library.dm_waits(self._handle, flat)
        rows = (flat[i : i + 6] for i in range(0, len(flat), 6))
        return [
            WarpWait(launch, cta, warp, KINDS[kind], start / 1e3, end / 1e3)
            for launch, cta, warp, kind, start, end in rows
        ]

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


def _report(progress: Callable[[int], None], machine: Machine) -> None:
    progress(machine.statistics.warp_instructions)


@functools.cache
def default_memory_limit() -> int:
    """Nine tenths of what the machine has, or of what its control group allows if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(limits) * 9 // 10


def _whole(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise LaunchError(f"{name} must be a whole number, not {value!r}") from None
    if not low <= number <= high:
        raise LaunchError(f"{name} must be {low} to {high}, not {number}")
    return number


def _size(name: str, size: Any) -> ctypes.Array[ctypes.c_uint32]:
    sizes = tuple(size) if isinstance(size, Iterable) else ()
    if len(sizes) != 3:
        raise LaunchError(f"{name} must be three sizes (x, y, z), not {size!r}")
    return (ctypes.c_uint32 * 3)(
        *(_whole(f"{name}[{i}]", value, 0, MAX_U32) for i, value in enumerate(sizes))
    )


def _warps(role: str, warps: Iterable[int]) -> ctypes.Array[ctypes.c_uint32]:
    indices = [_whole(f"a warp of role {role!r}", warp, 0, MAX_U32) for warp in warps]
    return (ctypes.c_uint32 * len(indices))(*indices)


def _check_storage(array: Any, name: str) -> None:
    """Refuses a tensor whose storage is gone, as FSDP frees it between uses."""
    if not hasattr(array, "untyped_storage") or not array.numel():
        return
    needed = (array.storage_offset() + array.numel()) * array.element_size()
    have = array.untyped_storage().nbytes()
    if have < needed:
        raise ValueError(
            f"{name}: it needs {needed} bytes of storage and has {have}; was the storage freed?"
        )


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
    _check_storage(value, "the tensor")
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
    offset, element_bytes, *sizes = (
        _whole(f"{array.name}: {what}", value, 0, MAX_U63)
        for what, value in (
            ("offset", array.offset),
            ("element_bytes", array.element_bytes),
            *(("a size", size) for size in array.shape),
        )
    )
    return offset, element_bytes, (ctypes.c_uint64 * len(sizes))(*sizes), len(sizes)


def supported_instructions() -> dict[str, str]:
    """Every mnemonic that the emulator decodes, with one line on what it does."""
    text = load().dm_supported_instructions().decode()
    return dict(line.split("\t") for line in text.splitlines())
