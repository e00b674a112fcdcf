"""Runs a compiled kernel: on a GPU, or for any number of ranks in the emulator."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from .counts import count

if TYPE_CHECKING:
    import torch

    from deep_moe.emulator import Chip, Machine
    from deep_moe.emulator.machine import EntriesBySource, NamedArray, Schedule
    from deep_moe.heuristics.segments import Layout

    from .cache import CompiledKernel


@dataclass(frozen=True)
class Mirror:
    """Arguments of `Machine.mirror_memory`."""

    onto: int
    num_ranks: int
    shift: int
    by_source: tuple[EntriesBySource, ...]


@dataclass(frozen=True)
class MemoryRegion:
    """Global memory that a launch may touch. home: the rank in whose GPU it lies, if it is another
    one's. mirror: the peer does not run, see `Machine.mirror_memory`."""

    name: str
    address: int
    num_bytes: int
    is_writable: bool
    layout: Layout | None = None  # its arrays, for the emulator's findings
    home: int | None = None
    mirror: Mirror | None = None

    @classmethod
    def of_tensor(cls, name: str, tensor: torch.Tensor, *, is_writable: bool) -> MemoryRegion:
        """From the tensor's first element to its last."""
        from deep_moe.tensor_memory import num_bytes_reached

        return cls(name, tensor.data_ptr(), num_bytes_reached(tensor), is_writable)


@dataclass(frozen=True)
class RankLaunch:
    """One rank's part of a call.

    num_threads: per CTA. smem_bytes: dynamic shared memory per CTA. memory: what `args` points to;
    the emulator faults on any access outside. For its findings, smem_layout: the arrays in shared
    memory; warp_roles: the warps of a CTA by what they do.
    """

    rank: int
    kernel: CompiledKernel
    num_ctas: int
    num_threads: int
    smem_bytes: int
    args: ctypes.Structure
    memory: tuple[MemoryRegion, ...]
    smem_layout: Layout | None = field(default=None, kw_only=True)
    warp_roles: Mapping[str, range] = field(default_factory=dict, kw_only=True)


def run_emulated(
    launches: Sequence[RankLaunch],
    *,
    seed: int,
    checks: bool,
    clock: Literal["virtual", "real"] | Chip,
    schedule: Schedule = "random",
    progress: Callable[[int], None] | None = None,
    hopper_fp8_sums: bool = False,
    products: bool = True,
    observe: Callable[[Machine], None] | None = None,
    machine_code: bool = False,
) -> str:
    """Run all launches at once, to completion; those of one rank after each other. Returns who
    waited for what, if all came to wait.

    seed, schedule: pick the interleaving, see `Machine`. checks: look for races and the like
    (slower). clock: "real" if other processes take part; "virtual", where waiting costs nothing; a
    chip, whose time is simulated. products: see `Machine`. observe: gets the machine after the run.
    progress: told now and then how many warp instructions have been executed.
    hopper_fp8_sums: drop the low bits of FP8 sums as an H200 does. machine_code: with a chip, what
    instructions cost is read from the kernels' machine code, see `deep_moe.emulator.machine_code`.
    """
    from deep_moe.emulator import Machine
    from deep_moe.emulator import machine_code as code

    if machine_code and isinstance(clock, str):
        raise ValueError(f"machine_code=True needs a chip as clock; got {clock!r}")

    machine = Machine(
        seed=seed,
        schedule=schedule,
        checks=checks,
        clock=clock,
        strict_tcgen05=True,
        hopper_fp8_sums=hopper_fp8_sums,
        products=products,
    )
    modules: dict[str, Any] = {}
    added: set[tuple[int, MemoryRegion]] = set()
    for launch in launches:
        for region in launch.memory:
            if (launch.rank, region) in added:
                continue
            added.add((launch.rank, region))
            machine.add_memory(
                launch.rank,
                region.address,
                region.num_bytes,
                region.name,
                writable=region.is_writable,
                arrays=_arrays(region.layout),
                home=region.home,
            )
        for region in launch.memory:
            if region.mirror is not None:
                machine.mirror_memory(launch.rank, region.address, **vars(region.mirror))
        kernel = launch.kernel
        resources = kernel.manifest["resources"]  # else as many as it may use at most
        if kernel.key not in modules:
            costs = None
            if machine_code:
                assert not isinstance(clock, str)
                whole = _with_cubin(kernel)
                read = code.read_costs(whole.cubin, kernel.ptx, kernel.name, clock)
                costs = {kernel.name: read}
            modules[kernel.key] = machine.load(
                kernel.ptx, name=str(kernel.folder / "kernel.ptx"), costs=costs
            )
        machine.launch(
            modules[kernel.key],
            kernel.name,
            grid=(launch.num_ctas, 1, 1),
            block=(launch.num_threads, 1, 1),
            shared_bytes=launch.smem_bytes,
            args=bytes(launch.args),
            rank=launch.rank,
            in_order=True,
            registers=None if resources is None else resources["num_registers"],
            roles=launch.warp_roles,
            shared_arrays=_arrays(launch.smem_layout),
        )
    machine.run(progress)
    if observe is not None:
        observe(machine)
    return machine.stall


