"""Shared memory of one CTA, from the 1024-aligned start of dynamic memory: a map per kernel.

The mark `barriers_offset` is the first barrier: combine reuses all that lies before it.
"""

from __future__ import annotations

from functools import lru_cache

from deep_moe.tokens import TokenFormat

from .segments import Layout, LayoutBuilder, align_up

SWIZZLE_ALIGNMENT = 1024  # a 128-byte swizzle pattern repeats every 1024 bytes
BULK_COPY_ALIGNMENT = 128
WARP_VALUES = 16  # of Linear1's output that a warp of SM100's epilogue makes of a token
# Of SM100's clusters: the pair that is loaded, two that are multiplied or wait for the epilogue,
# and one in the epilogue.
NUM_PAIR_SLOTS = 4
NUM_COMBINE_SLOTS = 3  # two being loaded in turn, one being stored

# To find the most stages that fit, a few layouts are asked for: most of what a config costs. The
# next number of tokens asks for the same ones.
_remembered = lru_cache(maxsize=1024)


@_remembered
def sm100_smem_layout(
    *,
    num_experts: int,
    hidden: int,
    num_dispatch_warps: int,
    num_epilogue_warps: int,
    block_m: int,
    block_n: int,
    block_k: int,
    store_block_m: int,
    num_stages: int,
    num_tmem_stages: int,
    tokens: TokenFormat,
    decoded_block_bytes: int = 0,
) -> Layout:
    """The SM100 kernel's. tokens: what tokens and Linear1's output are. decoded_block_bytes: of a
    stage's weights where these are decoded, else 0."""
    num_warpgroups = num_epilogue_warps // 4
    l1_row_bytes = tokens.num_bytes(block_n // 2)
    l1_staging_bytes = num_warpgroups * store_block_m * l1_row_bytes * 2  # double buffer
    l2_staging_bytes = num_warpgroups * store_block_m * block_n * 2  # bf16
    sf_block_m = align_up(block_m, 128)

    builder = LayoutBuilder()
    add = builder.add
    add("expert_count", "u32", (num_experts,), "tokens of this CTA per expert", alignment=1024)
    add(
        "pull_buffers",
        "u8",
        (num_dispatch_warps, tokens.num_bytes(hidden)),
        "one token in flight per dispatch warp",
        alignment=1024,
    )
    add(
        "cd_staging",
        "u8",
        (max(l1_staging_bytes, l2_staging_bytes),),
        "epilogue tiles on their way out",
        alignment=SWIZZLE_ALIGNMENT,
    )
    add(
        "activations",
        "u8",
        (num_stages, block_m // 2, tokens.num_bytes(block_k)),
        "this CTA's half of the token tile, 128-byte swizzle",
        alignment=SWIZZLE_ALIGNMENT,
    )
    if decoded_block_bytes:
        weights: tuple[int, ...] = (num_stages, decoded_block_bytes)
        purpose = "this CTA's weight rows, as they are decoded from"
    else:
        weights = (num_stages, block_n, tokens.num_bytes(block_k))
        purpose = "this CTA's weight rows, a value as long as a token's, 128-byte swizzle"
    add("weights", "u8", weights, purpose, alignment=SWIZZLE_ALIGNMENT)
    if tokens.has_scales:
        num_words = tokens.num_scale_words(block_k)
        # Beside tokens with one scale those of weights are all 1.
        num_weight_stages = 1 if tokens.scales_whole_tokens else num_stages
        add(
            "activation_sf",
            "u32",
            (num_stages, num_words, sf_block_m),
            "scales of the token tile",
            alignment=BULK_COPY_ALIGNMENT,
        )
        add(
            "weight_sf",
            "u32",
            (num_weight_stages, num_words, block_n),
            "scales of the weight rows",
            alignment=BULK_COPY_ALIGNMENT,
        )
    if tokens.scales_whole_tokens or tokens.values_per_scale > WARP_VALUES:
        add(
            "amax_exchange",
            "u32",
            (num_epilogue_warps, store_block_m),
            "bits of group maxima, between neighbouring epilogue warps",
            alignment=16,
        )
    builder.mark("barriers_offset", alignment=16)
    barriers = (
        ("pull_barriers", num_dispatch_warps, "token has arrived in the pull buffer"),
        ("full_barriers", num_stages, "stage is loaded"),
        ("empty_barriers", num_stages, "stage may be overwritten"),
        *(
            [("weight_barriers", num_stages, "the stage's weights are there to decode")]
            if decoded_block_bytes
            else []
        ),
        ("tmem_full_barriers", num_tmem_stages, "accumulator is complete"),
        ("tmem_empty_barriers", num_tmem_stages, "accumulator has been read"),
        ("pair_barriers", NUM_PAIR_SLOTS, "it is known which pair of blocks comes next"),
        ("pair_read_barriers", NUM_PAIR_SLOTS, "all roles know the pair in a slot"),
        ("combine_barriers", 2 * num_epilogue_warps, "contribution has arrived"),
    )
    for name, count, purpose in barriers:
        add(name, "u64", (count,), purpose, alignment=8)
    add("claimed_pairs", "u32", (NUM_PAIR_SLOTS,), "what the cluster claimed", alignment=4)
    add("tmem_ptr", "u32", (1,), "where the TMEM allocation starts", alignment=4)
    return builder.build(alignment=16)


@_remembered
def sm90_smem_layout(
    *,
    num_experts: int,
    hidden: int,
    num_dispatch_warps: int,
    num_publish_warps: int,
    num_epilogue_warps: int,
    block_m: int,
    block_n: int,
    block_k: int,
    num_stages: int,
    num_block_slots: int,
    weight_block_bytes: int,
    has_row_factors: bool,
    has_block_scales: bool,
    tokens: TokenFormat,
    has_biases: bool = False,
    has_gate: bool = True,
    cluster_size: int = 1,
) -> Layout:
    """The SM90 kernel's. Five stages of the widest tile fit beside tokens of hidden 7168.

    weight_block_bytes: of 256 rows x a k-block. has_row_factors: of weights whose scales are a
    factor for each row of a block. has_block_scales: of weights whose scales come with each stage.
    tokens: what tokens and Linear1's output are; weights of neither kind go with such without
    scales. has_biases: of both layers.
    """
    builder = LayoutBuilder()
    add = builder.add
    add("expert_count", "u32", (num_experts,), "tokens of this CTA per expert", alignment=1024)
    add(
        "pull_buffers",
        "u8",
        (num_dispatch_warps, tokens.num_bytes(hidden)),
        "one token in flight per dispatch warp",
        alignment=1024,
    )
    add(
        "activations",
        "u8",
        (num_stages, block_m, tokens.num_bytes(block_k)),
        "token tile, 128-byte swizzle",
        alignment=SWIZZLE_ALIGNMENT,
    )
    add(
        "weight_blocks",
        "u8",
        (num_stages, weight_block_bytes),
        "weights of 256 rows, in the order of the math threads",
        alignment=SWIZZLE_ALIGNMENT,
    )
    weight_scales = ("weight_scales", "f32", (num_stages, 4), "of the stage's weights")
    row_factors = ("row_factors", "f32", (num_block_slots, block_n), "of their weight rows")
    biases = ("biases", "f32", (num_block_slots, block_n), "of their weight rows")
    rescaling = (
        (
            "rescale_factors",
            "bf16",
            (num_stages, 4, block_m // 8, 2),
            "from a token's scale in one k-block of Linear2 to that in the next",
        ),
        ("changes_of_scale", "u32", (num_stages,), "whether they are to be applied"),
    )
    token_factors = (
        ("l1_token_factors", "f32", (num_block_slots, block_m), "of their tokens, for Linear1"),
        ("l2_token_factors", "f32", (num_block_slots, block_m), "the same for Linear2"),
    )
    claims = ("claimed_blocks", "u32", (num_block_slots,), "what the cluster's first CTA claimed")
    token_scales = ("token_scales", "f32", (num_stages, block_m), "of the stage's tokens")
    has_factors = tokens.has_scales and not tokens.promotes_scales
    # Without a gate, the values of a token and a warpgroup have a scale of their own.
    num_maxima = block_m if has_gate else 2 * block_m
    maxima = ("amax_exchange", "u32", (2, num_maxima), "largest magnitudes, between math warps")
    for name, dtype, dims, purpose in (
        *(rescaling if has_factors else ()),
        *([weight_scales] if has_block_scales else []),
        *([token_scales] if tokens.promotes_scales else []),
        ("block_headers", "u32", (num_block_slots, 4), "what the weight loader claimed"),
        *([row_factors] if has_row_factors else []),
        *([biases] if has_biases else []),
        *(token_factors if has_factors else ()),
        (
            "topk_weights",
            "f32",
            (num_block_slots, block_m),
            f"of their tokens, for Linear{2 if has_biases else 1}",
        ),
        ("destinations", "u64", (num_block_slots, block_m), "where each token's result goes"),
        *([maxima] if tokens.has_scales else []),
        *([claims] if cluster_size > 1 else []),
    ):
        add(name, dtype, dims, purpose, alignment=16)
    builder.mark("barriers_offset", alignment=16)
    claim_barriers = ("claim_barriers", num_block_slots, "it is known what was claimed")
    seen_barriers = (
        "seen_barriers",
        num_block_slots,
        "results of a block are seen, to publish them",
    )
    barriers = (
        ("pull_barriers", num_dispatch_warps, "token has arrived in the pull buffer"),
        ("full_barriers", num_stages, "stage is loaded"),
        ("empty_barriers", num_stages, "stage may be overwritten"),
        ("header_barriers", num_block_slots, "block header is written"),
        *([seen_barriers] if num_publish_warps else []),
        ("stored_barriers", num_block_slots, "results of a block are stored"),
        *([claim_barriers] if cluster_size > 1 else []),
        ("combine_barriers", 2 * num_epilogue_warps, "contribution has arrived"),
    )
    for name, count, purpose in barriers:
        add(name, "u64", (count,), purpose, alignment=8)
    return builder.build(alignment=16)


def num_combine_bytes(num_epilogue_warps: int, chunk_elements: int) -> int:
    """Shared memory that combine needs for BF16 chunks of one token."""
    return NUM_COMBINE_SLOTS * num_epilogue_warps * chunk_elements * 2
