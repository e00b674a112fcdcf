"""Each format has a function of its own; a buffer is for one format."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import deep_moe
from deep_moe.fused.mega_moe import CALLS
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.targets.sm90 import Sm90
from deep_moe.targets.sm90_mxfp4 import Sm90Mxfp4
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens

from .conftest import SHAPE, arch_with, fill

FP8 = dataclasses.replace(SHAPE, weights="fp8")


def buffer_for(shape: MoEShape):
    return deep_moe.get_symm_buffer_for_mega_moe(
        None,
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
        weights=shape.weights,
        device="cpu",
    )


@pytest.mark.parametrize("weights", CALLS)
@pytest.mark.parametrize("how", ["function", "function with lists", "operator"])
def test_the_function_of_a_format(weights: str, how: str) -> None:
    shape = dataclasses.replace(SHAPE, weights=weights)
    layer, tokens = exact_layer(shape), exact_tokens(shape, 9)
    arch = arch_with(weights)
    l1, l2 = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2, arch, weights=weights)
    buffer = buffer_for(shape)
    fill(buffer, tokens)
    y = torch.full((9, shape.hidden), torch.nan, dtype=torch.bfloat16)
    stats = torch.zeros(4, dtype=torch.int32)
    if how == "function":
        CALLS[weights](y, l1, l2, buffer, stats, arch=arch)
    elif how == "function with lists":
        CALLS[weights](y, list(l1), list(l2), buffer, stats, arch=arch)
    else:
        torch.ops.deep_moe.mega_moe(y, stats, *l1, *l2, buffer.handle, arch=arch)
    expected = reference_mega_moe(
        tokens.x,
        tokens.x_sf,
        tokens.topk_idx,
        tokens.topk_weights,
        layer.l1,
        layer.l2,
        numerics=target_of(arch).weights_of(weights).numerics,
    )
    assert torch.equal(y, expected)
    assert int(stats.sum()) == 18


@pytest.mark.parametrize("weights", CALLS)
def test_another_formats_function_is_refused(weights: str) -> None:
    buffer = buffer_for(dataclasses.replace(SHAPE, weights=weights))
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    pair = (torch.empty(1), torch.empty(1))
    for other, call in CALLS.items():
        if other == weights:
            continue
        words = (
            f"sym_buffer must be made with weights='{other}' for {call.__name__}; got one with "
            f"'{weights}', for {CALLS[weights].__name__}"
        )
        with pytest.raises(ValueError, match=re.escape(words)):
            call(y, pair, pair, buffer)


def test_weights_of_another_format_are_refused() -> None:
    layer = exact_layer(SHAPE)
    l1, l2 = deep_moe.transform_weights_for_mega_moe(layer.l1, layer.l2)
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    words = r"l1_weights\[0\] must be torch.float8_e4m3fn; got torch.int8"
    with pytest.raises(TypeError, match=words):
        deep_moe.fp8_mega_moe(y, l1, l2, buffer_for(FP8))


def test_a_target_without_the_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sm90, "weights", (Sm90Mxfp4(),))
    pair = (torch.empty(1), torch.empty(1))
    y = torch.empty(1, SHAPE.hidden, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="weights must be one of mxfp4 on sm_90a; got 'fp8'"):
        deep_moe.fp8_mega_moe(y, pair, pair, buffer_for(FP8), arch="sm_90a")


def test_a_buffer_says_its_format() -> None:
    assert "128, fp8 weights, up to 16 tokens" in repr(buffer_for(FP8))
    assert buffer_for(FP8).shape == FP8
    with pytest.raises(
        ValueError, match="weights must be one of mxfp4, fp8, bf16, mxfp4_bf16; got 'nvfp4'"
    ):
        deep_moe.get_symm_buffer_for_mega_moe(
            None, 4, 16, 2, 256, 128, weights="nvfp4", device="cpu"
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
    for call in CALLS.values():
        assert "timeout_s: limit of the kernel's waits" in (call.__doc__ or "")
        assert "{options}" not in (call.__doc__ or "")
