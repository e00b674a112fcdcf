"""The layer under other names gives what the all-to-all gives, and refuses the rest in words."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.formats.float_scaled import dequantize_e4m3_float, quantize_e4m3_float
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
    check_calls(make(), 0, 1, zero_copy=True)


def test_a_message_for_each_expert() -> None:
    check_calls(make(placement="experts"), 0, 1)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_other_groups_and_fp16(run_ranks, num_nodes: int) -> None:
    def work(rank: int) -> None:
        layer = make(rank, 2, local_world_size=2 // num_nodes, fp8_gsize=64, dtype=torch.float16)
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(rank)).half()
        ids = torch.tensor([[0, 3], [2, 1], [-1, 2]], dtype=torch.int32)
        weights = torch.tensor([[0.5, 0.25]] * 3)
        tokens, scales, _, meta = layer.dispatch(x, None, ids)
        assert scales.shape == (2, 8, 4)
        rows = (tokens.float() * scales.repeat_interleave(64, dim=2)).half()
        out = layer.combine(rows, ids, weights, meta)
        values, floats = quantize_e4m3_float(x, group_size=64)
        expected = (values.float() * floats.repeat_interleave(64, dim=1)).half().float()
        sums = expected * (weights * (ids >= 0)).sum(dim=1, keepdim=True)
        assert out.dtype == torch.float16
        assert ((out.float() - sums).abs() <= 2.0**-10 * sums.abs() + 2.0**-24).all()
        dist.barrier()
        layer.finalize()

    run_ranks(2, work)


def test_without_room_for_them() -> None:
    layer = make(zero_copy=False)
    x, ids = torch.zeros(2, 256, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int32)
    _, _, _, meta = layer.dispatch(x, None, ids)
    with pytest.raises(ValueError, match="get_combine_buffer needs a layer with zero_copy=True"):
        layer.get_combine_buffer(meta)
    layer.finalize()


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


# The layer's documented example but for its imports.
EXAMPLE = """
# Initialize distributed runtime
rank, world_size = initialize_distributed()

# Create layer
layer = EPLowLatencyAllToAllLayer(
    max_m=128,
    hidden=7168,
    topk=8,
    online_quant_fp8=True,
    rank=rank,
    num_experts=256,
    local_world_size=8,
    world_size=32,
    fp8_gsize=128,
    dtype=torch.bfloat16,
    enable_profiling=False,
)

# Prepare inputs
tokens = torch.randn(128, 7168, dtype=torch.bfloat16, device="cuda")
expert_ids = torch.randint(0, 256, (128, 8), dtype=torch.int32, device="cuda")
routing_weights = torch.softmax(torch.randn(128, 8, device="cuda"), dim=-1).float()

# Dispatch (bf16 -> fp8 quantized transfer)
recv_token, recv_scale, expert_recv_count, dispatch_meta = layer.dispatch(
    send_tokens=tokens,
    send_scales=None,  # Online quantization
    topk_indices=expert_ids,
)

# Expert computation
# recv_token: [experts/rank, world * max_m, hidden] - FP8
# recv_scale: [experts/rank, world * max_m, num_groups] - FP32
expert_output = your_fp8_expert_ffn(recv_token, recv_scale)

# Combine
combined = layer.combine(
    send_tokens=expert_output,
    topk_indices=expert_ids,
    topk_weights=routing_weights,
    dispatch_meta=dispatch_meta,
)

