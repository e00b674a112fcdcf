"""The phases of dispatches and combines in each CTA, from the kernels' time stamps.

A layer with `enable_profiling=True` runs kernels made with `Config::trace`, and keeps the stamps of
its newest calls; include/deep_moe/split/phase_span.cuh says what they are.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from deep_moe.heuristics.low_latency import Step
from deep_moe.jit.headers import library_path
from deep_moe.jit.kernel_args import SplitTraceCta
from deep_moe.traces.chrome import complete_event, process_name, thread_name, write_events
from deep_moe.traces.clock import TraceClock

from .kernels import SplitConfig

MAX_KERNELS = 128  # of a step, that are kept
_HEADER = "deep_moe/split/phase_span.cuh"
_CTA_DTYPE = np.dtype(SplitTraceCta)


@lru_cache(maxsize=1)
def phases() -> tuple[str, ...]:
    """Their names, by number."""
    source = (library_path() / _HEADER).read_text()
    return tuple(re.findall(r"^ +\w+ = \d+, +// (\w+)$", source, re.MULTILINE))


@dataclass(frozen=True)
class PhaseOfCta:
    """call: the layer's dispatch that it belongs to. Nanoseconds from the begin of the first kernel
    that is kept; in the emulator a nanosecond is a warp instruction, and kernels stand one behind
    the other."""

    call: int
    cta: int
    phase: str
    start_ns: float
    end_ns: float


@dataclass(frozen=True)
class _Recorded:
    call: int
    ctas: torch.Tensor


class Profile:
    """The stamps of one rank."""

    def __init__(self) -> None:
        self._kernels: dict[Step, deque[_Recorded]] = {
            "dispatch": deque(maxlen=MAX_KERNELS),
            "combine": deque(maxlen=MAX_KERNELS),
        }

    def attach(self, config: SplitConfig, call: int, device: torch.device) -> torch.Tensor:
        """Memory for the stamps of a dispatch or a combine."""
        assert config.step != "scalars", "which has no phases"
        num_bytes = config.num_ctas * _CTA_DTYPE.itemsize
        ctas = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._kernels[config.step].append(_Recorded(call, ctas))
        return ctas

    def collect(self, step: Step, *, is_emulated: bool) -> list[PhaseOfCta]:
        """What is kept of a step; waits for it. Kernels that have not run are left out."""
        raw = [(kernel.call, kernel.ctas.cpu().numpy()) for kernel in self._kernels[step]]
        kernels = [(call, ctas.view(_CTA_DTYPE)) for call, ctas in raw]
        kernels = [(call, ctas) for call, ctas in kernels if ctas["last"]["ticks"].all()]
        found: list[PhaseOfCta] = []
        begin_ns = 0.0
        for call, ctas in kernels:
            if is_emulated:
                clock = TraceClock.emulated(len(ctas))
                own = _phases(call, ctas, clock, begin_ns)
                begin_ns = max((phase.end_ns for phase in own), default=begin_ns)
            else:
                first = kernels[0][1]["first"]["global_ns"].min()
                passed_ns = float(ctas["first"]["global_ns"].min() - first)
                own = _phases(call, ctas, TraceClock.through(ctas), passed_ns)
            found += own
        return found

    def newest(self, step: Step, *, is_emulated: bool) -> tuple[int, list[PhaseOfCta]]:
        """The last kernel of a step; waits for it. When it began by the GPU's %globaltimer, 0 in
        the emulator, and its phases from then on. Raises ValueError if nothing was recorded."""
        if not self._kernels[step]:
            raise ValueError(f"nothing was recorded: no {step} was made")
        kernel = self._kernels[step][-1]
        ctas = kernel.ctas.cpu().numpy().view(_CTA_DTYPE)
        if is_emulated:
            return 0, _phases(kernel.call, ctas, TraceClock.emulated(len(ctas)), 0.0)
        begin_ns = int(ctas["first"]["global_ns"].min())
        return begin_ns, _phases(kernel.call, ctas, TraceClock.through(ctas), 0.0)

    def write(self, step: Step, path: str | Path, rank: int, *, is_emulated: bool) -> None:
        """The same as a file for chrome://tracing and ui.perfetto.dev, in a folder that is made if
        need be. A process is the rank, a thread a CTA. Raises ValueError if nothing was recorded.
        """
        found = self.collect(step, is_emulated=is_emulated)
        if not found:
            raise ValueError(f"nothing was recorded: no {step} was made")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_events(_events(found, rank), path)


def _phases(call: int, ctas: np.ndarray, clock: TraceClock, begin_ns: float) -> list[PhaseOfCta]:
    names = phases()
    found = []
    for cta, phase in np.argwhere(ctas["end_ticks"] != 0).tolist():
        start_ns, end_ns = (
            begin_ns
            + clock.first_ns[cta]
            + float(ctas[edge][cta, phase] - clock.first_ticks[cta]) * clock.ns_per_tick
            for edge in ("begin_ticks", "end_ticks")
        )
        found.append(PhaseOfCta(call, cta, names[phase], float(start_ns), float(end_ns)))
    return found


def _events(found: list[PhaseOfCta], rank: int) -> Iterator[str]:
    yield process_name(rank, f"rank {rank}")
    for cta in sorted({phase.cta for phase in found}):
        yield from thread_name(rank, cta, f"CTA {cta}")
    for phase in found:
        yield complete_event(
            phase.phase, rank, phase.cta, phase.start_ns, phase.end_ns, {"call": phase.call}
        )


class DumpsTraces:
    """A layer that writes its phases."""

    def dump_dispatch_trace(self, path: str | Path) -> None:
        """Write the phases of this rank's newest dispatches as a trace for chrome://tracing and
        ui.perfetto.dev: quant_and_put, count_put, wait, postprocess, of each CTA. Waits for them.
        The layer must have been made with enable_profiling=True. Of a call that is captured in a
        CUDA graph it is the last replay. Of several NVLink domains it has the kernels of this one.

        Args:
            path: of the file to write.

        Raises:
            ValueError: the layer was made without enable_profiling=True.
            OSError: the file cannot be written.
        """
        self._dump_trace("dispatch", path)

    def dump_combine_trace(self, path: str | Path) -> None:
        """The same of the newest combines: copy_and_put, if there is something to copy, recv_wait,
        topk_reduce.

        Args:
            path: of the file to write.

        Raises:
            ValueError: the layer was made without enable_profiling=True.
            OSError: the file cannot be written.
        """
        self._dump_trace("combine", path)

    def _dump_trace(self, step: Step, path: str | Path) -> None:
        raise NotImplementedError
