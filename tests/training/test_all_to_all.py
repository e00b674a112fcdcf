"""Expert parallel over our all-to-all: two and three ranks, a process each, against one rank with
all experts and tokens. The all-to-all's kernels run in the emulator, products in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.errors import MegaMoEError
from deep_moe.training.all_to_all import AllToAllWays, _rows_of

from ..fused.conftest import RunRanks, run_ranks
from ..fused.test_groups import RankCall, make_buffer
from .plain_layer import Layer, assert_close, assert_equal_bits, random_like

__all__ = ["run_ranks"]  # a fixture

WEIGHTS = ("w1", "w3", "w2", "b1", "b3", "b2")
HIDDEN, INTERMEDIATE, NUM_TOPK = 128, 32, 3
# A row is rounded once more before it travels, by up to 2^-8, and rows of a token may cancel.
BF16_ERROR = 2 * 2.0**-8


def random_layer(num_ranks: int, num_tokens: Sequence[int], **kind: Any) -> Layer:
    """Of all ranks, two experts each, or four of one; the last one gets no token."""
    num_experts = max(4, 2 * num_ranks)
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_topk": NUM_TOPK}
    options = {**sizes, **kind}
    return Layer.random(num_tokens=sum(num_tokens), num_experts=num_experts, **options)


def all_to_all(group: Any, num_experts: int, max_recv_rows: int = 96) -> deep_moe.AllToAll:
    sizes = (8, HIDDEN, num_experts, NUM_TOPK, max_recv_rows)
    return deep_moe.AllToAll(group, *sizes, expert_alignment=8, num_sms=2, device="cpu")


def part(layer: Layer, rank: int, num_tokens: Sequence[int], group: Any) -> Layer:
    """A rank's tokens and experts."""
    begin = sum(num_tokens[:rank])
    own = slice(begin, begin + num_tokens[rank])
    tensors: dict[str, torch.Tensor | None] = {}
    for name, tensor in layer.tensors.items():
        of = slice(2 * rank, 2 * rank + 2) if name in WEIGHTS else own
        tensors[name] = None if tensor is None else tensor[of].detach().clone().requires_grad_()
    return Layer(layer.topk_idx[own].contiguous(), tensors, {**layer.options, "group": group})


