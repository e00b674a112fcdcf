"""`MoEShape` refuses what no kernel can do, and derives the pool."""

import pytest

from deep_moe.heuristics import (
    PRESETS,
    MoEShape,
    preset_activation,
    preset_has_biases,
    preset_shape,
)

VALID = {
    "num_ranks": 8,
    "num_experts": 256,
    "num_topk": 8,
    "hidden": 7168,
    "intermediate_hidden": 2048,
    "num_max_tokens_per_rank": 256,
}


def test_pool_of_the_worked_case():
    # 8*256 tokens * 8 slots + 32 experts * 191 rows of padding = 22496, up to a multiple of 384
    shape = MoEShape(**VALID)
    assert shape.num_pool_rows == 22656
    assert shape.num_max_pool_blocks == 22656 // 8
    assert shape.num_padded_sf_pool_tokens == 22656 * 8


def test_every_slot_may_be_copied_even_if_there_are_more_than_local_experts():
    shape = MoEShape(**{**VALID, "num_experts": 16})  # 2 local experts, 8 slots
    assert shape.num_pool_rows == 16896  # 2048*8 + 2*191 = 16766
    assert 16896 % 384 == 0


@pytest.mark.parametrize("block_m", [8, 16, 64, 96, 128, 168, 176, 192])
@pytest.mark.parametrize("num_experts", [8, 72, 256])
@pytest.mark.parametrize("num_tokens", [1, 77, 4096])
@pytest.mark.parametrize("num_shared", [0, 4])
def test_whatever_is_sent_fits_into_the_pool_with_every_tile(
    block_m, num_experts, num_tokens, num_shared
):
    """As many tokens as can be, shared out so that all but one expert waste most of a block."""
    sizes = {"num_experts": num_experts, "num_max_tokens_per_rank": num_tokens}
    shape = MoEShape(**{**VALID, **sizes}, num_shared_experts=num_shared)
    num_local = shape.num_experts_per_rank
    num_left = shape.num_ranks * num_tokens * shape.num_topk  # all slots may name one expert
    counts = []
    for experts_left in range(num_local, 0, -1):
        counts.append(min(num_left, num_left if experts_left == 1 else 1))
        num_left -= counts[-1]
    counts += [num_tokens] * num_shared
    rows = sum(-(-count // block_m) * block_m for count in counts)
    assert num_left == 0
    assert sum(counts) == shape.num_max_received
    assert rows <= shape.num_pool_rows
    assert shape.num_pool_rows < rows + shape.num_local_experts * 192 + 384  # and not far more


def test_a_pool_without_bound_is_the_worst_case():
    unbounded = MoEShape(**VALID)
    assert unbounded.num_pool_rows == unbounded.most_pool_tokens
    assert not unbounded.is_bounded
    # More than that is of no use.
    for num_pool_tokens in (None, unbounded.most_pool_tokens, 384_000):
        assert MoEShape(**VALID, num_pool_tokens=num_pool_tokens) == unbounded


def test_a_bounded_pool_keeps_the_counters_of_all_blocks():
    bounded = MoEShape(**VALID, num_pool_tokens=384)
    assert bounded.is_bounded
    assert bounded.num_pool_rows == 384
    assert bounded.num_padded_sf_pool_tokens == 768
    assert bounded.num_max_pool_blocks == 22656 // 8
    assert bounded.num_max_received == 8 * 256 * 8


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "num_pool_tokens must be a positive multiple of 384, 384 rows more at least; got 0"),
        (256, "num_pool_tokens must be .* of 384, 128 rows more at least; got 256"),
        (-384, "num_pool_tokens must be .* of 384, 768 rows more at least; got -384"),
        (400, "num_pool_tokens must be a positive multiple of 384; got 400"),
    ],
)
def test_a_pool_that_no_kernel_can_use_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        MoEShape(**VALID, num_pool_tokens=value)


def test_a_pool_is_counted_in_whole_rows():
    with pytest.raises(TypeError, match=r"num_pool_tokens must be an int, .* 384; got 384\.0"):
        MoEShape(**VALID, num_pool_tokens=384.0)


