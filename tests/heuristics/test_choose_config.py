"""The choices for SM100: the tables of the design, their boundaries, and overrides."""

import dataclasses
import math

import pytest

from deep_moe.activations import Situ, Swiglu, SwigluOai
from deep_moe.heuristics import PRESETS, MoEShape, preset_shape
from deep_moe.targets import TARGETS, MegaMoEConfig, choose_config

V3 = MoEShape(8, 256, 8, 7168, 2048, 4096)
ONE_EXPERT_EACH = MoEShape(4, 4, 4, 256, 128, 4096)  # tokens per expert = 4 * tokens per rank


def shape_with(**changes) -> MoEShape:
    return dataclasses.replace(V3, **changes)


class TestTile:
    @pytest.mark.parametrize(
        ("num_tokens", "block_m", "store_block_m", "num_epilogue_warps"),
        [
            # with 256 experts, 8 ranks and 8 slots, tokens per expert = num_tokens / 4
            (0, 16, 8, 8),
            (31, 16, 8, 8),
            (32, 32, 16, 8),
            (81, 32, 16, 8),
            (82, 64, 32, 4),
            (186, 64, 32, 4),
            (187, 96, 16, 8),
            (298, 96, 16, 8),
            (299, 128, 32, 8),
            (461, 128, 32, 8),
            (462, 192, 32, 8),
            (779, 192, 32, 8),
            (780, 128, 32, 8),  # two blocks of an expert
            (996, 128, 32, 8),
            (997, 192, 32, 8),
            (4096, 192, 32, 8),
        ],
    )
    def test_least_cost(self, num_tokens, block_m, store_block_m, num_epilogue_warps):
        config = choose_config(V3, num_tokens)
        assert (config.block_m, config.store_block_m, config.num_epilogue_warps) == (
            block_m,
            store_block_m,
            num_epilogue_warps,
        )
        assert config.num_threads == 256 + 32 * num_epilogue_warps

    @pytest.mark.parametrize(
        ("changes", "block_m"),
        [
            ({}, 240),
            ({"weights": "bf16", "token_format": "bf16"}, 240),
            ({"weights": "nvfp4", "token_format": "nvfp4"}, 192),  # no tensor memory for its scales
            ({"weights": "nvfp4", "token_format": "bf16"}, 192),  # nor for decoded weights
            ({"num_pool_tokens": None}, 192),
            ({"num_pool_tokens": 1536}, 192),
        ],
    )
    def test_wide_tiles_need_room(self, changes, block_m):
        shape = shape_with(**{"num_pool_tokens": 24_576, **changes})
        config = choose_config(shape, 1536)
        assert config.block_m == block_m
        assert config.num_tmem_columns == 512
        if block_m != 240:
            with pytest.raises(ValueError, match=r"block_m must be one of .* 192; got 240"):
                choose_config(shape, 1536, overrides={"block_m": 240})

    def test_fixed_values(self):
        config = choose_config(V3, 100)
        assert (config.block_n, config.block_k, config.cluster_size) == (128, 128, 2)
        assert (config.num_dispatch_warps, config.num_tmem_stages) == (4, 2)

    def test_a_block_m_override_brings_its_row_along(self):
        config = choose_config(V3, 1, overrides={"block_m": 64})
        assert (config.block_m, config.store_block_m, config.num_epilogue_warps) == (64, 32, 4)

    def test_the_rest_of_the_row_can_be_overridden_too(self):
        overrides = {"block_m": 64, "store_block_m": 16, "num_epilogue_warps": 8}
        config = choose_config(V3, 1, overrides=overrides)
        assert (config.store_block_m, config.num_epilogue_warps) == (16, 8)


class TestTurns:
    def test_short_where_experts_have_many_tokens(self):
        config = choose_config(V3, 1024, overrides={"block_m": 128})
        # Of 16 pairs per m-block, 74 clusters have Linear1 of five at once.
        assert (config.num_turn_m_blocks, config.num_lead_m_blocks) == (1, 14)

    def test_less_than_one_token_per_expert_is_one_turn(self):
        assert choose_config(V3, 3).num_turn_m_blocks == 32
        assert choose_config(V3, 0).num_turn_m_blocks == 32

    def test_exactly_one_token_per_expert_is_not(self):
        # 1 block of 16 rows * 32 n-blocks per expert, 296 wanted: 10, and 16 divides 32
        config = choose_config(V3, 4)
        assert (config.num_turn_m_blocks, config.num_lead_m_blocks) == (16, 29)

    def test_never_more_than_the_local_experts(self):
        shape = shape_with(num_experts=16, intermediate_hidden=128)
        assert choose_config(shape, 4).num_turn_m_blocks == 2

    def test_a_prime_number_of_experts_is_one_turn(self):
        shape = shape_with(num_experts=8 * 7)
        assert choose_config(shape, 8).num_turn_m_blocks == 7


