"""The kernels' arguments, mirrored from kernel_args.cuh, prepare_inputs.cuh, low_latency_args.cuh
and throughput_args.cuh in include/deep_moe.

The templates render `layout_checks()` as static_asserts, so that a header that differs from this
mirror in a size or an offset does not compile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from deep_moe.heuristics.shape import MAX_RANKS
from deep_moe.targets.target import WEIGHT_POINTER_NAMES
from deep_moe.tensor_map import TENSOR_MAP_BYTES

ALIGNMENT = 64
NO_PEER_RANK = 0xFFFFFFFF
NUM_TRACE_TRACKS = 6
NUM_SPLIT_PHASES = 7
TENSOR_MAP_NAMES = (
    "l1_activations",
    "l1_activation_sf",
    "l1_weights",
    "l1_weight_sf",
    "l1_output",
    "l2_activations",
    "l2_activation_sf",
    "l2_weights",
    "l2_weight_sf",
)
# Of layers that have biases.
BIAS_POINTER_NAMES = ("l1_biases", "l2_biases")
# Of tokens that are here when the kernel starts.
LOCAL_POINTER_NAMES = ("local_x", "local_x_sf", "expert_begin", "expert_count")

TensorMapImage = ctypes.c_ubyte * TENSOR_MAP_BYTES


class KernelArgs(ctypes.Structure):
    """By-value argument of `mega_moe_kernel`.

    Tensor maps and weight pointers that the architecture does not use are zero.
    rank_buffers: base of every rank's symmetric buffer as this rank sees it. y: bf16
    [num_tokens, hidden]. cumulative_local_expert_recv_stats: i32 [local experts] or null.
    status: this rank's WaitStatus. num_tokens: rows of y. trace: for a kernel with `trace`, its
    trace buffer (deep_moe/trial/trace.py) of trace_capacity records per track; else null.
    l1_biases, l2_biases: as deep_moe/formats/biases.py lays them out, or null. local_x and what
    follows: of grouped experts (deep_moe/split/grouped_experts.py), else null and 0.
    """

    _fields_ = (
        *((name, TensorMapImage) for name in TENSOR_MAP_NAMES),
        *((name, ctypes.c_uint64) for name in WEIGHT_POINTER_NAMES),
        ("rank_buffers", ctypes.c_uint64 * MAX_RANKS),
        ("y", ctypes.c_uint64),
        ("cumulative_local_expert_recv_stats", ctypes.c_uint64),
        ("status", ctypes.c_uint64),
        ("wait_timeout_ns", ctypes.c_uint64),
        ("rank_idx", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("trace", ctypes.c_uint64),
        ("trace_capacity", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in BIAS_POINTER_NAMES),
        *((name, ctypes.c_uint64) for name in LOCAL_POINTER_NAMES),
        ("max_expert_rows", ctypes.c_uint32),
        # C++ pads to its alignment of 64, which ctypes cannot express before Python 3.13.
        ("_padding", ctypes.c_ubyte * 52),
    )


RECEIVED_UNEVENLY = 1 << 31  # the local experts' counts differ by more than chance makes them


class WaitStatus(ctypes.Structure):
    """What a kernel tells the host, mostly why it gave up; 64 bytes that the host can read.

    code: a WaitCode, 0 while all is well. site: a WaitSite. peer_rank: the first rank that was
    waited for, NO_PEER_RANK if none. received: tokens of all local experts of the rank, in the
    newest call that knows, and RECEIVED_UNEVENLY. missing_ranks: bit r % 64 of word r // 64 stands
    for rank r.
    """

    _fields_ = (
        ("code", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("cta", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("peer_rank", ctypes.c_uint32),
        ("received", ctypes.c_uint32),
        ("expected", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("waited_ns", ctypes.c_uint64),
        ("missing_ranks", ctypes.c_uint64 * 2),
    )


class TraceRecord(ctypes.Structure):
    """What begins on a track, and when; see trace/tracer.cuh."""

    _fields_ = (
        ("ticks", ctypes.c_uint64),
        ("step", ctypes.c_uint16),
        ("num_rows", ctypes.c_uint16),
        ("detail", ctypes.c_uint32),
    )


class TraceAnchor(ctypes.Structure):
    """Both clocks of an SM at one moment."""

    _fields_ = (("ticks", ctypes.c_uint64), ("global_ns", ctypes.c_uint64))


class TraceCta(ctypes.Structure):
    """What a trace buffer holds for each CTA, in front of all records."""

    _fields_ = (
        ("first", TraceAnchor),
        ("last", TraceAnchor),
        ("num_lost", ctypes.c_uint32 * NUM_TRACE_TRACKS),
        ("sm_idx", ctypes.c_uint32),
        ("_padding", ctypes.c_uint32),
    )


class PrepareInputsArgs(ctypes.Structure):
    """By-value argument of `prepare_inputs_kernel`; tensors are contiguous.

    x, topk_idx, topk_weights: what the caller has. input_*: the segments of the symmetric buffer.
    token_mask, expert_map, expert_load: 0 where there is none. num_chunks: 8 values of x each.
    num_slots: of topk_idx and topk_weights. num_mapped_experts: rows of expert_map. num_experts: of
    expert_load.
    """

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("topk_idx", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("input_x", ctypes.c_uint64),
        ("input_x_sf", ctypes.c_uint64),
        ("input_topk_idx", ctypes.c_uint64),
        ("input_topk_weights", ctypes.c_uint64),
        ("token_mask", ctypes.c_uint64),
        ("expert_map", ctypes.c_uint64),
        ("expert_load", ctypes.c_uint64),
        ("num_chunks", ctypes.c_uint32),
        ("num_slots", ctypes.c_uint32),
        ("num_topk", ctypes.c_uint32),
        ("num_mapped_experts", ctypes.c_uint32),
        ("num_experts", ctypes.c_uint32),
    )


class LowLatencyArgs(ctypes.Structure):
    """By-value argument of both low-latency kernels; what one does not use is zero.

    rank_buffers: base of every rank's symmetric buffer as this rank sees it. num_tokens: of this
    rank. The pointers, and the strides of recv_scales in words: split/low_latency_args.cuh.
    """

    _fields_ = (
        ("rank_buffers", ctypes.c_uint64 * MAX_RANKS),
        ("status", ctypes.c_uint64),
        ("wait_timeout_ns", ctypes.c_uint64),
        ("rank_idx", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("topk_idx", ctypes.c_uint64),
        ("call_idx", ctypes.c_uint64),
        ("recv_count", ctypes.c_uint64),
        ("src_slots", ctypes.c_uint64),
        ("layout_range", ctypes.c_uint64),
        ("wait_cycles", ctypes.c_uint64),
        ("expert_totals", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("recv_x", ctypes.c_uint64),
        ("recv_scales", ctypes.c_uint64),
        ("scale_expert_stride", ctypes.c_uint64),
        ("scale_row_stride", ctypes.c_uint64),
        ("scale_column_stride", ctypes.c_uint64),
        ("src_info", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
        ("num_earlier_rounds", ctypes.c_uint32),
    )


class ThroughputArgs(ctypes.Structure):
    """By-value argument of both throughput kernels; what one does not use is zero.

    rank_buffers, num_tokens: as in LowLatencyArgs. The pointers: split/throughput_args.cuh.
    """

    _fields_ = (
        ("rank_buffers", ctypes.c_uint64 * MAX_RANKS),
        ("status", ctypes.c_uint64),
        ("wait_timeout_ns", ctypes.c_uint64),
        ("rank_idx", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("slot_rows", ctypes.c_uint64),
        ("expert_begin", ctypes.c_uint64),
        ("expert_count", ctypes.c_uint64),
        ("expert_end", ctypes.c_uint64),
        ("own_rows", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("topk_idx", ctypes.c_uint64),
        ("x", ctypes.c_uint64),
        ("x_sf", ctypes.c_uint64),
        ("recv_x", ctypes.c_uint64),
        ("recv_scales", ctypes.c_uint64),
        ("recv_weights", ctypes.c_uint64),
        ("y", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("scalars", ctypes.c_uint64),
        ("slot_scalars", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
    )


class SplitTraceCta(ctypes.Structure):
    """What a trace of the split path's kernels holds for each CTA; see split/phase_span.cuh."""

    _fields_ = (
        ("first", TraceAnchor),
        ("last", TraceAnchor),
        ("begin_ticks", ctypes.c_uint64 * NUM_SPLIT_PHASES),
        ("end_ticks", ctypes.c_uint64 * NUM_SPLIT_PHASES),
    )


@dataclass(frozen=True)
class LayoutCheck:
    """A fact that host and device must agree on. `member` is None for the size of the struct."""

    struct: str
    member: str | None
    value: int


def layout_checks(*structs: type[ctypes.Structure]) -> Iterator[LayoutCheck]:
    """Size and every member's offset of some of the structs above."""
    for struct in structs:
        yield LayoutCheck(struct.__name__, None, ctypes.sizeof(struct))
        for name, *_ in struct._fields_:
            if not name.startswith("_"):
                yield LayoutCheck(struct.__name__, name, getattr(struct, name).offset)
