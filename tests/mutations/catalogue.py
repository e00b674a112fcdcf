"""Bugs to plant into the kernels: where, what it makes of the source, and who has to notice."""

# ruff: noqa: E501 (code of the headers)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deep_moe.activations import (
    Activation,
    GeluTanh,
    Relu2,
    Situ,
    Swiglu,
    SwigluOai,
    SwigluStep,
)

RENDERED = "kernel.cu"


@dataclass(frozen=True)
class Edit:
    """What becomes of the statement of a mark in the headers (`marks.py`).

    `old` stands in it once, white space aside; without it, the whole statement is replaced. `behind`:
    of which mark's statement the replaced one is put.
    """

    mark: str
    old: str | None = None
    new: str = ""
    behind: str | None = None


@dataclass(frozen=True)
class TextEdit:
    """`old`, which stands once in a file without marks, is replaced by `new`: in the rendered kernel
    with its config, or in a module of the host's side."""

    file: str
    old: str
    new: str


def removed(mark: str) -> Edit:
    return Edit(mark)


def instead(mark: str, statement: str) -> Edit:
    return Edit(mark, new=statement)


def replaced(mark: str, old: str, new: str) -> Edit:
    return Edit(mark, old, new)


def moved(mark: str, *, behind: str) -> Edit:
    return Edit(mark, behind=behind)


def rendered(old: str, new: str) -> TextEdit:
    return TextEdit(RENDERED, old, new)


def in_module(file: str, old: str, new: str) -> TextEdit:
    return TextEdit(file, old, new)


@dataclass(frozen=True)
class Mutation:
    """One bug, of one edit or several in one file.

    catcher: how it is noticed: "race", "misuse" (another error of the emulator), "timeout" (the
    kernel gives up), "result" (comparison with the reference) or "harmless: why" for one that nobody
    can notice. Several, separated by "|", where it depends on the schedule.
    """

    name: str
    edit: Edit | TextEdit | tuple[Edit, ...]
    catcher: str
    schedule: str = "random"
    arch: str = "sm_100a"  # what runs; roles that both architectures share are in one of them
    in_a_row: bool = False  # calls that ranks begin without a look at each other
    in_clusters: bool = False  # SM90: of two CTAs that share weights
    one_size: int = 0  # rows of m-blocks, on SM90 of one size instead of fitted ones
    weights: str = "mxfp4"  # their format
    token_format: str | None = None  # of the tokens
    # "module::function" in tests/kernels or tests/split, or "folder.module::function" in tests, where
    # calls cannot notice
    test: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of that function

    @property
    def edits(self) -> tuple[Edit | TextEdit, ...]:
        return self.edit if isinstance(self.edit, tuple) else (self.edit,)


