"""Objects that a module shares with others of its process, and that can be neither copied nor
saved.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deep_moe.fused.checks import require_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from deep_moe.split.throughput import AllToAll

_Value = TypeVar("_Value")


class Shared(Generic[_Value]):
    """A group or a buffer as a module holds it. A copy of the module shares the value; `torch.save`
    leaves the value out, and is_lost says so of what was loaded."""

    def __init__(self, value: _Value | None, *, is_lost: bool = False) -> None:
        self.value = value
        self.is_lost = is_lost

    def __deepcopy__(self, memo: dict[int, object]) -> Shared[_Value]:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Shared, is_lost=self.is_lost or self.value is not None), (None,)


def num_ranks_of(group: ProcessGroup | AllToAll | None) -> int:
    """How many ranks share the experts."""
    from deep_moe.split.throughput import AllToAll

    if group is None:
        return 1
    if isinstance(group, AllToAll):
        return group.shape.num_ranks
    require_type("group", group, dist.ProcessGroup, "a process group, an AllToAll or None")
    return group.size()


def is_dtensor(value: Any) -> bool:
    """Without an import, which takes a second: whoever has a DTensor has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _global_ranks_of(group: ProcessGroup | AllToAll) -> list[int]:
    """As PyTorch numbers the processes; none for ranks that are emulated in one."""
    from deep_moe.split.throughput import AllToAll

    if not isinstance(group, AllToAll):
        return dist.get_process_group_ranks(group)
    of_buffer = group._buffer.group
    return [] if of_buffer is None else dist.get_process_group_ranks(of_buffer)


def refuse_averages_of_fsdp(group: ProcessGroup | AllToAll, mesh: DeviceMesh) -> None:
    """For a parameter that FSDP2 shards over the mesh."""
    _refuse_averages(group, mesh.mesh.flatten().tolist(), "the mesh of fully_shard")


# Whose gradients a DDP module averages, by id.
_averaged: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()


def refuse_averages_of_ddp(
    group: ProcessGroup | AllToAll, parameters: Iterable[torch.nn.Parameter]
) -> None:
    """Within a forward pass of DDP, if it averages gradients of these."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return
    if ddp not in _averaged:
        _averaged[ddp] = frozenset(map(id, ddp._module_parameters))
    if any(id(parameter) in _averaged[ddp] for parameter in parameters):
        ranks = dist.get_process_group_ranks(ddp.process_group)
        _refuse_averages(group, ranks, "the process group of DistributedDataParallel")


def _refuse_averages(group: ProcessGroup | AllToAll, ranks: Iterable[int], of: str) -> None:
    common = sorted({*ranks}.intersection(_global_ranks_of(group)))
    if len(common) > 1:
        raise ValueError(
            f"group must have one rank at most in common with {of}, which averages gradients over "
            f"its ranks, because each rank of group has other experts; got both over {common}"
        )
