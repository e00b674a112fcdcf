"""Choices and limits for the SM90 kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from deep_moe.tokens import token_format

from .choices import (
    MIN_STAGES,
    ConfigFields,
    FieldChoices,
    check_index_ranges,
    check_registers,
    choose_blocks,
    choose_combine_chunks,
    choose_ring,
    choose_shared_parts,
    choose_stages,
    choose_turns,
    neighbours,
)
from .segments import Layout, align_up, ceil_div
from .shape import MoEShape
from .sm90_tiles import (
    BLOCK_MS,
    MMAS_PER_K_BLOCK,
    NUM_OTHER_REGISTERS,
    PAIRED_LOOP_REGISTERS,
    SharedWork,
    WeightKind,
    choose_tile,
    num_mmas_per_group,
    shares_copies,
    smallest_rows,
    wide_tiles,
)
from .smem_layout import sm90_smem_layout

SMEM_CAPACITY = 227 * 1024  # what one CTA of sm_90 may opt in to
DEFAULT_NUM_SMS = 132  # H100 and H200
# A cluster's CTAs share copies of weights. Decoded weights do not gain from that: prefill is bound
# by power there, not by copies (H200, 2026-11-20, and the whole kernel again on 2026-11-23).
CLUSTER_SIZES = (1, 2)
BLOCK_N = (
    256  # two math warpgroups of two 64-row products each; 128 rows read tokens twice as often
)
NUM_DISPATCH_WARPS = 2
# Rows of the widest tile whose blocks a dispatch warp publishes. With INT4 weights an H200 gains 3
# to 7 % by it, with FP8 nothing (2026-11-28, benchmarks/LOG.md). Wider tiles were not timed.
MAX_PUBLISHED_ROWS = 32
NUM_LOADER_WARPS = 2  # activations, weights; in one warpgroup with dispatch
NUM_MATH_WARPS = 8

# Where experts have few tokens, the layers go one after the other in long turns: the links are not
# full, and weights are read one layer at a time (H200, 2026-11-22: benchmarks/LOG.md).
BLOCKS_PER_SM_IN_TURN = 6
# Of a token in combine, with the smallest tiles (H200, 2026-11-22: 7 and 8 are no better, fewer are
# 1 to 3 % slower with one token).
COMBINE_CHUNKS_OF_FEW_TOKENS = 4


OVERRIDABLE = (
    "num_sms",
    "block_m",
    "block_m_step",
    "num_stages",
    "num_turn_m_blocks",
    "num_lead_m_blocks",
    "num_unit_m_blocks",
    "num_experts_per_part",
    "num_part_m_blocks",
    "num_publish_warps",
    "num_dispatch_registers",
    "num_epilogue_registers",
    "num_combine_chunks",
    "cluster_size",
)
TUNABLE = ("block_m", "num_stages")
ROLES = ("dispatch", "loaders", "math and epilogue")


def warp_roles(fields: ConfigFields) -> dict[str, range]:
    """Which warps of a CTA do what, as the role table of kernels/sm90_mega_moe.cuh has it."""
    loader = int(fields["num_dispatch_warps"])
    math_warps = loader + NUM_LOADER_WARPS
    return {
        "dispatch": range(loader),
        "activation loader": range(loader, loader + 1),
        "weight loader": range(loader + 1, loader + 2),
        "math": range(math_warps, math_warps + int(fields["num_epilogue_warps"])),
    }


def _register_words(kind: WeightKind) -> str:
    """What takes most of a math thread's registers."""
    if kind.is_decoded:
        return "accumulators and decoded weights"
    return "sums and products" if kind.has_block_scales else "accumulators"


def num_block_slots(config: ConfigFields) -> int:
    """Blocks whose headers and factors lie in shared memory: the one that math is at, and those
    that the loaders may have begun while their stages are not given back."""
    num_k_blocks = min(int(config["num_l1_k_blocks"]), int(config["num_l2_k_blocks"]))
    # One stage more, because a slot may be written before its block's first stage is waited for.
    return 1 + ceil_div(int(config["num_stages"]) + 1, num_k_blocks)


