"""What all layers of the same sizes share, for as long as its process group exists."""

from __future__ import annotations

import weakref
from typing import Any, Generic, Protocol, TypeVar

from deep_moe.fused.peers import exists


class _Closeable(Protocol):
    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=_Closeable)


class KeptByGroup(Generic[Kept]):
    """Values by keys whose first item is a process group or None."""

    def __init__(self) -> None:
        # By group itself: one that was made after another was destroyed may have its name.
        self._kept: dict[tuple[Any, ...], Kept] = {}
        # A group has threads for as long as somebody holds it. Python stops them where they are
        # when it ends, which can abort the process; exit handlers run before that.
        weakref.finalize(self, self._kept.clear)

    def _close_those_of_destroyed_groups(self) -> None:
        """As an engine leaves them that ends and starts again in the same process."""
        for key in [key for key in self._kept if key[0] is not None and not exists(key[0])]:
            self._kept.pop(key).close()

    def close(self) -> None:
        """Close all. On every rank, before a process group is destroyed."""
        while self._kept:
            _, value = self._kept.popitem()
            value.close()
