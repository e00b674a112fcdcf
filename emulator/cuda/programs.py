"""Runs a program under the stand-in for CUDA's driver and gathers its report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..findings import Finding, decode_finding
from ..library import stand_in_path
from .causes import Cause, group_findings
from .options import GpuOptions

# As which the stand-in is found. It brings the runtime along.
LIBRARY_NAMES = ("libcuda.so", "libcuda.so.1", "libcudart.so", "libcudart.so.12", "libcudart.so.13")
TIMED_OUT = 124


# What Triton calls for machine code: it gets the PTX, which the emulator loads. The version keeps
# that apart from machine code in Triton's cache.
PTXAS = """#!/bin/sh
for argument; do
    case "$argument" in
        --version) echo "ptxas of warpcheck, release 13.0"; exit ;;
        *.ptx) input=$argument ;;
    esac
    [ "$previous" = -o ] && output=$argument
    previous=$argument
done
exec cp "$input" "$output"
"""


# Results of calls that a GPU would have served: there is no image for it, or it is not supported.
_UNSERVED = (209, 801)


@dataclass(frozen=True)
class RefusedCall:
    """A call of the driver or the runtime that failed for a reason that can be said.

    Args:
        call: its name.
        result: its CUresult, which is also the cudaError_t.
        text: the reason.
    """

    call: str
    result: int
    text: str

    @property
    def is_unserved(self) -> bool:
        """Whether the emulator is what lacks something, so that the program was not checked."""
        return self.result in _UNSERVED


@dataclass(frozen=True)
class ProgramRun:
    """What came of a program.

    Args:
        status: its exit status, 128 + n if signal n ended it, 124 after `timeout`.
        findings: all of them, with the launch during which each came.
        calls: that were refused.
        launches: how many kernels ran.
        warp_instructions: how many were executed.
        seconds: in kernels.
    """

    status: int
    findings: tuple[tuple[Finding, str], ...] = ()
    calls: tuple[RefusedCall, ...] = ()
    launches: int = 0
    warp_instructions: int = 0
    seconds: float = 0.0

    @property
    def causes(self) -> list[Cause]:
        """The findings by cause."""
        return group_findings(self.findings)


def run_program(
    command: Sequence[str],
    options: GpuOptions | None = None,
    *,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
    **popen: Any,
) -> ProgramRun:
    """Run a program, and the programs that it starts, on emulated GPUs.

    Args:
        command: the program and its arguments.
        options: of the GPUs.
        timeout: seconds after which it is ended, with all that it started.
        environment: variables beside those of this process.
        popen: what else `subprocess.Popen` takes, such as `cwd` and `stdout`.

    Raises:
        OSError: the program cannot be started.
    """
    return _run(_Started(), command, options or GpuOptions(), timeout, environment or {}, popen)


def run_side_by_side(
    command: Sequence[str],
    options: Sequence[GpuOptions],
    jobs: int,
    *,
    timeout: float | None = None,
    stdout: IO[bytes],
    stderr: IO[bytes],
) -> list[ProgramRun]:
    """Run a program once for each of `options`, several at a time.

    Args:
        command: the program and its arguments.
        options: of the GPUs, for each run.
        jobs: how many runs there are at a time.
        timeout: seconds after which a run is ended, with all that it started.
        stdout: gets what the runs print, in the order of `options`.
        stderr: likewise.

    Raises:
        OSError: the program cannot be started.
    """
    started = _Started()

    def one(own: GpuOptions) -> tuple[ProgramRun, bytes, bytes]:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            popen = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            run = _run(started, command, own, timeout, {}, {**popen, "start_new_session": True})
            out.seek(0)
            err.seek(0)
            return run, out.read(), err.read()

    runs = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for run, printed, said in pool.map(one, options):
                runs.append(run)
                stdout.write(printed)
                stdout.flush()
                stderr.write(said)
                stderr.flush()
        except BaseException:
            started.kill()
            raise
    return runs


class _Started:
    """Processes that may be ended together, if each has a session of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[Any]] = []
        self._is_over = False

    def start(self, command: Sequence[str], **popen: Any) -> subprocess.Popen[Any]:
        """Raises KeyboardInterrupt behind `kill`."""
        with self._lock:
            if self._is_over:
                raise KeyboardInterrupt
            process = subprocess.Popen(list(command), **popen)
            self._processes.append(process)
            return process

    def kill(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._processes:
                if process.poll() is None:
                    _kill_session(process)


def _run(
    started: _Started,
    command: Sequence[str],
    options: GpuOptions,
    timeout: float | None,
    environment: Mapping[str, str],
    popen: Mapping[str, Any],
) -> ProgramRun:
    with prepared_environment(options) as (folder, variables):
        process = started.start(
            command,
            env={**os.environ, **environment, **variables},
            **{"start_new_session": timeout is not None, **popen},
        )
        status = _wait(process, timeout)
        return read_reports(folder.glob("*.jsonl"), status)


@contextlib.contextmanager
def prepared_environment(options: GpuOptions) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for reports, and the variables that put the stand-in before a program.

    Args:
        options: of the GPUs.
    """
    library = stand_in_path()
    with tempfile.TemporaryDirectory(prefix="warpcheck-") as name:
        folder = Path(name)
        links = folder / "lib"
        links.mkdir()
        for link in LIBRARY_NAMES:
            (links / link).symlink_to(library)
        ptxas = folder / "ptxas"
        ptxas.write_text(PTXAS)
        ptxas.chmod(0o755)
        kept = folder / "kept"  # where the stand-in looks for the PTX of a cubin
        kept.mkdir()
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").symlink_to(Path(__file__).with_name("site_hook.py"))

        def before(variable: str, value: str, separator: str) -> str:
            return separator.join(filter(None, (value, os.environ.get(variable))))

        yield (
            folder,
            {
                "LD_PRELOAD": before("LD_PRELOAD", str(library), " "),
                "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", str(links), ":"),
                "WARPCHECK_OPTIONS": options.as_variable(),
                "WARPCHECK_REPORT": str(folder),
                "PYTHONPATH": before("PYTHONPATH", str(site), ":"),
                "CUPY_ACCELERATORS": "",  # those of CUB are machine code
                # What else is machine code there is PTX here, and would be taken for it later.
                "CUPY_CACHE_DIR": str(folder / "cupy"),
                "TILELANG_CACHE_DIR": str(folder / "tilelang"),
                "CUTE_DSL_KEEP": "ptx,cubin",
                "CUTE_DSL_DUMP_DIR": str(kept),
                "TRITON_DEFAULT_BACKEND": "nvidia",
                "TRITON_LIBCUDA_PATH": str(links),
                "TRITON_PTXAS_PATH": str(ptxas),
                "TRITON_PTXAS_BLACKWELL_PATH": str(ptxas),
            },
        )


def _wait(process: subprocess.Popen[Any], timeout: float | None) -> int:
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        _kill_session(process)
        process.wait()
        return TIMED_OUT
    except BaseException:
        process.kill()
        process.wait()
        raise
    return status if status >= 0 else 128 - status


def _kill_session(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_reports(paths: Iterable[Path], status: int) -> ProgramRun:
    """The reports of a program's processes as one.

    Args:
        paths: of files with a JSON document in each line.
        status: of the program.
    """
    findings, calls = [], []
    launches = warp_instructions = 0
    seconds = 0.0
    for path in sorted(paths):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the process ended while it wrote
                continue
            if "finding" in entry:
                findings.append((decode_finding(json.dumps(entry["finding"])), entry["launch"]))
            elif "call" in entry:
                calls.append(RefusedCall(entry["call"], entry["result"], entry["text"]))
            else:
                launches += entry["launches"]
                warp_instructions += entry["warp_instructions"]
                seconds += entry["seconds"]
    return ProgramRun(status, tuple(findings), tuple(calls), launches, warp_instructions, seconds)


def merge_runs(runs: Sequence[ProgramRun]) -> ProgramRun:
    """Several runs of one program as one; its status is the first that is not 0.

    Args:
        runs: at least one.
    """
    return ProgramRun(
        next((run.status for run in runs if run.status), 0),
        tuple(finding for run in runs for finding in run.findings),
        tuple(dict.fromkeys(call for run in runs for call in run.calls)),
        sum(run.launches for run in runs),
        sum(run.warp_instructions for run in runs),
        sum(run.seconds for run in runs),
    )
