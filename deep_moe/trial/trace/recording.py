"""Records calls: memory that kernels with `Config::trace` store stamps in, and what they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from deep_moe.jit.kernel_args import TraceCta, TraceRecord
from deep_moe.traces.clock import TraceClock

from .names import steps, tracks
from .rank_trace import SPAN_DTYPE, RankTrace

if TYPE_CHECKING:
    from deep_moe.targets.config import MegaMoEConfig

DEFAULT_CAPACITY = 2048  # records per track; three for each block that a CTA computes
CTA_DTYPE = np.dtype(TraceCta)
RECORD_DTYPE = np.dtype(TraceRecord)


class TracedBuffer(Protocol):
    """What calls go through that are recorded: a symmetric buffer, or a work space."""

    device: torch.device
    recorder: Recorder | None

    @property
    def rank(self) -> int: ...

    @property
    def is_emulated(self) -> bool: ...

    def raise_if_failed(self) -> None: ...


class Recorder:
    """The trace buffer of one rank. Holds the last call that was made while it was in force."""

    def __init__(self, buffer: TracedBuffer, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 record per track; got {capacity}")
        self.buffer = buffer
        self.capacity = capacity
        self.memory: torch.Tensor | None = None
        self.config: MegaMoEConfig | None = None
        self.begin_ns = 0  # of what was collected, by the GPU's %globaltimer
        self.is_timed = not buffer.is_emulated  # else a nanosecond is an instruction

    def attach(self, config: MegaMoEConfig) -> torch.Tensor:
        """Zeroed memory for a call of this kernel, enqueued on the current stream."""
        num_records = config.num_sms * len(tracks().number) * self.capacity
        num_bytes = config.num_sms * CTA_DTYPE.itemsize + num_records * RECORD_DTYPE.itemsize
        if self.memory is None or self.memory.numel() != num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.buffer.device)
        self.config = config
        return self.memory.zero_()

    def collect(self) -> RankTrace:
        """What the last call recorded; waits for it. Raises if the call failed."""
        if self.memory is None or self.config is None:
            raise ValueError("nothing was recorded: no call was made")
        raw = self.memory.cpu().numpy()
        self.buffer.raise_if_failed()
        num_ctas = self.config.num_sms
        num_header_bytes = num_ctas * CTA_DTYPE.itemsize
        ctas = raw[:num_header_bytes].view(CTA_DTYPE)
        records = raw[num_header_bytes:].view(RECORD_DTYPE)
        records = records.reshape(num_ctas, len(tracks().number), self.capacity)
        clock = TraceClock.through(ctas) if self.is_timed else TraceClock.emulated(num_ctas)
        self.begin_ns = int(ctas["first"]["global_ns"].min()) if self.is_timed else 0
        return RankTrace(
            rank=self.buffer.rank,
            num_n_blocks=self.config.num_traced_n_blocks,
            is_emulated=not self.is_timed,
            spans=_spans(records, clock),
            clock_error_ns=clock.error_ns,
            sm_clock_mhz=1e3 / clock.ns_per_tick,
            num_lost=int(ctas["num_lost"].sum()),
            begin_ns=self.begin_ns,
        )


@contextlib.contextmanager
def record(*buffers: TracedBuffer, capacity: int = DEFAULT_CAPACITY) -> Iterator[list[Recorder]]:
    """Record the calls with these buffers; `collect` gives the last one of each. A buffer may be
    the work space of `GroupedExperts`."""
    recorders = [Recorder(buffer, capacity) for buffer in buffers]
    for buffer, recorder in zip(buffers, recorders, strict=True):
        if buffer.recorder is not None:
            raise ValueError(f"sym_buffer of rank {buffer.rank} is being recorded already")
        buffer.recorder = recorder
    try:
        yield recorders
    finally:
        for buffer in buffers:
            buffer.recorder = None


def _spans(records: np.ndarray, clock: TraceClock) -> np.ndarray:
    """records: [ctas, tracks, capacity]. A step lasts until the next one of its track."""
    starts = records[..., :-1]
    ends = records[..., 1:]
    step = steps().number
    whole = (starts["step"] != step["none"]) & (ends["step"] != step["none"])
    cta, track, _ = np.nonzero(whole)
    starts, ends = starts[whole], ends[whole]

    def ns(ticks: np.ndarray) -> np.ndarray:
        passed = (ticks - clock.first_ticks[cta]).astype(np.int64)
        return clock.first_ns[cta] + passed * clock.ns_per_tick

    spans = np.empty(len(cta), SPAN_DTYPE)
    spans["cta"], spans["track"] = cta, track
    for name in ("step", "num_rows", "detail"):
        spans[name] = starts[name]
    spans["start_ns"], spans["end_ns"] = ns(starts["ticks"]), ns(ends["ticks"])
    counts_ticks = spans["step"] == step["await_block"]
    spans["detail"][counts_ticks] = np.round(spans["detail"][counts_ticks] * clock.ns_per_tick)
    return spans
