"""The layer over the throughput all-to-all; `deep-moe run --path throughput` judges its numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe import ThroughputMoE
from deep_moe.errors import MegaMoEError
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.tokens import token_format as token_format_of
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.calls import model_inputs, rank_operands
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import exact_layer, exact_tokens

ARCH = "sm_90a"
SHAPE = MoEShape(1, 4, 2, 256, 128, 8)
ON_TARGET = target_of(ARCH).weights_of(SHAPE.weights)


def layer_of(**changes: Any) -> ThroughputMoE:
    options: dict[str, Any] = {"arch": ARCH, "num_sms": 2, "device": "cpu", **changes}
    return ThroughputMoE(None, 8, 256, 128, 4, 2, **options)


def test_calls_of_a_rank_alone_are_exact_and_one_too_many_rows_leave_it_usable() -> None:
    """Also with a result tensor of the caller's, and without tokens."""
    weights = exact_layer(SHAPE, scale_block=ON_TARGET.scale_block)
    operands, biases = rank_operands(SHAPE, weights, 0, torch.device("cpu"), ARCH)
    assert not biases
    with layer_of(max_recv_rows=8) as layer:
        for num_tokens in (4, 5, 0, 3):
            x, tokens = model_inputs(exact_tokens(SHAPE, num_tokens, seed=num_tokens))
            out = torch.full((num_tokens, 256), torch.nan, dtype=torch.bfloat16)
            arguments = x, tokens.topk_idx, tokens.topk_weights, operands
            if num_tokens == 5:
                with pytest.raises(MegaMoEError, match=r"rank 0 would get 10 .* 8"):
                    layer(*arguments, out=out)
                with pytest.raises(MegaMoEError, match=r"reset\(\)"):
                    layer(*arguments, out=out)
                layer.reset()
                continue
            assert layer(*arguments, out=out) is out
            layer.check()
            expected = reference_bounds(
                *weights.operands(tokens),
                weights_in_combine=True,
                numerics=ON_TARGET.numerics,
                sum_bits=FP32_SUM_BITS,
            )
            comparison = compare(out, expected.y)
            assert comparison.is_right
            assert comparison.num_equal == comparison.num_values


def test_both_steps_of_a_layer_are_given_the_mask() -> None:
    """A rank alone can mask nobody, so that it notices a mask by what it refuses."""
    operands, _ = rank_operands(
        SHAPE, exact_layer(SHAPE, scale_block=ON_TARGET.scale_block), 0, torch.device("cpu"), ARCH
    )
    x, tokens = model_inputs(exact_tokens(SHAPE, 5))
    arguments = x, tokens.topk_idx, tokens.topk_weights, operands
    none_masked, itself = (torch.full((1,), value, dtype=torch.int32) for value in (0, 1))
    with layer_of() as layer:
        expected = layer(*arguments)
        assert torch.equal(layer(*arguments, masked_ranks=none_masked), expected)
        with pytest.raises(ValueError, match="masked_ranks must leave out other ranks"):
            layer(*arguments, masked_ranks=itself)
        with pytest.raises(ValueError, match="masked_ranks must be given to every call"):
            layer(*arguments)
        received, handle = layer.dispatch(x, tokens.topk_idx, masked_ranks=none_masked)
        y = layer.compute(received, operands)
        for mask, words in ((itself, "must leave out other ranks"), (None, "must be given to")):
            with pytest.raises(ValueError, match=words):
                layer.combine(y, handle, tokens.topk_weights, masked_ranks=mask)
        layer.reset()
        assert torch.equal(layer(*arguments), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "int5"}, "weights must be one of"),
        ({"token_format": "fp8_128"}, "token_format must be .*; got 'fp8_128'"),
        (
            {"weights": "bf16", "token_format": "mxfp8"},
            "token_format must be 'bf16' with bf16 weights",
        ),
        ({"max_recv_rows": 0}, "max_recv_rows must be 1 to"),
        ({"overrides": {"block_x": 3}}, "block_x"),
        ({"num_sms": 0}, "num_sms must be at least 1"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        layer_of(**changes)


def test_what_is_no_dispatch_is_not_computed() -> None:
    with layer_of() as layer, pytest.raises(TypeError, match="received must be what a dispatch"):
        layer.compute(torch.zeros(3, 256), None)  # type: ignore[arg-type]
    assert "ThroughputMoE" in repr(layer)
    assert layer.nbytes > 0


@pytest.mark.parametrize(
    ("weights", "token_format"),
    [("mxfp4", "mxfp8"), ("fp8", "fp8_128"), ("mxfp4", "fp8_128_ue8m0"), ("bf16", "bf16")],
)
def test_tokens_quantized_behind_the_links_have_the_same_bits(weights, token_format) -> None:
    in_products = token_format_of(token_format).in_products
    shape = MoEShape(1, 4, 2, 512, 128, 8, weights=weights, token_format=in_products)
    block = target_of(ARCH).weights_of(weights, in_products).scale_block
    operands, _ = rank_operands(
        shape, exact_layer(shape, scale_block=block), 0, torch.device("cpu"), ARCH
    )
    x, tokens = model_inputs(exact_tokens(shape, 5))
    results = []
    for behind in (False, True):
        options = {"weights": weights, "token_format": token_format, "quantize_behind": behind}
        layer = ThroughputMoE(
            *(None, 8, 512, 128, 4, 2), arch=ARCH, num_sms=2, device="cpu", **options
        )
        assert layer.all_to_all.token_format == ("bf16" if behind else token_format)
        results.append(layer(x, tokens.topk_idx, tokens.topk_weights, operands))
        layer.close()
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    assert results[0].any()


def test_a_scale_for_each_token_is_not_made_behind() -> None:
    with pytest.raises(ValueError, match=r"quantize_behind must be False.*'fp8_token'"):
        layer_of(weights="fp8", token_format="fp8_token", quantize_behind=True)
    with pytest.raises(TypeError, match="quantize_behind must be a bool"):
        layer_of(quantize_behind="yes")
