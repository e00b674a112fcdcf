"""Tokens that come quantized, with numbers of their own, arrive like those of the kernel."""

from __future__ import annotations

import pytest
import torch

from deep_moe.split.emulated_all_to_all import EmulatedAllToAll
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.tokens import ALL_TO_ALL_FORMATS

from .reference import bits, check_dispatched, expected_out, quantized, random_inputs


def as_they_travel(x: torch.Tensor, token_format: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales are packed behind the links only."""
    return quantized(x, "fp8_128_pow2" if token_format == "fp8_128_ue8m0" else token_format)


@pytest.mark.parametrize(
    ("token_format", "placement"),
    [*((name, "ranks") for name in ALL_TO_ALL_FORMATS), ("fp8_128", "experts")],
)
def test_every_bit_arrives(token_format: str, placement: str) -> None:
    with EmulatedAllToAll(
        *(2, 5, 512, 4, 3),
        token_format=token_format,
        placement=placement,
        relays_tokens=True,
        num_sms=2,
    ) as ranks:
        inputs = random_inputs(ranks.shape, (5, 3))
        given = [as_they_travel(x, token_format) for x in inputs.xs]
        numbers = [torch.randint(-9, 99, (x.shape[0],), dtype=torch.int32) for x in inputs.xs]
        launches, results = [], []
        for rank, layer in enumerate(ranks.layers):
            values, scales = given[rank]
            launch, result = layer.prepare_dispatch(
                values, inputs.topk_idxs[rank], x_sf=scales, origins=numbers[rank]
            )
            launches.append([launch])
            results.append(result)
        ranks.run(launches)
        for rank, result in enumerate(results):
            for local, count in enumerate(result.recv_count.tolist()):
                slots = result.handle.src_slots[local, :count] // ranks.shape.num_topk
                sources = torch.cat(
                    [
                        torch.full((int(packed) & 0xFFFFFFFF,), source)
                        for source, packed in enumerate(result.layout_range[local])
                    ]
                )
                told = [
                    int(numbers[source][token])
                    for source, token in zip(sources.tolist(), slots.tolist(), strict=True)
                ]
                assert result.src_info[local, :count].tolist() == told
                result.src_info[local, :count] = slots
            check_dispatched(ranks.shape, result, rank, inputs.xs, inputs.topk_idxs)
        outs = ranks.combine(
            inputs.ys, inputs.topk_idxs, inputs.topk_weights, [r.handle for r in results]
        )
        for rank, out in enumerate(outs):
            expected = expected_out(
                ranks.shape, rank, inputs.topk_idxs, inputs.topk_weights[rank], inputs.ys
            )
            assert torch.equal(bits(out), bits(expected))


def test_what_is_refused() -> None:
    layer = LowLatencyAllToAll(None, 4, 128, 4, 2, device="cpu")
    x, ids = torch.zeros(2, 128).bfloat16(), torch.zeros(2, 2, dtype=torch.int64)
    numbers, scales = torch.zeros(2, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(ValueError, match="origins must be None without relays_tokens"):
        layer.dispatch(x, ids, origins=numbers)
    layer.close()
    layer = LowLatencyAllToAll(None, 4, 128, 4, 2, relays_tokens=True, device="cpu")
    values = x.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"x must be torch\.float8_e4m3fn"):
        layer.dispatch(x, ids, x_sf=scales, origins=numbers)
    with pytest.raises(TypeError, match="origins must be a tensor with relays_tokens"):
        layer.dispatch(values, ids, x_sf=scales)
    with pytest.raises(TypeError, match="x_sf must be a tensor with relays_tokens"):
        layer.dispatch(values, ids, origins=numbers)
    with pytest.raises(ValueError, match=r"x_sf must .*\(2, 1\)"):
        layer.dispatch(values, ids, x_sf=torch.ones(2, 2), origins=numbers)
    layer.close()