@pytest.mark.parametrize(
    ("intermediate_hidden", "num_words"), [(128, 1), (4096, 1), (4224, 2), (8192, 2), (8320, 3)]
)
def test_mask_has_a_bit_per_linear1_block(intermediate_hidden, num_words):
    shape = MoEShape(**{**VALID, "intermediate_hidden": intermediate_hidden})
    assert shape.num_l2_mask_words == num_words


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_ranks", 0, "num_ranks must be 1 to 72; got 0"),
        ("num_ranks", 73, "num_ranks must be 1 to 72; got 73"),
        (
            "num_experts",
            250,
            r"num_experts must be a positive multiple of num_ranks \(8\), .*; got 250",
        ),
        (
            "num_experts",
            0,
            r"num_experts must be a positive multiple of num_ranks .*; got 0",
        ),
        ("num_experts", 1032, r"num_experts must be .* \(8\), at most 1024; got 1032"),
        ("num_topk", 0, "num_topk must be 1 to 32; got 0"),
        ("num_shared_experts", 5, "num_shared_experts must be 0 to 4; got 5"),
        ("num_shared_experts", -1, "num_shared_experts must be 0 to 4; got -1"),
        ("num_topk", 33, "num_topk must be 1 to 32; got 33"),
        ("hidden", 7169, "hidden must be a positive multiple of 32; got 7169"),
        ("hidden", 0, "hidden must be a positive multiple of 32; got 0"),
        (
            "intermediate_hidden",
            200,
            "intermediate_hidden must be a positive multiple of 32; got 200",
        ),
        ("num_max_tokens_per_rank", 0, "num_max_tokens_per_rank must be at least 1; got 0"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(field, value, message):
    with pytest.raises(ValueError, match=message):
        MoEShape(**{**VALID, field: value})


def test_more_slots_than_experts_are_refused():
    with pytest.raises(ValueError, match=r"num_topk must be at most num_experts \(8\); got 9"):
        MoEShape(**{**VALID, "num_experts": 8, "num_topk": 9})


@pytest.mark.parametrize("value", [8.0, "8", True, None])
def test_a_bad_type_is_named(value):
    with pytest.raises(TypeError, match="num_topk must be an int, 1 to 32; got"):
        MoEShape(**{**VALID, "num_topk": value})


@pytest.mark.parametrize("num_ranks", [1, 8, 72])
def test_extreme_rank_counts_are_allowed(num_ranks):
    assert MoEShape(**{**VALID, "num_ranks": num_ranks, "num_experts": 8 * num_ranks})


def test_presets():
    assert PRESETS == {
        "deepseek-v4-flash": (256, 6, 4096, 2048),
        "deepseek-v4-pro": (384, 6, 7168, 3072),
        "deepseek-v3": (256, 8, 7168, 2048),
        "deepseek-v4.1-flash": (384, 6, 5120, 2304),
        "gpt-oss-120b": (128, 4, 2880, 2880),
        "glm-5": (256, 8, 6144, 2048),
        "glm-5.3": (256, 8, 6144, 2048),
        "glm-5.3-flash": (288, 8, 4096, 2048),
        "gemma-4-26b": (128, 8, 2816, 704),
        "kimi-k2": (384, 8, 7168, 2048),
        "kimi-k3": (896, 16, 3584, 3072),
        "minimax-m3": (128, 4, 6144, 3072),
        "nemotron-3-super": (512, 22, 1024, 2688),
        "nemotron-3-ultra": (512, 22, 2048, 5120),
        "qwen3-235b": (128, 8, 4096, 1536),
        "step-3.7": (288, 8, 4096, 1280),
    }
    activations = {name: preset_activation(name) for name in PRESETS}
    others = {name: own for name, own in activations.items() if own != "swiglu"}
    assert others == {
        "gemma-4-26b": "gelu_tanh",
        "gpt-oss-120b": "swiglu_oai",
        "kimi-k3": "situ",
        "minimax-m3": "swiglu_oai",
        "nemotron-3-super": "relu2",
        "nemotron-3-ultra": "relu2",
    }
    for name, activation in activations.items():
        shape = preset_shape(name, num_ranks=8, num_max_tokens_per_rank=64)
        assert shape.has_gate is (activation != "relu2")
    with_biases = [name for name in PRESETS if preset_has_biases(name)]
    assert with_biases == ["gpt-oss-120b"]
    shape = preset_shape("deepseek-v4-pro", num_ranks=8, num_max_tokens_per_rank=64)
    assert (shape.num_experts_per_rank, shape.hidden, shape.num_max_tokens_per_rank) == (
        48,
        7168,
        64,
    )


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"preset must be one of deepseek-v4-flash, .*; got 'gpt'"):
        preset_shape("gpt", num_ranks=1, num_max_tokens_per_rank=1)
    with pytest.raises(ValueError, match=r"preset must be one of deepseek-v4-flash, .*; got 'gpt'"):
        preset_activation("gpt")
