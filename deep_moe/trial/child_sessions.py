"""Programs in sessions of their own, so that what they start ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

Start = Callable[..., "subprocess.Popen[Any]"]


@contextmanager
def child_sessions() -> Iterator[Start]:
    """Gives what starts a program, as `subprocess.Popen` does. Where the block ends, so do these
    programs, their children, and what those left behind; also if this process is asked to end
    meanwhile (SIGTERM), which reaches no other session. For the main thread."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    with ExitStack() as ends:
        ends.callback(signal.signal, signal.SIGTERM, before)

        def start(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
            child = subprocess.Popen(*arguments, start_new_session=True, **options)
            ends.callback(_end, child)
            return child

        yield start


def _end(child: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
