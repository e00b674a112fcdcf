"""The choices for SM90: tile, stages, registers, their limits and what can be overridden."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest

from deep_moe.heuristics import PRESETS, MoEShape, preset_shape, sm90_tiles
from deep_moe.heuristics.smem_layout import num_combine_bytes
from deep_moe.targets import choose_config, target_of
from tests.pairs import formats

PRO = preset_shape("deepseek-v4-pro", num_ranks=4, num_max_tokens_per_rank=8192)
BLOCK_MS = tuple(range(8, 184, 8))
FITTED = ((64, 8), (72, 8), (80, 8), (88, 8))
TILES_OF_UNEVEN = (*((block_m, block_m) for block_m in BLOCK_MS), (128, 32))
TILES = (*TILES_OF_UNEVEN, *FITTED)
KINDS = {name: target_of("sm_90a").weights_of(name).kind for name in ("mxfp4", "fp8", "bf16")}


def sm90_config(num_tokens: int, shape: MoEShape = PRO, **arguments):
    return choose_config(shape, num_tokens, arch="sm_90a", **arguments)


@pytest.mark.parametrize(
    ("num_tokens", "block_m", "block_m_step"),
    # on 4 ranks with 384 experts and 6 slots, tokens per expert = num_tokens / 16
    [
        (0, 8, 8),
        (32, 8, 8),
        (128, 16, 16),
        (256, 24, 24),
        (512, 40, 40),
        (768, 64, 8),
        (1024, 88, 8),
        (1536, 112, 112),
        (2048, 152, 152),
        (2560, 176, 176),
        (3072, 112, 112),
        (4096, 144, 144),
        (5120, 176, 176),
        (8192, 176, 176),
    ],
)
def test_the_tile_fits_the_tokens_of_most_experts(num_tokens, block_m, block_m_step):
    config = sm90_config(num_tokens)
    assert (config.block_m, config.block_m_step) == (block_m, block_m_step)


@pytest.mark.parametrize(
    ("weights", "is_uneven", "tiles"),
    [
        (
            "mxfp4",
            False,
            {0: 8, 3: 8, 6: 16, 8: 16, 12: 24, 16: 24, 24: 32, 32: 40, 48: 64, 64: 88},
        ),
        ("mxfp4", False, {128: 152, 768: 160}),
        ("mxfp4", True, {16: (32, 32), 32: (48, 48), 64: (128, 32), 128: (128, 32)}),
        ("fp8", False, {3: 8, 16: 24, 64: 80, 96: 112, 110: 128}),
        ("fp8", False, dict.fromkeys((128, 192, 256, 384, 512, 768), (128, 16))),
        ("bf16", False, {64: (88, 88), 128: (160, 160), 192: (128, 16), 768: (128, 16)}),
    ],
)
def test_the_tile_of_a_mean_count(weights, is_uneven, tiles):
    for mean, expected in tiles.items():
        chosen = sm90_tiles.choose_tile(Fraction(mean), KINDS[weights], is_uneven)
        assert expected in (chosen, chosen[0]), mean


def mean_cost(counts, block_m, step):
    """By the formula for one expert, over simulated counts instead of a distribution."""
    values, times = np.unique(counts[counts > 0], return_counts=True)
    simulated = list(zip(values.tolist(), (times / len(counts)).tolist(), strict=True))
    return sm90_tiles.expected_cost((block_m, step), simulated, KINDS["mxfp4"])


@pytest.mark.parametrize("num_tokens", [*range(1, 60), *range(60, 1150, 31)])
def test_no_other_tile_is_expected_to_cost_less(num_tokens):
    """With counts as they come about, not as the distribution has them."""
    mean = num_tokens / 16
    counts = np.random.default_rng(num_tokens).poisson(mean, 100_000)
    config = sm90_config(num_tokens)
    least = min(mean_cost(counts, *tile) for tile in TILES if tile[0] >= mean)
    assert mean_cost(counts, config.block_m, config.block_m_step) <= 1.002 * least


@pytest.mark.parametrize("num_tokens", [256, 512, 768, 1024, 2048, 4096, 8192])
def test_uneven_routing_gets_tiles_that_fit_small_and_large_counts(num_tokens):
    """Against a simulation, in which the experts' means vary by a third or by half."""
    generator = np.random.default_rng(num_tokens)
    config = sm90_config(num_tokens, is_uneven=True)
    for variation in (0.35, 0.5):
        means = num_tokens / 16 * generator.gamma(variation**-2, variation**2, 50_000)
        counts = generator.poisson(means)
        least = min(mean_cost(counts, *tile) for tile in TILES_OF_UNEVEN)
        assert mean_cost(counts, config.block_m, config.block_m_step) <= 1.03 * least


