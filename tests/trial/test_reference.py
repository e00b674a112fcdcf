"""The torch reference against loops over single numbers, and the rules for odd inputs."""

import itertools
import math

import pytest
import torch

from deep_moe.activations import Situ, SwigluOai
from deep_moe.formats.block_scaled import (
    dequantize_e2m1_ue8m0,
    dequantize_e4m3_ue8m0,
    quantize_e2m1_ue8m0,
    quantize_e4m3_ue8m0,
)
from deep_moe.trial.reference import (
    combine_slots,
    reference_mega_moe,
    slot_contributions,
    valid_slots,
)

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 256, 128


@pytest.fixture
def weights():
    torch.manual_seed(1)
    return (
        quantize_e2m1_ue8m0(torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5),
        quantize_e2m1_ue8m0(torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5),
    )


def tokens(num_tokens: int, num_topk: int = 3, seed: int = 2):
    generator = torch.Generator().manual_seed(seed)
    x, x_sf = quantize_e4m3_ue8m0(torch.randn(num_tokens, HIDDEN, generator=generator))
    topk_idx = torch.stack(
        [torch.randperm(NUM_EXPERTS, generator=generator)[:num_topk] for _ in range(num_tokens)]
    )
    return x, x_sf, topk_idx, torch.rand(num_tokens, num_topk, generator=generator)


def bf16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().to(torch.bfloat16).item()


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def one_slot_by_numbers(x_row, expert, weight, weights, clamp) -> list[float]:
    """One token through one expert in Python floats (float64), rounded where the layer rounds."""
    w1 = dequantize_e2m1_ue8m0(*[t[expert] for t in weights[0]], torch.float64).tolist()
    w2 = dequantize_e2m1_ue8m0(*[t[expert] for t in weights[1]], torch.float64).tolist()
    projected = [bf16(math.fsum(a * b for a, b in zip(x_row, row, strict=True))) for row in w1]
    activated = []
    for gate, up in zip(projected[:INTERMEDIATE], projected[INTERMEDIATE:], strict=True):
        if clamp is not None:
            gate, up = min(gate, clamp), max(-clamp, min(up, clamp))
        silu = f32(gate / (1 + math.exp(-gate)))
        activated.append(f32(f32(silu * up) * weight))
    h = dequantize_e4m3_ue8m0(*quantize_e4m3_ue8m0(torch.tensor(activated)), torch.float64)
    return [bf16(math.fsum(a * b for a, b in zip(h.tolist(), row, strict=True))) for row in w2]


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_a_token_matches_arithmetic_on_single_numbers(weights, clamp):
    x, x_sf, topk_idx, topk_weights = tokens(2)
    rows = dequantize_e4m3_ue8m0(x, x_sf, torch.float64).tolist()
    y = reference_mega_moe(
        x, x_sf, topk_idx, topk_weights, *weights, activation_clamp=clamp
    ).double()
    for token, row in enumerate(rows):
        total = [0.0] * HIDDEN
        for expert, weight in zip(topk_idx[token], topk_weights[token], strict=True):
            slot = one_slot_by_numbers(row, int(expert), weight.item(), weights, clamp)
            total = [f32(a + b) for a, b in zip(total, slot, strict=True)]
        expected = torch.tensor([bf16(value) for value in total], dtype=torch.float64)
        # float32 exp may differ in its last bit and move single values of h to a neighbour.
        assert (y[token] == expected).double().mean() > 0.9
        assert (y[token] - expected).norm() < 2e-3 * expected.norm()


def test_the_clamp_changes_the_result(weights):
    args = tokens(4)
    free = reference_mega_moe(*args, *weights)
    assert not torch.equal(free, reference_mega_moe(*args, *weights, activation_clamp=0.5))
    assert torch.equal(free, reference_mega_moe(*args, *weights, activation_clamp=1e9))


def test_activations_give_other_results(weights):
    args = tokens(4)
    named = ("swiglu", "swiglu_oai", "situ")
    results = [reference_mega_moe(*args, *weights, activation=name) for name in named]
    results.append(reference_mega_moe(*args, *weights, activation=Situ(beta=0.5)))
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(results, 2))
    assert torch.equal(results[0], reference_mega_moe(*args, *weights))
    limited = reference_mega_moe(*args, *weights, activation="swiglu_oai", activation_clamp=0.5)
    object_ = reference_mega_moe(*args, *weights, activation=SwigluOai(limit=0.5))
    assert torch.equal(limited, object_)
    assert not torch.equal(limited, results[1])


