"""Objects that a module shares with others of its process, and that can be neither copied nor
saved.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch.distributed as dist

from deep_moe.fused.checks import require_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
