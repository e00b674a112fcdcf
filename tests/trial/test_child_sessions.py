"""Programs in sessions of their own, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from deep_moe.trial.child_sessions import child_sessions

PARENT = """
import sys
from deep_moe.trial.child_sessions import child_sessions

with child_sessions() as start:
    start([sys.executable, "-c", sys.argv[1]]).wait()
"""
# With one of its own, which does not hear of signals to a process.
CHILD = """
import os, subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), flush=True)
"""


@pytest.mark.parametrize(
    ("child", "asked", "status"),
    [
        pytest.param(CHILD + "grandchild.wait()", True, 128 + signal.SIGTERM, id="asked to end"),
        pytest.param(CHILD, False, 0, id="a child left its own behind"),
    ],
)
def test_nothing_outlives_the_block(child, asked, status):
    """All have this pipe: it ends when the last of them has ended."""
    command = [sys.executable, "-c", PARENT, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        session = int(parent.stdout.readline())
        if asked:
            parent.terminate()
        try:
            parent.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(session, signal.SIGKILL)
            raise
    assert parent.returncode == status


def test_signals_are_handled_as_before_behind_the_block():
    before = signal.getsignal(signal.SIGTERM)
    with child_sessions():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
