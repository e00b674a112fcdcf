"""Bugs to plant into the kernels: where, what it replaces, and who has to notice."""

# ruff: noqa: E501 (patterns are lines of the headers)

from __future__ import annotations

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Mutation:
    """`pattern` stands exactly once in `include/deep_moe/<file>` and is replaced; `kernel.cu` is the
    rendered kernel with its config, `jit/...` the host's side.

    catcher: how it is noticed: "race", "misuse" (another error of the emulator), "timeout" (the
    kernel gives up), "result" (comparison with the reference) or "harmless: why" for one that nobody
    can notice. Several, separated by "|", where it depends on the schedule.
    """

    name: str
    file: str
    pattern: str
    replacement: str
    catcher: str
    schedule: str = "random"
    arch: str = "sm_100a"  # what runs; roles that both architectures share are in one of them
    in_a_row: bool = False  # calls that ranks begin without a look at each other
    one_size: int = 0  # SM90: rows of m-blocks that are of one size instead of fitted ones


PULL, COMBINE, COUNT = "roles/pull_tokens.cuh", "roles/combine.cuh", "roles/count_tokens.cuh"
PUBLISH = "roles/publish_counts.cuh"
DISPATCH, CLEANUP, WAIT = "roles/dispatch.cuh", "roles/cleanup.cuh", "roles/wait_for_tokens.cuh"
L1, L2, MMA = "sm100/l1_epilogue.cuh", "sm100/l2_epilogue.cuh", "sm100/mma.cuh"
LOAD_A, LOAD_W = "sm100/activation_loader.cuh", "sm100/weight_loader.cuh"
SMEM, WARP = "sm100/shared_memory.cuh", "sm100/epilogue_warp.cuh"
RENDERED = "kernel.cu"
PREPARATION = "prepare_inputs.cuh"
S90_LOOP, S90_WARPS, S90_SMEM = (
    "sm90/main_loop.cuh",
    "sm90/math_warps.cuh",
    "sm90/shared_memory.cuh",
)
S90_LOAD_A, S90_LOAD_W, S90_COPY = (
    "sm90/activation_loader.cuh",
    "sm90/weight_loader.cuh",
    "sm90/tile_copy.cuh",
)
S90_L1, S90_L2, S90_PULL = "sm90/l1_epilogue.cuh", "sm90/l2_epilogue.cuh", "sm90/pull_policy.cuh"
S90_DECODE, S90_KERNEL = "sm90/fp4_decode.cuh", "sm90/mega_moe.cuh"
S90_CLAIMS, S90_PUBLISH = "sm90/block_claims.cuh", "sm90/l1_publisher.cuh"
FENCE = "ptx::fence_proxy_async_shared_cta();\n"
LONG = "(threadIdx.x == ~0u)"  # a condition that is never true