def test_an_odd_last_m_block_of_fp8_costs_more_in_clusters():
    fp8 = KINDS["fp8"]
    alone, in_clusters = (
        [sm90_tiles.expected_cost((96, 96), [(96 * n, 1.0)], fp8, shares) for n in range(1, 5)]
        for shares in (False, True)
    )
    extra = np.subtract(in_clusters, alone)
    assert np.allclose(extra, [KINDS["fp8"].lone_m_block_cost, 0] * 2)


@pytest.mark.parametrize("num_tokens", [3072, 4096, 6144, 8192])
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_weights_that_come_as_they_are_get_fitted_tiles_where_experts_have_several(
    weights, num_tokens
):
    shape = dataclasses.replace(PRO, **formats(weights))
    for is_uneven in (False, True):
        config = sm90_config(num_tokens, shape, is_uneven=is_uneven)
        assert (config.min_block_m, config.block_m, config.block_m_step) == (80, 128, 16)
        assert config.cluster_size == 2
    few = sm90_config(num_tokens // 16, shape)
    assert few.block_m == few.block_m_step


def test_tiles_have_one_size_unless_the_formula_or_the_caller_wants_them_fitted():
    def of(is_uneven, **overrides):
        config = sm90_config(3072, is_uneven=is_uneven, overrides=overrides)
        return config.block_m, config.block_m_step, config.num_epilogue_registers

    assert of(True) == of(True, block_m=128) == of(False, block_m=128, block_m_step=32)
    assert of(True) == (128, 32, 224)
    assert of(False, block_m=128) == of(True, block_m=128, block_m_step=128) == (128, 128, 216)
    assert of(True, block_m=136) == (136, 136, 216)
    # where the formula's own tile is of 32 rows
    narrow, wide = sm90_config(384), sm90_config(384, overrides={"block_m": 128})
    assert (narrow.block_m_step, wide.block_m_step) == (32, 128)
    with pytest.raises(ValueError, match="block_m_step must be 128 or 32 with block_m 128; got 16"):
        sm90_config(8192, overrides={"block_m": 128, "block_m_step": 16})
    with pytest.raises(ValueError, match="block_m_step must be 144 with block_m 144; got 48"):
        sm90_config(8192, overrides={"block_m": 144, "block_m_step": 48})
    with pytest.raises(ValueError, match="block_m_step must be 64 or 8 with block_m 64; got 32"):
        sm90_config(500, overrides={"block_m": 64, "block_m_step": 32})


def test_tiles_grow_with_the_tokens_as_long_as_one_is_enough():
    tiles = [sm90_config(num_tokens).block_m for num_tokens in range(0, 1300, 7)]
    assert tiles == sorted(tiles)
    assert set(range(8, 96, 8)) - {56} <= set(tiles)


def test_fitted_tiles_are_for_experts_of_about_one_of_them():
    """Where weights bound, or products do, sizes that fit measured no faster than one size."""
    fitted = [
        m for m in range(1, 600) if sm90_tiles.choose_tile(Fraction(m), KINDS["mxfp4"]) in FITTED
    ]
    assert fitted == list(range(38, 75))
    config = sm90_config(1024)
    assert (config.block_m, config.min_block_m, config.num_epilogue_registers) == (88, 64, 216)
    uneven = sm90_config(1024, is_uneven=True)
    assert (uneven.block_m, uneven.min_block_m) == (128, 64)


@pytest.mark.parametrize(
    ("num_tokens", "is_uneven", "turn", "lead"),
    [
        (0, False, 96, 111),
        (512, False, 48, 63),  # 6 * 132 blocks; an expert has 24 per m-block
        (768, False, 1, 16),  # tiles of 64 rows
        (2048, False, 1, 16),
        (4096, False, 1, 16),  # of six m-blocks the grid has Linear1 at once
        (4096, True, 1, 16),
        (8192, False, 1, 16),
    ],
)
def test_turns_are_short_where_experts_have_many_tokens(num_tokens, is_uneven, turn, lead):
    config = sm90_config(num_tokens, is_uneven=is_uneven)
    assert (config.num_turn_m_blocks, config.num_lead_m_blocks) == (turn, lead)


@pytest.mark.parametrize(
    ("block_m", "num_warps"), [(8, 1), (32, 1), (40, 0), (112, 0)], ids=lambda n: str(n)
)
def test_who_publishes(block_m: int, num_warps: int) -> None:
    assert sm90_config(100, overrides={"block_m": block_m}).num_publish_warps == num_warps
    with pytest.raises(ValueError, match="num_publish_warps must be 0 or 1; got 2"):
        sm90_config(100, overrides={"block_m": block_m, "num_publish_warps": 2})


def test_fixed_values():
    config = sm90_config(100)
    assert (config.block_n, config.block_k, config.cluster_size) == (256, 128, 1)
    assert (config.num_dispatch_warps, config.num_epilogue_warps, config.num_threads) == (2, 8, 384)
    others = ("store_block_m", "num_tmem_stages", "num_tmem_columns")  # of SM100
    assert not any(hasattr(config, name) for name in others)
    assert config.tmem_layout is None
    assert config.num_sms == 132
    assert choose_config(PRO, 100).num_sms == 148


def test_block_counts_round_the_last_rows_of_an_odd_hidden_up():
    config = sm90_config(8, MoEShape(1, 4, 2, 384, 256, 8))
    assert (config.num_l1_n_blocks, config.num_l2_n_blocks) == (2, 2)
    assert (config.num_l1_k_blocks, config.num_l2_k_blocks) == (3, 2)


@pytest.mark.parametrize(("intermediate", "num_words"), [(128, 1), (8192, 1), (8320, 2)])
def test_one_bit_per_linear1_block(intermediate, num_words):
    shape = MoEShape(1, 4, 2, 256, intermediate, 8)
    config = sm90_config(8, shape)
    assert config.num_l2_mask_words == num_words
    # The buffer is the same for every architecture and so may hold more words than are used.
    assert shape.num_l2_mask_words >= num_words


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        (name, num_ranks)
        for name, (num_experts, *_) in PRESETS.items()
        for num_ranks in (1, 4, 8, 64)
        if num_experts % num_ranks == 0 and num_experts // num_ranks <= 512
    ],
)
def test_presets_have_a_kernel_for_every_number_of_tokens(name, num_ranks):
    shape = preset_shape(name, num_ranks=num_ranks, num_max_tokens_per_rank=8192)
    for num_tokens in (0, 1, 8, 64, 512, 2048, 8192):
        config = sm90_config(num_tokens, shape)
        assert config.num_stages >= 5
        assert config.smem_bytes == config.smem_layout.num_bytes <= 232448


