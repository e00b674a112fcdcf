"""What is not allowed is refused in words, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.heuristics.low_latency import LowLatencyConfig, LowLatencyShape
from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.split.low_latency import LowLatencyAllToAll

from .reference import Inputs, random_inputs

T, H, E, K = 4, 128, 4, 2


def make(**changes: Any) -> LowLatencyAllToAll:
    arguments: dict[str, Any] = {
        "group": None,
        "num_max_tokens_per_rank": T,
        "hidden": H,
        "num_experts": E,
        "num_topk": K,
        "device": "cpu",
        "num_sms": 1,
    }
    return LowLatencyAllToAll(**{**arguments, **changes})


@pytest.fixture
def layer() -> LowLatencyAllToAll:
    return make()


@pytest.fixture
def inputs(layer: LowLatencyAllToAll) -> Inputs:
    return random_inputs(layer.shape, (T,))


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("num_max_tokens_per_rank", 0, "num_max_tokens_per_rank must be 1 to 1024; got 0"),
        ("num_max_tokens_per_rank", 1025, "num_max_tokens_per_rank must be 1 to 1024; got 1025"),
        ("hidden", 100, "hidden must be a positive multiple of 128; got 100"),
        ("hidden", 0, "hidden must be a positive multiple of 128; got 0"),
        ("num_experts", 4097, "num_experts must be 1 to 4096; got 4097"),
        ("num_topk", 33, "num_topk must be 1 to 32; got 33"),
        ("num_topk", 5, r"num_topk must be at most num_experts \(4\); got 5"),
        ("token_format", "fp4", "fp8_128_pow2, fp8_128, bf16; got 'fp4'"),
        ("num_sms", 0, "num_sms must be at least 1; got 0"),
        ("timeout_s", -1.0, "timeout_s must be a positive number of at most 1e.09; got -1"),
        ("arch", "sm_80", "arch must be one of .*; got 'sm_80'"),
        ("device", "meta", "device must be a CPU or a CUDA device; got meta"),
    ],
)
def test_sizes_and_options(argument: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value", "text"),
    [
        ("hidden", 128.0, "hidden must be an int"),
        ("token_format", None, "token_format must be a str; got NoneType"),
        ("num_sms", 2.0, "num_sms must be an int"),
        ("timeout_s", "1", "timeout_s must be a number or None; got str"),
        ("scales_by_column", 1, "scales_by_column must be a bool; got int"),
        ("group", 3, "group must be a torch.distributed process group"),
        ("schedule_seed", 1.0, "schedule_seed must be an int"),
    ],
)
def test_types_of_options(argument: str, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make(**{argument: value})


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"num_experts must be a multiple of num_ranks \(3\)"):
        LowLatencyShape(3, 4, 2, 128, 4, "bf16")


def test_a_config_without_ctas() -> None:
    shape = LowLatencyShape(1, 4, 2, 128, 4, "bf16")
    with pytest.raises(ValueError, match="num_ctas must be at least 1; got 0"):
        LowLatencyConfig(shape, "dispatch", 0, "sm_90a")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"x": torch.zeros(T, H)}, TypeError, "x must be torch.bfloat16; got torch.float32"),
        ({"x": torch.zeros(T)}, ValueError, "x must be 2-dimensional"),
        ({"x": torch.zeros(T, 256).bfloat16()}, ValueError, r"x must have shape \(4, 128\)"),
        ({"x": torch.zeros(5, H).bfloat16()}, ValueError, r"at most .* \(4\) tokens; got 5"),
        ({"x": torch.zeros(T, 2 * H).bfloat16()[:, ::2]}, ValueError, "x must be contiguous"),
        ({"x": torch.zeros(T * H + 1).bfloat16()[1:].view(T, H)}, ValueError, "x must start at"),
        ({"x": None}, TypeError, "x must be a tensor; got NoneType"),
        ({"topk_idx": torch.zeros(T, K)}, TypeError, "topk_idx must be torch.int64 or torch.int32"),
        ({"topk_idx": torch.zeros(T, 3).long()}, ValueError, "topk_idx must have shape"),
        ({"topk_idx": torch.full((T, K), 4)}, ValueError, "expert ids 0 to 3, or -1 .* got 4 for"),
        ({"topk_idx": torch.full((T, K), -2)}, ValueError, "token 0, slot 0"),
        ({"topk_idx": torch.zeros(K, T).long().T}, ValueError, "topk_idx must be contiguous"),
    ],
)
def test_what_is_dispatched(layer, inputs, changes, error, text: str) -> None:
    arguments = {"x": inputs.xs[0], "topk_idx": inputs.topk_idxs[0], **changes}
    with pytest.raises(error, match=text):
        layer.dispatch(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"y": torch.zeros(E, T, H)}, TypeError, "y must be torch.bfloat16"),
        ({"y": torch.zeros(E, T + 1, H).bfloat16()}, ValueError, "y must have shape"),
        ({"y": torch.zeros(E, H, T).bfloat16().mT}, ValueError, "y must be contiguous"),
        ({"topk_idx": torch.zeros(T - 1, K).long()}, ValueError, "topk_idx must have shape"),
        ({"topk_weights": torch.zeros(T, K).half()}, TypeError, "topk_weights must be torch.float"),
        ({"topk_weights": torch.zeros(T, 1)}, ValueError, "topk_weights must have shape"),
        ({"topk_weights": torch.zeros(K, T).T}, ValueError, "topk_weights must be contiguous"),
        ({"out": torch.zeros(T, H)}, TypeError, "out must be torch.bfloat16"),
        ({"out": torch.zeros(T + 1, H).bfloat16()}, ValueError, r"the dispatch had tokens \(4\)"),
        ({"handle": 3}, TypeError, "handle must be what a dispatch returned; got int"),
    ],
)
def test_what_is_combined(layer, inputs, changes, error, text: str) -> None:
    result = layer.dispatch(inputs.xs[0], inputs.topk_idxs[0])
    arguments = {
        "y": inputs.ys[0],
        "topk_idx": inputs.topk_idxs[0],
        "topk_weights": inputs.topk_weights[0],
        "handle": result.handle,
        **changes,
    }
    with pytest.raises(error, match=text):
        layer.combine(**arguments)


def test_gradients_are_refused(layer, inputs) -> None:
    x, ids, weights = inputs.xs[0], inputs.topk_idxs[0], inputs.topk_weights[0]
    with pytest.raises(ValueError, match="x must not require a gradient"):
        layer.dispatch(x.requires_grad_(), ids)
    with torch.no_grad():
        result = layer.dispatch(x, ids)
    with pytest.raises(ValueError, match="topk_weights must not require a gradient"):
        layer.combine(inputs.ys[0], ids, weights.requires_grad_(), result.handle)


def combine(layer: LowLatencyAllToAll, inputs: Inputs, handle: Any, **options: Any) -> torch.Tensor:
    ids, weights = inputs.topk_idxs[0], inputs.topk_weights[0]
    return layer.combine(inputs.ys[0], ids, weights, handle, **options)


def dispatch(layer: LowLatencyAllToAll, inputs: Inputs, **options: Any) -> Any:
    return layer.dispatch(inputs.xs[0], inputs.topk_idxs[0], **options).handle


def test_a_handle_is_used_once(layer, inputs) -> None:
    handle = dispatch(layer, inputs)
    combine(layer, inputs, handle)
    with pytest.raises(ValueError, match="handle must be used for one combine; that of call 0"):
        combine(layer, inputs, handle)
    handle = dispatch(layer, inputs)
    combine(layer, inputs, handle, receive=False)
    with pytest.raises(ValueError, match="its combine has been sent and not received"):
        combine(layer, inputs, handle)


def test_a_handle_is_combined_again(layer, inputs) -> None:
    handle = dispatch(layer, inputs)
    with pytest.raises(ValueError, match="handle must be one that has been combined, for again"):
        combine(layer, inputs, handle, again=True)
    combine(layer, inputs, handle)
    combine(layer, inputs, handle, again=True)


def test_rows_that_may_still_be_fetched(inputs) -> None:
    layer = make(zero_copy=True)
    handle = dispatch(layer, inputs)
    ids, weights = inputs.topk_idxs[0], inputs.topk_weights[0]
    combine(layer, inputs, handle)
    rows = layer.get_combine_buffer(handle).copy_(inputs.ys[0])
    layer.combine(rows, ids, weights, handle, zero_copy=True, again=True)
    with pytest.raises(ValueError, match="again must be False for a handle whose rows the other"):
        layer.combine(rows, ids, weights, handle, zero_copy=True, again=True)
    with pytest.raises(ValueError, match="received and not combined from this buffer"):
        layer.get_combine_buffer(handle)


def test_a_format_that_there_is_no_room_for(layer, inputs) -> None:
    with pytest.raises(
        ValueError, match="token_format must be that of the layer, 'fp8_128', or None"
    ):
        dispatch(layer, inputs, token_format="bf16")
    layer = make(any_format=True)
    with pytest.raises(ValueError, match=r"token_format must be one of .*; got 'fp4'"):
        dispatch(layer, inputs, token_format="fp4")
    with pytest.raises(ValueError, match="hidden must be a multiple of 512 for token_format"):
        dispatch(layer, inputs, token_format="fp8_128_ue8m0")


@pytest.mark.parametrize("name", ["expert_totals", "wait_cycles"])
def test_statistics_of_another_size(layer, inputs, name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{name} must"):
        dispatch(layer, inputs, **{name: torch.zeros(9, dtype=torch.int64)})


def test_a_handle_whose_half_has_a_later_call(layer, inputs) -> None:
    old, _, newest = (dispatch(layer, inputs) for _ in range(3))
    with pytest.raises(ValueError, match=r"one of the last 2 dispatches.* got that of call 0, "):
        combine(layer, inputs, old)
    combine(layer, inputs, newest)


def test_a_handle_of_another_layer(layer, inputs) -> None:
    other = make()
    handle = dispatch(other, inputs)
    with pytest.raises(ValueError, match="handle must be of a dispatch of this layer"):
        combine(layer, inputs, handle)


def test_a_handle_of_before_a_reset(layer, inputs) -> None:
    handle = dispatch(layer, inputs)
    layer.reset()
    with pytest.raises(ValueError, match=r"since the last reset\(\); got one of before"):
        combine(layer, inputs, handle)
    combine(layer, inputs, dispatch(layer, inputs))


def test_what_has_only_been_sent(layer, inputs) -> None:
    handle = dispatch(layer, inputs, receive=False)
    with pytest.raises(ValueError, match=r"dispatch must follow receive\(handle\) of the dispatch"):
        dispatch(layer, inputs)
    with pytest.raises(ValueError, match=r"combine must follow receive\(handle\) of its dispatch"):
        combine(layer, inputs, handle)
    layer.receive(handle)
    with pytest.raises(ValueError, match="call 0 has nothing to receive: its dispatch has been"):
        layer.receive(handle)
    combine(layer, inputs, handle, receive=False)
    dispatch(layer, inputs)
    with pytest.raises(ValueError, match=r"of the combine two calls before it.*call 0 has only"):
        dispatch(layer, inputs)
    layer.receive(handle)
    dispatch(layer, inputs)


def test_the_combine_buffer(inputs) -> None:
    layer = make()
    handle = dispatch(layer, inputs)
    with pytest.raises(ValueError, match="needs a layer with zero_copy=True"):
        layer.get_combine_buffer(handle)
    layer = make(zero_copy=True)
    old, newest = dispatch(layer, inputs), dispatch(layer, inputs)
    with pytest.raises(ValueError, match="handle must be of the newest dispatch"):
        layer.get_combine_buffer(old)
    with pytest.raises(ValueError, match=r"y must be what get_combine_buffer\(handle\) gave"):
        combine(layer, inputs, newest, zero_copy=True)
    rows = layer.get_combine_buffer(newest)
    with pytest.raises(ValueError, match="got zero_copy=False"):
        combine(layer, inputs, newest)
    with pytest.raises(ValueError, match="got zero_copy=True"):
        combine(layer, inputs, newest, zero_copy=True)
    with pytest.raises(ValueError, match="dispatch must follow the combine of the call before it"):
        dispatch(layer, inputs)
    rows.copy_(inputs.ys[0])
    ids, weights = inputs.topk_idxs[0], inputs.topk_weights[0]
    layer.combine(rows, ids, weights, newest, zero_copy=True)
    combine(layer, inputs, dispatch(layer, inputs))


def test_a_config_that_fetches_rows_that_are_not_there() -> None:
    shape = LowLatencyShape(1, 4, 2, 128, 4, "bf16")
    with pytest.raises(ValueError, match="fetches_rows must be False"):
        LowLatencyConfig(shape, "combine", 1, "sm_90a", fetches_rows=True)


@pytest.mark.parametrize(
    ("ranks", "error", "text"),
    [
        ([2], ValueError, "ranks must be other ranks, 0 to 1 but not 0; got 2"),
        ([0], ValueError, "ranks must be other ranks, 0 to 1 but not 0; got 0"),
        (["1"], TypeError, "ranks must be an int"),
    ],
)
def test_masks(ranks: Any, error: type[Exception], text: str) -> None:
    with EmulatedAllToAll(2, T, H, E, K) as layers, pytest.raises(error, match=text):
        layers.layers[0].mask_ranks(ranks)


def test_a_closed_layer(layer, inputs) -> None:
    assert "open" in repr(layer)
    layer.close()
    layer.close()
    assert "closed" in repr(layer)
    text = "LowLatencyAllToAll must be an open buffer; this one is closed"
    for use in (
        lambda: dispatch(layer, inputs),
        layer.reset,
        layer.check,
        layer.masked_ranks,
        lambda: layer.mask_ranks([]),
    ):
        with pytest.raises(ValueError, match=text):
            use()


def test_ranks_of_one_process_run_together(inputs) -> None:
    with (
        EmulatedAllToAll(2, T, H, E, K) as layers,
        pytest.raises(ValueError, match="called through its EmulatedAllToAll"),
    ):
        dispatch(layers.layers[0], inputs)


def test_the_names_are_public() -> None:
    assert deep_moe.LowLatencyAllToAll is LowLatencyAllToAll
    assert deep_moe.EmulatedAllToAll is EmulatedAllToAll


def test_many_rows_of_one_expert_come_back() -> None:
    """More than few bits of a row hold."""
    num_tokens = 300
    layer = deep_moe.LowLatencyAllToAll(
        None, num_tokens, 128, 2, 1, token_format="bf16", num_sms=1, device="cpu"
    )
    x = torch.arange(num_tokens).bfloat16().view(-1, 1).expand(-1, 128).contiguous()
    topk_idx = torch.zeros(num_tokens, 1, dtype=torch.int64)
    received = layer.dispatch(x, topk_idx)
    assert torch.equal(received.recv_x[0, :num_tokens], x)
    out = layer.combine(received.recv_x, topk_idx, torch.ones(num_tokens, 1), received.handle)
    assert torch.equal(out, x)