M = Mutation
SM100_MUTATIONS = (
    # ---- dispatch
    M(
        "count_before_zeroed",
        COUNT,
        "counts[i] = 0;\n    barriers.cta();",
        "counts[i] = 0;",
        "race",
    ),
    M("report_before_counted", COUNT, "    barriers.cta();\n\n    // (2)", "\n    // (2)", "race"),
    M(
        "place_before_drawn",
        COUNT,
        "    if (!barriers.cta(!earlier_call_failed)) return;\n",
        "",
        "race",
    ),
    M(
        "publish_without_gather",
        DISPATCH,
        "    if (barriers.is_last_cta()) {\n        trace.mark(TraceStep::publish_counts);",
        "    if (cta_idx == 0) {\n        trace.mark(TraceStep::publish_counts);",
        "race|timeout",
    ),
    M("publish_without_fence", PUBLISH, "        ptx::fence_release_sys();\n", "", "race"),
    M(
        "publish_fence_gpu_scope",
        "ptx/fence.cuh",
        "fence.release.sys;",
        "fence.release.gpu;",
        "race",
    ),
    M("pull_without_acquire", "scheduler.cuh", "        ptx::fence_acquire_sys();\n", "", "race"),
    M(
        "pull_acquires_at_gpu_scope",
        "ptx/fence.cuh",
        "fence.acquire.sys;",
        "fence.acquire.gpu;",
        "race",
    ),
    M(
        "pull_does_not_acquire",
        DISPATCH,
        "scheduler.acquire_expert_counts(waiter)",
        "scheduler.fetch_expert_counts(waiter)",
        "race",
    ),
    M(
        "no_rank_barrier_before_combine",
        DISPATCH,
        "barriers.await_ranks(WaitSite::rank_barrier_before_combine, round, is_last);",
        "",
        "race",
    ),
    M(
        "one_cta_waits_for_ranks",
        DISPATCH,
        "barriers.await_ranks(WaitSite::rank_barrier_before_combine, round, is_last);",
        "if (is_last) barriers.await_ranks(WaitSite::rank_barrier_before_combine, round, is_last);",
        "race|timeout",
    ),
    M(
        "no_gather_before_combine",
        DISPATCH,
        "const bool is_last = barriers.is_last_cta();",
        "const bool is_last = cta_idx == 0;",
        "race",
    ),
    M(
        "no_rank_barrier_after_cleanup",
        DISPATCH,
        "        barriers.await_ranks(WaitSite::rank_barrier_after_cleanup, round + 1, is_last);\n",
        "",
        "race|timeout|result",
        in_a_row=True,
    ),
    M(
        "pull_without_fence",
        PULL,
        "    ptx::fence_proxy_async();\n",
        "",
        "harmless: bulk copies of the pull read the callers' inputs only, which were written before "
        "the kernel started; the boundary between kernels orders both proxies",
    ),
    M(
        "pull_publishes_before_written",
        PULL,
        "ptx::cp_async_bulk_wait_group<0>();",
        "ptx::cp_async_bulk_wait_group_read<0>();",
        "race",
    ),
    M(
        "pull_relaxed_arrival",
        PULL,
        "ptx::red_add_release_gpu(local.l1_arrival_count(token.pool_block_idx), 1);",
        "atomicAdd(local.l1_arrival_count(token.pool_block_idx), 1u);",
        "race",
    ),
    M(
        "pull_without_wait",
        PULL,
        "if (!waiter.warp_mbarrier(WaitSite::token_arrival, pull_barrier, parity)) return false;",
        "",
        "race|misuse",
    ),
    M("pull_parity_stuck", PULL, "parity ^= 1;", "", "race|misuse"),
    M(
        "pull_expects_too_little",
        PULL,
        "mbarrier_arrive_expect_tx(pull_barrier, Config::hidden)",
        "mbarrier_arrive_expect_tx(pull_barrier, Config::hidden - 16)",
        "race|misuse|timeout",
    ),
    M(
        "pull_row_shifted",
        PULL,
        "token.row_idx = idx_in_expert - first_pool_block * Config::block_m_step;",
        "token.row_idx = (idx_in_expert - first_pool_block * Config::block_m_step + 1) % Config::block_m;",
        "result|race",
    ),
    M(
        "pull_slot_of_neighbour",
        PULL,
        "slot / Config::num_topk, slot % Config::num_topk};",
        "slot / Config::num_topk, (slot + 1) % Config::num_topk};",
        "result|race",
    ),
    # ---- barriers between ranks and CTAs
    M(
        "gather_before_cta_is_done",
        DISPATCH,
        "    barriers.cta();\n    if (barriers.is_last_cta()) {\n        trace.mark(TraceStep::publish_counts);",
        "    if (barriers.is_last_cta()) {\n        trace.mark(TraceStep::publish_counts);",
        "race",
    ),
    M(
        "gather_not_reset",
        "sync/grid_gather.cuh",
        "        if (is_last) ptx::red_add_relaxed_gpu(counter, -num_ctas);\n",
        "",
        "timeout",
    ),
    M(
        "gather_one_short",
        "sync/grid_gather.cuh",
        "== num_ctas - 1;",
        ">= num_ctas - 2;",
        "race|timeout|result",
    ),
    M(
        "round_behind_the_gather",
        DISPATCH,
        "barriers.await_ranks(WaitSite::rank_barrier_before_combine, round, is_last);",
        "barriers.await_ranks(WaitSite::rank_barrier_before_combine,\n"
        "                         RankBarrier<Config>::next_round(buffers.local()), is_last);",
        "timeout|race",
    ),
    M(
        "rank_barrier_gpu_scope",
        "sync/rank_barrier.cuh",
        "ptx::red_add_release_sys(",
        "ptx::red_add_relaxed_gpu(",
        "race",
    ),
    M(
        "rank_barrier_relaxed_poll",
        "sync/rank_barrier.cuh",
        "ptx::ld_acquire_sys(local.rank_barrier_signal(signal_idx()))",
        "ptx::ld_relaxed_sys(reinterpret_cast<const uint32_t*>("
        "local.rank_barrier_signal(signal_idx())))",
        "race",
    ),
    # ---- clean-up
    M(
        "clean_up_not_atomic",
        CLEANUP,
        "ptx::st_relaxed_sys(words + i, uint64_t{0});",
        "words[i] = 0;",
        "race",
    ),
    M(
        "clean_up_forgets_send_count",
        CLEANUP,
        "zero_relaxed(local.expert_send_count(0), Config::num_experts, thread_idx, num_threads);",
        "",
        "timeout|result|misuse|race",
    ),
    M(
        "clean_up_forgets_recv_sum",
        CLEANUP,
        "zero_relaxed(local.expert_recv_sum(0), Config::num_experts_per_rank, thread_idx, num_threads);",
        "",
        "timeout|result|misuse|race",
    ),
    M(
        "clean_up_forgets_l1_arrivals",
        CLEANUP,
        "zero(local.l1_arrival_count(0), num_pool_blocks, thread_idx, num_threads);",
        "",
        "timeout|result|race",
    ),
    M(
        "clean_up_forgets_l2_arrivals",
        CLEANUP,
        "zero(local.l2_arrival_mask(0), num_pool_blocks * Config::num_l2_mask_words, "
        "thread_idx,\n         num_threads);",
        "",
        "timeout|result|race",
    ),
    M(
        "clean_up_one_block_short",
        CLEANUP,
        "zero(local.l1_arrival_count(0), num_pool_blocks, ",
        "zero(local.l1_arrival_count(0), num_pool_blocks - 1, ",
        "timeout|result|race",
    ),
    # ---- loaders
    M(
        "l1_wait_one_short",
        WAIT,
        "WaitSite::l1_block_arrival, block.num_valid_rows,",
        "WaitSite::l1_block_arrival, block.num_valid_rows - 1,",
        "race|timeout",
    ),
    M("l1_relaxed_wait", WAIT, "ptx::ld_acquire_gpu(count)", "ptx::ld_relaxed_gpu(count)", "race"),
    M("l2_relaxed_wait", WAIT, "ptx::ld_acquire_gpu(word)", "ptx::ld_relaxed_gpu(word)", "race"),
    M("loader_without_fence", WAIT, "    ptx::fence_proxy_async_global();\n", "", "race"),
    M(
        "activation_bytes",
        LOAD_A,
        "smem.activation_tile_bytes + smem.activation_sf_bytes",
        "smem.activation_tile_bytes",
        "misuse|race|timeout",
    ),
    M("activation_parity", LOAD_A, "ring.parity ^ 1", "ring.parity", "timeout|race|misuse"),
    M("activation_split", LOAD_A, "num_mma_tokens(block) / 2", "Config::block_m / 2", "result"),
    M(
        "weight_expert",
        LOAD_W,
        "block.expert_idx * num_rows + row_in_expert",
        "row_in_expert",
        "result",
    ),
    M("weight_k", LOAD_W, "k_block_idx * Config::block_k,", "0,", "result"),
    M(
        "weight_loader_does_not_drain",
        LOAD_W,
        "i < Config::num_stages; ++i",
        "i < 0; ++i",
        "harmless: the commits of the last stages precede, in the thread's order, that of the last "
        "accumulator, which the epilogue of both CTAs waits for before it goes on",
    ),
    # ---- MMA
    M("mma_always_accumulates", MMA, "!is_first || i > 0", "true", "misuse|result"),
    M(
        "mma_scale_byte",
        MMA,
        "instruction_descriptor(num_tokens, i)",
        "instruction_descriptor(num_tokens, 0)",
        "result",
    ),
    M(
        "mma_tokens_not_rounded",
        MMA,
        "align_up(block.num_valid_rows, 16u)",
        "align_up(block.num_valid_rows, 8u)",
        "misuse",
    ),
    M(
        "mma_early_release",
        MMA,
        "smem.empty_barrier(ring.stage), both_ctas",
        "smem.empty_barrier(ring.stage), uint16_t{1}",
        "timeout|race|misuse",
    ),
    M(
        "mma_accumulator_parity",
        MMA,
        "accumulators.parity ^ 1",
        "accumulators.parity",
        "timeout|race|misuse",
    ),
    M(
        "mma_commits_before_multiplying",
        MMA,
        "                multiply_k_block(smem, ring.stage, tmem, accumulator, num_tokens, k_block_idx == 0);\n"
        "                ptx::tcgen05_commit_cta_group2_multicast(smem.empty_barrier(ring.stage), both_ctas);",
        "                ptx::tcgen05_commit_cta_group2_multicast(smem.empty_barrier(ring.stage), both_ctas);\n"
        "                multiply_k_block(smem, ring.stage, tmem, accumulator, num_tokens, k_block_idx == 0);",
        "race",
    ),
    M(
        "mma_without_fence_behind_tiles",
        MMA,
        "            ptx::tcgen05_fence_after_thread_sync();\n            // The same lane",
        "            // The same lane",
        "harmless: the mbarrier's acquire orders the copies of a stage before the MMAs, and tensor "
        "memory has the fence behind the wait for its accumulator; PTX's pattern has one here, too",
    ),
    M(
        "accumulator_column",
        MMA,
        "accumulators.stage * Config::block_m;",
        "accumulators.stage * (Config::block_m / 2);",
        "race|result|misuse",
    ),
    # ---- accumulators
    M(
        "epilogue_without_acquire",
        "sm100/epilogue.cuh",
        "(epilogue_warp_idx != 0 || wait_for_dispatch(local, block, waiter)) &&",
        "",
        "race",
    ),
    M(
        "epilogue_without_tcgen05_fence",
        "sm100/epilogue.cuh",
        "ptx::tcgen05_fence_after_thread_sync();",
        "",
        "race",
    ),
    M(
        "release_without_tcgen05_fence",
        WARP,
        "ptx::tcgen05_fence_before_thread_sync();",
        "",
        "race",
    ),
    M("load_without_wait", WARP, "ptx::tcgen05_wait_ld(values);", "", "race"),
    M(
        "release_before_last_load",
        L1,
        "            compute_tile(block, accumulator, token, atoms);\n"
        "            if (tile_idx + 1 == num_tiles) accumulator.release();",
        "            if (tile_idx + 1 == num_tiles) accumulator.release();\n"
        "            compute_tile(block, accumulator, token, atoms);",
        "race",
    ),
    # ---- Linear1 epilogue
    M("l1_tile_without_fence", L1, "        " + FENCE, "", "race"),
    M(
        "l1_maxima_without_barrier",
        L1,
        "warp_.sync_warpgroup();\n#pragma unroll",
        "#pragma unroll",
        "race|misuse",
    ),
    M(
        "l1_store_before_written",
        L1,
        "warp_.sync_warpgroup();\n        if (issues_stores()) {",
        "if (issues_stores()) {",
        "race|misuse",
    ),
    M(
        "l1_publishes_before_written",
        L1,
        "ptx::cp_async_bulk_wait_group<0>();",
        "ptx::cp_async_bulk_wait_group_read<0>();",
        "race",
    ),
    M("l1_publishes_before_others", L1, "warp_.sync_all();", "", "race"),
    M(
        "l1_relaxed_publish",
        L1,
        "ptx::red_or_release_gpu(\n"
        "                local_.l2_arrival_mask(block.pool_block_idx, block.n_block_idx / 64),",
        "atomicOr(\n                reinterpret_cast<unsigned long long*>(local_.l2_arrival_mask("
        "block.pool_block_idx, block.n_block_idx / 64)),",
        "race",
    ),
    M(
        "l1_waits_for_too_few_stores",
        L1,
        "wait_group_read<Smem::num_store_slots - 1>",
        "wait_group_read<Smem::num_store_slots>",
        "race",
    ),
    M("l1_maxima_of_wrong_warp", L1, "warp_.warp_idx ^ 1", "warp_.warp_idx ^ 2", "result|race"),
    M("l1_scale_byte", L1, "[group_idx % 4]", "[(group_idx + 1) % 4]", "result|race"),
    M("l1_swizzle", L1, "& 0x30", "& 0x10", "result|race"),
    # ---- Linear2 epilogue
    M(
        "l2_one_row_too_many",
        L2,
        "row >= block.num_valid_rows",
        "row > block.num_valid_rows",
        "race|result|misuse",
    ),
    M(
        "l2_read_before_staged",
        L2,
        "warp_.sync_warpgroup();\n            write_tile",
        "write_tile",
        "race|misuse",
    ),
    M("l2_staged_before_read", L2, "if (tile_idx > 0) warp_.sync_warpgroup();", "", "race"),
    M(
        "l2_block_that_does_not_exist",
        L2,
        "exists ? warp_.num_tiles(block) : 0",
        "warp_.num_tiles(block)",
        "race|result|misuse",
    ),
    # ---- combine
    M(
        "handover_without_fence",
        "roles/handover.cuh",
        "    " + FENCE,
        "",
        "harmless: Combine::run executes fence.proxy.async for all spaces behind the barrier, and a "
        "fence anywhere between the accesses is enough; it stays for writers who fence what is theirs",
    ),
    M("combine_without_fence", COMBINE, "        ptx::fence_proxy_async();\n", "", "race"),
    M(
        "combine_buffer_read_without_fence",
        COMBINE,
        FENCE + "                __syncwarp();",
        "__syncwarp();",
        "race",
    ),
    M(
        "combine_buffer_read_without_syncwarp",
        COMBINE,
        FENCE + "                __syncwarp();",
        FENCE,
        "race",
    ),
    M(
        "combine_store_without_fence",
        COMBINE,
        FENCE + "        __syncwarp();",
        "__syncwarp();",
        "race",
    ),
    M(
        "combine_out_buffer_reused",
        COMBINE,
        "if (ptx::lane_idx() == 0) ptx::cp_async_bulk_wait_group_read<0>();",
        "",
        "race",
    ),
    M(
        "combine_exits_early",
        COMBINE,
        "if (ptx::lane_idx() == 0) ptx::cp_async_bulk_wait_group<0>();",
        "",
        "misuse",
        "late_copies",
    ),
    M("combine_parity", COMBINE, "num_loads_ / 2 % 2", "num_loads_ % 2", "race|timeout|misuse"),
    M("combine_unpacks_wrong", COMBINE, "pairs[j] << 16", "pairs[j] << 15", "result"),
    # ---- set-up
    M(
        "barriers_without_init_fence",
        SMEM,
        "ptx::fence_mbarrier_init_release_cluster();",
        "",
        "race",
    ),
    M(
        "full_barrier_count",
        SMEM,
        "Config::num_stages, 4)",
        "Config::num_stages, 3)",
        "misuse|race",
    ),
    M(
        "tmem_empty_barrier_count",
        SMEM,
        '2 * Config::num_epilogue_warps);\n        // "A contr',
        'Config::num_epilogue_warps);\n        // "A contr',
        "misuse|race",
    ),
    M(
        "set_up_without_cluster_barrier",
        "sm100/mega_moe.cuh",
        "ptx::barrier_cluster_arrive();\n    ptx::barrier_cluster_wait();\n    return",
        "__syncthreads();\n    return",
        "race|misuse",
    ),
    # ---- layouts
    M("tiles_overlap", RENDERED, "int weights_offset = ", "int weights_offset = -1024u + ", "race"),
    M(
        "tensor_memory_overlaps",
        RENDERED,
        "int activation_sf_column = ",
        "int activation_sf_column = -96u + ",
        "race|result|misuse",
    ),
    M(
        "barriers_overlap",
        RENDERED,
        "int combine_barriers_offset = ",
        "int combine_barriers_offset = -8u + ",
        "misuse",
    ),
    M(
        "map_stride",
        "jit/sm100_maps.py",
        "strides=(num_columns * data_type.bits // 8,)",
        "strides=(num_columns * data_type.bits // 8 + 16,)",
        "result|misuse|race",
    ),
    M(
        "map_box",
        "jit/sm100_maps.py",
        "half_m = config.block_m // 2",
        "half_m = config.block_m // 4",
        "misuse|timeout|race",
    ),
    M(
        "tensor_memory_kept",
        "sm100/mega_moe.cuh",
        "ptx::tcgen05_dealloc_cta_group2(tmem, Config::num_tmem_columns);",
        "",
        "misuse",
    ),
)