M = Mutation
# Where lists have several pages, in two calls.
PAGES = partial(
    M,
    test="test_list_pages::test_calls_with_long_lists_follow_each_other",
    arguments={"arch": "sm_100a", "num_calls": 2},
)
ROUTED_BY_GROUPS = {"rule": "sigmoid, groups", "dtype": torch.float32, "has_bias": True}
ROUTED_BY_SOFTMAX = {
    "rule": "softmax, weights as they are",
    "dtype": torch.float32,
    "has_bias": False,
}
ROUTED_FAST = {"rule": "fast_sigmoid", "dtype": torch.float32, "has_bias": True}
ODD_BLOCKS_IN_CLUSTERS = {
    "weights": "fp8",
    "tile": {"block_m": 40},
    "sizes": {"hidden": 768, "intermediate_hidden": 384},
}
SM100_MUTATIONS = (
    # ---- dispatch
    M("count_before_zeroed", removed("counts_zeroed"), "race"),
    M("report_before_counted", removed("slots_counted"), "race"),
    M("place_before_drawn", removed("places_drawn"), "race"),
    M(
        "publish_without_gather",
        replaced("gather_to_publish", "barriers.come_to_gather()", "cta_idx == 0"),
        "race|timeout",
    ),
    # Of two ranks one has few tokens.
    M("few_counted_before_zeroed", removed("few_zeroed"), "race|misuse"),
    M("few_unused_slots_sent", removed("few_routed"), "misuse"),
    M(
        "few_counted_without_atomics",
        replaced(
            "few_counted",
            "ptx::atom_add_shared(expert_counts + expert_idx * sizeof(uint32_t), 1)",
            "counts[expert_idx]++",
        ),
        "race",
    ),
    M(
        "few_listed_for_another_rank",
        replaced("few_slot", "page_idx", "page_idx ^ 1"),
        "race|result",
    ),
    M(
        "few_of_the_second_pass",
        replaced("few_slot", "i * num_threads + thread_idx", "thread_idx"),
        "race|result",
        test="test_dispatch_and_combine::test_shapes_at_the_edges",
        arguments={"shape": {"num_tokens": [150, 100], "hidden": 128}, "seed": 0},
    ),
    M("few_published_before_listed", replaced("few_listed", "barriers.cta()", "true"), "race"),
    M("few_sent_twice", replaced("one_sends", "cta_idx == 0", "cta_idx < 2"), "race|misuse|result"),
    M("few_told_for_one_cta", replaced("few_told", "{Config::num_sms}", "{1}"), "timeout"),
    M(
        "few_sent_after_a_failure",
        replaced("few_zeroed", "may_send", "true"),
        "result|misuse|race",
        test="test_dispatch_and_combine::test_calls_behind_one_that_gave_up_leave_the_other_ranks_alone",
        arguments={"num_tokens": 24, "seed": 0},
    ),
    M("publish_without_fence", removed("publish_fence"), "race"),
    M("publish_fence_gpu_scope", replaced("fence_release", "release.sys", "release.gpu"), "race"),
    M("pull_without_acquire", removed("counts_fence"), "race"),
    M(
        "pull_relaxed_counts",
        replaced("counts_loaded", "ptx::ld_acquire_sys", "ptx::ld_relaxed_sys"),
        "race",
        one_size=32,
    ),
    M(
        "pull_acquires_at_gpu_scope",
        replaced("fence_acquire", "acquire.sys", "acquire.gpu"),
        "race",
    ),
    M("pull_does_not_acquire", replaced("counts_acquired", "acquire", "fetch"), "race"),
    M("no_rank_barrier_before_combine", removed("ranks_computed"), "race"),
    M(
        "one_cta_waits_for_ranks",
        replaced("ranks_computed", "barriers.await_ranks", "if (is_last) barriers.await_ranks"),
        "race|timeout",
    ),
    M(
        "no_gather_before_combine",
        replaced("gather_to_combine", "barriers.come_to_gather()", "cta_idx == 0"),
        "race",
    ),
    M(
        "no_rank_barrier_after_cleanup",
        removed("ranks_clean"),
        "race|timeout|result",
        in_a_row=True,
    ),
    M(
        "pull_without_fence",
        removed("pull_fence"),
        "harmless: bulk copies of the pull read the callers' inputs only, which were written before "
        "the kernel started; the boundary between kernels orders both proxies",
    ),
    M(
        "pull_publishes_before_written",
        replaced("token_written", "cp_async_bulk_wait_group", "cp_async_bulk_wait_group_read"),
        "race",
    ),
    M(
        "pull_relaxed_arrival",
        instead("token_arrived", "atomicAdd(local.l1_arrival_count(token.pool_block_idx), 1u);"),
        "race",
    ),
    M("pull_without_wait", removed("token_here"), "race|misuse"),
    M("pull_parity_stuck", removed("pull_parity"), "race|misuse"),
    M(
        "pull_expects_too_little",
        replaced("pull_bytes", "token_bytes", "token_bytes - 16"),
        "race|misuse|timeout",
    ),
    M(
        "pull_row_shifted",
        instead(
            "pull_row",
            "token.row_idx = (idx_in_expert - first_pool_block * Config::block_m_step + 1) % Config::block_m;",
        ),
        "result|race",
    ),
    M("pull_slot_of_neighbour", replaced("pull_source", "slot %", "(slot + 1) %"), "result|race"),
    # ---- pages of lists
    PAGES("pages_not_taken", removed("pages_taken"), "timeout|result"),
    PAGES("page_of_another_list", replaced("pages_drawn", "end - begin", "0"), "race|result"),
    PAGES("owner_not_told_of_pages", removed("page_listed"), "race|result|misuse"),
    PAGES("own_ctas_not_told_of_pages", removed("page_told"), "timeout|result"),
    M(
        "page_not_awaited",
        replaced("page_awaited", "place.page_idx != 0", "true"),
        "race|result",
        test="test_list_pages::test_slots_are_listed_page_by_page",
        arguments={"routing": "one expert", "num_sms": 9, "schedule": "round_robin"},
    ),
    PAGES("slot_behind_the_page", removed("slot_in_page"), "race|result|misuse"),
    PAGES("always_the_second_page", replaced("page_found", "page - 1)", "0)"), "race|result"),
    PAGES("pages_kept_for_the_next_call", removed("pages_forgotten"), "race|result"),
    PAGES("taken_pages_kept", removed("taken_zeroed"), "race|result"),
    PAGES("number_of_taken_pages_kept", removed("num_taken_zeroed"), "race|result"),
    M(
        "failed_rank_takes_pages",
        removed("failed_takes_none"),
        "misuse|result",
        test="test_list_pages::test_a_rank_that_gave_up_lists_no_pages",
    ),
    # ---- barriers between ranks and CTAs
    M("gather_before_cta_is_done", removed("lists_written"), "race"),
    M("gather_not_reset", removed("gather_reset"), "timeout"),
    M(
        "gather_one_short",
        replaced("gather_last", "== num_ctas - 1", ">= num_ctas - 2"),
        "race|timeout|result",
    ),
    M(
        "round_behind_the_gather",
        replaced("ranks_computed", "round", "RankBarrier<Config>::next_round(buffers.local())"),
        "timeout|race",
    ),
    M(
        "rank_barrier_gpu_scope",
        replaced("rank_arrives", "red_add_release_sys", "red_add_relaxed_gpu"),
        "race",
    ),
    M(
        "rank_barrier_relaxed_poll",
        replaced("rank_polls", "ptx::ld_acquire_sys(", "ptx::ld_relaxed_sys((const uint32_t*)"),
        "race",
    ),
    # ---- clean-up
    M("clean_up_not_atomic", instead("zeroed_relaxed", "words[i] = 0;"), "race"),
    M("clean_up_forgets_send_count", removed("send_counts_zeroed"), "timeout|result|misuse|race"),
    M("clean_up_forgets_recv_sum", removed("recv_sums_zeroed"), "timeout|result|misuse|race"),
    M("clean_up_forgets_l1_arrivals", removed("l1_arrivals_zeroed"), "timeout|result|race"),
    M("clean_up_forgets_l2_arrivals", removed("l2_arrivals_zeroed"), "timeout|result|race"),
    M(
        "clean_up_one_block_short",
        replaced("l1_arrivals_zeroed", "num_pool_blocks", "num_pool_blocks - 1"),
        "timeout|result|race",
    ),
    # ---- loaders
    M(
        "l1_wait_one_short",
        replaced("tokens_awaited", "num_valid_rows", "num_valid_rows - 1"),
        "race|timeout",
    ),
    M("l1_relaxed_wait", replaced("tokens_acquired", "ld_acquire_gpu", "ld_relaxed_gpu"), "race"),
    M(
        "l2_relaxed_wait",
        replaced("l1_output_acquired", "ld_acquire_gpu", "ld_relaxed_gpu"),
        "race",
    ),
    M("loader_without_fence", removed("tokens_fence"), "race"),
    M(
        "activation_bytes",
        replaced("token_bytes", "num_bytes", "smem.activation_tile_bytes"),
        "misuse|race|timeout",
    ),
    M(
        "activation_box_too_small",
        replaced("token_box", "[num_boxes - 1]", "[0]"),
        "timeout|race|misuse|result",
    ),
    M("activation_parity", replaced("token_stage_free", "^ 1", ""), "timeout|race|misuse"),
    M(
        "activation_split",
        replaced("half_tile", "num_mma_tokens(block)", "Config::block_m"),
        "result",
    ),
    M("weight_expert", replaced("weight_row", "block.expert_idx * num_rows +", ""), "result"),
    M("weight_k", replaced("weight_tile", "k_block_idx * k_block_elements<Config>", "0"), "result"),
    M(
        "weight_loader_does_not_drain",
        replaced("weights_drained", "i < Config::num_stages", "i < 0"),
        "harmless: the commits of the last stages precede, in the thread's order, that of the last "
        "accumulator, which the epilogue of both CTAs waits for before it goes on",
    ),
    # ---- pairs of blocks
    M("pair_not_told", removed("pair_told"), "misuse|timeout", one_size=32),
    M("pair_not_awaited", instead("pair_awaited", "if (false) {"), "race|misuse", one_size=32),
    M(
        "pair_slot_named_anew_too_early",
        instead("slot_free", "if (false) {"),
        "race|misuse",
        one_size=32,
    ),
    M("pair_slot_never_read", removed("pair_read"), "timeout", one_size=32),
    M(
        "pair_read_barrier_count",
        replaced("pair_read_init", "3 +", "2 +"),
        "race|misuse|timeout",
        one_size=32,
    ),
    M(
        "every_other_pair_dealt_out",
        replaced("pair_dealt_out", "+=", "+= 2 *"),
        "race|misuse|timeout|result",
        one_size=16,
    ),
    # ---- MMA
    M("mma_always_accumulates", replaced("mma", "accumulates", "true"), "misuse|result"),
    M(
        "bf16_mma_overwrites",
        replaced("bf16_mma", "accumulates", "i > 0"),
        "result",
        weights="bf16",
    ),
    M("mma_scale_byte", replaced("mma", "(num_tokens, i)", "(num_tokens, 0)"), "result"),
    M("mma_tokens_not_rounded", replaced("mma_tokens", "16u", "8u"), "misuse"),
    M(
        "mma_early_release",
        replaced("committed", "both_ctas", "uint16_t{1}"),
        "timeout|race|misuse",
    ),
    M(
        "mma_block_told_to_one_cta",
        replaced("block_committed", "both_ctas", "uint16_t{1}"),
        "timeout",
    ),
    M("mma_accumulator_parity", replaced("mma_accumulator", "^ 1", ""), "timeout|race|misuse"),
    M("mma_commits_before_multiplying", moved("multiplied", behind="committed"), "race|misuse"),
    M(
        "mma_without_fence_behind_tiles",
        removed("mma_fence"),
        "harmless: the mbarrier's acquire orders the copies of a stage before the MMAs, and tensor "
        "memory has the fence behind the wait for its accumulator; PTX's pattern has one here, too",
    ),
    M(
        "accumulator_column",
        replaced(
            "mma_column",
            "Config::Tmem::accumulator_stride",
            "(Config::Tmem::accumulator_stride / 2)",
        ),
        "race|result|misuse",
    ),
    # ---- accumulators
    M(
        "epilogue_without_acquire",
        replaced(
            "block_arrived",
            "wait_for_dispatch(local, block, waiter)",
            "true",
        ),
        "race",
    ),
    M("epilogue_without_tcgen05_fence", removed("accumulator_fence"), "race"),
    M("release_without_tcgen05_fence", removed("release_fence"), "race"),
    M("load_without_wait", removed("accumulator_loaded"), "race"),
    M(
        "release_before_last_load",
        (
            replaced(
                "l1_computed",
                "compute_tile",
                "if (part_idx + 1 == num_parts && tile_idx + 1 == num_tiles) accumulator.release();"
                " compute_tile",
            ),
            removed("l1_released"),
        ),
        "race",
    ),
    # ---- Linear1 epilogue
    M("l1_tile_without_fence", removed("l1_tile_fence"), "race"),
    M("l1_maxima_without_barrier", removed("l1_maxima_there"), "race|misuse"),
    M("l1_store_before_written", removed("l1_tile_written"), "race|misuse"),
    M(
        "l1_publishes_before_written",
        replaced("l1_stored", "cp_async_bulk_wait_group", "cp_async_bulk_wait_group_read"),
        "race",
    ),
    M("l1_publishes_before_others", removed("l1_all_stored"), "race"),
    M(
        "l1_relaxed_publish",
        replaced("l1_published", "ptx::red_or_release_gpu(", "atomicOr((unsigned long long*)"),
        "race",
    ),
    M("l1_waits_for_too_few_stores", replaced("l1_slot_free", "- 1", ""), "race"),
    M("l1_maxima_of_wrong_warp", replaced("l1_neighbour", "^ 1", "^ 2"), "result|race"),
    M("l1_scale_byte", replaced("l1_scale_byte", "group_idx", "(group_idx + 1)"), "result|race"),
    M("l1_swizzle", replaced("swizzle", "0x30", "0x10"), "result|race"),
    M("l1_bf16_swizzle", replaced("bf16_swizzle", "0x70", "0x30"), "result", weights="bf16"),
    # ---- NVFP4
    *(
        M(name, edit, catcher, weights="nvfp4", token_format="nvfp4")
        for name, edit, catcher in (
            (
                "fp4_mma_always_accumulates",
                replaced("fp4_mma", "accumulates", "true"),
                "misuse|result",
            ),
            (
                "fp4_scales_of_next_group",
                replaced("fp4_scale_words", "words, 1", "words, 0"),
                "result",
            ),
            (
                "fp4_token_factor_lost",
                replaced("fp4_token_factor", "tokens.factors.x * factor[0]", "factor[0]"),
                "result",
            ),
            (
                "fp4_factors_of_other_rows",
                replaced("sm100_row_factors", "8 * r", "16 * r"),
                "result|misuse",
            ),
            (
                "fp4_constant_lost",
                replaced("fp4_l1_groups", "1.0f / fp4_linear2_scale", "1.0f"),
                "result",
            ),
            ("fp4_bytes_of_other_lanes", replaced("fp4_neighbour", ", 4)", ", 8)"), "result"),
            ("fp4_swizzle", replaced("fp4_swizzle", "0x10", "0x30"), "result|race"),
            (
                "fp4_weight_lost",
                replaced("fp4_l2_weight", "is_weighed ? result : result * topk_weight", "result"),
                "result",
            ),
        )
    ),
    M(
        "fp4_weights_of_the_first_tile",
        removed("l2_next_weight"),
        "result",
        test="test_sm100_nvfp4::test_every_tile",
        arguments={"block_m": 192},
    ),
    M(
        "fp4_scale_of_other_token",
        replaced("fp4_scale_byte", ">> 8 * t", ""),
        "result",
        test="test_sm100_nvfp4::test_any_size_of_linear1_output",
        arguments={"size": 1.0},
    ),
    *(
        M(name, edit, "result", test="test_sm100_nvfp4::test_prepared_tokens")
        for name, edit in (
            (
                "fp4_inverse_of_zero",
                replaced("fp4_zero_scale", "scale == 0.0f ? 0.0f : rounded", "rounded"),
            ),
            (
                "fp4_scale_of_a_zero_token",
                replaced(
                    "fp4_token_scale",
                    "fmaxf(__uint_as_float(amax_bits), min_fp4_token_amax)",
                    "__uint_as_float(amax_bits)",
                ),
            ),
            (
                "fp4_groups_of_eight",
                replaced("fp4_group", "fp4_group_size / values_per_chunk", "1"),
            ),
        )
    ),
    # ---- decoded weights
    *(
        M(name, edit, catcher, weights=weights, token_format="bf16")
        for weights, name, edit, catcher in (
            (
                "int4",
                "decoded_into_a_place_in_use",
                replaced("decoded_slot_free", "num_free == 0", "false"),
                "race|misuse",
            ),
            (
                "int4",
                "decoded_behind_products_without_fence",
                removed("decoded_slot_fence"),
                "race",
            ),
            (
                "int4",
                "weights_decoded_before_loaded",
                replaced("weights_loaded", "ring.parity", "ring.parity ^ 1"),
                "race|misuse|timeout",
            ),
            ("int4", "codes_never_said_to_be_read", removed("codes_read"), "timeout"),
            (
                "int4",
                "codes_of_the_neighbour",
                replaced("packed_chunk", "+ row)", "+ (row ^ 1))"),
                "result",
            ),
            (
                "int4",
                "first_chunk_twice",
                replaced("chunk_decoded", "chunks[i]", "chunks[0]"),
                "result",
            ),
            (
                "int4",
                "chunks_on_top_of_each_other",
                replaced("chunk_stored", "columns + i", "columns + 0"),
                "result|misuse",
            ),
            (
                "int4",
                "products_before_decoded_weights_are_stored",
                removed("decoded_stored"),
                "race",
            ),
            ("int4", "decoded_without_fence", removed("decoded_fence"), "race"),
            ("int4", "products_of_decoded_weights_without_fence", removed("mma_fence"), "race"),
            (
                "int4",
                "decoded_told_to_the_own_cta",
                replaced("decoded_there", "even_", "smem_"),
                "timeout|misuse|race",
            ),
            (
                "int4",
                "product_of_one_k_step_of_decoded_weights",
                replaced("decoded_mma", "weights + i", "weights + 0"),
                "result",
            ),
            (
                "int4",
                "block_of_the_first_k_block",
                replaced("decoded_weight_block", "(block_idx + k_block_idx)", "block_idx"),
                "result",
            ),
            (
                "int4",
                "sm100_int4_scale_of_the_first_group",
                replaced("sm100_int4_scale", "0x3232", "0x1010"),
                "result",
            ),
            (
                "nvfp4",
                "sm100_nvfp4_scale_of_every_other_group",
                replaced("sm100_nvfp4_scale", "group *", "2 * i *"),
                "result",
            ),
        )
    ),
    M(
        "sm100_mxfp4_scale_of_the_first_group",
        replaced("sm100_mxfp4_scale", "i * 0x0101", "0"),
        "result",
        test="test_bf16_tokens::test_tiles",
        arguments={"arch": "sm_100a", "pair": "mxfp4 x bf16", "block_m": 16},
    ),
    # ---- Linear2 epilogue
    M("l2_one_row_too_many", replaced("l2_valid_row", "<", "<="), "race|result|misuse"),
    M("l2_read_before_staged", removed("l2_tile_staged"), "race|misuse"),
    M(
        "l2_source_of_another_warp",
        replaced("l2_sources", "min(token, block.num_valid_rows - 1)", "0"),
        "race|result",
    ),
    M("l2_staged_before_read", removed("l2_tile_read"), "race"),
    M(
        "l2_block_that_does_not_exist",
        replaced("l2_tiles", "exists(block)", "true"),
        "race|result|misuse",
    ),
    # ---- combine
    M(
        "handover_without_fence",
        removed("handover_fence"),
        "harmless: Combine::run executes fence.proxy.async for all spaces behind the barrier, and a "
        "fence anywhere between the accesses is enough; it stays for writers who fence what is theirs",
    ),
    M("combine_without_fence", removed("combine_fence"), "race"),
    M("combine_buffer_read_without_fence", removed("added_fence"), "race"),
    M("combine_buffer_read_without_syncwarp", removed("added_by_all"), "race"),
    M("combine_store_without_fence", removed("out_fence"), "race"),
    M("combine_out_buffer_reused", removed("out_free"), "race"),
    M("combine_exits_early", removed("combine_drained"), "misuse", "late_copies"),
    M("combine_parity", replaced("combine_parity", "/ 2", ""), "race|timeout|misuse"),
    M("combine_unpacks_wrong", replaced("unpacked_low", "<< 16", "<< 15"), "result"),
    # ---- set-up
    M(
        "barriers_without_init_fence",
        removed("init_fence"),
        "harmless: the cluster's barrier behind it releases what it ordered; PTX asks for the fence "
        "beside relaxed arrivals",
    ),
    M("full_barrier_count", replaced("full_init", "2 +", "1 +"), "misuse|race"),
    M("tmem_empty_barrier_count", replaced("tmem_empty_init", "2 *", ""), "misuse|race"),
    M(
        "set_up_without_cluster_barrier",
        (instead("cluster_arrive", "__syncthreads();"), removed("cluster_wait")),
        "race|misuse",
    ),
    # ---- layouts
    M("tiles_overlap", rendered("int weights_offset = ", "int weights_offset = -1024u + "), "race"),
    M(
        "tensor_memory_overlaps",
        rendered("int activation_sf_column = ", "int activation_sf_column = -96u + "),
        "race|result|misuse",
    ),
    M(
        "barriers_overlap",
        rendered("int combine_barriers_offset = ", "int combine_barriers_offset = -8u + "),
        "misuse",
    ),
    M(
        "map_stride",
        in_module(
            "deep_moe/targets/sm100/weights.py",
            "strides=(row_bytes,)",
            "strides=(row_bytes + 16,)",
        ),
        "result|misuse|race",
    ),
    M(
        "map_box",
        in_module(
            "deep_moe/targets/sm100/weights.py",
            "half_m = config.block_m // 2",
            "half_m = config.block_m // 4",
        ),
        "misuse|timeout|race",
    ),
    M("tensor_memory_kept", removed("tmem_freed"), "misuse"),
)

