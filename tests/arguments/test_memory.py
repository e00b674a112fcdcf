"""Tensors whose storage is gone, or whose memory another tensor of the call has, are refused before
anything is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.weights.layers import LayerWeights

from .public_calls import CALLS, H, T, bf16, tensors_of

Way = tuple[Any, ...]
# Who takes tensors.
CALLS_WITH_TENSORS = [name for name, make in CALLS.items() if any(tensors_of(make()[1]))]


def replaced(value: Any, way: Way, item: Any) -> Any:
    """A copy of nested dicts, tuples and lists with another item at the end of the way."""
    if not way:
        return item
    place, *rest = way
    if isinstance(value, dict):
        return {**value, place: replaced(value[place], tuple(rest), item)}
    if isinstance(value, deep_moe.MegaMoEWeights):
        return replace(value, **{place: replaced(getattr(value, place), tuple(rest), item)})
    items = list(value)
    items[place] = replaced(items[place], tuple(rest), item)
    is_of_fields = hasattr(value, "_fields") or isinstance(value, LayerWeights)
    return type(value)(*items) if is_of_fields else type(value)(items)


def freed(tensor: torch.Tensor, num_bytes: int = 0) -> torch.Tensor:
    gone = tensor.clone()
    gone.untyped_storage().resize_(num_bytes)
    return gone


@pytest.mark.parametrize("name", CALLS_WITH_TENSORS)
def test_tensors_without_their_storage_are_refused(name: str) -> None:
    function, arguments = CALLS[name]()
    for way, tensor in tensors_of(arguments):
        for num_bytes in {0, tensor.nbytes - 1} if tensor.numel() else ():
            given = replaced(arguments, way, freed(tensor, num_bytes))
            with pytest.raises(
                ValueError, match=rf"{way[0]}\S* must have a storage that holds its"
            ):
                function(**given)
    function(**arguments)  # a refused argument spoils nothing


@pytest.mark.parametrize("name", ["mega_moe, biases", "prepare_inputs", "GroupedExperts()"])
@pytest.mark.parametrize("num_bytes", [0, 8])
def test_tensors_that_are_freed_after_a_call_are_refused(name: str, num_bytes: int) -> None:
    """What a first call has checked is remembered."""
    function, arguments = CALLS[name]()
    function(**arguments)
    for way, tensor in tensors_of(arguments):
        if tensor.nbytes > num_bytes:
            values = tensor.clone()
            tensor.untyped_storage().resize_(num_bytes)
            with pytest.raises(
                ValueError, match=rf"{way[0]}\S* must have a storage that holds its"
            ):
                function(**arguments)
            tensor.untyped_storage().resize_(values.nbytes)
            tensor.copy_(values)
            function(**arguments)


def test_a_view_behind_the_end_of_a_shrunk_storage_is_refused() -> None:
    """Its address is not zero."""
    function, arguments = CALLS["mega_moe, bf16"]()
    rows = bf16(2 * T, H)
    y = rows[T:]
    function(**{**arguments, "y": y})
    rows.untyped_storage().resize_(y.nbytes)
    with pytest.raises(ValueError, match="y must have a storage that holds its values, 2048 bytes"):
        function(**{**arguments, "y": y})


def overlapping(name: str) -> list[tuple[str, str]]:
    """Of a call, pairs of an output and another argument that has room for it."""
    _, arguments = CALLS[name]()
    outputs = {"y", "out", "cumulative_local_expert_recv_stats", "wait_cycles", "expert_totals"}
    outputs |= {"expert_load"}
    if name.endswith(("combine", "return_scalars")):
        outputs -= {"y"}  # which a combine reads
    if name.startswith("transform"):
        outputs = set()  # tests/formats/test_transform.py
    tensors = {way[0]: tensor for way, tensor in tensors_of(arguments)}
    return [
        (output, other)
        for output in sorted(outputs & tensors.keys())
        for other, tensor in tensors.items()
        if other != output and tensor.nbytes >= tensors[output].nbytes
    ]


# What these read of x and the routing is staged or sent before `out` is written.
READ_FIRST = [
    (name, "out", other)
    for name in ("ThroughputMoE()", "TwoLevelMoE.call")
    for other in ("x", "topk_idx", "topk_weights")
]
OUTPUTS = [
    (name, output, other)
    for name in CALLS_WITH_TENSORS
    for output, other in overlapping(name)
    if (name, output, other) not in READ_FIRST
]


@pytest.mark.parametrize(("name", "output", "other"), OUTPUTS)
def test_outputs_in_the_memory_of_others_are_refused(name: str, output: str, other: str) -> None:
    function, arguments = CALLS[name]()
    (memory,) = [t for way, t in tensors_of(arguments) if way[0] == other][-1:]
    own = arguments[output]
    memory = memory.flatten().view(torch.uint8)
    view = memory[memory.numel() - own.nbytes :].view(own.dtype).view(own.shape)
    with pytest.raises(ValueError, match=rf"({output}|{other})\S* must not share memory with"):
        function(**{**arguments, output: view})
    function(**arguments)


@pytest.mark.parametrize("name", ["ThroughputMoE()", "TwoLevelMoE.call"])
def test_a_result_may_take_the_place_of_the_tokens(name: str) -> None:
    function, arguments = CALLS[name]()
    arguments["x"] = torch.randn(T, H).bfloat16()
    expected = function(**arguments).clone()
    function(**{**arguments, "out": arguments["x"]})
    assert arguments["x"].equal(expected)


@pytest.mark.parametrize("first", [True, False])
def test_an_output_in_the_buffer_is_refused(first: bool) -> None:
    """Of a kernel that writes there meanwhile; known from earlier calls or not."""
    function, arguments = CALLS["mega_moe, bf16"]()
    buffer = arguments["sym_buffer"]
    if not first:
        function(**arguments)
    words = "must not share memory with sym_buffer of rank 0"
    with pytest.raises(ValueError, match=f"y {words}"):
        function(**{**arguments, "y": buffer.x[:3]})
    stats = buffer.topk_idx.flatten().view(torch.int32)[:4]
    with pytest.raises(ValueError, match=f"cumulative_local_expert_recv_stats {words}"):
        function(**{**arguments, "cumulative_local_expert_recv_stats": stats})
    function(**arguments)


def test_outputs_of_emulated_ranks_have_memory_of_their_own() -> None:
    _, arguments = CALLS["EmulatedRanks.call"]()
    ranks = deep_moe.EmulatedRanks(2, 8, T, 2, H, 128, weights="bf16")
    for buffer in ranks.buffers:
        buffer.topk_idx.fill_(-1)
    y = arguments["ys"][0]
    weights = arguments["weights"] * 2
    options = {"arch": "sm_90a", "num_sms": 2}
    with pytest.raises(ValueError, match=r"ys\[1\] must not share memory with ys\[0\]"):
        ranks.call([y, y[1:]], weights, **options)
    with pytest.raises(ValueError, match=r"ys\[1\] must not share memory with sym_buffer of"):
        ranks.call([y, ranks.buffers[0].x[:2]], weights, **options)
    stats = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"stats\[1\] must not share memory with stats\[0\]"):
        ranks.call([y, bf16(T, H)], weights, [stats, stats], **options)
    ranks.call([y, bf16(T, H)], weights, **options)


def test_a_combine_takes_rows_of_the_buffer_as_a_whole_only() -> None:
    function, arguments = CALLS["AllToAll.combine"]()
    layer = function.__self__
    everything = layer._buffer.memory.tensor
    address = layer.get_combine_buffer().data_ptr() - everything.data_ptr()
    num_bytes = arguments["y"].nbytes
    beside = everything[address - 16 : address - 16 + num_bytes].view(torch.bfloat16).view(64, H)
    with pytest.raises(ValueError, match="y must not share memory with AllToAll of rank 0"):
        function(**{**arguments, "y": beside})
