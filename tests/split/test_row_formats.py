"""Other groups of values per scale than 128, and FP16 in place of BF16."""

from __future__ import annotations

import pytest
import torch

from deep_moe.formats.block_scaled import quantize_e4m3_ue8m0
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.split.emulated_throughput import EmulatedThroughputAllToAll
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.split.throughput import AllToAll

from .reference import bits, check_dispatched, expected_out, random_inputs

FP16 = torch.float16


@pytest.mark.parametrize(
    ("options", "zero_copy"),
    [
        pytest.param({"group_size": 16}, False, id="16"),
        pytest.param({"group_size": 64, "token_format": "fp8_128_pow2"}, False, id="64_pow2"),
        pytest.param({"group_size": 512, "dtype": FP16}, True, id="512_fp16"),
        pytest.param({"group_size": 32, "placement": "experts"}, False, id="32_by_expert"),
        pytest.param({"dtype": FP16, "token_format": "mxfp8"}, False, id="fp16_mxfp8"),
        pytest.param({"dtype": FP16, "token_format": "bf16"}, False, id="fp16_as_it_is"),
        pytest.param({"group_size": 256}, False, id="256", marks=pytest.mark.slow),
    ],
)
def test_every_bit_of_calls_in_turn(options: dict, zero_copy: bool) -> None:
    options = {"token_format": "fp8_128", **options}
    with EmulatedAllToAll(
        *(2, 5, 512, 4, 3), zero_copy=zero_copy, num_sms=2, checked=True, **options
    ) as ranks:
        for seed, counts in enumerate([(5, 3), (0, 4)]):
            inputs = random_inputs(ranks.shape, counts, seed)
            if seed == 0 and options.get("dtype") is FP16:
                inputs.xs[0][0, :6] = torch.tensor([65504.0, -0.0, 6e-8, 1.5, torch.inf, 2.0])
            results = ranks.dispatch(inputs.xs, inputs.topk_idxs)
            for rank, result in enumerate(results):
                check_dispatched(ranks.shape, result, rank, inputs.xs, inputs.topk_idxs)
            ys = inputs.ys
            if zero_copy:
                ys = [
                    layer.get_combine_buffer(result.handle).copy_(y)
                    for layer, result, y in zip(ranks.layers, results, ys, strict=True)
                ]
            handles = [result.handle for result in results]
            outs = ranks.combine(
                ys, inputs.topk_idxs, inputs.topk_weights, handles, zero_copy=zero_copy
            )
            for rank, out in enumerate(outs):
                expected = expected_out(
                    ranks.shape, rank, inputs.topk_idxs, inputs.topk_weights[rank], inputs.ys
                )
                assert out.dtype == expected.dtype
                assert torch.equal(bits(out), bits(expected))


def test_sums_beyond_fp16_are_infinite() -> None:
    layer = LowLatencyAllToAll(
        None, 2, 128, 4, 2, token_format="bf16", dtype=FP16, device="cpu", num_sms=2
    )
    x, ids = torch.ones(1, 128, dtype=FP16), torch.tensor([[0, 1]])
    result = layer.dispatch(x, ids)
    assert result.recv_x.dtype == FP16
    y = torch.full_like(result.recv_x, 60000.0)
    out = layer.combine(y, ids, torch.ones(1, 2), result.handle)
    assert torch.isinf(out).all()
    layer.close()


@pytest.mark.parametrize("token_format", ["bf16", "fp8_128"])
def test_many_tokens_in_fp16(token_format: str) -> None:
    with EmulatedThroughputAllToAll(
        *(2, 4, 256, 4, 2, 32),
        expert_alignment=4,
        token_format=token_format,
        dtype=FP16,
        num_sms=2,
    ) as ranks:
        generator = torch.Generator().manual_seed(1)
        xs = [torch.randn(count, 256, generator=generator).half() for count in (4, 3)]
        ids = [torch.randint(0, 4, (len(x), 2), generator=generator) for x in xs]
        weights = [torch.rand(len(x), 2, generator=generator) for x in xs]
        results = ranks.dispatch(xs, ids)
        for received, _ in results:
            assert received.x.dtype == (FP16 if token_format == "bf16" else torch.float8_e4m3fn)
        rows = []
        for received, _ in results:
            if received.x_sf is None:
                rows.append(received.x)
            else:
                scales = received.x_sf.repeat_interleave(128, dim=1)
                rows.append((received.x.float() * scales).half())
        outs = ranks.combine(rows, [handle for _, handle in results], topk_weights=weights)
        for x, weight, out in zip(xs, weights, outs, strict=True):
            row = x
            if token_format != "bf16":
                values, scales = quantize_e4m3_float(x)
                row = (values.float() * scales.repeat_interleave(128, dim=1)).half()
            total = torch.zeros(len(x), 256)
            for slot in range(2):
                total = total + weight[:, slot : slot + 1] * row.float()
            assert torch.equal(bits(out), bits(total.half()))


def test_what_is_refused() -> None:
    sizes = (None, 4, 256, 4, 2)
    with pytest.raises(ValueError, match=r"group_size must be one of 16, 32.*; got 48"):
        LowLatencyAllToAll(*sizes, group_size=48, device="cpu")
    with pytest.raises(ValueError, match=r"hidden must be a multiple of group_size \(512\)"):
        LowLatencyAllToAll(*sizes, group_size=512, device="cpu")
    with pytest.raises(ValueError, match="group_size must be 128 but for token_format"):
        LowLatencyAllToAll(*sizes, group_size=64, token_format="mxfp8", device="cpu")
    with pytest.raises(ValueError, match="group_size must be 128 with any_format=True; got 64"):
        LowLatencyAllToAll(*sizes, group_size=64, any_format=True, device="cpu")
    with pytest.raises(ValueError, match=r"dtype must be torch\.bfloat16 or torch\.float16"):
        LowLatencyAllToAll(*sizes, dtype=torch.float32, device="cpu")
    with pytest.raises(TypeError, match=r"dtype must be .*; got 'fp16'"):
        AllToAll(*sizes, 64, dtype="fp16", device="cpu")  # type: ignore[arg-type]
    layer = AllToAll(*sizes, 64, expert_alignment=8, dtype=FP16, device="cpu", num_sms=2)
    x, ids = torch.zeros(2, 256, dtype=FP16), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match="x must be"):
        layer.dispatch(x.bfloat16(), ids)
    _, handle = layer.dispatch(x, ids)
    with pytest.raises(ValueError, match="topk_weights must be None for a dispatch with a handle"):
        layer.dispatch(x, topk_weights=torch.ones(2, 2), handle=handle)
    layer.close()
    with pytest.raises(ValueError, match="group_size must divide"):
        quantize_e4m3_float(torch.ones(2, 128), group_size=48)
    assert quantize_e4m3_ue8m0(torch.ones(2, 128))[1].shape == (2, 1)
