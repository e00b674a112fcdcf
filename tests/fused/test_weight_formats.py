"""One call for all pairs of weights and tokens; a buffer is for one pair."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import deep_moe
from deep_moe.fused.checks import STATISTICS
from deep_moe.fused.mega_moe import _mega_moe_op
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.targets.sm90 import SM90A
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import Layer, exact_layer, exact_tokens
from deep_moe.weights.mxfp4.sm90 import Sm90Mxfp4
from tests.pairs import formats

from .conftest import SHAPE, arch_with, fill

FP8 = dataclasses.replace(SHAPE, **formats("fp8"))


def buffer_for(shape: MoEShape):
    return deep_moe.get_symm_buffer_for_mega_moe(None, **shape.buffer_arguments, device="cpu")


PAIRS = ["mxfp4", "fp8", "bf16", "mxfp4 x bf16", "nvfp4", "int4", "mxfp8"]


def laid_out(pair: str, layer: Layer) -> tuple[str, deep_moe.MegaMoEWeights]:
    arch = arch_with(**formats(pair))
    return arch, deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch, **formats(pair))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("how", ["function", "operator"])
def test_a_call_of_each_pair(pair: str, how: str) -> None:
    shape = dataclasses.replace(SHAPE, **formats(pair))
    layer, tokens = exact_layer(shape), exact_tokens(shape, 9)
    arch, weights = laid_out(pair, layer)
    buffer = buffer_for(shape)
    fill(buffer, tokens)
    y = torch.full((9, shape.hidden), torch.nan, dtype=torch.bfloat16)
    stats = torch.zeros(4, dtype=torch.int32)
    if how == "function":
        deep_moe.mega_moe(y, weights, buffer, stats, arch=arch)
    else:
        named = {STATISTICS: stats, "arch": arch}
        _mega_moe_op(y, *weights.tensors, buffer.handle, **named)
    expected = reference_mega_moe(
        *layer.operands(tokens),
        numerics=target_of(arch).weights_of(**formats(pair)).numerics,
    )
    assert torch.equal(y, expected)
    assert int(stats.sum()) == 18


def test_deep_gemms_name_takes_the_pairs_of_both_layers() -> None:
    layer, tokens = exact_layer(SHAPE), exact_tokens(SHAPE, 9)
    weights = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2)
    buffer = buffer_for(SHAPE)
    fill(buffer, tokens)
    l1, l2 = weights
    ys = [torch.full((9, SHAPE.hidden), torch.nan, dtype=torch.bfloat16) for _ in range(3)]
    deep_moe.mega_moe(ys[0], weights, buffer)
    deep_moe.fp8_fp4_mega_moe(ys[1], l1, l2, buffer)
    deep_moe.fp8_fp4_mega_moe(ys[2], list(l1), list(l2), buffer)
    assert torch.equal(ys[0], ys[1])
    assert torch.equal(ys[0], ys[2])


@pytest.mark.parametrize("pair", PAIRS[1:])
def test_deep_gemms_name_is_for_one_pair(pair: str) -> None:
    buffer = buffer_for(dataclasses.replace(SHAPE, **formats(pair)))
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    layer = (torch.empty(1), torch.empty(1))
    words = "sym_buffer must be made for mxfp4 weights and mxfp8 tokens for fp8_fp4_mega_moe"
    with pytest.raises(ValueError, match=words):
        deep_moe.fp8_fp4_mega_moe(y, layer, layer, buffer)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("other", PAIRS)
def test_weights_of_another_pair_are_refused_by_name(pair: str, other: str) -> None:
    if pair == other:
        return
    arch = "sm_90a"
    made = deep_moe.empty_weights_for_mega_moe(4, 256, 128, arch=arch, **formats(other))
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    shape = dataclasses.replace(SHAPE, **formats(pair))
    words = (
        f"weights must be {shape.weights} weights beside {shape.token_format} tokens for sm90, as "
        f"the call's sizes and arch say; got {made.words}"
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        deep_moe.mega_moe(y, made, buffer_for(shape), arch=arch)


def test_weights_for_another_target_are_refused_by_name() -> None:
    made = deep_moe.empty_weights_for_mega_moe(4, 256, 128, arch="sm_90a")
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"tokens for sm100, as .* got .* laid out for sm90"):
        deep_moe.mega_moe(y, made, buffer_for(SHAPE), arch="sm_103a")
    with pytest.raises(TypeError, match=r"weights must be MegaMoEWeights, as .*; got tuple"):
        deep_moe.mega_moe(y, tuple(made), buffer_for(SHAPE))


def test_a_target_without_the_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = deep_moe.empty_weights_for_mega_moe(4, 256, 128, arch="sm_90a", weights="fp8")
    monkeypatch.setitem(vars(SM90A), "weights", (Sm90Mxfp4(),))
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weights must be one of mxfp4 on sm_90a; got 'fp8'"):
        deep_moe.mega_moe(y, made, buffer_for(FP8), arch="sm_90a")


def test_a_buffer_says_its_format() -> None:
    assert "128, fp8 weights, mxfp8 tokens, up to 16 tokens" in repr(buffer_for(FP8))
    assert buffer_for(FP8).shape == FP8
    with pytest.raises(ValueError, match=r"weights must be one of mxfp4, .*; got 'nvfp3'"):
        deep_moe.get_symm_buffer_for_mega_moe(
            None, 4, 16, 2, 256, 128, weights="nvfp3", device="cpu"
        )


def test_ranks_agree_on_the_format(run_ranks) -> None:
    def make(rank: int) -> str:
        with pytest.raises(ValueError, match="weights must be") as caught:
            deep_moe.get_symm_buffer_for_mega_moe(
                torch.distributed.group.WORLD, 4, 16, 2, 256, 128, weights=("mxfp4", "fp8")[rank]
            )
        return str(caught.value)

    words = "weights must be the same on every rank; got 'mxfp4' on rank 0 and 'fp8' on rank 1"
    assert run_ranks(2, make) == [words, words]


def test_help_says_the_options() -> None:
    for call in (deep_moe.mega_moe, deep_moe.fp8_fp4_mega_moe):
        assert "timeout_s: limit of the kernel's waits" in (call.__doc__ or "")
        assert "{options}" not in (call.__doc__ or "")
