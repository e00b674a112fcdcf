"""What the throughput all-to-all refuses, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.split.throughput import AllToAll

SIZES = {
    "max_tokens_per_rank": 4,
    "hidden": 256,
    "num_experts": 4,
    "num_topk": 2,
    "max_recv_rows": 64,
}


def make(**changes: Any) -> AllToAll:
    options = {"device": "cpu", "num_sms": 2, "expert_alignment": 8}
    return AllToAll(None, **{**SIZES, **options, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 100}, "hidden must be a positive multiple of 128; got 100"),
        ({"num_experts": 4096}, "num_experts must be 1 to 2048; got 4096"),
        ({"num_topk": 33}, "num_topk must be 1 to 32; got 33"),
        ({"num_topk": 5}, "num_topk must be at most num_experts"),
        ({"max_tokens_per_rank": 32769}, "max_tokens_per_rank must be 1 to 32768; got 32769"),
        ({"max_recv_rows": 0}, "max_recv_rows must be 1 to 16777216; got 0"),
        ({"max_recv_rows": 2**24 + 1}, "max_recv_rows must be 1 to 16777216"),
        ({"expert_alignment": 48}, "expert_alignment must be a power of two; got 48"),
        ({"expert_alignment": 8192}, "expert_alignment must be 1 to 4096; got 8192"),
        ({"token_format": "fp4"}, "token_format must be one of mxfp8.*got 'fp4'"),
        ({"token_format": "fp8_128_ue8m0"}, "hidden must be a multiple of 512 for token_format"),
        ({"num_sms": 0}, "num_sms must be at least 1; got 0"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"schedule_seed": -1}, "schedule_seed must be at least 0; got -1"),
        ({"token_format": ["bf16"]}, r"token_format must be one of .*got \['bf16'\]"),
    ],
)
def test_sizes_are_checked(changes: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make(**changes)


def tokens(count: int = 4) -> torch.Tensor:
    return torch.ones(count, 256, dtype=torch.bfloat16)


def ids(count: int = 4) -> torch.Tensor:
    return torch.zeros(count, 2, dtype=torch.int64)


def weights(count: int = 4) -> torch.Tensor:
    return torch.ones(count, 2)


CALLS: dict[str, tuple[Callable[[AllToAll, Any], object], str]] = {
    "too_many_tokens": (
        lambda layer, handle: layer.dispatch(tokens(5), ids(5)),
        r"x must have at most max_tokens_per_rank \(4\) tokens; got 5",
    ),
    "neither": (lambda layer, handle: layer.dispatch(tokens()), "either topk_idx or.*got neither"),
    "both": (
        lambda layer, handle: layer.dispatch(tokens(), ids(), handle=handle),
        "either topk_idx or.*got both",
    ),
    "other_number": (
        lambda layer, handle: layer.dispatch(tokens(3), handle=handle),
        r"as many tokens as the handle's dispatch \(4\); got 3",
    ),
    "quantized_factors": (
        lambda layer, handle: layer.dispatch(
            tokens(), topk_weights=weights(), token_format="mxfp8", handle=handle
        ),
        "only such rows are multiplied; got 'mxfp8'",
    ),
    "no_tensor_of_ids": (
        lambda layer, handle: layer.dispatch(tokens(), [[0, 1]]),
        "topk_idx must be a tensor or None; got list",
    ),
    "ids_of_other_type": (
        lambda layer, handle: layer.dispatch(tokens(), ids().short()),
        "topk_idx must",
    ),
    "id_out_of_range": (
        lambda layer, handle: layer.dispatch(tokens(), ids() + 4),
        "topk_idx must",
    ),
    "width": (
        lambda layer, handle: layer.dispatch(tokens()[:, :128], ids()),
        "x must",
    ),
    "scales_of_bf16": (
        lambda layer, handle: layer.dispatch(tokens(), ids(), x_sf=torch.ones(4, 2)),
        "x_sf must be None for an x of bfloat16",
    ),
    "fp8_for_bf16": (
        lambda layer, handle: layer.dispatch(tokens().to(torch.float8_e4m3fn), ids()),
        "x must be bfloat16 for token_format 'bf16'; got float8_e4m3fn",
    ),
    "scales_of_other_type": (
        lambda layer, handle: layer.dispatch(
            tokens().to(torch.float8_e4m3fn), ids(), x_sf=torch.ones(4, 2), token_format="mxfp8"
        ),
        "x_sf must",
    ),
    "weights_of_other_shape": (
        lambda layer, handle: layer.dispatch(tokens(), ids(), topk_weights=weights(3)),
        "topk_weights must",
    ),
    "gradient": (
        lambda layer, handle: layer.dispatch(tokens().requires_grad_(), ids()),
        "x must not",
    ),
    "rows_of_other_shape": (
        lambda layer, handle: layer.combine(tokens(63), handle),
        "y must",
    ),
    "out_of_other_size": (
        lambda layer, handle: layer.combine(tokens(64), handle, out=tokens(3)),
        r"as many rows as the dispatch had tokens \(4\); got 3",
    ),
    "values_of_other_size": (
        lambda layer, handle: layer.return_scalars(torch.ones(63), handle),
        "values must",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_checked(name: str) -> None:
    call, text = CALLS[name]
    layer = make()
    _, handle = layer.dispatch(tokens(), ids())
    with pytest.raises((ValueError, TypeError), match=text):
        call(layer, handle)


def test_handles_are_of_the_same_layer_and_no_older_than_its_reset() -> None:
    layer, other = make(), make()
    _, handle = layer.dispatch(tokens(), ids())
    with pytest.raises(ValueError, match="handle must be of a dispatch of this layer"):
        other.combine(tokens(64), handle)
    with pytest.raises(TypeError, match="handle must be what a dispatch returned"):
        layer.combine(tokens(64), "handle")  # type: ignore[arg-type]
    layer.reset()
    with pytest.raises(ValueError, match=r"since the last reset\(\)"):
        layer.return_scalars(torch.ones(64), handle)


def test_a_closed_layer_is_refused() -> None:
    layer = make()
    layer.close()
    with pytest.raises(ValueError, match="this one is closed"):
        layer.dispatch(tokens(), ids())


def test_public_names() -> None:
    assert deep_moe.AllToAll is AllToAll
    layers = deep_moe.EmulatedThroughputAllToAll(2, **SIZES, num_sms=2)
    with pytest.raises(ValueError, match="called through its EmulatedThroughputAllToAll"):
        layers.layers[0].dispatch(tokens(), ids())
    assert "up to 4 tokens and 64 received rows" in repr(layers.layers[1])
    layers.close()


def test_many_rows_of_one_expert_come_back() -> None:
    """More than few bits of a place or a row hold."""
    num_tokens = 600
    layer = AllToAll(None, num_tokens, 128, 2, 1, 1024, device="cpu", num_sms=1)
    x = torch.arange(num_tokens).bfloat16().view(-1, 1).expand(-1, 128).contiguous()
    topk_idx = torch.zeros(num_tokens, 1, dtype=torch.int64)
    received, handle = layer.dispatch(x, topk_idx)
    assert torch.equal(received.x[:num_tokens], x)
    assert torch.equal(layer.combine(received.x, handle), x)
