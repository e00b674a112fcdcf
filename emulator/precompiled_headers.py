"""What NVRTC has parsed of other libraries' headers, kept for the next kernel of this process.

CuTe's types bring so much of CCCL along that an SM100 kernel's headers take longer than all else
that makes its PTX. A source that has `#pragma nv_hdrstop` behind such includes is compiled with a
precompiled header: the second source of a process that begins alike makes it, later ones use it.
The PTX is the same. No other process can use it, since it holds addresses.

NVRTC does not look whether the headers have changed since, so only what stays as it is while a
process runs may stand before the pragma: no header of this library.

A file of 110 MB for CuTe's, where temporary files go. It has no name once it is made, so that it
goes with the process, however that ends. NVRTC writes it through mapped memory, and where there is
no room any more, that ends the process; so none is made unless there is far more.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

HEADER_STOP = "#pragma nv_hdrstop\n"

# Room for files of 64 processes that begin at a time, each of the 256 MB that NVRTC has for one.
MIN_FREE_BYTES = 64 * 256 * 2**20


class Outcome(Protocol):
    """Of a run of the compiler."""

    @property
    def succeeded(self) -> bool: ...


_Outcome = TypeVar("_Outcome", bound=Outcome)
Run = Callable[[Sequence[str]], _Outcome]  # of the compiler, with all of these options


class _State(Enum):
    """Of the headers before the pragma, where there is no file."""

    SEEN = "once: most processes compile one kernel"
    IN_WORK = "another thread makes the file"
    REFUSED = "no file can be made or used"


class PrecompiledHeaders:
    """Those of one process. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...], _State | BinaryIO] = {}

    def compile(self, source: str, options: Sequence[str], run: Run[_Outcome]) -> _Outcome:
        """What `run` gives with `options`, for a `source` that it compiles. It runs once more where
        the first try failed and may have done so for the precompiled header."""
        headers, stop, _ = source.partition(HEADER_STOP)
        if not stop:
            return run(options)
        key = (headers, *map(_as_parsed, options))
        with self._lock:
            known = self._known.get(key)
            if known is None:
                self._known[key] = _State.SEEN
            elif known is _State.SEEN:
                self._known[key] = _State.IN_WORK
        if known is _State.SEEN:
            return self._make(key, options, run)
        if known is None or isinstance(known, _State):
            return run(options)
        outcome = run([*options, f"--use-pch=/proc/self/fd/{known.fileno()}"])
        if outcome.succeeded:
            return outcome
        outcome = run(options)
        if outcome.succeeded:
            self._known[key] = _State.REFUSED
        return outcome

    def _make(self, key: tuple[str, ...], options: Sequence[str], run: Run[_Outcome]) -> _Outcome:
        made: _State | BinaryIO = _State.SEEN  # what the source itself may be at fault for
        try:
            with tempfile.TemporaryDirectory(prefix="precompiled-") as folder:
                if shutil.disk_usage(folder).free >= MIN_FREE_BYTES:
                    path = Path(folder, "headers.pch")
                    outcome = run([*options, f"--create-pch={path}"])
                    if outcome.succeeded:
                        # NVRTC goes on without a file where its memory for one is too small.
                        made = path.open("rb") if path.exists() else _State.REFUSED
                        return outcome
            outcome = run(options)
            if outcome.succeeded:
                made = _State.REFUSED
            return outcome
        except OSError:  # no folder for temporary files
            made = _State.REFUSED
            return run(options)
        finally:
            self._known[key] = made


def _as_parsed(option: str) -> str:
    """The parser sees the virtual architecture; the real one's name is for ptxas."""
    return option.replace("--gpu-architecture=sm_", "--gpu-architecture=compute_")
