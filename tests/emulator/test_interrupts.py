"""Ctrl-C ends a run, whatever the kernel does, and the machine can be used again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from warpcheck import Machine

from .raw_ptx import entry

POLL = "L: ld.volatile.global.u32 %r1, [%p0]; setp.eq.u32 %c1, %r1, 0; @%c1 bra L;"
REAL_TIME = {"clock": "real"}
ENDLESS = {
    "a loop": ("L: bra L;", {}),
    "a poll": (POLL, REAL_TIME),
    "sleep": ("L: nanosleep.u32 1000000; bra L;", REAL_TIME),
    "atomics": ("L: atom.sys.global.add.u32 %r1, [%p0], 1; bra L;", {}),
}


@contextlib.contextmanager
def signal_soon(number: int = signal.SIGINT) -> Iterator[None]:
    """Sends this process a signal in a moment, unless the block ends before. Ctrl-C raises, also in
    a process that a shell has put in the background, where SIGINT is ignored from the start."""
    old = signal.getsignal(number)
    if number == signal.SIGINT:
        signal.signal(number, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(number, old)


@pytest.mark.parametrize("with_progress", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ENDLESS)
def test_ctrl_c_ends_a_run(name: str, num_ranks: int, with_progress: bool) -> None:
    body, options = ENDLESS[name]
    word = np.zeros(1, np.uint32)
    machine = Machine(**options)
    module = machine.load(entry(body, 1))
    for rank in range(num_ranks):
        machine.add_array(word, "word", rank=rank)
        machine.launch(module, grid=(2, 1, 1), block=(64, 1, 1), args=[word], rank=rank)
    reports: list[int] = []
    with pytest.raises(KeyboardInterrupt), signal_soon():
        machine.run(progress=reports.append if with_progress else None)
    assert bool(reports) == with_progress
    machine.launch(
        machine.load(entry("st.global.u32 [%p0], 7;", 1)),
        grid=(1, 1, 1),
        block=(1, 1, 1),
        args=[word],
    )
    machine.run()
    assert word[0] == 7


def test_a_handler_that_returns_lets_the_run_go_on() -> None:
    seen: list[int] = []
    word = np.zeros(1, np.uint32)

    def handle(number: int, frame: object) -> None:
        seen.append(number)
        word[0] = 1

    machine = Machine(**REAL_TIME)
    machine.add_array(word, "word")
    machine.launch(machine.load(entry(POLL, 1)), grid=(1, 1, 1), block=(32, 1, 1), args=[word])
    old = signal.signal(signal.SIGUSR1, handle)
    try:
        with signal_soon(signal.SIGUSR1):
            machine.run()
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert seen == [signal.SIGUSR1]


def test_other_threads_run_meanwhile() -> None:
    word = np.zeros(1, np.uint32)
    machine = Machine(**REAL_TIME)
    machine.add_array(word, "word")
    machine.launch(machine.load(entry(POLL, 1)), grid=(1, 1, 1), block=(32, 1, 1), args=[word])

    def release() -> None:
        time.sleep(0.2)
        word[0] = 1

    thread = threading.Thread(target=release)
    thread.start()
    machine.run()
    thread.join()


def test_what_a_progress_function_raises_ends_the_run() -> None:
    machine = Machine()
    machine.launch(machine.load(entry("L: bra L;", 0)), grid=(1, 1, 1), block=(32, 1, 1))

    def fail(steps: int) -> None:
        raise ValueError(steps)

    with pytest.raises(ValueError, match=r"[1-9]"):
        machine.run(progress=fail)