def smem_layout(config: ConfigFields, kind: WeightKind) -> Layout:
    """Shared memory of a config, given by its fields."""
    names = (
        "num_experts",
        "hidden",
        "num_dispatch_warps",
        "num_publish_warps",
        "num_epilogue_warps",
        "block_m",
        "block_n",
        "block_k",
        "num_stages",
    )
    return sm90_smem_layout(
        **{name: int(config[name]) for name in names},
        num_block_slots=num_block_slots(config),
        weight_block_bytes=kind.block_bytes,
        has_row_factors=kind.has_row_factors,
        has_biases=bool(config["biases"]),
        has_gate=bool(config["has_gate"]),
        cluster_size=int(config["cluster_size"]),
        has_block_scales=kind.has_block_scales,
        tokens=token_format(str(config["token_format"])),
    )


def tmem_layout(config: ConfigFields) -> None:
    """SM90 has no tensor memory."""


def choose_fields(
    shape: MoEShape,
    num_tokens: int,
    kind: WeightKind,
    *,
    is_uneven: bool,
    num_sms: int,
    smem_capacity: int,
    overrides: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, str]]:
    """All fields that are not given by the problem, and the reason of each."""
    choices = FieldChoices(overrides)
    choose = choices.choose

    check_index_ranges(shape, l2_rows_per_expert=align_up(shape.hidden, BLOCK_N))
    choose("num_sms", num_sms, "one CTA per SM of the device, all resident at once")
    if num_sms < 1:
        raise ValueError(f"num_sms must be at least 1; got {num_sms}")
    expected = shape.expected_tokens_per_expert(num_tokens)
    allowed_rows = sorted({rows for rows, _ in kind.tiles})
    choose_shared_parts(shape, choices)
    shared = SharedWork.of(shape, num_tokens, choices.fields)
    chooses_from = kind
    if not shape.has_gate and shape.tokens.has_scales:
        chooses_from = replace(kind, spared_tiles=(*kind.spared_tiles, *wide_tiles(kind)))
    chosen_block_m, chosen_step = choose_tile(expected, chooses_from, is_uneven, shared)
    block_m = choose(
        "block_m",
        chosen_block_m,
        f"least expected cost with {float(expected):.4g} tokens per expert"
        + (", unevenly" if is_uneven else "")
        + (f", and {num_tokens} per shared expert" if shared else ""),
    )
    if block_m not in allowed_rows:
        raise ValueError(
            f"block_m must be one of {', '.join(map(str, allowed_rows))}; got {block_m}"
        )
    _choose_clusters(choices, kind, has_two_m_blocks=shares_copies(kind, expected, block_m))
    default_step = chosen_step if block_m == chosen_block_m else block_m
    block_m_step = choose(
        "block_m_step",
        default_step,
        "all m-blocks have the same size"
        if default_step == block_m
        else "m-blocks are fitted to each expert's tokens",
    )
    steps = [step for tile, step in kind.tiles if tile == block_m]
    if block_m_step not in steps:
        raise ValueError(
            f"block_m_step must be {' or '.join(map(str, steps))} with block_m {block_m}; "
            f"got {block_m_step}"
        )
    min_block_m = choose(
        "min_block_m",
        smallest_rows(block_m, block_m_step),
        "all m-blocks have the same size"
        if block_m_step == block_m
        else "as many sizes as one kernel has registers for",
    )
    is_mixed = min_block_m != block_m
    choose_blocks(
        shape,
        choices,
        block_n=BLOCK_N,
        block_n_reason="weight rows of two math warpgroups, 128 each",
    )

    choose("num_dispatch_warps", NUM_DISPATCH_WARPS, "half of a warpgroup, beside the loaders")
    # In clusters a call that is given up would write a stage again before its first copy has come
    # (test_every_role_leaves_wherever_it_stands). They were not timed, either.
    is_small = block_m <= MAX_PUBLISHED_ROWS and choices.fields["cluster_size"] == 1
    num_publish_warps = choose(
        "num_publish_warps",
        1 if is_small else 0,
        "of dispatch: memory bounds blocks of few rows, and no load is to wait for a release"
        if is_small
        else "the weight loader publishes, and all dispatch warps pull",
    )
    if num_publish_warps not in (0, 1):
        raise ValueError(f"num_publish_warps must be 0 or 1; got {num_publish_warps}")
    choose("num_epilogue_warps", NUM_MATH_WARPS, "two math warpgroups, which also do the epilogue")
    choose(
        "num_threads",
        32 * (NUM_DISPATCH_WARPS + NUM_LOADER_WARPS + NUM_MATH_WARPS),
        f"{NUM_DISPATCH_WARPS} dispatch + {NUM_LOADER_WARPS} loader + {NUM_MATH_WARPS} math warps",
    )
    needed_registers = kind.math_registers(block_m, block_m_step)
    num_registers = choose(
        "num_dispatch_registers",
        NUM_OTHER_REGISTERS[needed_registers],
        "what the math warps leave of a CTA's registers",
    )
    choose("num_loader_registers", num_registers, "of dispatch: one warpgroup, one budget")
    math_registers = choose(
        "num_epilogue_registers",
        needed_registers,
        f"{_register_words(kind)} of the math warps"
        + (", with a main loop for each size of m-block" if is_mixed else ""),
    )
    mmas_per_group = choose(
        "num_mmas_per_group",
        num_mmas_per_group(block_m, math_registers) if kind.is_decoded else MMAS_PER_K_BLOCK,
        f"{math_registers - block_m} registers beside the accumulators; pairs of products need "
        f"{PAIRED_LOOP_REGISTERS}"
        if kind.is_decoded
        else "all of a k-block"
        + (", whose sums are added up in registers" if kind.has_block_scales else ""),
    )
    if is_mixed and mmas_per_group == 1:
        raise ValueError(
            f"num_epilogue_registers must be at least {block_m + PAIRED_LOOP_REGISTERS} with "
            f"block_m_step {block_m_step}; got {math_registers}"
        )
    names = ("num_dispatch_registers", "num_loader_registers", "num_epilogue_registers")
    check_registers(
        {name: choices.fields[name] for name in names},
        (NUM_DISPATCH_WARPS, NUM_LOADER_WARPS, NUM_MATH_WARPS),
    )

    choose_ring(shape, choices, sf_columns_per_block=block_m_step)
    choose_turns(shape, expected, choices, blocks_per_sm=BLOCKS_PER_SM_IN_TURN)
    layout = partial(smem_layout, kind=kind)
    choose_stages(shape, smem_capacity, layout, choices)
    choose(
        "num_block_slots",
        num_block_slots(choices.fields),
        "the block that math is at, and those that the stages may belong to",
    )
    choose_combine_chunks(
        shape,
        layout,
        choices,
        num_min_chunks=COMBINE_CHUNKS_OF_FEW_TOKENS if block_m == min(BLOCK_MS) else 1,
    )
    return choices.fields, choices.reasons


