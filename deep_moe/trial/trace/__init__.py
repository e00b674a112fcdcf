"""What every warp of a call did and when, from time stamps that the kernel itself takes.

    with trace.record(buffer) as (recorder,):
        deep_moe.fp8_fp4_mega_moe(y, l1, l2, buffer)
    ranks = trace.aligned([recorder.collect()])
    trace.write_chrome_trace(ranks, "layer.json.gz")     # chrome://tracing, ui.perfetto.dev
    print(trace.table({"this call": trace.breakdown(ranks)}))

Inside `record` calls run a kernel of their own, compiled with `Config::trace`; include/deep_moe/
trace/tracer.cuh says what it stores. With several processes each records its own rank, and one gets
what the others collected.

Stamps are counts of an SM's clock. A straight line for each CTA, through pairs of both clocks taken
at its begin and end, turns them into nanoseconds of the GPU's global clock, and the moment at which
ranks leave the barrier before combine brings the clocks of several GPUs together. In the emulator
a nanosecond is a warp instruction, of whichever warp, and all ranks share the clock.
"""

from __future__ import annotations

from .breakdown import breakdown, table
from .chrome import chrome_events, write_chrome_trace
from .names import Names, steps, tracks
from .rank_trace import RankTrace, aligned, alignment_error_ns
from .recording import DEFAULT_CAPACITY, Recorder, TracedBuffer, record
from .timeline import timeline_of, usage_series

__all__ = [
    "DEFAULT_CAPACITY",
    "Names",
    "RankTrace",
    "Recorder",
    "TracedBuffer",
    "aligned",
    "alignment_error_ns",
    "breakdown",
    "chrome_events",
    "record",
    "steps",
    "table",
    "timeline_of",
    "tracks",
    "usage_series",
    "write_chrome_trace",
]
