"""Choices and limits for the SM90 kernel."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from .choices import (
    MIN_STAGES,
    ConfigFields,
    FieldChoices,
    check_index_ranges,
    check_registers,
    choose_blocks,
    choose_combine_chunks,
    choose_stages,
    choose_waves,
    divisors,
    neighbours,
)
from .segments import Layout, align_up, ceil_div
from .shape import MoEShape
from .smem_layout import sm90_smem_layout

SMEM_CAPACITY = 227 * 1024  # what one CTA of sm_90 may opt in to
DEFAULT_NUM_SMS = 132  # H100 and H200
# Measured on an H200 on 2026-11-20: sharing tokens or weights among 2 CTAs changed the rate of
# prefill by -3 to 0 %, among 4 by -30 %. The chip is bound by power there, not by copies.
CLUSTER_SIZE = 1
BLOCK_N = (
    256  # two math warpgroups of two 64-row products each; 128 rows read tokens twice as often
)
NUM_DISPATCH_WARPS = 2
NUM_LOADER_WARPS = 2  # activations, weights; in one warpgroup with dispatch
NUM_MATH_WARPS = 8

# Tokens per tile, which is the N of wgmma. With 160 the compiler no longer overlaps the products
# with anything else (232 registers are a few short of what both phases need beside the
# accumulators): on an H200, 2026-11-20, a layer of deepseek-v4-pro with 8192 tokens ran 7 % slower
# with it than with 128.
BLOCK_MS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
# Tiles of different sizes in one kernel: of up to this many tokens, in such steps. Each size is a
# main loop of its own; with steps of 16 the compiler no longer overlaps the products.
MIXED_BLOCK_M = 128
MIXED_BLOCK_M_STEP = 32
# Tiles of one size, and how many standard deviations more tokens than an expert expects they have
# to hold to be chosen. 80: on an H200, 2026-11-21, 64 tokens per expert of deepseek-v4-pro took 3 %
# less with it than with tiles of different sizes, 96 of deepseek-v4-flash 42 % more.
SINGLE_BLOCK_MS = {8: 3, 16: 3, 24: 3, 32: 3, 40: 3, 48: 3, 56: 3, 64: 3, 80: 2}
# Waves of this many Linear1 blocks per SM: with fewer, tiles of different sizes leave SMs waiting
# for Linear1 at a wave's end (H200, 2026-11-21: 1 to 2 % at 2048 tokens).
BLOCKS_PER_SM_AND_WAVE = 6

OVERRIDABLE = (
    "num_sms",
    "block_m",
    "block_m_step",
    "num_stages",
    "num_experts_per_wave",
    "num_dispatch_registers",
    "num_epilogue_registers",
    "num_combine_chunks",
)
TUNABLE = ("block_m", "num_experts_per_wave", "num_stages")
ROLES = ("dispatch", "loaders", "math and epilogue")


def warp_roles(fields: Mapping[str, int | float | bool]) -> dict[str, range]:
    """Which warps of a CTA do what, as the role table of sm90/mega_moe.cuh has it."""
    loader = int(fields["num_dispatch_warps"])
    math_warps = loader + NUM_LOADER_WARPS
    return {
        "dispatch": range(loader),
        "activation loader": range(loader, loader + 1),
        "weight loader": range(loader + 1, loader + 2),
        "math": range(math_warps, math_warps + int(fields["num_epilogue_warps"])),
    }


def choose_block_m(expected: Fraction) -> int:
    """The smallest tile that holds two or three standard deviations more tokens than an expert
    expects.

    Routing scatters the tokens of an expert like a Poisson count. A second tile would read the
    expert's weights again, which costs more than to multiply with rows that are not used. With more
    tokens than one small tile holds, tiles of different sizes fit each expert.

    >>> [choose_block_m(Fraction(m)) for m in (0, 2, 3, 7, 8, 12, 18, 19, 31, 44, 45, 65, 512)]
    [8, 8, 16, 16, 24, 24, 32, 40, 48, 64, 80, 128, 128]
    """
    for block_m, num_deviations in SINGLE_BLOCK_MS.items():
        margin = block_m - expected
        if margin >= 0 and margin**2 >= num_deviations**2 * expected:
            return block_m
    return MIXED_BLOCK_M


def num_block_slots(config: ConfigFields) -> int:
    """Blocks whose headers and factors lie in shared memory: the one that math is at, and those
    that the loaders may have begun while their stages are not given back."""
    num_k_blocks = min(int(config["num_l1_k_blocks"]), int(config["num_l2_k_blocks"]))
    # One stage more, because a slot may be written before its block's first stage is waited for.
    return 1 + ceil_div(int(config["num_stages"]) + 1, num_k_blocks)


def smem_layout(config: ConfigFields) -> Layout:
    """Shared memory of a config, given by its fields."""
    names = (
        "num_experts",
        "hidden",
        "num_dispatch_warps",
        "num_epilogue_warps",
        "block_m",
        "block_n",
        "block_k",
        "num_stages",
    )
    return sm90_smem_layout(
        **{name: int(config[name]) for name in names}, num_block_slots=num_block_slots(config)
    )


def tmem_layout(config: ConfigFields) -> None:
    """SM90 has no tensor memory."""


def choose_fields(
    shape: MoEShape,
    num_tokens: int,
    *,
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
    choose("cluster_size", CLUSTER_SIZE, "sharing tiles among CTAs measured no faster")

    expected = shape.expected_tokens_per_expert(num_tokens)
    block_m = choose(
        "block_m",
        choose_block_m(expected),
        f"{float(expected):.4g} tokens per expert expected, and 3 standard deviations on top",
    )
    if block_m not in BLOCK_MS:
        raise ValueError(f"block_m must be one of {', '.join(map(str, BLOCK_MS))}; got {block_m}")
    steps = {block_m: "all m-blocks have the same size"}
    if block_m == MIXED_BLOCK_M:
        steps = {
            MIXED_BLOCK_M_STEP: "m-blocks are fitted to each expert's tokens, in these steps",
            **steps,
        }
    block_m_step = choose("block_m_step", *next(iter(steps.items())))
    if block_m_step not in steps:
        raise ValueError(
            f"block_m_step must be {' or '.join(map(str, steps))} with block_m {block_m}; "
            f"got {block_m_step}"
        )
    is_mixed = block_m_step != block_m
    choose("store_block_m", block_m, "block_m: the epilogue stores whole tiles")
    choose_blocks(
        shape,
        choices,
        block_n=BLOCK_N,
        block_n_reason="weight rows of two math warpgroups, 128 each",
    )

    choose("num_dispatch_warps", NUM_DISPATCH_WARPS, "half of a warpgroup, beside the loaders")
    choose("num_epilogue_warps", NUM_MATH_WARPS, "two math warpgroups, which also do the epilogue")
    choose(
        "num_threads",
        32 * (NUM_DISPATCH_WARPS + NUM_LOADER_WARPS + NUM_MATH_WARPS),
        f"{NUM_DISPATCH_WARPS} dispatch + {NUM_LOADER_WARPS} loader + {NUM_MATH_WARPS} math warps",
    )
    num_registers = choose(
        "num_dispatch_registers",
        56 if is_mixed else 72,
        "what the math warps leave of a CTA's registers",
    )
    choose("num_loader_registers", num_registers, "of dispatch: one warpgroup, one budget")
    choose(
        "num_epilogue_registers",
        224 if is_mixed else 216,
        "accumulators and decoded weights of the math warps"
        + (", with a main loop for each size of m-block" if is_mixed else ""),
    )
    names = ("num_dispatch_registers", "num_loader_registers", "num_epilogue_registers")
    check_registers(
        {name: choices.fields[name] for name in names},
        (NUM_DISPATCH_WARPS, NUM_LOADER_WARPS, NUM_MATH_WARPS),
    )

    choose("num_tmem_stages", 0, "SM90 has no tensor memory")
    choose("num_tmem_columns", 0, "SM90 has no tensor memory")

    choose_waves(shape, expected, choices, blocks_per_sm=BLOCKS_PER_SM_AND_WAVE)
    choose_stages(shape, smem_capacity, smem_layout, choices)
    choose(
        "num_block_slots",
        num_block_slots(choices.fields),
        "the block that math is at, and those that the stages may belong to",
    )
    choose_combine_chunks(shape, smem_layout, choices)
    return choices.fields, choices.reasons


def candidates(shape: MoEShape, chosen: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Other values of each tunable field that are worth measuring beside the `chosen` ones.

    >>> shape = MoEShape(4, 256, 6, 4096, 2048, 64)
    >>> sizes = candidates(shape, {"block_m": 8, "num_experts_per_wave": 32, "num_stages": 12})
    >>> sizes["num_experts_per_wave"], sizes["num_stages"]
    ((64, 16, 8), (11, 10))
    """
    num_stages = chosen["num_stages"]
    return {
        "block_m": neighbours(BLOCK_MS, chosen["block_m"], 3),
        "num_experts_per_wave": neighbours(
            divisors(shape.num_experts_per_rank), chosen["num_experts_per_wave"], 2
        ),
        # More do not fit. Fewer leave combine larger chunks and less to fill at first.
        "num_stages": neighbours(range(MIN_STAGES, num_stages + 1), num_stages, 2),
    }