def of_ranks(
    run_ranks: RunRanks, layer: Layer, num_tokens: Sequence[int], d_out: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output and gradients, parts put together. Every rank's bits are the same with received
    tokens kept, and with Linear1 computed again."""

    def work(rank: int) -> dict[str, list]:
        group = all_to_all(dist.group.WORLD, 2 * len(num_tokens))
        own = part(layer, rank, num_tokens, group)
        begin = sum(num_tokens[:rank])
        d_own = d_out[begin : begin + num_tokens[rank]]
        first = own.run(d_own)
        recompute = not layer.options.get("quantize_kept", False)
        assert_equal_bits(first, own.run(d_own, keep_received=True, recompute=recompute))
        group.close()
        return {name: [value.tolist(), value.shape[1:]] for name, value in first.items()}

    results = run_ranks(len(num_tokens), work)
    return {
        name: torch.cat([torch.tensor(own[name][0]).view(-1, *own[name][1]) for own in results])
        for name in results[0]
    }


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [
        ((5, 2), {"fused": True}),
        ((0, 6), {"fused": True, "precision": "mxfp8"}),
        ((3, 4), {"fused": True, "precision": "fp8", "intermediate": 128}),
        ((3, 4), {"fused": True, "precision": "fp8_dgrad", "intermediate": 128}),
        ((3, 4), {"fused": True, "precision": "fp8_wgrad", "intermediate": 128}),
        ((4, 3), {"fused": True, "quantize_kept": True, "intermediate": 128}),
        pytest.param((4, 0, 3), {"fused": True}, marks=pytest.mark.slow),
    ],
    ids=[
        "uneven",
        "an empty rank, mxfp8",
        "fp8",
        "fp8_dgrad",
        "fp8_wgrad",
        "quantized",
        "three ranks",
    ],
)
def test_ranks_have_the_bits_of_one_rank(
    run_ranks: RunRanks, num_tokens: Sequence[int], kind: dict[str, Any]
) -> None:
    """W1 and W3 in one tensor, no biases: rows are rounded where they are on one rank."""
    layer = random_layer(len(num_tokens), num_tokens, **kind)
    expected = layer.run()
    results = of_ranks(run_ranks, layer, num_tokens, random_like(expected["out"]))
    assert_equal_bits(results, {name: value.float() for name, value in expected.items()})


def test_with_biases_and_two_tensors_rows_are_rounded_before_they_travel(
    run_ranks: RunRanks,
) -> None:
    layer = random_layer(2, (5, 2), biases=True)
    expected = layer.run()
    results = of_ranks(run_ranks, layer, (5, 2), random_like(expected["out"]))
    rounded = {"out", "x"}
    for name in rounded:
        assert_close({name: results.pop(name)}, {name: expected.pop(name)}, BF16_ERROR)
    assert_equal_bits(results, {name: value.float() for name, value in expected.items()})


def test_a_single_rank_may_have_one_too() -> None:
    layer = random_layer(1, (7,), fused=True)
    expected = layer.run()
    assert_equal_bits(layer.run(group=all_to_all(None, 4)), expected)


def test_whole_steps_by_our_kernels() -> None:
    """Those of the layer, too; exponentials differ in last places."""
    layer = random_layer(1, (7,), biases=True)
    group = all_to_all(None, 4)
    assert_close(layer.run(group=group, arch="sm_90a"), layer.run(group=group), bound=2.0**-9)


def test_the_backward_pass_multiplies_received_tokens(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bug as over a process group, planted here: a rank's own tokens in the gradients of
    its weights, in place of those that came from others."""
    real = AllToAllWays.receive
    calls: list[torch.Tensor] = []  # of a rank: x again, then d_out

    def local_tokens(ways: AllToAllWays, tokens: torch.Tensor) -> torch.Tensor:
        received = real(ways, tokens)
        calls.append(tokens)
        is_again = len(calls) == 1
        return tokens[torch.arange(len(received)) % len(tokens)] if is_again else received

    layer = random_layer(2, (5, 2), fused=True)
    d_out = random_like(layer())

    def work(rank: int) -> list:
        own = part(layer, rank, (5, 2), all_to_all(dist.group.WORLD, 4))
        return own.run(d_out[:5] if rank == 0 else d_out[5:])["w1"].tolist()

    monkeypatch.setattr(AllToAllWays, "receive", local_tokens)
    wrong = torch.cat([torch.tensor(own) for own in run_ranks(2, work)])
    expected = layer.run(d_out)["w1"].float()
    assert (wrong - expected).norm() > 0.1 * expected.norm()


def test_too_many_rows_are_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    """And the group goes on when all have reset it."""
    layer = random_layer(2, (5, 2))
    layer.topk_idx.fill_(2)  # of rank 1: 21 slots, in 24 rows

    def work(rank: int) -> str:
        group = all_to_all(dist.group.WORLD, 4, max_recv_rows=16)
        own = part(layer, rank, (5, 2), group)
        with pytest.raises(MegaMoEError) as error:
            own()
        group.reset()
        own.topk_idx.fill_(rank)
        own.topk_idx[2:] = -1
        assert own().isfinite().all()
        return str(error.value)

    for words in run_ranks(2, work):
        assert "rank 1 would get 24 rows, padding included; max_recv_rows is 16" in words


def test_layers_of_a_model_share_one() -> None:
    """Two forward passes, then their backward passes, with a call without gradients and an
    all-to-all of the caller's in between: each finds its own ways again."""
    first, second = (random_layer(1, (7,), fused=True, seed=seed) for seed in (0, 1))
    expected = [first.run(), second.run()]
    group = all_to_all(None, 4)
    outs = [layer(group=group) for layer in (first, second)]
    with torch.inference_mode():
        other = random_layer(1, (4,), seed=2)
        assert torch.equal(other(group=group), other())
    x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    received, handle = group.dispatch(x, torch.tensor([[0, 1, -1]] * 3))
    assert torch.equal(group.combine(received.x, handle), 2 * x)
    for layer, out, own in zip((first, second), outs, expected, strict=True):
        assert_equal_bits({"out": out.detach(), **layer.gradients(out)}, own)


def test_inference_calls_on_the_group_may_come_between(run_ranks: RunRanks) -> None:
    """Between forward and backward passes, over the process group and over the all-to-all: the
    fused call, and the layer without gradients."""
    layer = random_layer(2, (5, 2))
    expected = layer.run()
    d_out = random_like(expected["out"])

    def work(rank: int) -> None:
        begin, end = ((0, 5), (5, 7))[rank]
        buffer = make_buffer(2)
        fused = RankCall(rank, 2)
        groups = (all_to_all(dist.group.WORLD, 4), dist.group.WORLD)
        layers = [part(layer, rank, (5, 2), group) for group in groups]
        outs = [own() for own in layers]
        fused.run(buffer)
        with torch.no_grad():
            again = layers[0]()
        assert fused.is_right()
        assert torch.equal(again, outs[0])
        for own, out in zip(layers, outs, strict=True):
            gradients = own.gradients(out, d_out[begin:end])
            assert_close({"x": gradients["x"]}, {"x": expected["x"][begin:end]}, BF16_ERROR)
            own_experts = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(gradients["w1"], expected["w1"][own_experts])

    run_ranks(2, work)


def test_ends_that_mean_nothing_stay_within_the_rows() -> None:
    """What a failed dispatch leaves is read by what comes behind it on the stream."""
    layer = random_layer(1, (7,))
    group = all_to_all(None, 4)
    x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
    assert x is not None
    assert weights is not None
    received, _ = group.dispatch(x.detach(), layer.topk_idx, topk_weights=weights.detach())
    offs = _rows_of(received).offs
    assert torch.equal(offs, received.expert_end)
    received.expert_end.copy_(torch.tensor([-(2**31), 2**31 - 1, 13, 40]))
    received.expert_begin.copy_(torch.tensor([2**31 - 1, -5, 77, -(2**31)]))
    rows = _rows_of(received)
    assert rows.offs.tolist() == [0, 96, 96, 96]
    assert set(rows.slot_of_row.tolist()) <= set(range(-1, 96))


def test_graphs_go_backward_again_if_they_are_retained() -> None:
    layer = random_layer(1, (7,))
    out = layer(group=all_to_all(None, 4))
    leaves = [tensor for tensor in layer.tensors.values() if tensor is not None]
    d_out = random_like(out).bfloat16()
    once = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    again = torch.autograd.grad(out, leaves, d_out)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(d_out)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_finite_value_stays_in_its_token(value: float) -> None:
    layer = random_layer(1, (7,))
    layer.topk_idx[4, 0] = 0
    group = all_to_all(None, 4)
    clean = layer.run(group=group)
    with torch.no_grad():
        layer.tensors["x"][4, 3] = value  # type: ignore[index]
    results = layer.run(group=group)
    others = torch.arange(7) != 4
    assert not results["out"][4].isfinite().all()
    for name in ("out", "x", "topk_weights"):
        assert torch.equal(results[name][others], clean[name][others]), name


def test_unused_slots_have_zero_gradients() -> None:
    layer = random_layer(1, (7,))
    layer.topk_idx[2] = -1
    layer.topk_idx[3, 1] = 99  # of no expert
    results = layer.run(group=all_to_all(None, 4))
    for name in ("out", "x", "topk_weights"):
        assert (results[name][2] == 0).all()
    assert results["topk_weights"][3, 1] == 0
    assert (results["x"][3] != 0).any()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": 256}, ValueError, r"of the layer's hidden \(256\); got one of 128"),
        ({"num_topk": 2}, ValueError, r"of the layer's num_topk \(2\); got one of 3"),
        ({"num_experts": 3}, ValueError, r"num_experts per rank \(3\); got one of 4"),
        ({"dtype": torch.float64}, TypeError, "x must be torch.bfloat16 for an AllToAll"),
        ({"max_recv_slots": 9}, ValueError, "max_recv_slots must be None with an AllToAll"),
        ({"num_tokens": 9}, ValueError, r"at most max_tokens_per_rank \(8\) tokens; got 9"),
    ],
)
def test_what_a_group_is_not_made_for_is_named(
    change: dict[str, Any], error: type, words: str
) -> None:
    sizes = {"num_tokens": 7, "num_topk": 3, "num_experts": 4, "hidden": 128, "intermediate": 32}
    layer = Layer.random(**{**sizes, **change})
    with pytest.raises(error, match=words):
        layer(group=all_to_all(None, 4))


