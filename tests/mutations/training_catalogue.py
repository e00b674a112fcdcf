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
    M("rows_begin_with_a_slot", replaced("rows_begin_unused", "-1", "0"), "result"),
    M("segments_begin_together", replaced("earlier_segments_summed", "num_slots", "0"), "race|result"),
    M("warps_counts_not_cleared_first", removed("counts_of_warps_cleared"), "race|misuse"),
    M("next_round_counts_early", removed("round_counted"), "race"),
    M("unused_slot_has_a_row", replaced("slot_without_row", "-1", "0"), "result"),
    M("row_counted_on_before_it_is_read", removed("rows_of_round_read"), "race"),
    M("next_round_takes_rows_early", removed("rows_of_round_taken"), "race"),
    # ---- rows
    M("rows_of_another_token", replaced("rows_of_token", "token * args.num_topk", "token"), "result|misuse|race"),
    M("unused_slot_gathered", replaced("used_slots_only", "row_of_lane >= 0", "true"), "result|misuse"),
    M("padding_is_not_zero", replaced("padding_is_zero", "uint4{}", "uint4{1, 0, 0, 0}"), "result"),
    M("padding_activated", replaced("padding_not_activated", "!is_padding", "true"), "result"),
    M("up_bias_of_first_expert", replaced("up_bias_added", "+ bias", "+ 0"), "result"),
    M("second_row_left_out", replaced("second_row_added", "second.values[j]", "0.0f"), "result"),
    M("rows_bias_of_first_expert", replaced("bias_of_row", "expert * args.num_chunks", "0"), "result"),
    M("bias_of_first_expert", replaced("gate_bias_added", "+ bias", "+ 0"), "result"),
    M("unused_slot_added", replaced("unused_slot_skipped", "rows[i] < 0", "false"), "result|misuse"),
    M("row_not_weighted", replaced("row_weighted", "weight", "1.0f"), "result"),
    # ---- backward
    M("half_of_the_lanes_summed", replaced("lanes_summed", "lane_mask", "lane_mask / 16 * 16"), "result"),
    M("gate_without_its_bias", removed("gate_bias_in_gradient"), "result"),
    M("up_without_its_bias", removed("up_bias_in_gradient"), "result"),
    M("gate_gradient_unweighted", replaced("gate_gradient", "d_weighted", "d_value"), "result"),
    M("up_gradient_of_a_straight_line", replaced("up_gradient", "factors.up.slope", "1.0f"), "result"),
    M("down_bias_left_out", replaced("down_bias_gradient", "bias.values[i]", "0.0f"), "result"),
    M("padding_gradient_left", removed("padding_has_no_gradient"), "result|misuse"),
    M("weight_gradient_weighted", replaced("weight_gradient", "value * d_value", "value * d_value * weight"), "result"),
    M("linear2_gradient_unweighted", replaced("activated_weighted", "value * weight", "value"), "result"),
    M("slope_beyond_the_clamp", replaced("swiglu_gate_slope", "gate > clamp", "false"), "result"),
    M("gelu_slope_of_a_square", replaced("gelu_slope", "3.0f * cubic", "2.0f * cubic"), "result"),
    M("step_slope_beyond_the_limit", replaced("step_gate_slope", "of_gate.value > limit", "false"), "result"),
    M("situ_without_its_bound", replaced("situ_gate_slope", "bounded.slope", "1.0f"), "result"),
    # ---- MXFP8
    M("gathered_as_it_is", removed("gathered_rounded"), "result"),
    M("activated_as_it_is", removed("activated_rounded"), "result"),
    M("first_groups_scale_is_everyones", replaced("row_scale", "[chunk_idx / chunks_per_scale]", "[0]"), "result|race"),
    M("first_groups_scale_kept", replaced("kept_rows_scale", "scales[i / chunks_per_scale]", "scales[0]"), "result"),
    M("scale_of_another_block", replaced("block_scale", "first + block", "first"), "result|race"),
    M("transposed_scale_of_another_block", replaced("transposed_scale", "first + block", "first"), "result|race"),
    M("column_behind_the_last", replaced("column_exists", "< args_.num_columns", "<= args_.num_columns"), "result|misuse|race"),
    M("row_behind_the_last", replaced("row_exists", "< args_.num_rows", "<= args_.num_rows"), "result|misuse|race"),
    M("maxima_read_early", removed("maxima_stored"), "race|misuse"),
    M("transposed_too_early", removed("block_transposed"), "race|misuse"),
    M("column_of_the_next_block", replaced("transposed_columns", ">= num_columns", "> num_columns"), "result|misuse|race"),
    M("last_words_compared_alone", replaced("words_compared", "|=", "="), "result"),
    M("differences_of_nobody", removed("difference_seen"), "result"),
    # ---- columns
    M("no_block_of_zeros", replaced("block_of_zeros", "1u", "0u"), "result|misuse"),
    M("block_of_two_experts", replaced("end_of_row_block", "min(begin + rows_per_block, rows_end)", "begin + rows_per_block"), "result|misuse"),
    M("rows_behind_a_block", replaced("rows_of_block", ">= rows.end", ">= rows.begin + Block::size"), "result|misuse"),
    M("padding_has_a_token", replaced("padding_of_block", "row < 0", "row < -1"), "result|misuse"),
    M("token_is_its_slot", replaced("token_of_slot", "args.num_topk", "1"), "result|misuse"),
    M("rows_of_the_next_block_stored", replaced("rows_of_block_exist", "row < rows.end", "true"), "result|misuse|race"),
    M("scale_of_the_first_columns", replaced("scale_of_columns", "[first]", "[first - column_block]"), "result|race"),
    M("one_columns_scale", replaced("weight_amax", "pairs[i] & 0x7fff0000u", "low_amax"), "result"),
)  # fmt: skip
