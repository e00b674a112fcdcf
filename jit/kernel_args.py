"""The kernels' arguments and what kernels tell the host, as ctypes has them: the structs of the
header library, where each member is explained. Pointers are 0 where there is nothing."""

from __future__ import annotations

from .cpp_structs import CppStruct, constant, struct

_CALL = "deep_moe/layout/kernel_args.cuh"
_TRACE = "deep_moe/trace/tracer.cuh"
_SPLIT_TRACE = "deep_moe/split/phase_span.cuh"
_TRAINING = "deep_moe/training/args.cuh"

NO_PEER_RANK = constant(_CALL, "no_peer_rank")
RECEIVED_UNEVENLY = constant(_CALL, "received_unevenly")
NUM_TRACE_TRACKS = constant(_TRACE, "num_trace_tracks")
NUM_SPLIT_PHASES = constant(_SPLIT_TRACE, "num_split_phases")

TensorMap = struct(_CALL, "TensorMap")
WaitStatus = struct(_CALL, "WaitStatus")
TraceRecord = struct(_TRACE, "TraceRecord")
TraceAnchor = struct(_TRACE, "TraceAnchor")
TraceCta = struct(_TRACE, "TraceCta")
SplitTraceCta = struct(_SPLIT_TRACE, "SplitTraceCta")
PrepareInputsArgs = struct("deep_moe/kernels/prepare_inputs.cuh", "PrepareInputsArgs")
LowLatencyArgs = struct("deep_moe/split/low_latency_args.cuh", "LowLatencyArgs")
ThroughputArgs = struct("deep_moe/split/throughput_args.cuh", "ThroughputArgs")
RowsArgs = struct(_TRAINING, "RowsArgs")
RouteSlotsArgs = struct(_TRAINING, "RouteSlotsArgs")
GatherRowsArgs = struct(_TRAINING, "GatherRowsArgs")
ActivateRowsArgs = struct(_TRAINING, "ActivateRowsArgs")
ActivateRowsBackwardArgs = struct(_TRAINING, "ActivateRowsBackwardArgs")
ScatterRowsArgs = struct(_TRAINING, "ScatterRowsArgs")
QuantizeRowsArgs = struct(_TRAINING, "QuantizeRowsArgs")
QuantizeColumnsArgs = struct(_TRAINING, "QuantizeColumnsArgs")
QuantizeWeightsArgs = struct(_TRAINING, "QuantizeWeightsArgs")
RoundWeightsArgs = struct(_TRAINING, "RoundWeightsArgs")
GroupedProductArgs = struct("deep_moe/products/args.cuh", "GroupedProductArgs")

ARGS_OF_STEP = {
    "count_slots": RouteSlotsArgs,
    "scan_counts": RouteSlotsArgs,
    "place_slots": RouteSlotsArgs,
    "gather_rows": GatherRowsArgs,
    "activate_rows": ActivateRowsArgs,
    "activate_rows_backward": ActivateRowsBackwardArgs,
    "scatter_rows": ScatterRowsArgs,
    "dequantize_rows": QuantizeRowsArgs,
    "quantize_rows": QuantizeRowsArgs,
    "quantize_columns": QuantizeColumnsArgs,
    "quantize_weights": QuantizeWeightsArgs,
    "round_weights": RoundWeightsArgs,
    "grouped_product": GroupedProductArgs,
}


def kernel_args(kernel: str) -> type[CppStruct]:
    """The argument of a target's Mega MoE kernel."""
    return struct(f"deep_moe/experts/{kernel}/kernel_args.cuh", f"{kernel}::KernelArgs")
