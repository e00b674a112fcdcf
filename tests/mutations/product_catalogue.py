"""Bugs to plant into the kernel of `grouped_product`; see catalogue.py."""

# ruff: noqa: E501 (code of the headers)

from __future__ import annotations

from .catalogue import Mutation, removed, replaced

M = Mutation
PRODUCT_MUTATIONS = (
    M("rows_of_the_next_expert", replaced("rows_of_own_expert", "begin + args_.rows_per_expert", "num_rows"), "race|result"),
    M("rows_behind_all", replaced("rows_bounded", "min(end, limit)", "end"), "misuse|result|race"),
    M("both_ctas_have_one_m_block", replaced("m_block_of_rank", "+ rank_", "+ 0"), "race|result"),
    M("columns_of_an_odd_m_block_once", replaced("odd_block", "+ rank_", "+ 0"), "race|result"),
    M("rows_of_the_next_tile_loaded", replaced("end_of_rows", "+ tile.num_rows", "+ Config::block_m"), "misuse|result"),
    M("half_of_weights_twice", replaced("own_half_of_weights", "ptx::cluster_ctarank()", "0"), "race|misuse|result"),
    M("stage_freed_by_half", replaced("product_empty_init", "Config::num_math_warps", "Config::num_math_warps / 2"), "race|misuse|result"),
    M("stage_freed_by_own_cta", replaced("product_stage_released", "lane_idx)", "ptx::cluster_ctarank())"), "race|misuse|result"),
    M("loaded_before_factors", replaced("product_full_init", "num_full_arrivals", "1"), "race|misuse|result"),
    M("multiplied_before_loaded", removed("product_stage_awaited"), "race|misuse|result"),
    M("tile_before_loaded", removed("product_tile_awaited"), "race|misuse|result"),
    M("loaded_before_free", removed("product_stage_free"), "race|misuse|result"),
    M("factors_before_free", removed("product_factors_free"), "race|misuse|result"),
    M("factors_told_before_stored", removed("product_factors_stored"), "race"),
    M("stage_kept_by_an_idle_warpgroup", removed("product_stage_passed"), "misuse"),
    M("rows_of_two_experts", replaced("end_of_expert_before", "args_.expert_end[expert - 1]", "0"), "race|result"),
    M("weight_of_first_expert", replaced("weight_of_expert", "tile.expert", "0"), "result"),
    M("scale_of_first_block", replaced("weight_scale_of_block", "k_block * scales.column_k_stride", "0"), "result"),
    M("k_blocks_of_first_expert", removed("k_blocks_of_expert"), "result"),
    M("scales_of_first_k_block", replaced("scales_of_k_block", "column_block", "0"), "result"),
    M("sums_of_first_expert", removed("y_of_expert"), "race|result"),
    M("added_before_complete", removed("product_complete"), "race|misuse"),
    M("first_part_added_before_complete", removed("product_first_complete"), "race|misuse"),
    M("scale_of_the_other_row", replaced("product_promoted", "i / 2 % 2 == 0", "i / 2 % 2 == 1"), "result"),
    M("registers_not_fenced", removed("product_fence"), "race|misuse"),
    M("rows_of_the_next_tile_stored", replaced("product_stored", "row_in_tile < tile.num_rows", "true"), "result|misuse|race"),
    M("columns_of_the_next_row_stored", replaced("product_columns", "min(max_columns, args_.num_columns - first_column)", "max_columns"), "result|misuse|race"),
    M("results_overwritten", removed("product_results_free"), "race|result"),
    M("part_overwritten", removed("product_part_free"), "race|result"),
    M("results_not_fenced", removed("product_results_fenced"), "race|misuse|result"),
    M("results_copied_before_written", removed("product_results_written"), "race|misuse|result"),
    M("barriers_used_before_made", removed("product_set_up"), "race|misuse"),
    M("cluster_left_early", removed("product_left"), "race|misuse"),
)  # fmt: skip
