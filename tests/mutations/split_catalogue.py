"""Bugs to plant into the kernels of the split path; see catalogue.py."""

# ruff: noqa: E501 (code of the headers)

from __future__ import annotations

from .catalogue import Mutation, instead, removed, replaced

M = Mutation
LOW_LATENCY = "test_low_latency::"
PLACEMENTS = "test_placements::"
SPLIT_MUTATIONS = (
    # ---- which call it is
    M("one_half_only", replaced("half_in_turn", "call_idx % 2", "0u"), "race|timeout|result"),
    M(
        "every_cta_counts_the_call",
        replaced("call_counted", "is_last && ", ""),
        "race|timeout|result",
    ),
    M(
        "stale_handle_taken",
        replaced("half_is_own", "age == 1 || age == 2", "true"),
        "result",
        test=LOW_LATENCY + "test_the_kernel_finds_a_stale_handle_that_the_host_cannot_know",
    ),
    # ---- dispatch, sending
    M("count_before_cleared", removed("counts_cleared"), "race"),
    M("place_before_counted", removed("tokens_counted"), "race"),
    M("cleared_before_published", removed("counts_read"), "race"),
    M("destinations_before_found", removed("destinations_found"), "race|misuse"),
    M("zero_is_a_count", replaced("count_encoded", "~count", "0u - count"), "timeout|result"),
    M(
        "count_one_too_low",
        replaced("count_encoded", "~count", "~count + 1"),
        "race|timeout|result|misuse",
    ),
    M(
        "counts_into_the_other_half",
        replaced("count_published", "half", "half ^ 1"),
        "race|timeout|result",
    ),
    M("counts_not_zeroed", removed("counts_zeroed_ahead"), "race|timeout|result|misuse"),
    M("dispatch_arrivals_not_zeroed", removed("dispatch_arrivals_zeroed"), "race|timeout"),
    M("combine_arrivals_not_zeroed", removed("combine_arrivals_zeroed"), "race|timeout"),
    M(
        "own_arrivals_zeroed_late",
        replaced("dispatch_arrivals_zeroed", "half ^ 1", "half"),
        "race|timeout",
    ),
    M(
        "row_of_the_rank",
        replaced("row_of_expert", "of_expert(slot.expert_idx)", "of_rank(slot.rank_idx)"),
        "race|result|misuse",
    ),
    M(
        "staging_slot_of_the_expert",
        replaced("slot_of_rank", "of_rank(slot.rank_idx)", "of_expert(slot.expert_idx)"),
        "race|result|misuse",
    ),
    M(
        "staging_slots_shared",
        replaced("slot_of_rank", "counts.of_rank(slot.rank_idx)", "0"),
        "race",
    ),
    M(
        "rows_of_other_ranks",
        replaced("header_written", "owner == rank_idx", "true"),
        "race|result|misuse",
    ),
    M("scale_bytes_mixed", replaced("byte_place", "% 4", "% 2"), "result"),
    # ---- dispatch, sending a message to each expert
    M(
        "message_slot_of_the_rank",
        replaced("message_slot", "of_expert(slot.expert_idx)", "of_rank(slot.rank_idx)"),
        "race|result|misuse",
        test=PLACEMENTS + "run_ahead_by_expert",
    ),
    M(
        "control_of_another_slot",
        replaced("control_written", "slot.slot_idx", "0"),
        "race|result",
        test=PLACEMENTS + "run_ahead_by_expert",
    ),
    M(
        "messages_of_the_other_half",
        replaced("message_place", "half", "half ^ 1"),
        "race|result|misuse",
        test=PLACEMENTS + "run_ahead_by_expert",
    ),
    M(
        "message_to_the_first_row",
        replaced("message_row", "slot_idx", "0"),
        "race|result|misuse",
        test=PLACEMENTS + "run_ahead_by_expert",
    ),
    M(
        "messages_not_awaited",
        removed("messages_of_pair_awaited"),
        "race",
        test=PLACEMENTS + "run_ahead_by_expert",
    ),
    M(
        "unpacked_before_ranks_have_come",
        removed("staging_awaited"),
        "race|misuse",
        test=PLACEMENTS + "run_ahead_by_expert",
    ),
    M(
        "message_arrivals_not_zeroed",
        removed("message_arrivals_zeroed"),
        "result",
        test=PLACEMENTS + "test_a_pairs_messages_do_not_wait_for_those_of_others",
        arguments={"num_calls_before": 2},
    ),
    # ---- arrivals
    M("told_before_all_messages_sent", removed("all_messages_sent"), "race"),
    M(
        "messages_told_at_gpu_scope",
        replaced("messages_released", "red_add_release_sys", "red_add_relaxed_gpu"),
        "race",
    ),
    M("messages_not_counted", removed("message_counted"), "timeout"),
    M("one_token_not_awaited", replaced("tokens_expected", "+ 1", "+ 0"), "race|timeout"),
    M("sent_messages_not_cleared", removed("sent_messages_cleared"), "misuse"),
    M(
        "arrival_not_acquired",
        replaced(
            "arrival_acquired", "ptx::ld_acquire_sys(", "ptx::ld_relaxed_sys((const uint32_t*)"
        ),
        "race",
    ),
    M("tokens_not_awaited", removed("staging_awaited"), "race|misuse"),
    M("contributions_not_awaited", removed("contributions_awaited"), "race"),
    M(
        "overwritten_before_added",
        removed("last_sums_awaited"),
        "race|timeout|result",
        test=LOW_LATENCY + "repeats_with_other_rows",
    ),
    # ---- arrivals of a combine
    M("told_before_all_parts_sent", removed("all_parts_sent"), "race"),
    M("parts_not_counted", removed("part_counted"), "timeout"),
    M(
        "one_row_of_a_rank_awaited",
        replaced("parts_expected", "sent_rows[i]", "(sent_rows[i] != 0)"),
        "race",
    ),
    M(
        "one_part_of_a_row_awaited",
        replaced("parts_expected", "RowPart<Config>::per_row", "1"),
        "race",
        test=LOW_LATENCY + "test_odd_sizes",
        arguments={"hidden": 9216, "num_experts": 32, "num_topk": 4, "num_sms": 3},
    ),
    M(
        "rows_of_other_ranks_awaited",
        replaced(
            "row_count_kept", "sent_rows[rank_idx]", "sent_rows[Config::num_ranks - 1 - rank_idx]"
        ),
        "race|timeout",
    ),
    M(
        "rank_comes_in_silence",
        removed("rank_came"),
        "timeout",
        test=LOW_LATENCY + "repeats_with_other_rows",
    ),
    M(
        "only_rows_of_earlier_combines_awaited",
        replaced("ranks_awaited", "+ 1", "+ 0"),
        "race|timeout|result",
        test=LOW_LATENCY + "repeats_with_other_rows",
    ),
    # ---- dispatch, receiving
    M(
        "exponents_of_one_scale",
        replaced("exponent_packed", "4 * column + i", "4 * column"),
        "result",
        test=LOW_LATENCY + "test_scales_that_are_powers_of_two_are_the_smallest_that_fit",
    ),
    M(
        "count_not_awaited",
        replaced("count_awaited", "word != 0", "true"),
        "race|result|misuse|timeout",
    ),
    M("counts_before_shared", instead("counts_shared", "return true;"), "race|misuse"),
    M(
        "range_the_other_way_round",
        instead(
            "range_packed",
            "args.layout_range[local_expert_idx * Config::num_ranks + rank_idx] = static_cast<int64_t>(uint64_t{count} << 32 | num_rows);",
        ),
        "result|race|misuse",
    ),
    M(
        "rows_of_ranks_overlap",
        replaced("row_placed", "received_.first_row(local_expert_idx, rank_idx)", "0u"),
        "race|result",
    ),
    M(
        "source_slot_forgotten",
        replaced("source_told", "token_topk_idx", "token_idx * Config::num_topk"),
        "race|result",
    ),
    M("source_is_the_slot", replaced("token_told", "number", "token_topk_idx"), "result"),
    # ---- combine
    M("expert_rows_before_shared", removed("expert_rows_shared"), "race|misuse"),
    M("rows_into_the_other_half", replaced("row_sent", "half", "half ^ 1"), "race|result"),
    M(
        "row_of_a_slot_that_got_none",
        replaced("row_of_slot", "first_slot_of_expert", "slot_idx"),
        "race|result",
    ),
    # ---- combine of rows that stay where they are
    M(
        "told_the_other_half",
        replaced("row_told", "half", "half ^ 1"),
        "race|result|misuse",
        test=LOW_LATENCY + "test_rows_are_fetched_from_where_the_experts_wrote_them",
        arguments={"receive": True},
    ),
    M(
        "row_of_the_own_experts",
        replaced("row_fetched", "ranks.of(rank_idx)", "local"),
        "race|result|misuse",
        test=LOW_LATENCY + "test_rows_are_fetched_from_where_the_experts_wrote_them",
        arguments={"receive": True},
    ),
    # ---- masked ranks
    M(
        "high_ranks_masked_as_low_ones",
        replaced("mask_word", "rank_idx < 64 ? low_ : high_", "low_"),
        "result|race|timeout",
        test=LOW_LATENCY + "test_the_last_of_many_ranks_can_be_masked",
    ),
)
