"""Bugs to plant into the kernels of the throughput all-to-all; see catalogue.py. What they share
with the low-latency ones is in split_catalogue.py."""

from __future__ import annotations

from .catalogue import Mutation, instead, removed, replaced

M = Mutation
ANYTHING = "race|result|misuse|timeout"
THROUGHPUT_MUTATIONS = (
    # ---- steps
    M("two_of_a_kind_do_not_meet", instead("same_kind_meets", "return true;"), "race|result"),
    M("kinds_met_by_some_threads", instead("kinds_met", "return true;"), "race|result"),
    M("grid_awaited_by_some_threads", instead("grid_agreed", "return true;"), "race|result|misuse"),
    M("last_step_forgotten", removed("step_kept"), "race|result"),
    M("rounds_not_counted", removed("rounds_counted"), "race|timeout"),
    M("part_told_before_written", removed("part_written"), "race"),
    M(
        "part_not_released",
        replaced("part_released", "red_add_release_sys", "red_add_relaxed_gpu"),
        "race",
    ),
    M(
        "part_not_acquired",
        replaced("part_acquired", "ptx::ld_acquire_sys(", "ptx::ld_relaxed_sys((const uint32_t*)"),
        "race",
    ),
    M(
        "marks_not_compared",
        removed("mark_compared"),
        ANYTHING,
        test="test_throughput::test_ranks_must_agree_where_rows_are",
        arguments={"schedule": "random"},
    ),
    M(
        "mark_of_the_next_round_compared",
        replaced("mark_is_of_rows", "kind_ == StepKind::rows", "true"),
        ANYTHING,
        test="test_throughput::test_rows_are_sent_and_fetched_in_turn",
        arguments={"schedule": "slow_rank"},
    ),
    # ---- dispatch, sending
    M("rest_told_before_written", removed("rest_written"), "race"),
    M("tokens_not_told", removed("tokens_told"), ANYTHING),
    M("counted_before_cleared", removed("slot_counts_cleared"), "race"),
    M("placed_before_earlier_counted", removed("earlier_counted"), "race"),
    M("earlier_slots_forgotten", removed("earlier_added"), ANYTHING),
    M("slots_of_a_warp_share_a_place", replaced("place_found", "num_in_warp", "0u"), ANYTHING),
    M("every_other_item_claimed", replaced("item_claimed", "1", "2"), ANYTHING),
    M(
        "totals_not_released",
        replaced("totals_released", "red_add_release_sys", "red_add_relaxed_gpu"),
        "race",
    ),
    M("counts_counted_never", removed("counts_counted"), ANYTHING),
    M("total_one_too_high", replaced("total_published", "count", "count + 1"), ANYTHING),
    # ---- dispatch, receiving
    M("counts_of_others_not_awaited", removed("counts_of_all_awaited"), ANYTHING),
    M(
        "tokens_of_others_not_awaited",
        replaced("part_awaited", "!wait.reach(i / Config::num_ranks)", "false"),
        ANYTHING,
    ),
    M("experts_placed_before_summed", removed("totals_summed"), "race|misuse"),
    M("counts_used_before_shared", instead("arrivals_passed_on", "return true;"), "race|misuse"),
    M("places_used_before_shared", instead("places_passed_on", "return true;"), "race|misuse"),
    M("tokens_of_ranks_forgotten", removed("rank_tokens_told"), ANYTHING),
    M("rows_here_forgotten", removed("row_here_told"), ANYTHING),
    M("experts_begin_at_their_end", replaced("expert_placed", "begin", "expert_end"), ANYTHING),
    M(
        "overflow_not_seen",
        replaced("overflow_seen", "end > Config::max_recv_rows", "false"),
        ANYTHING,
        test="test_throughput::test_more_rows_than_there_is_room_for_are_an_error_on_every_rank",
    ),
    M(
        "row_without_its_rank",
        replaced("slot_row_told", "(row)", "(RankRow::row_idx(row))"),
        ANYTHING,
    ),
    M(
        "rows_of_the_own_rank",
        replaced("row_pulled", "first_row(expert_idx, source)", "own_row(expert_idx)"),
        ANYTHING,
    ),
    M(
        "rank_taken_for_a_row",
        replaced("row_pulled_again", "RankRow::row_idx(word)", "word"),
        ANYTHING,
    ),
    M("factor_of_the_first_slot", replaced("slot_factor", "slot", "0"), "result"),
    M("weight_not_told", removed("weight_told"), "result"),
    M("padding_not_cleared", removed("padding_cleared"), "result"),
    # ---- combine
    M("rows_not_awaited", replaced("piece_awaited", "wait.reach(i)", "true"), ANYTHING),
    M(
        "rows_of_the_next_slot",
        replaced("row_sent_to_slot", "+ slot_idx", "+ slot_idx + 1"),
        ANYTHING,
    ),
    M("rows_of_the_first_slot", replaced("row_shared", "[slot_idx]", "[0]"), ANYTHING),
    M(
        "rows_of_the_own_experts",
        replaced("row_returned", "ranks.of(rank_idx)", "ranks.local()"),
        ANYTHING,
        test="test_throughput::test_rows_that_experts_wrote_into_the_buffer_are_fetched_from_there",
    ),
    M(
        "own_rows_of_the_first",
        replaced("own_row_added", "RankRow::row_idx(word)", "RankRow::row_idx(0u)"),
        ANYTHING,
    ),
    # ---- scalars
    M("scalars_not_awaited", removed("scalars_of_all_awaited"), ANYTHING),
    M("scalars_forgotten", removed("scalar_returned"), "result"),
    # ---- masked ranks
    *(
        M(
            name,
            edit,
            catcher,
            test="test_masked_throughput::test_without_masked_ranks_the_others_have_every_bit",
            arguments={"masked": (1,), "schedule": "random"},
        )
        for name, edit, catcher in (
            ("masked_rank_is_told", removed("masked_not_told"), "misuse"),
            ("masked_rank_gets_tokens_told", removed("masked_gets_no_tokens"), "misuse"),
            ("masked_rank_gets_totals", removed("masked_gets_no_totals"), "misuse"),
            ("masked_rank_gets_arrivals", removed("masked_gets_no_arrival"), "misuse"),
            ("masked_rank_has_tokens", removed("masked_has_no_tokens"), ANYTHING),
            (
                "masked_rank_has_slots",
                replaced("masked_total_dropped", "&& active.contains(first + i)", ""),
                ANYTHING,
            ),
            (
                "masked_experts_have_slots",
                replaced(
                    "routed_to_active",
                    "&& owned_by_active<Config>(static_cast<uint32_t>(expert_idx), ranks)",
                    "",
                ),
                ANYTHING,
            ),
        )
    ),
    *(
        M(
            name,
            edit,
            catcher,
            test="test_masked_throughput::test_the_mask_grows_between_steps",
            arguments={"schedule": "random"},
        )
        for name, edit, catcher in (
            ("rows_of_the_masked_kept", removed("masked_row_cleared"), "result"),
            (
                "masked_rank_gets_rows",
                replaced("masked_gets_no_rows", "ranks_.active().contains(rank_idx)", "true"),
                "misuse",
            ),
            (
                "rows_of_masked_experts_added",
                replaced(
                    "masked_row_dropped",
                    "&& ranks.active().contains(RankRow::rank_idx(word))",
                    "",
                ),
                "misuse",
            ),
        )
    ),
    M(
        "masked_rank_is_awaited",
        removed("masked_not_awaited"),
        "timeout",
        test="test_masked_throughput::test_survivors_name_the_dead_and_go_on_after_a_reset",
    ),
    *(
        M(
            name,
            edit,
            "result|timeout",
            test="test_masked_throughput::"
            "test_a_rank_that_was_left_out_comes_back_behind_a_reset_alone",
        )
        for name, edit in (
            ("left_out_forgotten", removed("left_out_kept")),
            ("returning_rank_not_refused", removed("return_refused")),
        )
    ),
    M(
        "masked_rank_calls_on",
        removed("own_mask_refused"),
        ANYTHING,
        test="test_masked_throughput::test_a_masked_rank_that_calls_stops_alone",
    ),
)
