"""The training kernels' arguments, mirrored from training/args.cuh in include/deep_moe, where each
member is explained. Pointers are 0 where there is nothing.
"""

from __future__ import annotations

import ctypes


class RowsArgs(ctypes.Structure):
    """What kernels know of the rows that they go through."""

    _fields_ = (
        ("offs", ctypes.c_uint64),
        ("slot_of_row", ctypes.c_uint64),
        ("num_experts", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
    )


class RouteSlotsArgs(ctypes.Structure):
    """By-value argument of the three kernels that sort slots by expert."""

    _fields_ = (
        ("topk_idx", ctypes.c_uint64),
        ("segment_counts", ctypes.c_uint64),
        ("offs", ctypes.c_uint64),
        ("row_of_slot", ctypes.c_uint64),
        ("slot_of_row", ctypes.c_uint64),
        ("num_slots", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("num_segments", ctypes.c_uint32),
    )


class GatherRowsArgs(ctypes.Structure):
    """By-value argument of `gather_rows_kernel`."""

    _fields_ = (
        ("rows", RowsArgs),
        ("row_of_slot", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("gathered", ctypes.c_uint64),
        ("num_tokens", ctypes.c_uint32),
        ("num_topk", ctypes.c_uint32),
        ("num_chunks", ctypes.c_uint32),
    )


class ActivateRowsArgs(ctypes.Structure):
    """By-value argument of `activate_rows_kernel`."""

    _fields_ = (
        ("rows", RowsArgs),
        ("gate", ctypes.c_uint64),
        ("up", ctypes.c_uint64),
        ("gate_bias", ctypes.c_uint64),
        ("up_bias", ctypes.c_uint64),
        ("activated", ctypes.c_uint64),
        ("num_chunks", ctypes.c_uint32),
        ("stride_chunks", ctypes.c_uint32),
    )


class ActivateRowsBackwardArgs(ctypes.Structure):
    """By-value argument of `activate_rows_backward_kernel`."""

    _fields_ = (
        ("rows", RowsArgs),
        ("gate", ctypes.c_uint64),
        ("up", ctypes.c_uint64),
        ("gate_bias", ctypes.c_uint64),
        ("up_bias", ctypes.c_uint64),
        ("d_activated", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("d_rows", ctypes.c_uint64),
        ("down_bias", ctypes.c_uint64),
        ("activated", ctypes.c_uint64),
        ("d_gate", ctypes.c_uint64),
        ("d_up", ctypes.c_uint64),
        ("d_topk_weights", ctypes.c_uint64),
        ("num_chunks", ctypes.c_uint32),
        ("num_hidden_chunks", ctypes.c_uint32),
        ("stride_chunks", ctypes.c_uint32),
        ("d_stride_chunks", ctypes.c_uint32),
    )


class ScatterRowsArgs(ctypes.Structure):
    """By-value argument of `scatter_rows_kernel`."""

    _fields_ = (
        ("offs", ctypes.c_uint64),
        ("row_of_slot", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
        ("topk_weights", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("num_experts", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("num_topk", ctypes.c_uint32),
        ("num_chunks", ctypes.c_uint32),
    )


class RoundWeightsArgs(ctypes.Structure):
    """By-value argument of `round_weights_kernel`."""

    _fields_ = (
        ("weights", ctypes.c_uint64),
        ("rounded", ctypes.c_uint64),
        ("num_groups", ctypes.c_uint32),
        ("num_pairs", ctypes.c_uint32),
    )


ARGS_OF_STEP: dict[str, type[ctypes.Structure]] = {
    "count_slots": RouteSlotsArgs,
    "scan_counts": RouteSlotsArgs,
    "place_slots": RouteSlotsArgs,
    "gather_rows": GatherRowsArgs,
    "activate_rows": ActivateRowsArgs,
    "activate_rows_backward": ActivateRowsBackwardArgs,
    "scatter_rows": ScatterRowsArgs,
    "round_weights": RoundWeightsArgs,
}
