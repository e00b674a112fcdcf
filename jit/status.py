"""Words the failure that a kernel left in its WaitStatus.

Names and texts of the waiting places are read from the enum in include/deep_moe/sync/wait.cuh, so
that they exist once.
"""

from __future__ import annotations

import ctypes
import platform
import re
import time
from enum import IntEnum
from functools import lru_cache

from deep_moe.emulator import library
from deep_moe.errors import MegaMoEError, MegaMoETimeoutError

from .cpp_structs import CppStruct
from .headers import library_path
from .kernel_args import NO_PEER_RANK

_WAIT_HEADER = "deep_moe/sync/wait.cuh"
_REPORT_S = 1.0  # a kernel writes its report in microseconds, unless it is ended meanwhile
_LOADS_IN_ORDER = ("x86_64", "AMD64")  # machines whose loads need no fence to stay in order


class StatusCode(IntEnum):
    """WaitCode of the kernel, and what the host adds."""

    OK = 0
    TIMEOUT = 1
    POOL_OVERFLOW = 2
    # Written by another rank's host, so that this rank's kernel does not wait for a call that the
    # other one refused.
    REFUSED_BY_PEER = 3
    STALE_HANDLE = 4
    RECV_OVERFLOW = 5
    TOO_MANY_ROWS = 6
    ROWS_OUTSIDE = 7
    REPORTING = 8
    ROWS_ELSEWHERE = 9
    MASKED_ITSELF = 10
    MASKED_BEFORE = 11


def error_of(status: CppStruct, rank: int) -> MegaMoEError | None:
    """The error that `rank`'s status stands for, or None. The kernel may be running."""
    if status.code == StatusCode.OK:
        return None
    deadline = time.monotonic() + _REPORT_S
    while status.code == StatusCode.REPORTING:
        if time.monotonic() > deadline:
            return MegaMoEError(f"rank {rank} stopped, and did not get to say why")
        time.sleep(1e-5)
    # The kernel writes the other fields before the code. Hosts of Arm processors may read them
    # before the code all the same. Others do without the library: a source checkout would compile
    # it, for a minute, before an error is told.
    if platform.machine() not in _LOADS_IN_ORDER:
        library.load().dm_fence()
    where = f"rank {rank}, CTA {status.cta}, warp {status.warp}"
    site = site_text(status.site)
    if status.code == StatusCode.TIMEOUT:
        return MegaMoETimeoutError(
            f"{where} waited {status.waited_ns / 1e9:.1f} s for {site}{_missing(status)}: "
            f"expected {status.expected}, saw {status.seen}"
        )
    if status.code == StatusCode.POOL_OVERFLOW:
        return MegaMoEError(
            f"{where}: {status.seen} tokens do not fit the pool of {status.expected}; a rank sent "
            f"more than the buffer was made for (at {site})"
        )
    if status.code == StatusCode.REFUSED_BY_PEER:
        return MegaMoEError(f"rank {rank} stopped: another rank refused its call")
    if status.code == StatusCode.STALE_HANDLE:
        return MegaMoEError(
            f"{where}: handle must be of one of the last {status.expected} dispatches; it is of "
            f"the last but {status.seen - 1}"
            if 0 < status.seen < 1 << 31
            else f"{where}: handle must be of a dispatch of this buffer that has been sent"
        )
    if status.code == StatusCode.RECV_OVERFLOW:
        return MegaMoEError(
            f"{where}: the experts of rank {status.peer_rank} would get {status.seen} rows, "
            f"padding included; max_recv_rows is {status.expected}"
        )
    if status.code == StatusCode.TOO_MANY_ROWS:
        return MegaMoEError(
            f"{where}: expert_count must be at most max_rows ({status.expected}) of all experts "
            f"together; got {status.seen} or more"
        )
    if status.code == StatusCode.ROWS_OUTSIDE:
        num_rows = ctypes.c_int32(status.expected).value  # as the caller's int32 has it
        return MegaMoEError(
            f"{where}: expert_count and expert_begin must name rows of x; those of local expert "
            f"{status.seen}, {num_rows} rows, do not"
        )
    if status.code == StatusCode.ROWS_ELSEWHERE:
        here, there = ("", "not ") if status.expected else ("not ", "")
        return MegaMoEError(
            f"{where}: y of a combine must be get_combine_buffer() on all ranks or on none; it is "
            f"{here}on this rank, and {there}on rank {status.peer_rank}"
        )
    if status.code == StatusCode.MASKED_ITSELF:
        return MegaMoEError(
            f"rank {rank} stopped: masked_ranks must leave out other ranks, and not {rank}, which "
            "calls"
        )
    if status.code == StatusCode.MASKED_BEFORE:
        return MegaMoEError(
            f"rank {rank} stopped: masked_ranks must leave out rank {status.peer_rank}, as an "
            "earlier call did, until reset() on every rank"
        )
    return MegaMoEError(f"{where} stopped with unknown code {status.code} (at {site})")


def site_text(site: int) -> str:
    """What a wait at `site` waits for, in words."""
    return wait_sites().get(site, f"unknown wait {site}")


@lru_cache(maxsize=1)
def wait_sites() -> dict[int, str]:
    """Number and text of every enumerator of WaitSite."""
    header = (library_path() / _WAIT_HEADER).read_text()
    body = re.search(r"enum class WaitSite\b[^{]*\{(.*?)\};", header, re.DOTALL)
    if body is None:
        raise ValueError(f"{_WAIT_HEADER} declares no enum class WaitSite")
    entries = re.findall(r"^\s*\w+ = (\d+),\s*// (.+)$", body.group(1), re.MULTILINE)
    return {int(number): text for number, text in entries}


def missing_ranks(status: CppStruct) -> list[int]:
    """Ranks that had not arrived when the wait gave up."""
    ranks = [
        64 * word + bit
        for word, bits in enumerate(status.missing_ranks)
        for bit in range(64)
        if bits >> bit & 1
    ]
    if not ranks and status.peer_rank != NO_PEER_RANK:
        ranks = [status.peer_rank]
    return ranks


def _missing(status: CppStruct) -> str:
    ranks = missing_ranks(status)
    if not ranks:
        return ""
    return f" (missing: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
