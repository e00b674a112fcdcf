"""What makes a call wait: kernels that this process has compiled, read and loaded, as numbers."""

from __future__ import annotations

import threading
from typing import NamedTuple


class KernelCounts(NamedTuple):
    """Of this process, since it began.

    Attributes:
        compiled: kernels that NVRTC compiled, a second or more each.
        read: kernels that were taken from a cache, some milliseconds each.
        loaded: kernels that were loaded into a CUDA context, some 70 ms each.
    """

    compiled: int = 0
    read: int = 0
    loaded: int = 0


_lock = threading.Lock()
_counts = KernelCounts()


def kernel_counts() -> KernelCounts:
    """The kernels that this process has compiled, read and loaded until now.

    A server that compares two of these learns whether a step in between waited for a kernel. Other
    processes' work, as that of `compile_ahead`, counts there, not here.

    >>> before = kernel_counts()
    >>> kernel_counts() == before
    True
    """
    return _counts


def count(*, compiled: int = 0, read: int = 0, loaded: int = 0) -> None:
    """Add to the counts."""
    global _counts
    with _lock:
        _counts = KernelCounts(
            _counts.compiled + compiled, _counts.read + read, _counts.loaded + loaded
        )