class TestRegisters:
    @pytest.mark.parametrize(
        ("num_experts", "registers"),
        [(8 * 64, (48, 40, 208)), (8 * 65, (96, 88, 160))],
    )
    def test_budget_depends_on_the_local_experts(self, num_experts, registers):
        config = choose_config(shape_with(num_experts=num_experts), 64)
        chosen = (
            config.num_dispatch_registers,
            config.num_loader_registers,
            config.num_epilogue_registers,
        )
        assert chosen == registers

    def test_both_budgets_use_up_a_cta(self):
        for num_experts in (8 * 64, 8 * 65):
            config = choose_config(shape_with(num_experts=num_experts), 4096)
            total = sum(row.registers for row in config.explain().registers)
            assert total == 64512


class TestCombineChunks:
    @pytest.mark.parametrize(
        ("hidden", "num_chunks"),
        [(256, 1), (4096, 1), (4224, 2), (7168, 2), (8192, 2), (128 * 71, 3)],
    )
    def test_fewest_chunks_that_fit(self, hidden, num_chunks):
        config = choose_config(shape_with(hidden=hidden), 1024)
        assert config.num_combine_chunks == num_chunks

    def test_fewer_registers_mean_more_chunks(self):
        shape = shape_with(num_experts=8 * 65)
        assert choose_config(shape, 64).num_combine_chunks == 3  # 7168/2 sums do not fit 80 * 32


@pytest.mark.parametrize("arch", TARGETS)
def test_uneven_counts_change_choices_only_where_the_architecture_says_so(arch: str):
    sizes = [*range(0, 64, 3), *range(64, 4097, 211)]
    changed = [
        num_tokens
        for num_tokens in sizes
        if choose_config(V3, num_tokens, arch=arch)
        != choose_config(V3, num_tokens, arch=arch, is_uneven=True)
    ]
    assert bool(changed) == TARGETS[arch].heeds_uneven


def test_numerics_are_taken_over():
    config = choose_config(V3, 1, activation_clamp=7, fast_math=False)
    assert config.activation == Swiglu(7.0)
    assert config.fast_math is False
    assert choose_config(V3, 1).activation == Swiglu()
    assert choose_config(V3, 1, activation="situ").activation == Situ()
    assert choose_config(V3, 1, activation=SwigluOai(limit=3)).activation == SwigluOai(limit=3.0)


def test_a_config_as_a_dict_names_the_activation_and_its_parameters():
    config = choose_config(V3, 1, activation="swiglu_oai", activation_clamp=3)
    added = config.to_dict().items() - config.kernel_fields().items()
    alpha = SwigluOai().alpha
    assert dict(added) == {
        "activation": "swiglu_oai",
        "activation_alpha": alpha,
        "activation_limit": 3.0,
    }


def test_a_config_is_a_value():
    first, second = choose_config(V3, 100), choose_config(V3, 101)
    assert first == second  # same kernel, whatever the number of tokens that led to it
    assert hash(first) == hash(second)
    assert first != choose_config(V3, 100, num_sms=146)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.block_m = 64  # type: ignore[misc]


def test_shape_can_be_taken_back_from_the_config():
    assert choose_config(V3, 5).shape == V3


def test_kernel_fields_are_numbers_in_declaration_order():
    fields = choose_config(V3, 5).kernel_fields()
    assert next(iter(fields)) == "num_ranks"
    assert list(fields)[-1] == "num_decode_registers"  # of this target
    assert not {"activation", "arch", "decision"} & set(fields)
    assert all(isinstance(value, (int, float)) for value in fields.values())


def test_derived_block_counts():
    config = choose_config(MoEShape(1, 4, 2, 384, 256, 8), 8)
    assert (config.num_l1_n_blocks, config.num_l2_n_blocks) == (4, 3)
    assert (config.num_l1_k_blocks, config.num_l2_k_blocks) == (3, 2)