M = partial(Mutation, arch="sm_90a")
SM90_MUTATIONS = (
    # ---- products and their stages
    M(
        "stage_released_while_read",
        S90_LOOP,
        "if (group_idx == 2 && !is_first_stage) release(Ring::stage_before(stage.idx));",
        "if (group_idx == 2) release(stage.idx);",
        "race|misuse",
    ),
    M(
        "fragments_overwritten",
        S90_LOOP,
        "ptx::wgmma_wait_group<2>();",
        "ptx::wgmma_wait_group<3>();",
        "race",
    ),
    M(
        "fragments_overwritten_in_a_loop_of_one_size",
        S90_LOOP,
        "ptx::wgmma_wait_group<num_groups_in_registers - 1>();",
        "ptx::wgmma_wait_group<num_groups_in_registers>();",
        "race",
        one_size=96,
    ),
    M(
        "fragments_overwritten_where_products_go_one_by_one",
        S90_LOOP,
        "ptx::wgmma_wait_group<num_groups_in_registers - 1>();",
        "ptx::wgmma_wait_group<num_groups_in_registers>();",
        "race",
        one_size=168,
    ),
    M(
        "stage_released_one_group_too_early",
        S90_LOOP,
        "if (group_idx == 2 &&",
        "if (group_idx == 1 &&",
        "race",
        one_size=96,
    ),
    M(
        "accumulators_read_early",
        S90_LOOP,
        "ptx::wgmma_wait_group<0>();\n        ptx::wgmma_keep_order(upper)",
        "ptx::wgmma_wait_group<1>();\n        ptx::wgmma_keep_order(upper)",
        "race",
    ),
    M("products_without_fence", S90_LOOP, "        ptx::wgmma_fence();\n", "", "race"),
    M(
        "rescaled_while_multiplied",
        S90_LOOP,
        "                ptx::wgmma_wait_group<0>();\n                rescale",
        "                rescale",
        "race",
    ),
    M("stage_not_awaited", S90_LOOP, "if (!next_is_loaded) await_stage();", "", "race"),
    M("stage_asked_for_in_vain", S90_LOOP, "if (!next_is_loaded)", "if (next_is_loaded)", "race"),
    M(
        "parity_of_the_stage_before",
        S90_LOOP,
        "full_barrier(ring_.stage), ring_.parity);",
        "full_barrier(ring_.stage), ring_.parity ^ 1);",
        "race",
    ),
    M("one_warp_releases", S90_LOOP, "thread_idx_ % warp_size == 0", "thread_idx_ == 0", "timeout"),
    M(
        "every_lane_releases",
        S90_LOOP,
        "if (thread_idx_ % warp_size == 0) ptx::",
        "ptx::",
        "misuse",
    ),
    M("last_stage_kept", S90_LOOP, "        release(stage.idx);\n", "", "timeout"),
    M(
        "k_step_of_descriptor",
        S90_LOOP,
        "(first_mma + i) * (mma_k >> 4)",
        "(first_mma + i) * (mma_k >> 5)",
        "result",
    ),
    M(
        "descriptor_stride",
        S90_LOOP,
        "stride = 1024 >> 4",
        "stride = 512 >> 4",
        "result",
    ),
    M(
        "one_half_not_rescaled",
        S90_LOOP,
        "                rescale(smem_, stage.idx, lower);\n",
        "",
        "result",
    ),
    M(
        "sign_of_upper_nibbles",
        S90_DECODE,
        "((word << 4) & 0x80808080u)",
        "((word << 3) & 0x80808080u)",
        "result",
    ),
    # ---- set-up
    M(
        "empty_barrier_count",
        S90_SMEM,
        "Config::num_stages, Config::num_epilogue_warps)",
        "Config::num_stages, Config::num_epilogue_warps / 2)",
        "race|misuse",
    ),
    M(
        "barrier_of_last_stage",
        S90_SMEM,
        "init(Smem::full_barriers_offset, Config::num_stages, 2)",
        "init(Smem::full_barriers_offset, Config::num_stages - 1, 2)",
        "misuse",
    ),
    M(
        "barriers_without_init_fence",
        S90_SMEM,
        "        ptx::fence_mbarrier_init_release_cluster();\n",
        "",
        "harmless: a CTA that uses its own barriers behind a barrier of the CTA does without; NVIDIA's "
        "tutorials do",
    ),
    M(
        "set_up_without_barrier",
        S90_KERNEL,
        "    ptx::bar_sync(NamedBarrier::cta, Config::num_threads);\n",
        "",
        "misuse|race",
    ),
    M(
        "loaders_keep_registers",
        S90_KERNEL,
        "        set_registers<Config, Config::num_dispatch_registers>();\n"
        "        if (warp_idx < Roles::activation_loader) {\n",
        "        if (warp_idx < Roles::activation_loader) {\n"
        "            set_registers<Config, Config::num_dispatch_registers>();\n",
        "misuse",
    ),
    M(
        "registers_beyond_the_pool",
        S90_KERNEL,
        "set_registers<Config, Config::num_epilogue_registers>()",
        "set_registers<Config, Config::num_epilogue_registers + 32>()",
        "misuse",
    ),
    # ---- loaders
    M(
        "stage_overwritten",
        S90_LOAD_A,
        "            if (!waiter.warp_mbarrier(WaitSite::activation_stage_empty,\n"
        "                                      smem.empty_barrier(ring.stage), ring.parity ^ 1)) {\n"
        "                return;\n"
        "            }\n"
        "            if (k_block_idx == 0) {",
        "            if (k_block_idx == 0) {",
        "race",
    ),
    M(
        "no_scale_may_change",
        S90_LOAD_A,
        "store_change_of_scale(smem, ring.stage, has_own_scales);",
        "store_change_of_scale(smem, ring.stage, false);",
        "result",
    ),
    M(
        "arrival_without_syncwarp",
        S90_LOAD_A,
        "            __syncwarp();\n            if (ptx::elect_sync()) {\n                const uint32_t full",
        "            if (ptx::elect_sync()) {\n                const uint32_t full",
        "race",
    ),
    M(
        "factors_not_expected",
        S90_LOAD_A,
        "copy.num_bytes() + 2 * token_vector_bytes",
        "copy.num_bytes() + token_vector_bytes",
        "misuse",
    ),
    M(
        "destinations_of_padding",
        S90_LOAD_A,
        "if (row < num_valid_rows) {",
        "if (row < Config::block_m) {",
        "race|misuse",
    ),
    M(
        "header_after_arrival",
        S90_LOAD_W,
        "    store_header(smem.block_header(slot), header);\n    ptx::mbarrier_arrive(smem.header_barrier(slot));",
        "    ptx::mbarrier_arrive(smem.header_barrier(slot));\n    store_header(smem.block_header(slot), header);",
        "race",
    ),
    M(
        "first_blocks_claimed_again",
        S90_CLAIMS,
        "Config::num_sms + __shfl_sync",
        "__shfl_sync",
        "race|misuse|timeout",
    ),
    M(
        "claim_by_every_lane",
        S90_CLAIMS,
        "if (ptx::lane_idx() == 0) claimed_",
        "claimed_",
        "timeout|misuse|result",
    ),
    M(
        "clean_up_forgets_claims",
        CLEANUP,
        "zero(local.num_claimed_blocks(), 1, thread_idx, num_threads);",
        "",
        "result|timeout|race|misuse",
    ),
    M(
        "weights_not_expected",
        S90_LOAD_W,
        "ptx::mbarrier_arrive_expect_tx(full, weight_block_bytes);",
        "ptx::mbarrier_arrive(full);",
        "race|misuse",
    ),
    M(
        "slot_ring_one_short",
        S90_WARPS,
        "return block_idx_ % Config::num_block_slots",
        "return block_idx_ % (Config::num_block_slots - 1)",
        "race|misuse",
    ),
    M("second_box_not_copied", S90_COPY, "if (has_second_box_) copy(box_rows);", "", "misuse"),
    M("second_box_is_the_first", S90_COPY, "copy(box_rows);", "copy(0);", "result|misuse"),
    M(
        "block_ends_too_late",
        S90_COPY,
        "num_valid_rows_(block.num_valid_rows)",
        "num_valid_rows_(block.num_rows)",
        "harmless: what the rows behind the last token hold costs energy, but goes nowhere; "
        "test_sm90_tile_copy notices",
    ),
    M(
        "block_begins_too_early",
        S90_COPY,
        "num_valid_rows_ + row,",
        "num_valid_rows_ + row + 1,",
        "result|misuse",
    ),
    M(
        "bytes_of_full_tile",
        S90_COPY,
        "Config::block_m : box_rows",
        "Config::block_m : Config::block_m",
        "misuse",
    ),
    # ---- epilogues
    M(
        "maxima_without_barrier",
        S90_L1,
        "        if (!thread_.vote(waiter)) return false;\n",
        "",
        "race",
    ),
    M(
        "factors_without_barrier",
        S90_L1,
        "        choose_scales(block);\n        thread_.sync();",
        "        choose_scales(block);",
        "race",
    ),
    M(
        "stored_before_other_lanes",
        S90_WARPS,
        "                __syncwarp();\n                if (Thread::here().lane_idx() == 0) {",
        "                if (Thread::here().lane_idx() == 0) {",
        "race",
    ),
    M(
        "publishes_before_stored",
        S90_PUBLISH,
        "        const bool stored = waiter.warp_mbarrier(WaitSite::results_stored,\n"
        "                                                 smem_.stored_barrier(done.stage), done.parity);",
        "        const bool stored = true;",
        "race|misuse",
    ),
    M(
        "math_publishes_before_others",
        S90_L1,
        "            thread_.sync();\n            if (thread_.thread_idx == 0) publish",
        "            if (thread_.thread_idx == 0) publish",
        "race",
        one_size=8,
    ),
    M(
        "publishes_behind_next_block",
        S90_PUBLISH,
        "return min(Config::num_stages, num_k_blocks - 1);",
        "return num_k_blocks;",
        "timeout|misuse",
    ),
    M(
        "stored_without_one_warp",
        S90_SMEM,
        "init(Smem::stored_barriers_offset, Config::num_block_slots, Config::num_epilogue_warps);",
        "init(Smem::stored_barriers_offset, Config::num_block_slots, Config::num_epilogue_warps - 1);",
        "race|misuse|timeout",
    ),
    M(
        "publishes_to_its_cta",
        "ptx/atomics.cuh",
        "red.or.release.gpu.global.b64",
        "red.or.release.cta.global.b64",
        "race",
    ),
    M(
        "maxima_cleared_in_use",
        S90_WARPS,
        "clear_maxima(smem_, Thread::here(), turn() ^ 1)",
        "clear_maxima(smem_, Thread::here(), turn())",
        "race",
    ),
    M(
        "own_scale_not_told",
        S90_L1,
        "            ptx::red_or_relaxed_gpu(local_.l1_arrival_count(block.pool_block_idx),\n"
        "                                    SymmBuffer<Config>::has_own_scales);\n",
        "",
        "result",
    ),
    M(
        "rows_that_do_not_exist",
        S90_L2,
        "if (Config::hidden % Config::block_n != 0 && column >= Config::hidden) return;",
        "",
        "race|result|misuse",
    ),
    # ---- dispatch
    M(
        "rewritten_without_fence",
        S90_PULL,
        "        ptx::fence_proxy_async_shared_cta();\n",
        "",
        "race",
    ),
    M(
        "rewritten_before_read",
        S90_PULL,
        "                __syncwarp();  // the block's words have been read\n",
        "",
        "race",
    ),
    M(
        "scale_of_other_group",
        S90_PULL,
        "(scales >> (8 * group))",
        "(scales >> (8 * (group ^ 1)))",
        "result",
    ),
    M(
        "warps_share_a_pull_barrier",
        DISPATCH,
        "pull_barriers_offset + warp_idx * sizeof(uint64_t)",
        "pull_barriers_offset",
        "misuse|race|timeout",
    ),
    M(
        "counted_without_atomics",
        COUNT,
        "ptx::red_add_shared(expert_counts + expert_idx * sizeof(uint32_t), 1);",
        "counts[expert_idx] += 1;",
        "race",
    ),
    M("unused_slot_counted", "roles/routing.cuh", "expert_idx >= 0 && ", "", "misuse"),
    M(
        "unused_slot_added",
        COMBINE,
        "is_routed<Config>(*local_.input_topk_idx(token_idx * Config::num_topk + slot));",
        "true;",
        "result",
    ),
    M(
        "lists_of_wrong_rank",
        COUNT,
        "buffers.rank_idx(),\n                                      list_idx",
        "1 - buffers.rank_idx(),\n                                      list_idx",
        "race|result",
    ),
    M(
        "received_counts_kept",
        CLEANUP,
        "    zero(local.expert_recv_count(0, 0), Config::num_ranks * Config::num_experts_per_rank,\n"
        "         thread_idx, num_threads);\n",
        "",
        "harmless: every call overwrites them before it reads them; zeros only tell a rank that runs "
        "out of time who has not published",
    ),
    M(
        "valid_rows_of_last_block",
        "scheduler.cuh",
        "num_expert_tokens - first_pool_block * Config::block_m_step, block.num_rows);",
        "num_expert_tokens, block.num_rows);",
        "timeout|race|misuse|result",
    ),
    # ---- barriers
    M(
        "grid_arrival_relaxed",
        "ptx/atomics.cuh",
        "atom.add.acq_rel.gpu",
        "atom.add.relaxed.gpu",
        "race",
    ),
    M(
        "grid_arrival_of_cta_scope",
        "ptx/atomics.cuh",
        "atom.add.acq_rel.gpu",
        "atom.add.acq_rel.cta",
        "race",
    ),
    M(
        "l2_wait_of_cta_scope",
        "ptx/ld_st.cuh",
        '"ld.acquire.gpu.global.u64',
        '"ld.acquire.cta.global.u64',
        "race",
    ),
    M(
        "vote_without_syncwarp",
        "sync/wait.cuh",
        "        __syncwarp();  // orders memory, which the vote does not\n",
        "",
        "harmless: another __syncwarp or barrier stands between every such wait and what other lanes "
        "than the first make of it; it is there for waits to come",
    ),
    M(
        "statistics_of_every_warp",
        CLEANUP,
        "if (stats == nullptr || thread_idx >= warp_size) return;",
        "if (stats == nullptr) return;",
        "result",
    ),
    # ---- layouts
    M(
        "factors_overlap_weights",
        RENDERED,
        "int rescale_factors_offset = ",
        "int rescale_factors_offset = -64u + ",
        "race|result",
    ),
    M(
        "map_of_wrong_pool",
        "jit/sm90_maps.py",
        '"l2_activations": pool("l2_tokens")',
        '"l2_activations": pool("l1_tokens")',
        "race|result|misuse",
    ),
    # ---- input preparation, a kernel of its own
    M(
        "maximum_of_two_lanes",
        PREPARATION,
        "lane_mask < lanes_per_scale;",
        "lane_mask < lanes_per_scale / 2;",
        "result",
    ),
    M(
        "sign_in_maximum",
        PREPARATION,
        "pair << 16 & 0x7fff0000u",
        "pair << 16 & 0xffff0000u",
        "result",
    ),
    M(
        "chunks_behind_the_last_read",
        PREPARATION,
        "chunks_[i] = is_valid(i) ? x[chunk_idx(i)] : uint4{};",
        "chunks_[i] = x[chunk_idx(i)];",
        "misuse",
    ),
    M(
        "chunks_behind_the_last_written",
        PREPARATION,
        "            if (!is_valid(i)) continue;\n",
        "",
        "misuse",
    ),
)
MUTATIONS = SM100_MUTATIONS + SM90_MUTATIONS
