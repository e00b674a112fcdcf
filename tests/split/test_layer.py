"""The layer under other names gives what the all-to-all gives, and refuses the rest in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.heuristics.low_latency import LowLatencyShape
from deep_moe.split.handle import Dispatched
from deep_moe.split.layer import DispatchMetaInfo, EPLowLatencyAllToAllLayer
from deep_moe.targets import target_of
from deep_moe.trial.bounds import reference_bounds
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import random_layer

from .reference import bits, check_dispatched, expected_out, random_inputs


def make(rank: int = 0, world_size: int = 1, **changes: Any) -> EPLowLatencyAllToAllLayer:
    arguments: dict[str, Any] = {
        "max_m": 4,
        "hidden": 256,
        "topk": 2,
        "online_quant_fp8": True,
        "rank": rank,
        "num_experts": 4,
        "local_world_size": world_size,
        "world_size": world_size,
        "device": "cpu",
    }
    return EPLowLatencyAllToAllLayer(**{**arguments, **changes})


def check_calls(
    layer: EPLowLatencyAllToAllLayer, rank: int, num_ranks: int, zero_copy: bool = False
) -> None:
    shape = LowLatencyShape(num_ranks, 4, 2, 256, 4, "fp8_128")
    for call in range(3):
        assert (layer.call_count, layer.phase) == (call, call % 2)
        inputs = random_inputs(shape, [4 - call] * num_ranks, call, dtype=torch.int32)
        ids, weights = inputs.topk_idxs[rank], inputs.topk_weights[rank]
        tokens, scales, count, meta = layer.dispatch(inputs.xs[rank], None, ids)
        assert isinstance(meta, DispatchMetaInfo)
        sources, ranges = meta.recv_token_source_indices, meta.recv_token_source_count_and_start
        result = Dispatched(tokens, scales, count, sources, ranges, meta.handle)
        check_dispatched(shape, result, rank, inputs.xs, inputs.topk_idxs)
        rows = inputs.ys[rank]
        if zero_copy:
            rows = layer.get_combine_buffer(meta).copy_(rows)
        out = layer.combine(rows, ids, weights, meta, zero_copy=zero_copy)
        expected = expected_out(shape, rank, inputs.topk_idxs, weights, inputs.ys)
        assert torch.equal(bits(out), bits(expected))
    layer.finalize()


def test_one_rank() -> None:
    check_calls(make(), 0, 1)


def test_experts_that_write_into_the_communication_buffer() -> None:
    check_calls(make(zero_copy=True), 0, 1, zero_copy=True)


def test_a_message_for_each_expert() -> None:
    check_calls(make(placement="experts"), 0, 1)


def test_its_tokens_go_to_fp8_experts_as_they_are() -> None:
    """Float32 scales of any size, and no quantization between dispatch and experts."""
    shape = MoEShape(1, 4, 2, 256, 128, 4, weights="fp8", token_format="fp8_128")
    weights = random_layer(shape, scale_block=(128, 128))
    transformed = deep_moe.transform_weights_for_mega_moe(
        weights.l1, weights.l2, arch="sm_90a", weights="fp8", token_format="fp8_128"
    )
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0]], dtype=torch.int32)
    topk_weights = torch.tensor([[0.5, 0.25]] * 4)
    layer = make()
    tokens, scales, count, meta = layer.dispatch(x, None, ids)
    experts = deep_moe.GroupedExperts(
        8, 256, 128, 4, weights="fp8", token_format="fp8_128", arch="sm_90a", device="cpu"
    )
    y = experts(tokens, scales, transformed, count)
    out = layer.combine(y, ids, topk_weights, meta)
    values, floats = quantize_e4m3_float(x)
    bounds = reference_bounds(
        *(values, floats, ids.long(), topk_weights, weights.l1, weights.l2),
        numerics=target_of("sm_90a").weights_of("fp8", "fp8_128").numerics,
        sum_bits=FP32_SUM_BITS,
        weights_in_combine=True,
    )
    assert compare(out, bounds).is_right
    layer.finalize()
    experts.close()


def test_two_ranks(run_ranks) -> None:
    run_ranks(2, lambda rank: check_calls(make(rank, 2), rank, 2))


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("online_quant_fp8", False, "online_quant_fp8 must be True"),
        ("local_world_size", 8, r"local_world_size must be world_size \(1\).*got 8.*TwoLevelMoE"),
        ("fp8_gsize", 64, "fp8_gsize must be 128; got 64"),
        ("dtype", torch.float16, "dtype must be torch.bfloat16; got torch.float16"),
        ("rank", 1, "rank and world_size must be those of the group, 0 and 1; got 1 and 1"),
        ("max_m", 2000, "num_max_tokens_per_rank must be 1 to 1024; got 2000"),
    ],
)
def test_what_it_is_made_with(argument: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**{argument: value})


def test_what_it_is_called_with() -> None:
    layer = make()
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    ids = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="send_scales must be None"):
        layer.dispatch(x, torch.ones(2, 2), ids)  # type: ignore[arg-type]
    _, _, _, meta = layer.dispatch(x, None, ids)
    y = torch.zeros(4, 4, 256, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"y must be what get_combine_buffer\(handle\) gave"):
        layer.combine(y, ids, torch.zeros(2, 2), meta, zero_copy=True)
    with pytest.raises(TypeError, match="dispatch_meta must be what a dispatch returned"):
        layer.combine(y, ids, torch.zeros(2, 2), meta.handle)  # type: ignore[arg-type]
    layer.finalize()
    with pytest.raises(ValueError, match="this one is closed"):
        layer.dispatch(x, None, ids)


def test_the_names_are_public() -> None:
    assert deep_moe.EPLowLatencyAllToAllLayer is EPLowLatencyAllToAllLayer
    assert deep_moe.DispatchMetaInfo is DispatchMetaInfo
    assert not dist.is_initialized()