# Cleanup
layer.finalize()
"""


def scaled(text: str, numbers: dict[str, int]) -> str:
    """The example with other numbers, which a CPU takes."""
    text = text.replace('"cuda"', '"cpu"')
    return re.sub(r"\b(\d+)\b", lambda number: str(numbers.get(number[0], number[0])), text)


def run_example(text: str, rank: int, world_size: int, hidden: int) -> dict[str, Any]:
    def doubled(recv_token: torch.Tensor, recv_scale: torch.Tensor) -> torch.Tensor:
        return (2 * dequantize_e4m3_float(recv_token, recv_scale)).bfloat16()

    names: dict[str, Any] = {
        "torch": torch,
        "EPLowLatencyAllToAllLayer": deep_moe.EPLowLatencyAllToAllLayer,
        "initialize_distributed": lambda: (rank, world_size),
        "your_fp8_expert_ffn": doubled,
    }
    torch.manual_seed(rank)
    exec(text, names)
    values, scales = quantize_e4m3_float(names["tokens"])
    rows = (2 * dequantize_e4m3_float(values, scales)).bfloat16().float()
    close = rows * names["routing_weights"].sum(dim=1, keepdim=True)
    # Every sum of a domain, and the whole, may be half a BF16 unit off.
    room = 2.0**-7 * (rows.abs() * names["routing_weights"].sum(dim=1, keepdim=True))
    assert ((names["combined"].float() - close).abs() <= room).all()
    assert names["combined"].shape == names["tokens"].shape
    return names


NODES = {"128": 4, "7168": 256, "256": 16, "8": 2, "32": 8}


def test_the_documented_example_on_four_nodes(run_ranks) -> None:
    """Of two ranks each. Groups of scales stay 128 wide: that number is the tokens' alone."""
    text = scaled(EXAMPLE, NODES).replace("fp8_gsize=4", "fp8_gsize=128")
    assert "local_world_size=2" in text
    assert "world_size=8" in text

    def work(rank: int) -> None:
        names = run_example(text, rank, 8, 256)
        assert names["recv_token"].shape == (2, 8 * 4, 256)
        assert names["recv_scale"].shape == (2, 8 * 4, 2)
        assert names["expert_recv_count"].shape == (2,)
        meta = names["dispatch_meta"]
        assert meta.recv_token_source_indices.shape == (2, 8 * 4)
        assert meta.recv_token_source_count_and_start.shape == (2, 8)
        counts = meta.recv_token_source_count_and_start & 0xFFFFFFFF
        assert torch.equal(counts.sum(dim=1), names["expert_recv_count"].long())

    run_ranks(8, work)


@pytest.mark.slow
def test_the_documented_numbers_of_ranks(run_ranks) -> None:
    """Four nodes of eight ranks, top-8 of 256 experts; tokens are few and small."""
    text = EXAMPLE.replace("128, 7168", "2, 128").replace("(128, 8", "(2, 8")
    text = text.replace("max_m=128", "max_m=2").replace("hidden=7168", "hidden=128")
    assert "local_world_size=8" in text
    assert "world_size=32" in text
    text = text.replace('"cuda"', '"cpu"')
    run_ranks(32, lambda rank: run_example(text, rank, 32, 128) and None)


def test_several_nodes(run_ranks) -> None:
    """Phases, traces, masks, and groups that the caller has made."""

    def work(rank: int, folder: Path) -> None:
        groups = deep_moe.make_domain_groups(2)
        layer = make(rank, 2, local_world_size=1, group=groups, enable_profiling=True)
        x = torch.ones(2, 256, dtype=torch.bfloat16)
        ids = torch.tensor([[0, 3], [2, 1]], dtype=torch.int32)
        weights = torch.full((2, 2), 0.5)
        for call in range(2):
            assert (layer.call_count, layer.phase) == (call, call % 2)
            tokens, scales, _, meta = layer.dispatch(x, None, ids)
            y = layer.get_combine_buffer(meta)
            y.copy_(dequantize_e4m3_float(tokens, scales))
            out = layer.combine(y, ids, weights, meta, zero_copy=True)
            assert (out == 1).all()
        layer.check()
        os.chdir(folder)
        layer.dump_dispatch_trace()
        layer.dump_combine_trace()
        for step in ("dispatch", "combine"):
            assert (folder / "prof" / f"ll_{step}_RANK_{rank}.json").exists()
        dist.barrier()
        layer.mask_ranks([1 - rank])
        tokens, scales, _, meta = layer.dispatch(x, None, ids)
        y = dequantize_e4m3_float(tokens, scales).bfloat16()
        out = layer.combine(y, ids, weights, meta)
        assert (out == 0.5).all()  # one of each token's experts is here
        dist.barrier()
        layer.finalize()

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, lambda rank: work(rank, Path(folder)))


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("online_quant_fp8", False, "online_quant_fp8 must be True"),
        ("local_world_size", 8, r"local_world_size must divide world_size \(1\); got 8"),
        ("local_world_size", 0, "local_world_size must be at least 1; got 0"),
        ("num_max_foreign_tokens", 4, "num_max_foreign_tokens must be None for one node; got 4"),
        ("fp8_gsize", 48, "fp8_gsize must be one of 16, 32, 64, 128, 256, 512; got 48"),
        (
            "dtype",
            torch.float32,
            r"dtype must be torch\.bfloat16 or torch\.float16; got torch\.flo",
        ),
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
