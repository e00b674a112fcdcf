"""Bugs to plant into the kernel of `grouped_product`; see catalogue.py."""

# ruff: noqa: E501 (code of the headers)

from __future__ import annotations

from .catalogue import Mutation, removed, replaced

M = Mutation
PRODUCT_MUTATIONS = (
    M("rows_of_the_next_expert", replaced("rows_of_own_expert", "begin + args_.rows_per_expert", "num_rows"), "race|result"),
    M("rows_behind_all", replaced("rows_bounded", "min(end, limit)", "end"), "misuse|result|race"),
    M("stage_freed_by_half", replaced("product_empty_init", "Config::num_math_warps", "Config::num_math_warps / 2"), "race|misuse|result"),
    M("multiplied_before_loaded", removed("product_stage_awaited"), "race|misuse|result"),
    M("loaded_before_free", removed("product_stage_free"), "race|misuse|result"),
    M("weight_of_first_expert", replaced("weight_of_expert", "tile.expert", "0"), "result"),
    M("scale_of_first_block", replaced("weight_scale_of_block", "weight_sf[k_block]", "weight_sf[0]"), "result"),
    M("added_before_complete", removed("product_complete"), "race|misuse"),
    M("scale_of_the_other_row", replaced("product_promoted", "i / 2 % 2 == 0", "i / 2 % 2 == 1"), "result"),
    M("registers_not_fenced", removed("product_fence"), "race|misuse"),
    M("rows_of_the_next_expert_stored", replaced("product_stored", "own_row < tile.end_row", "true"), "result|misuse|race"),
    M("columns_of_the_next_row_stored", replaced("product_stored", "column < args_.num_columns", "true"), "result|misuse|race"),
    M("barriers_used_before_made", removed("product_set_up"), "race|misuse"),
)  # fmt: skip
