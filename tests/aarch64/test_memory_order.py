"""Which instructions keep the order of memory accesses between processes on aarch64.

Emulation of the processor cannot tell: the machine below orders more than that processor would. So
the library's own code is looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from deep_moe.emulator import library

OBJDUMP = "aarch64-linux-gnu-objdump"
pytestmark = pytest.mark.skipif(
    not os.environ.get("DEEP_MOE_OTHER_PROCESSOR"), reason="make test-aarch64 runs these"
)


@pytest.fixture(scope="module")
def code() -> str:
    path: Path = library.library_path()
    command = [OBJDUMP, "-d", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_fence_orders_all_accesses(code):
    fence = code.split("<dm_fence>:")[1].split("ret")[0]
    assert re.search(r"\bdmb\s+ish\n", fence)


@pytest.mark.parametrize("width", ["b", "h", ""])
def test_strong_loads_acquire_and_strong_stores_release(code, width):
    assert re.search(rf"\bldar{width}\s", code)
    assert re.search(rf"\bstlr{width}\s", code)


def test_products_and_sums_are_fused_only_where_ptx_says_so(code):
    """fma of PTX is a loop over lanes or a call; nothing else may become one by itself."""
    fused = len(re.findall(r"\bfn?m(?:add|sub)\s|\bfml[as]\s", code))
    assert 0 < fused < 100