def _with_cubin(kernel: CompiledKernel) -> CompiledKernel:
    """The kernel, compiled to machine code if it was made for the emulator alone."""
    if kernel.cubin:
        return kernel
    from deep_moe.jit import compile_cached

    whole = compile_cached(
        kernel.source, arch=kernel.arch, kernel=kernel.name, config=kernel.manifest["config"]
    )
    if whole.ptx != kernel.ptx:
        raise RuntimeError(f"{kernel.key}: the compiler made other PTX with the machine code")
    return whole


def _arrays(layout: Layout | None) -> list[NamedArray]:
    from deep_moe.emulator import NamedArray
    from deep_moe.heuristics.segments import DTYPE_BYTES

    return [
        NamedArray(s.name, s.offset, s.shape, DTYPE_BYTES[s.dtype])
        for s in (layout.segments if layout else ())
    ]


class CudaLauncher:
    """A kernel loaded into the CUDA context that is current when this object is made.

    cuda.core loads the module. The launch itself calls the driver through ctypes: cuda.core takes
    no struct as a kernel's argument, and cuda.bindings wraps a struct's every field, which takes
    longer than the rest of a launch in Python.

    num_threads, smem_bytes: as in RankLaunch. is_cooperative: all CTAs are resident at once,
        whatever other streams do, as a kernel needs it whose CTAs wait for each other.
    """

    def __init__(
        self,
        kernel: CompiledKernel,
        *,
        num_threads: int,
        smem_bytes: int = 0,
        is_cooperative: bool = False,
    ) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        from .driver import require_driver

        require_driver()
        # Kept: the module is unloaded with it.
        self._object_code = ObjectCode.from_cubin(kernel.cubin, name=kernel.name)
        function = int(self._object_code.get_kernel(kernel.name).handle)
        status, context = driver.cuCtxGetCurrent()
        _check(status, "find the current context")
        status, device = driver.cuCtxGetDevice()
        _check(status, "find the current device")
        (status,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            smem_bytes,
            driver.CUkernel(function),
            device,
        )
        _check(status, f"give the kernel {smem_bytes} bytes of shared memory")
        # Otherwise the first launch brings the kernel to the GPU, and that call takes longer.
        status, loaded = driver.cuKernelGetFunction(driver.CUkernel(function))
        _check(status, "find the kernel in this context")
        (status,) = driver.cuFuncLoad(loaded)
        _check(status, "load the kernel")
        self._context = int(context)
        self._get_current_context = driver.cuCtxGetCurrent
        self._launch_kernel = _launch_function()
        self._of_thread = _OfThread(function, num_threads, smem_bytes, is_cooperative)
        count(loaded=1)

    def launch(self, args: ctypes.Structure, num_ctas: int, stream: int) -> None:
        """Enqueue one call on a stream (a cudaStream_t) of the launcher's context. The arguments
        are copied. Any thread may call this, whatever context it is in."""
        prepared = self._of_thread.prepared
        # Mostly as in the last launch, and looking at an int is quicker than writing to a struct.
        if num_ctas != prepared.num_ctas:
            prepared.config.gridDimX = prepared.num_ctas = num_ctas
        if stream != prepared.stream:
            prepared.config.hStream = prepared.stream = stream
        prepared.parameters[0] = ctypes.addressof(args)
        status, context = self._get_current_context()
        if status == 0 and int(context) == self._context:
            status = self._launch_kernel(*prepared.addresses)
        else:  # The thread works on another device, or has not used CUDA yet.
            with current_context(self._context):
                status = self._launch_kernel(*prepared.addresses)
        if status != 0:
            _check(status, "launch the kernel")


