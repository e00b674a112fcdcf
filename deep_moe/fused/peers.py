"""Whether the ranks of a group can reach each other's GPU memory, found out before memory is made.

Each rank tells the others what its GPU is and what keeps it from sharing memory. So all of them
refuse together, with the rank, the cause and what to do, and none is left alone in the exchange of
memory or faults at its first token.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
_START_FABRIC_MANAGER = "start nvidia-fabricmanager on that machine"
_START_IMEX = "start nvidia-imex there, and give the container /dev/nvidia-caps-imex-channels"
# By a part of an error's text: what it means for memory that ranks share, and what to do.
_CAUSES = (
    (
        ("pidfd_getfd", "pidfd_open"),
        "processes of this container may not take file descriptors from each other: run it with "
        "--cap-add=SYS_PTRACE, or without expandable_segments in PYTORCH_CUDA_ALLOC_CONF",
    ),
    (
        ("send fd", "recv fd", "receive fd"),
        "ranks of one machine pass file descriptors through sockets in /tmp: ranks in different "
        "containers must share /tmp and the process namespace; ranks on different machines need an "
        "NVLink fabric",
    ),
    (
        ("system not yet initialized",),
        f"the GPU is not ready, as its NVLink switches are not set up: {_START_FABRIC_MANAGER}",
    ),
    (
        ("invalid resource handle",),
        "ranks are in different NVLink domains: nvidia-smi -q shows each GPU's clique",
    ),
    (
        ("overlapping devices",),
        "ranks use the same GPU: call torch.cuda.set_device(local rank) first",
    ),
    (
        (
            "illegal memory access",
            "misaligned address",
            "unspecified launch failure",
            "device-side",
        ),
        "an earlier kernel of this process failed, and the buffer has nothing to do with it: "
        "CUDA_LAUNCH_BLOCKING=1 shows which; only a new process can use the GPU again",
    ),
    (("out of memory",), "the GPU has no room for the buffer: use fewer tokens per rank"),
    (
        ("not permitted", "not supported"),
        f"the driver shares no memory between these processes; on machines with a fabric: "
        f"{_START_IMEX}",
    ),
)


def cause_of(error: str) -> str | None:
    """What a text of PyTorch's or CUDA's means where ranks exchange memory, and what to do."""
    lower = error.lower()
    for parts, cause in _CAUSES:
        if any(part in lower for part in parts):
            return cause
    return None


def explained(error: BaseException) -> str:
    """An error's first line, and its cause if that is known."""
    text = str(error).strip().split("\n", 1)[0] or repr(error)
    cause = cause_of(str(error))
    return text if cause is None else f"{text}: {cause}"


def gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """`value` of every rank of `group`. Takes part in no other group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def exists(group: ProcessGroup) -> bool:
    """Whether this process has not destroyed the group. One that PyTorch never knew has no name."""
    try:
        _ = group.group_name
    except RuntimeError:
        return True
    return group in dist.distributed_c10d._world.pg_map


def machine_id() -> str:
    """Equal for processes that see each other in /proc."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class Fabric:
    """What joins GPUs of several machines. domain: GPUs of one domain have the same; "" for none.
    problem: why this GPU cannot share memory beyond its machine, and what to do."""

    domain: str = ""
    problem: str | None = "its GPU shares no memory with other machines"


@dataclass(frozen=True)
class GpuIdentity:
    """What a rank tells the others about its GPU."""

    machine: str
    uuid: str
    fabric: Fabric


@dataclass(frozen=True)
class _Report:
    """Of one rank."""

    gpu: GpuIdentity | None
    problem: str | None


def require_reachable_peers(group: ProcessGroup, device: torch.device) -> None:
    """Raise ValueError on every rank of `group` unless all their GPUs reach each other's memory."""
    rank = dist.get_rank(group)
    reports: list[_Report] = gather_objects(_report(rank, device), group)
    gpus = [report.gpu for report in reports if report.gpu is not None]
    problems = [report.problem for report in reports if report.problem is not None]
    if not problems:
        problem = unreachable_peer(gpus, rank, link_of_gpus)
        problems = [text for text in gather_objects(problem, group) if text is not None]
    if problems:
        raise ValueError(
            f"group must be ranks whose GPUs are linked by NVLink; {'; '.join(problems)}"
        )


def _report(rank: int, device: torch.device) -> _Report:
    problem = own_problem(device)
    if problem is not None:
        return _Report(None, f"rank {rank}: {problem}")
    return _Report(gpu_identity(device), None)