def test_slots_are_summed_in_order_in_float32_and_rounded_once():
    big, small = 2.0**9, 2.0**-1
    slots = torch.tensor([big, small, small, small, -big]).to(torch.bfloat16).reshape(1, 5, 1)
    valid = torch.ones(1, 5, dtype=torch.bool)
    assert combine_slots(slots, valid).item() == 1.5  # bfloat16 sums would lose the halves
    valid[0, 1] = False
    assert combine_slots(slots, valid).item() == 1.0


def test_an_unused_slot_adds_nothing_even_if_its_memory_holds_nan():
    slots = torch.tensor([[[1.0], [math.nan]]]).to(torch.bfloat16)
    assert combine_slots(slots, torch.tensor([[True, False]])).item() == 1.0


def test_ids_outside_the_experts_are_ignored(weights):
    x, x_sf, topk_idx, topk_weights = tokens(6)
    clean = topk_idx.clone()
    clean[::2, 1] = -1
    for bad in (NUM_EXPERTS, 2**40, -7, -(2**63)):
        dirty = topk_idx.clone()
        dirty[::2, 1] = bad
        assert not valid_slots(dirty, NUM_EXPERTS)[::2, 1].any()
        assert torch.equal(
            reference_mega_moe(x, x_sf, dirty, topk_weights, *weights),
            reference_mega_moe(x, x_sf, clean, topk_weights, *weights),
        )


def test_a_token_without_experts_gets_zeros(weights):
    x, x_sf, topk_idx, topk_weights = tokens(3)
    topk_idx[1] = -1
    y = reference_mega_moe(x, x_sf, topk_idx, topk_weights, *weights)
    assert (y[1] == 0).all()
    assert y[0].any()


def test_no_tokens(weights):
    x, x_sf, topk_idx, topk_weights = tokens(3)
    y = reference_mega_moe(x[:0], x_sf[:0], topk_idx[:0], topk_weights[:0], *weights)
    assert y.shape == (0, HIDDEN)
    assert y.dtype == torch.bfloat16


def test_an_expert_named_twice_counts_in_each_slot(weights):
    x, x_sf, _, _ = tokens(1)
    slots = torch.tensor([[2, 2]])
    routing = torch.tensor([[0.25, 0.75]])
    contributions = slot_contributions(x, x_sf, slots, routing, *weights)
    for slot in range(2):
        alone = slot_contributions(x, x_sf, slots[:, :1], routing[:, slot : slot + 1], *weights)
        assert torch.equal(contributions[:, slot], alone[:, 0])


@pytest.mark.parametrize("bad_byte", [0x7F, 0xFF])
def test_a_nan_token_spoils_no_other(weights, bad_byte):
    x, x_sf, topk_idx, topk_weights = tokens(8)
    clean = reference_mega_moe(x, x_sf, topk_idx, topk_weights, *weights)
    x.view(torch.uint8)[3, 17] = bad_byte
    y = reference_mega_moe(x, x_sf, topk_idx, topk_weights, *weights)
    assert y[3].isnan().all()
    others = [token for token in range(8) if token != 3]
    assert torch.equal(y[others], clean[others])


def test_permuted_experts_give_the_same_result(weights):
    x, x_sf, topk_idx, topk_weights = tokens(8)
    order = torch.randperm(NUM_EXPERTS)
    position = torch.empty_like(order)
    position[order] = torch.arange(NUM_EXPERTS)
    permuted = [tuple(tensor[order] for tensor in layer) for layer in weights]
    assert torch.equal(
        reference_mega_moe(x, x_sf, topk_idx, topk_weights, *weights),
        reference_mega_moe(x, x_sf, position[topk_idx], topk_weights, *permuted),
    )


def test_tokens_are_independent_of_their_neighbours(weights):
    args = tokens(16)
    together = reference_mega_moe(*args, *weights)
    for token in (0, 7, 15):
        alone = reference_mega_moe(*(tensor[token : token + 1] for tensor in args), *weights)
        # float64 sums in another order: a bfloat16 rounding may turn, the result may not drift.
        assert (alone[0].float() - together[token].float()).norm() <= 2e-3 * alone[0].float().norm()


@pytest.mark.gpu
def test_gpu_agrees_with_cpu(weights):
    args = tokens(16)
    expected = reference_mega_moe(*args, *weights).float()
    on_gpu = [tensor.cuda() for tensor in args]
    gpu_weights = [tuple(tensor.cuda() for tensor in layer) for layer in weights]
    result = reference_mega_moe(*on_gpu, *gpu_weights).cpu().float()
    assert (result - expected).norm() <= 2e-3 * expected.norm()