def _choose_clusters(choices: FieldChoices, kind: WeightKind, *, has_two_m_blocks: bool) -> None:
    """Needs num_sms. has_two_m_blocks: whether about half of the experts or more are expected to.

    On an H200 (2026-11-23, benchmarks/LOG.md) clusters take 1 to 9 % less time from there on with
    weights that come as they are, up to 1 % more below, and with decoded weights next to nothing.
    """
    num_sms = choices.fields["num_sms"]
    if not kind.shares_weights:
        chosen, reason = 1, "sharing decoded weights among CTAs measured no faster"
    elif not has_two_m_blocks:
        chosen, reason = 1, "most experts have one m-block, with nobody to share weights"
    elif num_sms % 2:
        chosen, reason = 1, "an odd number of SMs"
    else:
        chosen, reason = 2, "experts have two m-blocks and more, which share copies of weights"
    cluster_size = choices.choose("cluster_size", chosen, reason)
    if cluster_size not in CLUSTER_SIZES:
        raise ValueError(f"cluster_size must be 1 or 2; got {cluster_size}")
    if num_sms % cluster_size != 0:
        raise ValueError(f"num_sms must be even with cluster_size 2; got {num_sms}")
    choices.choose(
        "num_cluster_m_blocks",
        cluster_size,
        "CTAs share nothing"
        if cluster_size == 1
        else "CTAs of a cluster share an n-block's weights",
    )


def candidates(
    shape: MoEShape, chosen: Mapping[str, int], kind: WeightKind
) -> dict[str, tuple[int, ...]]:
    """Other values of each tunable field that are worth measuring beside the `chosen` ones."""
    num_stages = chosen["num_stages"]
    block_ms = sorted({rows for rows, _ in kind.tiles})
    return {
        "block_m": neighbours(block_ms, chosen["block_m"], 3),
        # More do not fit. Fewer leave combine larger chunks and less to fill at first.
        "num_stages": neighbours(range(MIN_STAGES, num_stages + 1), num_stages, 2),
    }
