"""A bounded cache for what a call has computed, for the next call like it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """At most `capacity` entries; the oldest makes room. Threads may share it.

    get(key): the value or None. It is a dict's own method, because every call looks keys up.
    """

    get: Callable[[Key], Value | None]

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[Key, Value] = {}
        self._lock = threading.Lock()
        self.get = self._entries.get

    def put(self, key: Key, value: Value) -> Value:
        """Keep `value`, and return it."""
        with self._lock:
            if key not in self._entries and len(self._entries) >= self.capacity:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = value
        return value

    def items(self) -> list[tuple[Key, Value]]:
        """The entries as they are now, oldest first."""
        with self._lock:
            return list(self._entries.items())

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
