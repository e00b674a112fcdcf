"""Bugs to plant where the experts' tokens are here when the kernel starts; see catalogue.py."""

from __future__ import annotations

from .catalogue import Mutation, removed, replaced

M = Mutation
GROUPED = "test_grouped_experts::"
GROUPED_MUTATIONS = (
    M(
        "rows_not_checked",
        replaced("rows_inside", "rows.is_inside(args)", "true"),
        "misuse|result",
        test=GROUPED + "check_rows_outside",
        arguments={"arch": "sm_100a"},
    ),
    M(
        "failed_call_forgotten",
        replaced("earlier_call_failed", "!= 0", "== 1"),
        "result",
        test=GROUPED + "check_call_behind_a_failed_one",
        arguments={"arch": "sm_100a"},
    ),
    M(
        "experts_side_by_side",
        replaced("expert_begin", "expert_idx * args.max_expert_rows", "expert_idx"),
        "race|result",
    ),
    M("scales_of_the_first_row", replaced("scales_of_row", "row_idx", "0"), "result"),
    M("result_to_another_row", replaced("result_row", "token_idx", "topk_idx"), "race|result"),
    M("rows_of_the_first_expert", replaced("local_source", "first_row_", "0"), "race|result"),
    M("clean_up_beside_other_roles", removed("local_blocks_done"), "race|misuse|timeout"),
    M(
        "clean_up_without_gather",
        replaced("gather_to_clean_up", "barriers.come_to_gather()", "cta_idx == 0"),
        "race|timeout|result",
    ),
)