@contextmanager
def current_context(context: int) -> Iterator[None]:
    """Makes a CUcontext this thread's current one meanwhile."""
    from cuda.bindings import driver

    (status,) = driver.cuCtxPushCurrent(driver.CUcontext(context))
    _check(status, "switch to another context")
    try:
        yield
    finally:
        status, _ = driver.cuCtxPopCurrent()
        _check(status, "switch back from another context")


@lru_cache(maxsize=64)
def primary_context(device_index: int) -> int:
    """The CUcontext that PyTorch and the CUDA runtime use on a device. It is never released."""
    from cuda.bindings import driver

    status, device = driver.cuDeviceGet(device_index)
    _check(status, f"find device {device_index}")
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    _check(status, f"make the context of device {device_index}")
    return int(context)


@lru_cache(maxsize=1)
def _launch_function() -> Callable[..., int]:
    """cuLaunchKernelEx."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    return function


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h; of its values, an int."""

    _fields_ = (
        ("id", ctypes.c_uint32),
        ("_padding", ctypes.c_uint32),
        ("value", ctypes.c_int32),
        ("_rest_of_value", ctypes.c_ubyte * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("gridDimX", ctypes.c_uint32),
        ("gridDimY", ctypes.c_uint32),
        ("gridDimZ", ctypes.c_uint32),
        ("blockDimX", ctypes.c_uint32),
        ("blockDimY", ctypes.c_uint32),
        ("blockDimZ", ctypes.c_uint32),
        ("sharedMemBytes", ctypes.c_uint32),
        ("hStream", ctypes.c_void_p),
        ("attrs", ctypes.c_void_p),
        ("numAttrs", ctypes.c_uint32),
    )


_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE


class _Prepared:
    """What the driver is given."""

    def __init__(
        self, function: int, num_threads: int, smem_bytes: int, is_cooperative: bool
    ) -> None:
        self._attribute = LaunchAttribute(_COOPERATIVE, 0, 1)
        self.config = LaunchConfig(1, 1, 1, num_threads, 1, 1, smem_bytes)
        # What the config has of a launch.
        self.num_ctas = 1
        self.stream = 0
        if is_cooperative:
            self.config.attrs = ctypes.addressof(self._attribute)
            self.config.numAttrs = 1
        self.parameters = (ctypes.c_void_p * 1)()
        # The driver's function takes these; without extra options.
        self.addresses = (
            ctypes.addressof(self.config),
            function,
            ctypes.addressof(self.parameters),
            None,
        )


class _OfThread(threading.local):
    """One per thread: a launch writes its grid, stream and arguments into what is prepared, and
    lets other threads run while the driver reads it."""

    def __init__(
        self, function: int, num_threads: int, smem_bytes: int, is_cooperative: bool
    ) -> None:
        self.prepared = _Prepared(function, num_threads, smem_bytes, is_cooperative)


def _check(status: int, what: str) -> None:
    """status: a CUresult or its number."""
    if status != 0:
        from cuda.bindings import driver

        raise RuntimeError(f"CUDA could not {what}: {driver.CUresult(status).name}")