@pytest.mark.parametrize("block_m", BLOCK_MS)
@pytest.mark.parametrize("hidden", [128, 384, 7168])
def test_the_shared_memory_map(block_m, hidden):
    config = sm90_config(64, MoEShape(1, 9, 3, hidden, 256, 64), overrides={"block_m": block_m})
    layout = config.smem_layout
    rows = list(layout.rows())
    assert [row.offset for row in rows[1:]] == [row.offset + row.num_bytes for row in rows[:-1]]
    assert rows[-1].end == layout.num_bytes
    for name in ("activations", "weight_blocks"):
        assert layout[name].offset % 1024 == 0
        assert layout[name].num_bytes % 1024 == 0
    assert layout["activations"].num_bytes == config.num_stages * block_m * 128
    assert layout["weight_blocks"].num_bytes == config.num_stages * 17408
    first_barrier = layout.mark("barriers_offset")
    for segment in layout.segments:
        if segment.name.endswith("barriers"):
            assert segment.offset >= first_barrier
            assert segment.offset % 8 == 0
        else:
            assert segment.end <= first_barrier
    chunk = -(-hidden // config.num_combine_chunks)
    assert num_combine_bytes(8, chunk) <= first_barrier


def test_as_many_stages_as_fit():
    config = sm90_config(8192, overrides={"block_m": 128})
    assert config.num_stages == 6
    with pytest.raises(ValueError, match="shared memory limit: num_stages 7 with hidden 7168"):
        sm90_config(8192, overrides={"block_m": 128, "num_stages": 7})


def test_registers_use_up_a_cta():
    rows = sm90_config(64).explain().registers
    assert sum(row.registers for row in rows) == 64512
    assert [(row.role, row.registers_per_thread) for row in rows] == [
        ("dispatch", 72),
        ("loaders", 72),
        ("math and epilogue", 216),
    ]


@pytest.mark.parametrize(
    ("block_m", "math", "others", "group"),
    [(152, 216, 72, 2), (160, 224, 56, 2), (168, 224, 56, 1)],
)
def test_wide_tiles_take_registers_of_the_other_warps(block_m, math, others, group):
    config = sm90_config(64, overrides={"block_m": block_m})
    assert (config.num_epilogue_registers, config.num_dispatch_registers) == (math, others)
    assert config.num_mmas_per_group == group


def test_loaders_share_the_budget_of_their_warpgroup():
    registers = {"num_dispatch_registers": 56, "num_epilogue_registers": 224}
    assert sm90_config(64, overrides=registers).num_loader_registers == 56


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"block_m": 76},
            "block_m must be one of 8, 16, 24, .*, 168, 176; got 76",
        ),
        ({"block_m": 192}, "block_m must be one of .*; got 192"),
        ({"num_sms": 0}, "num_sms must be at least 1; got 0"),
        ({"num_epilogue_registers": 240}, "register limit: .* at most 64512"),
        ({"num_dispatch_registers": 44}, "num_dispatch_registers must be a multiple of 8 .* 44"),
        (
            {"block_m": 128, "block_m_step": 32, "num_epilogue_registers": 184},
            "num_epilogue_registers must be at least 192 with block_m_step 32; got 184",
        ),
        ({"num_turn_m_blocks": 0}, "num_turn_m_blocks must be 1 to 65536; got 0"),
        (
            {"num_turn_m_blocks": 4, "num_lead_m_blocks": 3},
            "num_lead_m_blocks must be at least 11 with num_turn_m_blocks 4 and .* 8; got 3",
        ),
        ({"num_combine_chunks": 1}, "shared memory limit: num_combine_chunks 1 needs 344064"),
        ({"store_block_m": 8}, "overrides must name one of num_sms, block_m, .*'store_block_m'"),
        ({"num_epilogue_warps": 4}, "overrides must name one of .*; got 'num_epilogue_warps'"),
    ],
)
def test_an_impossible_override_says_which_limit_it_breaks(overrides, message):
    with pytest.raises(ValueError, match=message):
        sm90_config(8192, overrides=overrides)


def test_an_odd_number_of_ctas_is_allowed():
    assert sm90_config(8, num_sms=131).explain().schedule.num_rounds > 0


def test_every_field_has_a_reason_and_the_explanation_has_no_tensor_memory():
    config = sm90_config(1024)
    explanation = config.explain()
    assert {field.name: field.value for field in explanation.fields} == config.to_dict()
    assert all(field.reason for field in explanation.fields)
    assert (explanation.tmem_map, explanation.tmem_columns) == ((), 0)
    assert explanation.to_dict()["arch"] == "sm_90a"


def test_configs_of_two_architectures_differ():
    shape = dataclasses.replace(PRO, num_max_tokens_per_rank=64)
    assert sm90_config(64, shape) != choose_config(shape, 64)
    assert sm90_config(64, shape).symm_buffer_layout == choose_config(shape, 64).symm_buffer_layout
