"""A message for each expert of a token: its memory, read by what seed-like layouts say of it, and
the same results as where a token goes to a rank once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deep_moe.errors import MegaMoETimeoutError
from deep_moe.heuristics.low_latency import PLACEMENTS
from deep_moe.split.handle import Dispatched
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.tokens import ALL_TO_ALL_FORMATS

from .reference import Inputs, bits, quantized, random_inputs
from .test_low_latency import check_call, check_fetched, ranks, run_ahead

LOW_HALF = (1 << 32) - 1


def routed(inputs: Inputs, source: int, expert: int) -> list[int]:
    """Tokens of a rank that name an expert, each once."""
    return (inputs.topk_idxs[source] == expert).any(dim=1).nonzero().flatten().tolist()


class ReceiveBuffer:
    """The receive buffer of one rank, [local expert][source rank][slot], read byte by byte: a slot
    is 16 bytes of control, of which the first four are the token's index on its rank, the values,
    and a float32 scale for each 128 of them. Counts are -n - 1; zero is none yet."""

    def __init__(self, layer: LowLatencyAllToAll, half: int) -> None:
        shape = self.shape = layer.shape
        segments = {
            name: layer.buffer.memory.tensor[place.offset : place.end]
            for name in ("messages", "recv_counts")
            for place in [layer.buffer.layout[name]]
        }
        per_half = shape.num_experts_per_rank * shape.num_ranks * shape.num_max_tokens_per_rank
        self.message_bytes = 16 + shape.hidden + 4 * (shape.hidden // 128)
        self.message_bytes += -self.message_bytes % 16
        size = per_half * self.message_bytes
        self.bytes = segments["messages"].view(torch.uint8)[half * size : (half + 1) * size]
        counts = segments["recv_counts"].view(torch.int32)
        self.counts = counts.view(2, shape.num_ranks, shape.num_experts_per_rank)[half]

    def count(self, local_expert: int, source: int) -> int:
        value = int(self.counts[source, local_expert])
        assert value < 0
        return -value - 1

    def message(self, local_expert: int, source: int, slot: int) -> torch.Tensor:
        shape = self.shape
        place = local_expert * shape.num_ranks * shape.num_max_tokens_per_rank
        place += source * shape.num_max_tokens_per_rank + slot
        return self.bytes[place * self.message_bytes : (place + 1) * self.message_bytes]


@pytest.mark.parametrize("half", [0, 1])
def test_the_receive_buffer(half: int) -> None:
    """Calls take its halves in turn."""
    with ranks(num_ranks=3, num_experts=6, placement="experts") as layer:
        for call in range(half + 1):
            inputs = random_inputs(layer.shape, (8, 5, 7), seed=call)
            layer.dispatch(inputs.xs, inputs.topk_idxs)
        hidden = layer.shape.hidden
        tokens = [quantized(x, "fp8_128") for x in inputs.xs]
        for rank, own in enumerate(layer.layers):
            buffer = ReceiveBuffer(own, half)
            for local_expert in range(2):
                for source in range(3):
                    expected = routed(inputs, source, 2 * rank + local_expert)
                    assert buffer.count(local_expert, source) == len(expected)
                    found = []
                    for slot in range(len(expected)):
                        message = buffer.message(local_expert, source, slot)
                        token = int(message[:4].view(torch.int32))
                        found.append(token)
                        values, scales = tokens[source]
                        assert torch.equal(message[16 : 16 + hidden], bits(values[token]))
                        scale_bytes = message[16 + hidden :][: hidden // 128 * 4]
                        assert torch.equal(scale_bytes, bits(scales[token]))  # type: ignore[index]
                    assert sorted(found) == expected
                    behind = range(len(expected), 8)
                    if half == 0 and behind:  # a slot that nobody has written yet
                        assert not buffer.message(local_expert, source, behind[0]).any()


def read_packed(
    shape: Any, rank: int, result: Dispatched, inputs: Inputs, tokens: list[Any]
) -> None:
    """Whatever the order in which an expert's rows lie: ranges say which of them are whose, and
    src_info which token each is."""
    for local_expert in range(shape.num_experts_per_rank):
        expert = rank * shape.num_experts_per_rank + local_expert
        taken = torch.zeros(shape.num_rows_per_expert, dtype=torch.int32)
        for source in range(shape.num_ranks):
            packed = int(result.layout_range[local_expert, source])
            count, begin = packed & LOW_HALF, packed >> 32
            taken[begin : begin + count] += 1
            of_rows = result.src_info[local_expert, begin : begin + count].tolist()
            assert sorted(of_rows) == routed(inputs, source, expert)
            values, scales = tokens[source]
            rows = result.recv_x[local_expert, begin : begin + count]
            assert torch.equal(bits(rows), bits(values[of_rows]))
            assert result.scales is not None
            row_scales = result.scales[local_expert, begin : begin + count]
            assert torch.equal(bits(row_scales), bits(scales[of_rows]))
        count = int(result.recv_count[local_expert])
        assert taken[:count].eq(1).all()
        assert not taken[count:].any()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_packed_results(placement: str) -> None:
    with ranks(num_ranks=3, num_experts=9, placement=placement) as layer:
        for call in range(3):
            inputs = random_inputs(layer.shape, (8, 5 - call, call), seed=call)
            results = layer.dispatch(inputs.xs, inputs.topk_idxs)
            tokens = [quantized(x, "fp8_128") for x in inputs.xs]
            for rank, result in enumerate(results):
                read_packed(layer.shape, rank, result, inputs, tokens)


@pytest.mark.parametrize("token_format", ALL_TO_ALL_FORMATS)
def test_every_bit(token_format: str) -> None:
    with ranks(token_format=token_format, hidden=512, arch="sm_90a", placement="experts") as layer:
        for call in range(3):
            inputs = random_inputs(layer.shape, (8 - call, 5), seed=call)
            check_call(layer, inputs, receive=call != 1)


def test_messages_of_other_formats_in_turn() -> None:
    with ranks(any_format=True, hidden=512, placement="experts") as layer:
        shape = layer.shape
        for call, token_format in enumerate(ALL_TO_ALL_FORMATS):
            inputs = random_inputs(shape, (8, 3), seed=call)
            results = layer.dispatch(inputs.xs, inputs.topk_idxs, token_format=token_format)
            for result in results:
                values, scales = quantized(inputs.xs[0], token_format)
                begins, own = result.layout_range[:, 0] >> 32, result.layout_range[:, 0] & LOW_HALF
                for e, (begin, count) in enumerate(zip(begins.tolist(), own.tolist(), strict=True)):
                    of_rows = result.src_info[e, begin : begin + count].tolist()
                    rows = result.recv_x[e, begin : begin + count]
                    assert torch.equal(bits(rows), bits(values[of_rows]))
                    if scales is not None:
                        assert result.scales is not None
                        row_scales = result.scales[e, begin : begin + count]
                        assert torch.equal(bits(row_scales), bits(scales[of_rows]))
            layer.combine(
                inputs.ys, inputs.topk_idxs, inputs.topk_weights, [r.handle for r in results]
            )


@pytest.mark.parametrize("schedule", ["late_copies", "slow_rank"])
def test_ranks_run_ahead_of_each_other(schedule: str) -> None:
    run_ahead(schedule, placement="experts")


def run_ahead_by_expert() -> None:
    """A test of the mutations."""
    run_ahead("random", placement="experts")


def test_rows_are_fetched_from_where_the_experts_wrote_them() -> None:
    check_fetched(True, placement="experts")


def test_survivors_go_on() -> None:
    with ranks(num_ranks=3, num_experts=6, num_topk=4, placement="experts") as layer:
        layer.mask_ranks([1])
        check_call(layer, random_inputs(layer.shape, (8, 4, 6)), masked=[1])


def test_more_pairs_of_expert_and_rank_than_warps() -> None:
    sizes = {"num_ranks": 9, "num_experts": 72, "num_max_tokens_per_rank": 3, "hidden": 128}
    with ranks(**sizes, num_sms=1, placement="experts") as layer:  # type: ignore[arg-type]
        check_call(layer, random_inputs(layer.shape, [3] * 9))


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="placement must be one of ranks, experts; got 'slots'"):
        LowLatencyAllToAll(None, 4, 128, 4, 2, device="cpu", placement="slots")


@pytest.mark.parametrize("num_calls_before", [0, 2])
def test_a_pairs_messages_do_not_wait_for_those_of_others(num_calls_before: int) -> None:
    """Rank 2 has come and told its counts, and no message of it comes. Those that came in an
    earlier call of this half do not count."""
    with ranks(num_ranks=3, num_experts=6, placement="experts", timeout_s=0.01) as layer:
        for call in range(num_calls_before):
            check_call(layer, random_inputs(layer.shape, (3, 4, 8), seed=call))
        inputs = random_inputs(layer.shape, (8, 5, 0))
        for own in layer.layers[:2]:
            layout, memory = own.buffer.layout, own.buffer.memory.tensor
            for name, shape, value in (
                ("recv_counts", (2, 3, 2), -2),  # one message for each expert
                ("dispatch_arrivals", (2, 3), 1),
            ):
                words = memory[layout[name].offset : layout[name].end].view(torch.int32)
                words.view(shape)[0, 2] = value
        prepared = [
            own.prepare_dispatch(inputs.xs[rank], inputs.topk_idxs[rank])
            for rank, own in enumerate(layer.layers[:2])
        ]
        with pytest.raises(MegaMoETimeoutError, match=r"tokens of another rank(?s:.)*rank 2"):
            layer.run([[launch] for launch, _ in prepared], ranks=[0, 1])
        for rank, (_, result) in enumerate(prepared):
            for local_expert in range(2):
                for source in range(2):
                    values, _ = quantized(inputs.xs[source], "fp8_128")
                    expected = values[routed(inputs, source, 2 * rank + local_expert)]
                    first = int(result.layout_range[local_expert, source]) >> 32
                    found = result.recv_x[local_expert, first : first + len(expected)]
                    assert torch.equal(bits(found), bits(expected))
