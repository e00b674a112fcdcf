"""One rank on the CPU: the real kernel, emulated, against the reference."""

import pytest
import torch

from deep_moe.activations import Situ


def test_the_result_is_exact_and_inputs_are_left_alone(example) -> None:
    buffer, tokens = example.sym_buffer, example.tokens
    example()
    assert torch.equal(example.y, example.expected())
    assert torch.equal(buffer.x.view(torch.uint8), tokens.x.view(torch.uint8))
    assert torch.equal(buffer.topk_idx, tokens.topk_idx)


def test_the_next_call_finds_a_clean_buffer(example) -> None:
    """Every call leaves zero what it expects to be zero."""
    layout = example.sym_buffer.layout
    for num_tokens in (16, 5, 16):
        example.y.fill_(torch.nan)
        example(y=example.y[:num_tokens])
        assert torch.equal(example.y[:num_tokens], example.expected()[:num_tokens])
        control = example.sym_buffer.memory.tensor
        assert not control[layout.mark("zeroed_begin") : layout.mark("zeroed_end")].any()
    assert example.sym_buffer.num_calls == 3


@pytest.mark.parametrize("make_empty", [lambda y: y[:0], lambda y: torch.empty_like(y[:0])])
def test_no_tokens_at_all(example, make_empty) -> None:
    """B7: an empty tensor has a null pointer."""
    example(y=make_empty(example.y))
    example()
    assert torch.equal(example.y, example.expected())


def test_statistics_accumulate(example) -> None:
    counts = torch.bincount(example.tokens.topk_idx.flatten() + 1, minlength=5)[1:].int()
    stats = torch.full((4,), 10, dtype=torch.int32)
    example(cumulative_local_expert_recv_stats=stats)
    assert torch.equal(stats, counts + 10)
    example(cumulative_local_expert_recv_stats=stats)
    assert torch.equal(stats, 2 * counts + 10)


def test_the_clamp_reaches_the_kernel(example) -> None:
    """B14."""
    example(activation_clamp=4.0)
    clamped = example.expected(activation_clamp=4.0)
    assert torch.equal(example.y, clamped)
    assert not torch.equal(clamped, example.expected())


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "swiglu_oai"},
        {"activation": "swiglu_oai", "activation_clamp": 4.0},
        {"activation": Situ(beta=3.0)},
    ],
    ids=str,
)
def test_the_activation_reaches_the_kernel(example, options) -> None:
    example(**options)
    assert torch.equal(example.y, example.expected(**options))
    assert not torch.equal(example.y, example.expected())


def test_nan_and_infinity_stay_in_their_token(example) -> None:
    """B12."""
    example.sym_buffer.x.view(torch.uint8)[3] = 0x7F  # E4M3's NaN
    example.sym_buffer.topk_weights[7, 0] = torch.inf
    example()
    assert bool(example.y[3].isnan().all())
    others = [i for i in range(16) if i not in (3, 7)]
    assert torch.equal(example.y[others], example.expected()[others])


def test_padding_between_experts_in_the_weights(example) -> None:
    """B16: strides are the tensors' own."""
    weight, sf = example.l1_weights
    padded = torch.full((*weight.shape[:2], 256), -1, dtype=torch.int8)[..., : weight.shape[2]]
    padded.copy_(weight)
    assert not padded.is_contiguous()
    example(l1_weights=(padded, sf))
    assert torch.equal(example.y, example.expected())


def test_unchecked_ids_out_of_range_are_unused_slots(example) -> None:
    """B13."""
    ids = example.sym_buffer.topk_idx
    unused = torch.zeros_like(ids, dtype=torch.bool)
    unused[::3, 0] = True
    ids[unused] = 10**12
    example.tokens.topk_idx[unused] = -1
    example(checked=False)
    assert torch.equal(example.y, example.expected())


def test_weights_of_two_layers_share_a_buffer(example) -> None:
    """Tensor maps belong to the weights they were made for."""
    zero = tuple(torch.zeros_like(tensor) for tensor in example.l2_weights)
    example()
    example(l2_weights=zero)
    assert not example.y.any()
    example()
    assert torch.equal(example.y, example.expected())
    assert len(example.sym_buffer.caches.known_forms) == 2


def test_seeds_do_not_change_the_result(example) -> None:
    for seed in range(3):
        example.y.fill_(torch.nan)
        example(schedule_seed=seed)
        assert torch.equal(example.y, example.expected())


@pytest.mark.parametrize("num_sms", [2, 8])
def test_the_number_of_ctas_does_not_change_the_result(example, num_sms: int) -> None:
    example(num_sms=num_sms)
    assert torch.equal(example.y, example.expected())
