"""A fixture that runs CUDA programs on emulated GPUs and fails on what the checks find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .programs import ProgramRun


@pytest.fixture
def warpcheck() -> Callable[..., ProgramRun]:
    """`warpcheck(command, timeout=None, suppressions=None, allow_status=False, **options)`.

    It runs a program and returns its `ProgramRun`. The test fails with the causes if one is an
    error or a refusal, and with the status if that is not 0. `options` are the fields of
    `GpuOptions`.
    """
    # Not before a test asks for it: the plugin is loaded with every run of pytest.
    from .causes import read_suppressions, split_suppressed
    from .options import GpuOptions
    from .programs import run_program

    def run(
        command: Sequence[str],
        *,
        timeout: float | None = None,
        suppressions: Path | None = None,
        allow_status: bool = False,
        **options: Any,
    ) -> ProgramRun:
        result = run_program(
            [str(word) for word in command], GpuOptions(**options), timeout=timeout
        )
        known = read_suppressions(suppressions) if suppressions else []
        reported, _, _ = split_suppressed(result.causes, known)
        grave = [str(cause) for cause in reported if cause.severity != "warning"]
        grave += [call.text for call in result.calls if call.is_unserved]
        if grave:
            pytest.fail("\n\n".join(grave), pytrace=False)
        if result.status and not allow_status:
            said = "".join(f"\n{call.text}" for call in result.calls)
            pytest.fail(f"{command[0]} ended with status {result.status}{said}", pytrace=False)
        return result

    return run