def test_experts_at_odd_rows_are_refused() -> None:
    sizes = (8, HIDDEN, 4, NUM_TOPK, 96)
    group = deep_moe.AllToAll(None, *sizes, expert_alignment=4, device="cpu")
    with pytest.raises(ValueError, match="expert_alignment of group must be a multiple of 8"):
        random_layer(1, (7,))(group=group)


def test_a_compilers_graph_breaks_at_it() -> None:
    module = deep_moe.MoELayer(HIDDEN, INTERMEDIATE, 4, group=all_to_all(None, 4))
    layer = random_layer(1, (7,))
    x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
    torch._dynamo.reset()
    out = torch.compile(module, backend="aot_eager")(x, layer.topk_idx, weights)
    assert torch.equal(out, module(x, layer.topk_idx, weights))
    out.sum().backward()
    assert module.w1.grad is not None


def test_modules_have_their_ranks_experts() -> None:
    group = all_to_all(None, 4)
    module = deep_moe.MoELayer(HIDDEN, INTERMEDIATE, 4, group=group)
    layer = random_layer(1, (7,))
    layer.tensors |= dict(module.named_parameters())
    x, weights = layer.tensors["x"], layer.tensors["topk_weights"]
    assert torch.equal(module(x, layer.topk_idx, weights), layer())