def own_problem(device: torch.device) -> str | None:
    """What keeps this process from sharing its GPU's memory with anyone, and what to do."""
    import torch.distributed._symmetric_memory as symm_mem

    try:
        # A fault of an earlier kernel would show in the middle of the exchange.
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return explained(error)
    backend = symm_mem.get_backend(device)
    if backend not in (None, "CUDA"):
        return (
            f"PyTorch's symmetric memory uses {backend}, whose memory a kernel cannot address "
            "everywhere: unset TORCH_SYMMMEM, or call "
            'torch.distributed._symmetric_memory.set_backend("CUDA")'
        )
    return None


def unreachable_peer(
    gpus: Sequence[GpuIdentity], rank: int, is_linked: Callable[[str, str], bool | None]
) -> str | None:
    """Words for the first rank whose memory `rank` cannot work on, or None.

    is_linked: whether the first GPU, given by its uuid, can do all the kernel does in the second
        one's memory, its atomic operations included; None if this process does not see it.
    """
    own = gpus[rank]
    for peer, gpu in enumerate(gpus):
        if peer == rank:
            continue
        pair = f"rank {rank} and rank {peer}"
        if gpu.machine != own.machine:
            where = f"{pair} run on different machines, or in containers that do not see each other"
            for name, fabric in ((rank, own.fabric), (peer, gpu.fabric)):
                if fabric.problem is not None:
                    return f"{where}, and of rank {name}: {fabric.problem}"
            if gpu.fabric.domain != own.fabric.domain:
                return (
                    f"{where}, and in different NVLink domains ({own.fabric.domain} and "
                    f"{gpu.fabric.domain}): use a group for each, and TwoLevelMoE across them"
                )
        elif gpu.uuid == own.uuid:
            if not may_share_a_gpu():
                return f"{pair} use the same GPU: call torch.cuda.set_device(local rank) first"
        elif is_linked(own.uuid, gpu.uuid) is False:
            return f"the GPU of rank {rank} is not linked to that of rank {peer}"
    return None


def may_share_a_gpu() -> bool:
    """Whether several ranks on one GPU are meant, by PyTorch's own switch. Kernels of theirs that
    wait for each other have to run at the same time there."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


def gpu_identity(device: torch.device) -> GpuIdentity:
    from cuda.bindings import driver

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    has_fabric = _device_attribute(
        driver.cuDeviceGetAttribute,
        driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
        device.index,
    )
    return GpuIdentity(machine_id(), uuid, fabric_of(uuid) if has_fabric else Fabric())


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


_FABRIC_STATES = ("not supported", "not started", "in progress", "completed")
_COMPLETED = 3


def fabric_of(uuid: str, nvml: Any = None) -> Fabric:
    """The fabric of a GPU by what NVML says. nvml: the library, or a stand-in."""
    if nvml is None:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            return Fabric(problem=f"NVML cannot be loaded ({error})")
    device, info = ctypes.c_void_p(), _FabricInfo()
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    status = nvml.nvmlInit_v2()
    if status == 0:
        status = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    if status == 0:
        status = nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info))
    if status != 0:
        return Fabric(problem=f"NVML does not tell its GPU's fabric (error {status})")
    if info.state != _COMPLETED or info.status != 0:
        state = _FABRIC_STATES[info.state] if info.state <= _COMPLETED else str(info.state)
        detail = f"state {state}" + (f", error {info.status}" if info.status else "")
        return Fabric(
            problem=f"its GPU has not joined an NVLink fabric ({detail}): {_START_FABRIC_MANAGER}"
        )
    domain = f"{bytes(info.cluster).hex()}.{info.clique}"
    if not any(os.access(channel, os.R_OK) for channel in IMEX_CHANNELS.glob("channel*")):
        return Fabric(domain, f"no IMEX channel can be opened there: {_START_IMEX}")
    return Fabric(domain, None)


def link_of_gpus(uuid: str, peer_uuid: str) -> bool | None:
    """`is_linked` of `unreachable_peer`, by what the driver says."""
    from cuda.bindings import driver

    indices = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    if peer_uuid not in indices:
        return None
    pair = indices[uuid], indices[peer_uuid]
    query, names = driver.cuDeviceGetP2PAttribute, driver.CUdevice_P2PAttribute
    return _device_attribute(
        query, names.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, *pair
    ) and _device_attribute(query, names.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, *pair)


def _device_attribute(query: Callable[..., tuple[Any, int]], attribute: Any, *devices: int) -> bool:
    """A yes-or-no attribute of one device or of a pair of them."""
    from cuda.bindings import driver

    status, value = query(attribute, *(driver.cuDeviceGet(index)[1] for index in devices))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA could not query {attribute.name}: {status.name}")
    return bool(value)