class TestRefusals:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"block_m": 48}, "block_m must be one of 16, 32, 64, 96, 128, 192; got 48"),
            ({"block_m": 256}, "block_m must be one of .*; got 256"),
            ({"store_block_m": 12}, "store_block_m must be one of 8, 16, 24, 32; got 12"),
            (
                {"block_m": 16, "store_block_m": 32},
                "store_block_m must divide block_m 16; got 32",
            ),
            ({"num_epilogue_warps": 6}, "num_epilogue_warps must be one of 4, 8; got 6"),
            ({"num_stages": 1}, "num_stages must be 2 to 32; got 1"),
            ({"num_stages": 33}, "num_stages must be 2 to 32; got 33"),
            ({"num_stages": 12}, "shared memory limit: num_stages 12 .* at most 232448"),
            ({"num_turn_m_blocks": 0}, "num_turn_m_blocks must be 1 to 65536; got 0"),
            ({"num_turn_m_blocks": 65537}, "num_turn_m_blocks must be 1 to 65536; got 65537"),
            (
                {"num_turn_m_blocks": 4, "num_lead_m_blocks": 3},
                "num_lead_m_blocks must be at least 11 with num_turn_m_blocks 4 and .* 8; got 3",
            ),
            ({"num_sms": 147}, "num_sms must be even and at least 2 .*; got 147"),
            ({"num_sms": 0}, "num_sms must be even and at least 2 .*; got 0"),
            ({"num_epilogue_registers": 216}, "register limit: .* need 66560 .* at most 64512"),
            ({"num_loader_registers": 44}, "num_loader_registers must be a multiple of 8 .* 44"),
            ({"num_dispatch_registers": 16}, "num_dispatch_registers must be .* 24 to 256; got 16"),
            (
                {"num_combine_chunks": 500},
                r"num_combine_chunks must cut hidden \(7168\) .*; got 500",
            ),
            ({"num_combine_chunks": 0}, r"num_combine_chunks must cut hidden \(7168\)"),
            ({"num_combine_chunks": 1}, "shared memory limit: num_combine_chunks 1 needs 344064"),
            ({"block_n": 256}, "overrides must name one of num_sms, block_m, .*; got 'block_n'"),
            ({"blockm": 64}, "overrides must name one of num_sms, block_m, .*; got 'blockm'"),
        ],
    )
    def test_an_impossible_override_says_which_limit_it_breaks(self, overrides, message):
        with pytest.raises(ValueError, match=message):
            choose_config(V3, 4096, overrides=overrides)

    def test_sums_that_do_not_fit_registers(self):
        shape = shape_with(hidden=4224)
        with pytest.raises(ValueError, match="register limit: num_combine_chunks 1 needs 132 sums"):
            choose_config(shape, 100, overrides={"num_combine_chunks": 1})

    def test_an_override_of_another_type(self):
        with pytest.raises(TypeError, match=r"overrides\['block_m'\] must be an int"):
            choose_config(V3, 1, overrides={"block_m": 64.0})

    def test_a_hidden_size_beyond_shared_memory(self):
        with pytest.raises(
            ValueError, match=r"shared memory limit: num_stages 2 with hidden 51200"
        ):
            choose_config(shape_with(hidden=51200), 1)

    def test_a_pool_beyond_the_coordinates_of_tma(self):
        shape = MoEShape(72, 72 * 14, 32, 128, 128, 200_000)
        with pytest.raises(
            ValueError, match=r"index limit: the pool's padded scale columns .* got"
        ):
            choose_config(shape, 1)

    def test_too_small_a_shared_memory(self):
        with pytest.raises(ValueError, match=r"shared memory limit: .* at most 65536"):
            choose_config(V3, 1, smem_capacity=65536)

    @pytest.mark.parametrize("num_tokens", [-1, 4097])
    def test_tokens_out_of_range(self, num_tokens):
        message = rf"num_tokens must be 0 to num_max_tokens_per_rank \(4096\); got {num_tokens}"
        with pytest.raises(ValueError, match=message):
            choose_config(V3, num_tokens)

    def test_unknown_architecture(self):
        with pytest.raises(ValueError, match=r"arch must be one of sm_90a, sm_100a.*; got 'sm_75'"):
            choose_config(V3, 1, arch="sm_75")

    @pytest.mark.parametrize("clamp", [0, -1.0, math.nan])
    def test_a_clamp_that_is_not_positive(self, clamp):
        with pytest.raises(ValueError, match="activation_clamp must be None or a positive number"):
            choose_config(V3, 1, activation_clamp=clamp)

    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("activation_clamp", "7"),
            ("activation_clamp", True),
            ("fast_math", 1),
            ("num_sms", 148.0),
            ("smem_capacity", 1e5),
        ],
    )
    def test_argument_types(self, argument, value):
        with pytest.raises(TypeError, match=f"{argument} must be"):
            choose_config(V3, 1, **{argument: value})

    def test_shape_type(self):
        with pytest.raises(TypeError, match="shape must be a MoEShape; got dict"):
            choose_config({}, 1)  # type: ignore[arg-type]


def test_overrides_are_rendered_as_given():
    overrides = {
        "num_sms": 20,
        "num_stages": 3,
        "num_turn_m_blocks": 32,
        "num_combine_chunks": 8,
        "num_epilogue_registers": 200,
    }
    config = choose_config(V3, 64, overrides=overrides)
    for name, value in overrides.items():
        assert getattr(config, name) == value
    assert isinstance(config, MegaMoEConfig)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        (name, num_ranks)
        for name, (num_experts, *_) in PRESETS.items()
        for num_ranks in (1, 2, 8, 32, 64)
        if num_experts % num_ranks == 0 and num_experts // num_ranks <= 512
    ],
)
def test_presets_have_a_kernel_for_every_number_of_tokens(name, num_ranks):
    shape = preset_shape(name, num_ranks=num_ranks, num_max_tokens_per_rank=8192)
    for num_tokens in (0, 1, 8, 64, 100, 300, 8192):
        assert choose_config(shape, num_tokens).num_stages >= 4
