"""For random problems and overrides: a config within every limit, or an error that names one."""

import math
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from deep_moe.heuristics import PRESETS, MoEShape, preset_activation, preset_shape
from deep_moe.heuristics.smem_layout import num_combine_bytes
from deep_moe.targets import TARGETS, choose_config


@st.composite
def shapes(draw):
    num_experts_per_rank = draw(st.sampled_from([1, 2, 7, 8, 32, 33, 48, 64, 65, 97, 256, 512]))
    num_ranks = draw(st.integers(1, min(72, 1024 // num_experts_per_rank)))
    num_experts = num_ranks * num_experts_per_rank
    return MoEShape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=draw(st.integers(1, min(32, num_experts))),
        hidden=128 * draw(st.integers(1, 450)),
        intermediate_hidden=128 * draw(st.integers(1, 200)),
        num_max_tokens_per_rank=draw(st.integers(1, 200_000)),
    )


OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "block_m": st.sampled_from([8, 16, 32, 64, 96, 128, 160, 192, 256]),
        "store_block_m": st.sampled_from([8, 16, 32, 64]),
        "num_epilogue_warps": st.sampled_from([4, 8, 12]),
        "num_stages": st.integers(1, 14),
        "num_turn_m_blocks": st.sampled_from([1, 2, 8, 32]),
        "num_sms": st.integers(1, 160),
        "num_epilogue_registers": st.sampled_from([96, 160, 208, 240]),
        "num_combine_chunks": st.sampled_from([1, 2, 3, 4, 7, 100]),
    },
)

ARCHS = st.sampled_from(sorted(TARGETS))

LIMITS = (
    "shared memory limit",
    "register limit",
    "index limit",
    "must be",
    "must divide",
    "must cut",
    "must name one of",
)


def config_or_refusal(*args, **kwargs):
    """(config, "") or (None, the error's text)."""
    try:
        config = choose_config(*args, **kwargs)
    except ValueError as error:
        event("refused")
        return None, str(error)
    event("configured")
    return config, ""


def check_resources(config):
    smem, tmem, symm = config.smem_layout, config.tmem_layout, config.symm_buffer_layout
    assert sum(row.num_bytes for row in smem.rows()) == config.smem_bytes <= 232448
    assert sum(row.num_bytes for row in symm.rows()) == symm.num_bytes
    if tmem is not None:
        assert tmem.segments[-1].end <= config.num_tmem_columns <= 512
        assert config.num_tmem_columns & (config.num_tmem_columns - 1) == 0
    assert 2 <= config.num_stages <= 32
    assert config.num_sms % config.cluster_size == 0
    assert config.num_sms >= config.cluster_size

    registers = config.explain().registers
    assert sum(row.registers for row in registers) <= 64512
    assert sum(row.num_warps for row in registers) * 32 == config.num_threads <= 1024
    at_launch = 65536 // config.num_threads // 8 * 8
    assert sum(row.registers for row in registers) <= at_launch * config.num_threads


def check_within_limits(config):
    check_resources(config)
    smem = config.smem_layout
    # boxes of the tensor maps
    padded_block_m = -(-config.block_m // 128) * 128
    assert max(config.block_m // config.cluster_size, padded_block_m) <= 256
    assert config.block_m % (8 * config.cluster_size) == 0

    assert 1 <= config.num_turn_m_blocks <= config.num_lead_m_blocks
    chunk = -(-config.hidden // config.num_combine_chunks)
    chunk = -(-chunk // 8) * 8
    assert (config.num_combine_chunks - 1) * chunk < config.hidden  # none is empty
    free = smem.mark("barriers_offset")
    assert num_combine_bytes(config.num_epilogue_warps, chunk) <= free
    assert math.ceil(chunk / 32) <= min(128, config.num_epilogue_registers - 80)

    assert config.num_padded_sf_pool_tokens < 2**31
    if config.arch == "sm_100a":  # SM90 has one factor per token, at the token's own column
        assert config.block_m % config.store_block_m == 0
        assert config.store_block_m <= 256
        assert config.num_pool_tokens % config.block_m == 0
        assert config.num_pool_tokens // config.block_m * padded_block_m <= (
            config.num_padded_sf_pool_tokens
        )
    # Every expert's last block may be all but empty.
    received = config.num_ranks * config.num_max_tokens_per_rank
    received *= config.num_topk
    assert received + config.num_experts_per_rank * (config.block_m - 1) <= (config.num_pool_tokens)
    assert config.num_l2_mask_words * 64 >= config.num_l1_n_blocks


@settings(deadline=None, max_examples=300)
@given(ARCHS, shapes(), st.floats(0, 1))
def test_a_valid_shape_gets_a_config_or_a_named_limit(arch, shape, fraction):
    num_tokens = round(fraction * shape.num_max_tokens_per_rank)
    config, refusal = config_or_refusal(shape, num_tokens, arch=arch)
    if config is None:
        assert refusal.startswith(("shared memory limit", "index limit"))
    else:
        check_within_limits(config)


@settings(deadline=None, max_examples=300)
@given(ARCHS, shapes(), OVERRIDES)
def test_overrides_are_taken_or_refused_by_name(arch, shape, overrides):
    num_tokens = shape.num_max_tokens_per_rank
    config, refusal = config_or_refusal(shape, num_tokens, arch=arch, overrides=overrides)
    if config is None:
        assert any(limit in refusal for limit in LIMITS)
    else:
        for name, value in overrides.items():
            assert getattr(config, name) == value
        check_within_limits(config)


@settings(deadline=None, max_examples=100)
@given(
    ARCHS,
    st.integers(1, 32),
    st.integers(1, 8),
    st.integers(1, 60),
    st.integers(1, 16),
    st.integers(0, 256),
)
def test_ordinary_sizes_are_never_refused(
    arch, local_experts, num_ranks, hidden, intermediate, tokens
):
    num_experts = local_experts * num_ranks
    shape = MoEShape(
        num_ranks, num_experts, min(8, num_experts), 128 * hidden, 128 * intermediate, 256
    )
    check_within_limits(choose_config(shape, tokens, arch=arch))


@pytest.mark.parametrize("arch", TARGETS)
def test_more_experts_on_a_rank_than_a_warp_can_keep_counts_of_are_refused(arch):
    for num_ranks in (1, 2):
        check_within_limits(
            choose_config(MoEShape(num_ranks, 512 * num_ranks, 16, 256, 128, 64), 64, arch=arch)
        )
    message = "num_experts must be at most 512 per rank, 512 on 1; got 513"
    with pytest.raises(ValueError, match=message):
        choose_config(MoEShape(1, 513, 16, 256, 128, 64), 64, arch=arch)


@pytest.mark.parametrize("name", PRESETS)
def test_published_models_in_every_format(name):
    """On SM100 by all limits; SM90's tiles of other formats come in other sizes."""
    shape = preset_shape(name, num_ranks=8, num_max_tokens_per_rank=8192)
    for arch in ("sm_90a", "sm_100a"):
        for own in TARGETS[arch].weights:
            if own.tokens.has_float_scales and shape.hidden % 128:
                continue
            formats = {"weights": own.weights, "token_format": own.token_format}
            for num_tokens in (64, 8192):
                config = choose_config(
                    replace(shape, **formats),
                    num_tokens,
                    arch=arch,
                    activation=preset_activation(name),
                )
                (check_within_limits if arch == "sm_100a" else check_resources)(config)