M = partial(Mutation, arch="sm_90a")
# Of the main loop with FP8 weights, that with BF16 weights, and of CTAs that share FP8 weights.
FP8, BF16 = partial(M, weights="fp8"), partial(M, weights="bf16")
IN_CLUSTERS = partial(FP8, in_clusters=True)


def of_formula(activation: Activation, name: str, edit: Edit) -> Mutation:
    """Noticed in what an activation makes of numbers."""
    arguments = {"activation": activation, "fast_math": True}
    return M(name, edit, "result", test="test_activations::test_formula", arguments=arguments)


SM90_MUTATIONS = (
    # ---- products and their stages
    M(
        "stage_released_while_read",
        instead("stage_released", "if (group_idx == 2) release(stage.idx);"),
        "race|misuse",
    ),
    M(
        "fragments_overwritten",
        replaced("mixed_groups_in_flight", "wgmma_wait_group<2>", "wgmma_wait_group<3>"),
        "race",
    ),
    M(
        "fragments_overwritten_in_a_loop_of_one_size",
        replaced("groups_in_flight", "- 1", ""),
        "race",
        one_size=96,
    ),
    M(
        "fragments_overwritten_where_products_go_one_by_one",
        replaced("groups_in_flight", "- 1", ""),
        "race",
        one_size=168,
    ),
    M(
        "stage_released_one_group_too_early",
        replaced("stage_released", "group_idx == 2", "group_idx == 1"),
        "race",
        one_size=96,
    ),
    M(
        "accumulators_read_early",
        replaced("sums_complete", "wgmma_wait_group<0>", "wgmma_wait_group<1>"),
        "race",
    ),
    M("products_without_fence", removed("wgmma_fence"), "race"),
    M("rescaled_while_multiplied", removed("rescale_wait"), "race"),
    M("stage_not_awaited", removed("stage_awaited"), "race"),
    M(
        "stage_asked_for_in_vain",
        replaced("stage_awaited", "!next_is_loaded", "next_is_loaded"),
        "race",
    ),
    M(
        "parity_of_the_stage_before",
        replaced("stage_asked", "ring_.parity", "ring_.parity ^ 1"),
        "race",
    ),
    M("one_warp_releases", replaced("warp_releases", "% warp_size", ""), "timeout"),
    M(
        "every_lane_releases",
        replaced("lane_releases", "if (lane_idx == 0)", ""),
        "misuse",
    ),
    M("last_stage_kept", removed("last_stage_released"), "timeout"),
    M("k_step_of_descriptor", replaced("wgmma", "mma_bytes >> 4", "mma_bytes >> 5"), "result"),
    M("descriptor_stride", replaced("operand_stride", "1024", "512"), "result"),
    M("one_half_not_rescaled", removed("lower_rescaled"), "result"),
    FP8("upper_promoted_early", replaced("upper_complete", "num_sets - 1", "num_sets"), "race"),
    FP8(
        "lower_promoted_early",
        replaced("lower_complete", "wgmma_wait_group<0>", "wgmma_wait_group<1>"),
        "race",
    ),
    FP8("promoted_stage_not_awaited", removed("promoted_stage_awaited"), "race"),
    FP8("promoted_without_fence", removed("promoted_fence"), "race"),
    FP8(
        "products_of_the_block_before_kept",
        replaced("promoted_wgmma", "i > 0", "true"),
        "misuse|result",  # the first products are added to nothing that was written
    ),
    FP8("one_promoted_half_not_rescaled", removed("promoted_rescaled"), "result"),
    FP8(
        "scales_not_counted",
        replaced("weight_bytes", "block_bytes + scale_bytes", "block_bytes"),
        "race|misuse",
    ),
    *(
        M(name, edit, catcher, weights="fp8", token_format="fp8_128")
        for name, edit, catcher in (
            (
                "token_scale_not_promoted",
                replaced("token_scale_promoted", "scales.x * of_two.x", "scales.x"),
                "result",
            ),
            ("token_scales_not_copied", removed("token_scales_copied"), "race|misuse|timeout"),
            (
                "token_scales_not_counted",
                replaced("token_scale_bytes", " + token_vector_bytes", ""),
                "race|misuse",
            ),
            ("stage_released_before_its_scales_are_read", removed("token_scales_read"), "race"),
            (
                "float_scale_of_another_block",
                replaced(
                    "float_scale_column", "l1_token_sf(block_idx", "l1_token_sf(block_idx / 2"
                ),
                "result|race",
            ),
            ("columns_written_before_read", removed("columns_read"), "race"),
            ("columns_without_fence", removed("columns_fence"), "race"),
            (
                "columns_in_another_place",
                replaced("column_place", "16 * idx", "16 * (idx ^ 1)"),
                "result",
            ),
        )
    ),
    M(
        "float_scale_of_half_a_group",
        replaced("float_group", "lanes_per_float_scale", "lanes_per_scale"),
        "result",
        test="test_float_scales::test_prepared_inputs",
        arguments={"arch": "sm_90a", "tokens": "fp8_128"},
    ),
    BF16(
        "shared_stage_released_early",
        replaced("shared_groups_in_flight", "wgmma_wait_group<1>", "wgmma_wait_group<2>"),
        "race",
    ),
    BF16(
        "stage_released_while_multiplied",
        replaced("shared_stage_released", "Ring::stage_before(stage)", "stage"),
        "race|timeout|misuse",
    ),
    BF16("shared_stage_not_awaited", removed("shared_stage_awaited"), "race|misuse"),
    BF16("shared_sums_used_early", removed("shared_sums_complete"), "race"),
    BF16("shared_without_fence", removed("shared_fence"), "race"),
    BF16(
        "k_step_of_tokens", replaced("shared_wgmma", "tokens + (offset >> 4)", "tokens"), "result"
    ),
    *(
        M(
            name,
            edit,
            catcher,
            test=f"test_float_scales::{test}",
            arguments=(
                {"arch": "sm_90a", "tokens": "fp8_token"} if test == "test_prepared_inputs" else {}
            ),
        )
        for name, edit, catcher, test in (
            (
                "rescaled_while_shared_operands_are_multiplied",
                removed("shared_rescale_wait"),
                "race",
                "test_blocks_of_linear1s_output_with_scales_of_their_own",
            ),
            (
                "one_half_of_shared_sums_not_rescaled",
                removed("shared_rescaled"),
                "result",
                "test_blocks_of_linear1s_output_with_scales_of_their_own",
            ),
            (
                "token_scale_left_behind",
                removed("token_scale_copied"),
                "result",
                "test_prepared_inputs",
            ),
            (
                "token_maxima_not_awaited",
                removed("token_maxima_there"),
                "race|misuse",
                "test_prepared_inputs",
            ),
        )
    ),
    *(
        M(name, edit, catcher, test=f"test_float_scales::{test}", arguments={"arch": "sm_100a"})
        for name, edit, catcher, test in (
            (
                "plain_product_of_one_k_step",
                replaced(
                    "plain_fp8_mma", "accumulator, a, b,", "accumulator, a, first.activations,"
                ),
                "race|result",
                "test_gate_and_up_have_their_own",
            ),
            (
                "unit_scales_not_there",
                removed("unit_scales"),
                "misuse|result",
                "test_gate_and_up_have_their_own",
            ),
            (
                "unit_scales_without_fence",
                removed("unit_scales_fence"),
                "race",
                "test_gate_and_up_have_their_own",
            ),
        )
    ),
    M(
        "chunks_behind_a_tokens_last_read",
        instead("token_chunks_read", "chunks_[i] = x[chunk_idx(i)];"),
        "misuse|result",
        test="test_float_scales::test_prepared_inputs",
        arguments={"arch": "sm_90a", "tokens": "fp8_token"},
    ),
    BF16(
        "bf16_values_of_the_neighbour",
        replaced("bf16_place", "2 * thread_.row()", "2 * (thread_.row() ^ 1)"),
        "result",
    ),
    *(
        M(name, replaced(mark, old, new), "result", weights="mxfp4", token_format="bf16")
        for name, mark, old, new in (
            ("scale_of_another_group", "bf16_group_scale", "[i / 2]", "[0]"),
            ("exponent_of_another_value", "e2m1_split_value", "word, 10", "word, 12"),
            ("values_of_the_upper_row", "e2m1_odd_scale", "odd", "even"),
        )
    ),
    M(
        "nvfp4_scale_of_the_product_before",
        replaced("nvfp4_scale", "i % 2 == 0 ? 0x4140 : 0x4342", "0x4140"),
        "result",
        weights="nvfp4",
    ),
    *(
        M(name, replaced(mark, old, new), "result", weights=weights, token_format="bf16")
        for weights, name, mark, old, new in (
            ("int4", "int4_scale_of_another_group", "int4_scale", "[i / 2]", "[0]"),
            (
                "int4",
                "int4_offset_of_the_other_row",
                "int4_row",
                "upper_half_twice(offsets)",
                "lower_half_twice(offsets)",
            ),
            ("int4", "int4_codes_of_the_first_pair", "int4_second_codes", "word >> 8", "word"),
            ("mxfp8", "mxfp8_signs_of_the_first_pair", "mxfp8_second_pair", "0xb3a2", "0x93a2"),
        )
    ),
    *(
        M(name, edit, catcher, weights="int4", token_format="bf16", one_size=8)
        for name, edit, catcher in (
            ("eight_rows_given_back_before_other_lanes", removed("eight_rows_read"), "race"),
            ("eight_rows_not_awaited", removed("eight_rows_awaited"), "race"),
            (
                "eight_rows_loaded_where_one_lane_may",
                replaced("eight_rows_asked", "__all_sync(full_warp,", "("),
                "misuse",
            ),
            (
                "eight_rows_without_swizzle",
                replaced("token_chunk", "chunk ^ row", "chunk"),
                "result",
            ),
        )
    ),
    M("sign_of_upper_nibbles", replaced("upper_nibbles", "word << 4", "word << 3"), "result"),
    # ---- clusters
    IN_CLUSTERS(
        "peer_not_told_of_a_free_stage",
        replaced(
            "cluster_released",
            "ptx::mapa_shared_cluster(empty_barriers(stage), lane_idx)",
            "empty_barriers(stage)",
        ),
        "race",
    ),
    IN_CLUSTERS(
        "peers_releases_not_counted",
        replaced("sm90_empty_init", "* Config::cluster_size", ""),
        "race|misuse",
    ),
    IN_CLUSTERS(
        "both_copy_the_same_half",
        replaced("own_half", "ptx::cluster_ctarank()", "0"),
        "race|misuse|result",
    ),
    IN_CLUSTERS("claim_not_told", removed("claim_told"), "timeout"),
    IN_CLUSTERS("claim_not_awaited", removed("claim_awaited"), "race"),
    IN_CLUSTERS("cluster_set_up_without_barrier", removed("cluster_set_up"), "misuse|race"),
    IN_CLUSTERS(
        "a_cta_leaves_its_cluster",
        removed("cluster_left"),
        "harmless: both CTAs have done their blocks when ranks meet before combine; and who gives up has "
        "waited for longer than the other CTA can go on without it",
    ),
    IN_CLUSTERS(
        "an_odd_m_block_paired",
        replaced("m_blocks_paired", "num_in_unit / 2", "(num_in_unit + 1) / 2"),
        "race|misuse|timeout|result",
    ),
    *(
        M(
            name,
            edit,
            "result",
            test="test_block_walk::test_rows_are_used_again_behind_who_had_them",
            arguments={
                "arch": "sm_90a",
                "tile": {"block_m": 16, "cluster_size": 2, "num_turn_m_blocks": 5},
                "num_pool_tokens": 384,
                "counts": [70, 0, 1, 190, 16, 0, 0, 333, 129, 2, 64, 65],
            },
        )
        for name, edit in (
            ("linear1_leads_by_one_m_block_less", replaced("lead_pairs", "lead", "(lead - 1)")),
            ("linear2_by_more_than_a_turn", replaced("turn_of_linear2", "turn *", "(turn + 1) *")),
            (
                "units_behind_an_experts_last",
                replaced("unit_ends", "min(unit, tiles.num_m_blocks() - first)", "unit"),
            ),
            (
                "linear1_goes_on_behind_its_last",
                replaced("linear1_left", "< num_left", "<= num_left"),
            ),
        )
    ),
    M(
        "block_behind_linear1s_last_stored",
        removed("idle_linear1"),
        "race|misuse|result|timeout",
        test="test_sm90_clusters::test_even_and_odd_numbers_of_blocks",
        arguments=ODD_BLOCKS_IN_CLUSTERS,
    ),
    M(
        "block_behind_linear1s_last_published",
        replaced("idle_unpublished", "&& !is_idle", ""),
        "timeout",
        test="test_sm90_clusters::test_even_and_odd_numbers_of_blocks",
        arguments=ODD_BLOCKS_IN_CLUSTERS,
    ),
    M(
        "block_behind_linear1s_last_reads_rows",
        replaced("idle_without_rows", "!reads_pool", "false"),
        "race|misuse|timeout",
        test="test_sm90_clusters::test_a_small_ring",
        arguments={"schedule": "random"},
    ),
    M(
        "block_behind_linear2s_last_stored",
        removed("idle_linear2"),
        "race|misuse|result",
        test="test_sm90_clusters::test_even_and_odd_numbers_of_blocks",
        arguments=ODD_BLOCKS_IN_CLUSTERS,
    ),
    # ---- set-up
    M(
        "empty_barrier_count",
        replaced("sm90_empty_init", "num_math_warps<Config>", "num_math_warps<Config> / 2"),
        "race|misuse",
    ),
    M(
        "barrier_of_last_stage",
        replaced("sm90_full_init", "Config::num_stages", "Config::num_stages - 1"),
        "misuse",
    ),
    M(
        "barriers_without_init_fence",
        removed("sm90_init_fence"),
        "harmless: a CTA that uses its own barriers behind a barrier of the CTA does without; NVIDIA's "
        "tutorials do",
    ),
    M("set_up_without_barrier", removed("set_up"), "misuse|race"),
    M("loaders_keep_registers", moved("loader_registers", behind="role_split"), "misuse"),
    M(
        "registers_beyond_the_pool",
        replaced("math_registers", "num_math_registers<Config>", "num_math_registers<Config> + 32"),
        "misuse",
    ),
    # ---- loaders
    M("stage_overwritten", removed("sm90_stage_free"), "race"),
    M("scale_stage_overwritten", instead("sm90_scale_stage_free", "if (false) {"), "race"),
    M("no_scale_may_change", replaced("may_change_scale", "has_own_scales", "false"), "result"),
    M("arrival_without_syncwarp", removed("scales_stored"), "race"),
    M("arrival_before_destinations", removed("destinations_stored"), "race", weights="bf16"),
    M("factors_not_expected", replaced("factor_bytes", "num_vectors *", ""), "misuse"),
    M("row_factors_not_expected", removed("row_bytes"), "race|misuse"),
    M(
        "destinations_of_padding",
        replaced("has_destination", "num_valid_rows", "Config::block_m"),
        "race|misuse",
    ),
    M(
        "last_destinations_not_read",
        replaced("all_read", "num_k_blocks_behind >=", "num_k_blocks_behind + 1 >="),
        "race|misuse",
    ),
    M("header_after_arrival", moved("header_stored", behind="header_told"), "race", one_size=96),
    M(
        "header_left_in_another_slot",
        replaced("header_left", "(slot)", "((slot + 1) % Config::num_block_slots)"),
        "race|misuse|timeout|result",
        test="test_small_rings::test_two_calls",
        arguments={"arch": "sm_90a", "overrides": {"block_m": 160}},
    ),
    M(
        "first_blocks_claimed_again",
        replaced("claimed", "Config::num_sms / Config::cluster_size +", ""),
        "race|misuse|timeout",
        in_a_row=True,  # a block done twice gives the same; a later call sees the early report
    ),
    M(
        "claim_by_every_lane",
        replaced("claim", "if (ptx::lane_idx() == 0)", ""),
        "timeout|misuse|result",
    ),
    M("clean_up_forgets_claims", removed("claims_zeroed"), "result|timeout|race|misuse"),
    M(
        "expected_experts_of_others",
        replaced("expected_expert", "idx < Config::num_experts_per_rank", "true"),
        "misuse",
        one_size=8,
    ),
    M(
        "expected_blocks_behind_the_expert",
        replaced("expected_blocks", "block_idx < num_blocks", "true"),
        "misuse",
        one_size=8,
    ),
    M(
        "weights_not_expected",
        instead("weight_bytes", "ptx::mbarrier_arrive(full);"),
        "race|misuse",
    ),
    M(
        "slot_ring_one_short",
        replaced("math_slot", "Config::num_block_slots", "(Config::num_block_slots - 1)"),
        "race|misuse",
    ),
    M(
        "block_ends_too_late",
        replaced("end_of_block", "block.num_valid_rows", "block.num_rows"),
        "harmless: what the rows behind the last token hold costs energy, but goes nowhere; "
        "test_sm90_tile_copy notices",
    ),
    M(
        "block_begins_too_early",
        replaced("box_begin", "num_valid_rows_", "num_valid_rows_ + 1"),
        "result|misuse",
    ),
    M(
        "bytes_of_the_smallest_tile",
        replaced(
            "box_bytes",
            "Config::Smem::activations_stride",
            "Config::Smem::activations_stride / Config::block_m * Config::min_block_m",
        ),
        "misuse",
    ),
    # ---- epilogues
    M("maxima_without_barrier", removed("maxima_there"), "race"),
    M("factors_without_barrier", removed("scales_chosen"), "race"),
    M("stored_before_other_lanes", removed("warp_stored"), "race"),
    M(
        "publishes_before_stored",
        instead("results_stored", "const bool stored = true;"),
        "race|misuse",
    ),
    M(
        "own_warp_publishes_before_stored",
        replaced("own_results_stored", "slot.parity", "slot.parity ^ 1"),
        "race|misuse",
        one_size=8,
    ),
    M("header_written_before_read", instead("slot_awaited", "return true;"), "race", one_size=8),
    M(
        "slot_never_free",
        replaced("seen_init", "Config::num_block_slots, 1", "Config::num_block_slots, 2"),
        "timeout",
        one_size=8,
    ),
    M(
        "publishes_behind_next_block",
        instead("publish_at", "return num_k_blocks;"),
        "timeout|misuse",
    ),
    M(
        "stored_without_one_warp",
        replaced("stored_init", "num_math_warps<Config>", "num_math_warps<Config> - 1"),
        "race|misuse|timeout",
    ),
    M("publishes_to_its_cta", replaced("red_or_release", "release.gpu", "release.cta"), "race"),
    M("maxima_cleared_in_use", replaced("maxima_cleared", "^ 1", ""), "race"),
    M("own_scale_not_told", removed("own_scale_told"), "result"),
    M("rows_that_do_not_exist", removed("rows_exist"), "race|result|misuse"),
    # ---- dispatch
    M("rewritten_without_fence", removed("rewrite_fence"), "race"),
    M("rewritten_before_read", removed("words_read"), "race"),
    M("scale_of_other_group", replaced("group_scale", "8 * group", "8 * (group ^ 1)"), "result"),
    M(
        "warps_share_a_pull_barrier",
        replaced("pull_buffers", "+ warp_idx * Config::Smem::pull_barriers_stride", ""),
        "misuse|race|timeout",
    ),
    M("counted_without_atomics", instead("slot_counted", "counts[expert_idx] += 1;"), "race"),
    M("unused_slot_counted", replaced("routed", "expert_idx >= 0 &&", ""), "misuse"),
    M(
        "unused_slot_added",
        instead("added_slots", "const bool routed = slot < Config::num_topk;"),
        "result",
    ),
    M(
        "lists_of_wrong_rank",
        replaced("slot_listed", "place.page_idx", "place.page_idx ^ 1"),
        "race|result",
    ),
    M(
        "received_counts_kept",
        removed("recv_counts_zeroed"),
        "harmless: every call overwrites them before it reads them; zeros only tell a rank that runs "
        "out of time who has not published",
    ),
    M(
        "valid_rows_of_last_block",
        replaced("valid_rows", "- first_pool_block * Config::block_m_step", ""),
        "timeout|race|misuse|result",
    ),
    # ---- barriers
    M("grid_arrival_relaxed", replaced("atom_add_acq_rel", "acq_rel.gpu", "relaxed.gpu"), "race"),
    M(
        "grid_arrival_of_cta_scope",
        replaced("atom_add_acq_rel", "acq_rel.gpu", "acq_rel.cta"),
        "race",
    ),
    M("l2_wait_of_cta_scope", replaced("ld_acquire", "acquire.gpu", "acquire.cta"), "race"),
    M(
        "vote_without_syncwarp",
        removed("vote_ordered"),
        "harmless: another __syncwarp or barrier stands between every such wait and what other lanes "
        "than the first make of it; it is there for waits to come",
    ),
    M(
        "statistics_of_every_warp",
        replaced("stats_once", "|| thread_idx >= warp_size", ""),
        "result",
    ),
    # ---- layouts
    M(
        "factors_overlap_weights",
        rendered("int rescale_factors_offset = ", "int rescale_factors_offset = -64u + "),
        "race|result",
    ),
    M(
        "map_of_wrong_pool",
        in_module(
            "deep_moe/targets/sm90/weights.py",
            '"l2_activations": pool("l2_tokens")',
            '"l2_activations": pool("l1_tokens")',
        ),
        "race|result|misuse",
    ),
    # ---- input preparation, a kernel of its own
    M(
        "maximum_of_two_lanes",
        replaced("group_maximum", "num_lanes", "num_lanes / 2"),
        "result",
    ),
    M("sign_in_maximum", replaced("magnitude", "0x7fff0000u", "0xffff0000u"), "result"),
    M(
        "chunks_behind_the_last_read",
        instead("chunks_read", "chunks_[i] = x[chunk_idx(i)];"),
        "misuse",
    ),
    M("chunks_behind_the_last_written", removed("chunk_exists"), "misuse"),
    # ---- a router's rule in that kernel
    *(
        M(name, edit, "result", test=f"prepare_inputs.test_router::{test}", arguments=arguments)
        for name, edit, test, arguments in (
            (
                "higher_of_equals",
                replaced(
                    "lower_of_equals",
                    "redux_sync_min(key == best_key ? own : num_experts)",
                    "redux_sync_max(key == best_key ? own : 0)",
                ),
                "test_of_equal_choices_the_lower_expert_comes_first",
                {},
            ),
            (
                "the_best_group_by_one_choice",
                instead("sum_of_two", "key = next > 1 ? key : 1;"),
                "check_experts_and_weights",
                ROUTED_BY_GROUPS,
            ),
            (
                "experts_of_other_groups",
                removed("group_dropped"),
                "check_experts_and_weights",
                ROUTED_BY_GROUPS,
            ),
            (
                "an_expert_twice",
                removed("choice_taken"),
                "check_experts_and_weights",
                ROUTED_BY_GROUPS,
            ),
            (
                "sums_of_half_a_warp",
                replaced("halves_added", "distance", "distance / 2"),
                "check_experts_and_weights",
                ROUTED_BY_SOFTMAX,
            ),
            (
                "sums_of_every_other_slot",
                removed("pairs_added"),
                "check_experts_and_weights",
                ROUTED_FAST,
            ),
            (
                "a_choice_that_is_no_number_before_all_others",
                replaced("choice_of_no_number", "-1e30f", "1e30f"),
                "test_logits_that_are_no_numbers_or_infinite",
                {},
            ),
            (
                "scores_that_are_no_numbers",
                removed("score_of_no_number"),
                "test_logits_that_are_no_numbers_or_infinite",
                {},
            ),
            (
                "tokens_in_place_of_padding",
                replaced("token_masked", "==", "!="),
                "test_padding_as_vllm_marks_it",
                {},
            ),
        )
    ),
    # ---- a pool whose rows are used again within a call
    *(
        M(
            name,
            edit,
            catcher,
            test="test_small_rings::test_a_small_ring",
            arguments={"arch": arch, "schedule": "random", "biases": False},
            arch=arch,
        )
        for arch in ("sm_90a", "sm_100a")
        for name, edit, catcher in (
            ("rows_not_awaited", removed("rows_awaited"), "race|result|misuse"),
            (
                "rows_without_fence",
                removed("rows_fence"),
                "harmless: tokens are read and written by the async proxy alone, and the reads were "
                "seen to be complete by who released the rows; PTX's pattern has a fence here, too",
            ),
            (
                "rows_released_without_order",
                replaced("rows_released", "red_add_release_gpu", "red_add_relaxed_gpu"),
                "race",
            ),
            ("releases_kept", removed("releases_zeroed"), "result"),
            (
                "place_of_neighbour",
                replaced("ring_place", "num_blocks", "(num_blocks - 1)"),
                "race",
            ),
        )
    ),
    M(
        "linear1_not_acquired",
        replaced("linear1_acquired", "&& wait_for_tokens(local, block, waiter)", ""),
        "race",
        arch="sm_100a",
        test="test_small_rings::test_one_rank_with_small_blocks",
        arguments={"arch": "sm_100a", "schedule": "starved_role"},
    ),
    M(
        "rows_released_before_read",
        removed("routing_weights_read"),
        "race",
        arch="sm_100a",
        test="test_small_rings::test_a_small_ring",
        arguments={"arch": "sm_100a", "schedule": "random", "biases": True},
    ),
    # ---- biases
    *(
        M(
            f"{name}_on_{arch[:-1]}",
            edit,
            catcher,
            arch=arch,
            test="test_biases::test_exact_layer",
            arguments={"arch": arch, "weights": weights},
        )
        for name, arch, weights, edit, catcher in (
            (
                "linear1_without_bias",
                "sm_90a",
                "mxfp4",
                replaced("l1_bias_added", "fmaf(sum, scale, bias)", "sum * scale"),
                "result",
            ),
            (
                "bias_behind_the_weight",
                "sm_90a",
                "fp8",
                replaced(
                    "l2_bias_added",
                    "fmaf(sum, scale, bias) * topk_weight",
                    "fmaf(sum * topk_weight, scale, bias)",
                ),
                "result",
            ),
            ("linear2_without_weight", "sm_90a", "mxfp4", removed("l2_weights"), "result"),
            ("weight_not_stored", "sm_90a", "mxfp4", removed("weight_behind_linear2"), "misuse"),
            ("biases_not_copied", "sm_90a", "mxfp4", removed("biases_copied"), "timeout|misuse"),
            (
                "biases_of_other_rows",
                "sm_100a",
                "fp8",
                replaced("sm100_biases", "8 * r", "16 * r"),
                "result|misuse",
            ),
            ("linear2_without_weight", "sm_100a", "mxfp4", removed("sm100_l2_weights"), "result"),
        )
    ),
    M(
        "rows_of_other_lengths",
        replaced("padded_row", "* row_chunks", "* length"),
        "result|misuse|race",
        test="test_padded_sizes::test_prepared_inputs_of_two_ranks",
        arguments={"arch": "sm_100a", "weights": "mxfp4"},
    ),
    # ---- shared experts
    *(
        M(
            name,
            edit,
            catcher,
            test="test_shared_experts::test_parts_between_experts",
            arguments={
                "arch": "sm_90a",
                "tile": {"block_m": 24},  # a number of first tokens that is odd for a warp
                "num_pool_tokens": None,
                "num_experts_per_part": 1,
            },
            arch="sm_90a",
        )
        for name, edit, catcher in (
            (
                "weights_of_first_shared",
                replaced("shared_weights", "shared_expert(entry)", "0"),
                "result",
            ),
            (
                "parts_begin_together",
                replaced("part_begin", "entry / group_size * tokens_per_part()", "0u"),
                "race|result|timeout|misuse",
            ),
            (
                "routed_expert_before_counts",
                replaced("first_tokens", "num_shared", "(num_shared + 1)"),
                "race|result|timeout|misuse",
            ),
            (
                "shared_tokens_of_rank_0",
                replaced("shared_source", "counts_.own_rank_idx()", "0"),
                "race|result|timeout",
            ),
            (
                "first_tokens_of_rank_0",
                replaced("first_source", "order_.own_rank_idx()", "0"),
                "race|result|timeout",
            ),
            ("routed_weight_of_shared", instead("shared_weight", "{"), "result|misuse"),
            (
                "shared_not_added",
                replaced(
                    "shared_slots",
                    "Chunks::first_shared <= addend && addend < Chunks::num_addends",
                    "false",
                ),
                "result",
            ),
            (
                "phase_of_first_tokens_forgotten",
                replaced("pulled_parity", "num_pulled % 2", "0"),
                "race|result|timeout|misuse",
            ),
            (
                "first_tokens_pulled_twice",
                replaced("pulled_before", "+ num_pulled * num_warps", ""),
                "race|timeout",
            ),
        )
    ),
    # ---- sizes and inputs that the two calls do not have
    M(
        "count_of_16_bits",
        replaced("kept_count", "uint32_t", "uint16_t"),
        "result",
        test="test_many_tokens::test_they_are_walked_block_by_block",
        arguments={"block_m": 128},
    ),
    M(
        "places_of_16_bits",
        replaced("first_place", "uint32_t", "uint16_t"),
        "result|race",
        test="test_many_tokens::test_they_are_counted_and_listed",
    ),
    M(
        "header_of_16_bits",
        replaced("header_packed", "header.pool_block_idx", "header.pool_block_idx & 0xffff"),
        "result",
        test="test_many_tokens::test_headers_carry_every_field_whole",
    ),
    M(
        "second_mask_word_kept",
        replaced("l2_arrivals_zeroed", "* Config::Symm::l2_arrival_mask_dim1", ""),
        "race|result|misuse",
        test="test_exact::test_more_than_64_linear1_blocks",
        arguments={"arch": "sm_90a", "intermediate": 8320},
    ),
    of_formula(Swiglu(), "gate_for_up", replaced("gate_up_rounded", "(up, gate)", "(gate, up)")),
    of_formula(Swiglu(), "no_routing_weight", replaced("activation_applied", "* topk_weight", "")),
    of_formula(Swiglu(7.3), "gate_not_clamped", removed("swiglu_gate_clamped")),
    of_formula(
        Swiglu(7.3), "up_clamped_from_above_only", replaced("swiglu_up_clamped", "-clamp", "-1e30f")
    ),
    of_formula(SwigluOai(), "oai_gate_not_limited", removed("oai_gate_limited")),
    of_formula(
        SwigluOai(),
        "oai_up_limited_from_above_only",
        replaced("oai_up_limited", "-limit", "-1e30f"),
    ),
    of_formula(SwigluOai(), "oai_up_without_one", replaced("oai_product", "+ 1.0f", "")),
    of_formula(SwigluOai(), "oai_without_alpha", replaced("oai_product", "alpha", "1.0f")),
    of_formula(
        Situ(),
        "situ_gate_bounded_as_up",
        replaced("situ_gate_bounded", "(gate, beta)", "(gate, linear_beta)"),
    ),
    of_formula(
        Situ(), "situ_up_bounded_as_gate", replaced("situ_up_bounded", "linear_beta", "beta")
    ),
    of_formula(
        Relu2(),
        "relu2_of_negative_numbers",
        instead("relu2_positive", "const float positive = up;"),
    ),
    of_formula(Relu2(), "relu_not_squared", replaced("relu2_squared", "* positive", "")),
    of_formula(
        Relu2(), "two_rows_exchanged", replaced("two_rounded", "(second, first)", "(first, second)")
    ),
    of_formula(
        Relu2(), "second_row_without_weight", replaced("second_applied", "* topk_weight", "")
    ),
    of_formula(
        GeluTanh(),
        "gelu_of_the_plain_sigmoid",
        replaced("gelu_argument", "+ cubic * (gate * gate)", ""),
    ),
    of_formula(
        GeluTanh(), "gelu_of_the_other_sign", replaced("gelu_sigmoid", "-argument", "argument")
    ),
    of_formula(
        SwigluStep(2.7),
        "step_gate_limited_before_silu",
        replaced("step_silu", "(gate, 1.0f)", "(ptx::min_nan_f32(gate, limit), 1.0f)"),
    ),
    of_formula(
        SwigluStep(2.7),
        "step_silu_not_limited",
        replaced("step_limited", "ptx::min_nan_f32(silu, limit)", "silu"),
    ),
    of_formula(
        SwigluStep(2.7),
        "step_up_limited_from_above_only",
        replaced("step_up_limited", "-limit", "-1e30f"),
    ),
    M(
        "relu2_loses_nan",
        replaced("relu2_positive", "ptx::max_nan_f32", "fmaxf"),
        "result",
        test="test_activations::test_extremes_and_nan",
        arguments={"activation": Relu2(), "fast_math": True},
    ),
    *(
        M(
            name,
            edit,
            catcher,
            test="test_without_gate::test_every_main_loop_with_an_odd_number_of_blocks",
            arguments={"arch": arch, "pair": pair, "tile": 1},
        )
        for name, arch, pair, edit, catcher in (
            (
                "first_half_twice",
                "sm_100a",
                "bf16 x bf16",
                replaced("half_loaded", "(h * 16u << 16)", "0"),
                "result",
            ),
            (
                "halves_stored_at_one_place",
                "sm_100a",
                "mxfp4 x mxfp8",
                replaced(
                    "part_stored", "num_parts * block.n_block_idx + part_idx", "block.n_block_idx"
                ),
                "result|race|misuse|timeout",
            ),
            (
                "values_of_both_warpgroups_at_one_place",
                "sm_90a",
                "bf16 x bf16",
                replaced("values_k_block", "+ thread_.warpgroup_idx()", ""),
                "result|race|misuse",
            ),
            (
                "maxima_of_half_a_row",
                "sm_90a",
                "mxfp4 x mxfp8",
                removed("further_maxima"),
                "result",
            ),
            (
                "maxima_of_the_other_warpgroup",
                "sm_90a",
                "mxfp4 x mxfp8",
                replaced("own_maxima", "thread_.warpgroup_idx() * Config::block_m", "0"),
                "result|race",
            ),
        )
    ),
    M(
        "factor_of_the_first_token",
        replaced("factor_of_token", "is_second ? factor.y : factor.x", "factor.x"),
        "result",
        test="test_without_gate::test_every_main_loop_with_an_odd_number_of_blocks",
        arguments={"arch": "sm_90a", "pair": "fp8 x fp8_token", "tile": 1},
    ),
    of_formula(Situ(), "tanh_as_near_zero_too_far", replaced("tanh_chosen", "0.25f", "0.4f")),
    M(
        "high_rank_forgotten",
        removed("high_rank"),
        "result",
        test="test_block_walk::test_ranks_that_did_not_report_are_named",
        arguments={"missing": [3, 66]},
    ),
    M(
        "neighbour_of_high_rank",
        replaced("first_high_rank", "+ 63", "+ 64"),
        "result",
        test="test_block_walk::test_ranks_that_did_not_report_are_named",
        arguments={"missing": [69]},
    ),
    M(
        "last_token_not_checked",
        replaced(
            "slot_visited",
            "is_routed<Config>(expert_idx)",
            "is_routed<Config>(expert_idx) || slot + Config::num_topk >= num_slots",
        ),
        "misuse",
        test="test_dispatch_and_combine::test_slots_out_of_range_in_the_last_token_alone",
        arguments={"bad": -1, "slots": slice(None)},
    ),
    M(
        "y_not_added",
        replaced("added_y", "Config::accumulate && addend == 0", "false"),
        "result",
        test="test_accumulate::test_what_y_holds_is_added",
        arguments={"arch": "sm_90a", "num_shared": 0, "counts": (40, 9)},
    ),
    M(
        "zero_is_added_to_rows_that_stay",
        removed("kept_row"),
        "result",
        test="test_accumulate::test_what_y_holds_is_added",
        arguments={"arch": "sm_90a", "num_shared": 0, "counts": (40, 9)},
    ),
    M(
        "slots_behind_y_not_shifted",
        replaced("combined_slot", "- Chunks::first_slot", ""),
        "result|race|misuse",
        test="test_accumulate::test_what_y_holds_is_added",
        arguments={"arch": "sm_90a", "num_shared": 0, "counts": (40, 9)},
    ),
    *(
        M(
            name,
            edit,
            catcher,
            arch="sm_90a",
            test="test_masked_ranks::test_a_rank_that_never_came",
            arguments={"arch": "sm_90a", "num_shared": 2},
        )
        for name, edit, catcher in (
            ("masked_rank_gets_counts", removed("active_gets_count"), "misuse"),
            ("masked_rank_gets_sums", removed("sum_published"), "misuse"),
            (
                "masked_rank_gets_arrivals",
                replaced("arrives_for_masked", "ranks_.contains(rank)", "true"),
                "misuse",
            ),
            ("masked_rank_is_listed_to", removed("active_is_listed_to"), "misuse"),
            ("masked_rank_is_listed_to_by_one", removed("few_for_active"), "misuse"),
        )
    ),
    M(
        "masked_experts_take_pages",
        removed("masked_count_dropped"),
        "misuse",
        arch="sm_90a",
        test="test_masked_ranks::test_other_ways_through_the_kernel",
        arguments={"arch": "sm_90a", "way": "ring"},
    ),
    M(
        "rows_of_masked_are_added",
        replaced(
            "routed_to_active",
            "&& owned_by_active<Config>(static_cast<uint32_t>(expert_idx), ranks)",
            "",
        ),
        "result",
        arch="sm_90a",
        test="test_masked_ranks::test_other_ways_through_the_kernel",
        arguments={"arch": "sm_90a", "way": "clusters"},
    ),
)
MUTATIONS = SM100_MUTATIONS + SM90_MUTATIONS
