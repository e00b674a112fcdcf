"""Bugs to plant into the training kernels; see catalogue.py."""

# ruff: noqa: E501 (code of the headers)

from __future__ import annotations

from .catalogue import Mutation, removed, replaced

M = Mutation
TRAINING_MUTATIONS = (
    # ---- sorting slots by expert
    M("counts_not_cleared_first", removed("segment_cleared"), "race|misuse"),
    M("counts_read_before_counted", removed("segment_counted"), "race"),
    M("rows_not_aligned", replaced("rows_aligned", "align_up(num_slots, Config::alignment)", "num_slots"), "result"),
    M("warps_sums_read_early", removed("rows_of_warps_known"), "race|misuse"),
    M("warps_counted_late", removed("slots_of_warps_counted"), "race"),
    M("rows_taken_early", removed("first_rows_known"), "race"),
    M("rank_among_all_lanes", replaced("rank_of_slot", "__popc(before)", "ptx::lane_idx()"), "result|misuse|race"),
    # ---- rows
    M("rows_of_another_token", replaced("rows_of_token", "token * args.num_topk", "token"), "result|misuse|race"),
    M("unused_slot_gathered", replaced("used_slots_only", "row_of_lane >= 0", "true"), "result|misuse"),
    M("padding_is_not_zero", replaced("padding_is_zero", "uint4{}", "uint4{1, 0, 0, 0}"), "result"),
    M("padding_activated", replaced("padding_not_activated", "!is_padding", "true"), "result"),
    M("bias_of_first_expert", replaced("gate_bias_added", "+ bias", "+ 0"), "result"),
    M("unused_slot_added", replaced("unused_slot_skipped", "rows[i] < 0", "false"), "result|misuse"),
    M("row_not_weighted", replaced("row_weighted", "weight", "1.0f"), "result"),
    # ---- backward
    M("padding_gradient_left", removed("padding_has_no_gradient"), "result|misuse"),
    M("weight_gradient_weighted", replaced("weight_gradient", "value * d_value", "value * d_value * weight"), "result"),
    M("linear2_gradient_unweighted", replaced("activated_weighted", "value * weight", "value"), "result"),
    M("slope_beyond_the_clamp", replaced("swiglu_gate_slope", "gate > clamp", "false"), "result"),
    M("situ_without_its_bound", replaced("situ_gate_slope", "bounded.slope", "1.0f"), "result"),
    # ---- MXFP8
    M("one_columns_scale", replaced("weight_amax", "pairs[i] & 0x7fff0000u", "low_amax"), "result"),
)  # fmt: skip
