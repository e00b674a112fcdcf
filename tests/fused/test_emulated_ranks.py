"""Several ranks in one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import deep_moe
from deep_moe import EmulatedRanks, MegaMoEError, MegaMoETimeoutError
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens
from tests.kernels.layer_case import LayerCase


class Example:
    """Three ranks with different numbers of tokens, and their exact results."""

    def __init__(self, num_tokens: tuple[int, ...]) -> None:
        num_ranks = len(num_tokens)
        self.ranks = EmulatedRanks(num_ranks, 2 * num_ranks, 8, 2, 128, 128)
        shape = self.ranks.shape
        self.layer = exact_layer(shape)
        self.tokens: list[Tokens] = []
        self.weights = []
        self.ys = []
        for rank, buffer in enumerate(self.ranks.buffers):
            n = num_tokens[rank]
            tokens = exact_tokens(shape, n, seed=rank)
            buffer.x[:n].copy_(tokens.x)
            buffer.x_sf[:n].copy_(tokens.x_sf)
            buffer.topk_idx[:n].copy_(tokens.topk_idx)
            buffer.topk_weights[:n].copy_(tokens.topk_weights)
            self.tokens.append(tokens)
            self.weights.append(
                deep_moe.transform_weights_for_mega_moe(*self.layer.of_rank(rank, num_ranks))
            )
            self.ys.append(torch.full((n, shape.hidden), torch.nan, dtype=torch.bfloat16))

    def call(self, **options) -> None:
        self.ranks.call(self.ys, self.weights, num_sms=2, **options)

    def assert_exact(self) -> None:
        for tokens, y in zip(self.tokens, self.ys, strict=True):
            expected = reference_mega_moe(
                *self.layer.operands(tokens),
            )
            assert torch.equal(y, expected)


@pytest.mark.parametrize("num_tokens", [(8, 8), (8, 0, 3), (0, 0)])
def test_ranks_with_different_numbers_of_tokens(num_tokens: tuple[int, ...]) -> None:
    example = Example(num_tokens)
    example.call()
    example.assert_exact()


def test_two_buffers_in_use_at_once() -> None:
    """As on two streams: calls through one know nothing of those through the other."""
    examples = [Example((8, 3)), Example((2, 7))]
    with ThreadPoolExecutor(len(examples)) as pool:
        for _ in range(3):
            for done in [pool.submit(example.call) for example in examples]:
                done.result()
            for example in examples:
                example.assert_exact()
                for y in example.ys:
                    y.fill_(torch.nan)


def test_a_dirty_pool_and_another_interleaving_change_no_bit() -> None:
    """B17."""
    example = Example((8, 5))
    for seed in range(3):
        example.call(schedule_seed=seed)
        example.assert_exact()
        for buffer in example.ranks.buffers:
            pool_begin = buffer.layout["l1_tokens"].offset
            buffer.memory.tensor[pool_begin:] = 0xFF


def test_statistics_of_each_rank() -> None:
    example = Example((8, 8))
    stats = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    example.ranks.call(example.ys, example.weights, stats, num_sms=2)
    all_ids = torch.cat([tokens.topk_idx.flatten() for tokens in example.tokens])
    counts = torch.bincount(all_ids[all_ids >= 0], minlength=4).int()
    assert torch.equal(torch.cat(stats), counts)


def test_a_rank_that_takes_no_part_is_named_until_reset() -> None:
    example = Example((4, 4, 4))
    with pytest.raises(MegaMoETimeoutError) as caught:
        example.call(ranks=[0, 2], timeout_s=0.05)
    assert "token counts of a local expert from all ranks" in str(caught.value)
    assert "missing: rank 1" in str(caught.value)
    # And where everybody stood.
    assert "epilogue warp 0 (warp 8)" in str(caught.value)
    assert "polls expert_recv_sum[0] (byte" in str(caught.value)
    with pytest.raises(MegaMoEError, match="reset"):
        example.call()
    example.ranks.reset()
    example.call()
    example.assert_exact()


def test_one_of_its_buffers_cannot_be_called_alone() -> None:
    example = Example((4, 4))
    buffer, (l1, l2) = example.ranks.buffers[0], example.weights[0]
    with pytest.raises(ValueError, match="through its EmulatedRanks"):
        deep_moe.fp8_fp4_mega_moe(example.ys[0], l1, l2, buffer)


def test_a_list_for_another_number_of_ranks_is_refused() -> None:
    example = Example((4, 4))
    with pytest.raises(ValueError, match="ys must have one entry for each of the 2 ranks; got 1"):
        example.ranks.call(example.ys[:1], example.weights)
    with pytest.raises(ValueError, match="stats must have one entry for each of the 2 ranks"):
        example.ranks.call(example.ys, example.weights, [None])


def test_leaving_the_context_closes_the_buffers() -> None:
    with EmulatedRanks(2, 4, 8, 2, 128, 128) as ranks:
        buffers = ranks.buffers
    for buffer in buffers:
        with pytest.raises(ValueError, match="open buffer"):
            buffer.raise_if_unusable()


def test_the_schedule_reaches_the_emulator() -> None:
    with pytest.raises(ValueError, match="schedule must be one of"):
        Example((1, 1)).call(schedule="backwards")


def test_every_slot_of_all_tokens_fits_though_they_name_one_expert() -> None:
    """One local expert, four slots: the pool holds each token four times."""
    shape = MoEShape(4, 4, 4, 128, 128, 160)
    sum_bits = target_of("sm_90a").weights_of().numerics.sum_bits
    case = LayerCase(shape, exact_layer(shape, sum_bits=sum_bits), arch="sm_90a")
    tokens = [exact_tokens(shape, 160, seed=rank) for rank in range(4)]
    for own in tokens:
        own.topk_idx.zero_()
    results = case.compare_call(tokens, num_sms=2, checked=False)
    assert all(result.is_exact for result in results)


def test_options_are_those_of_the_function() -> None:
    example = Example((4, 4))
    with pytest.raises(TypeError, match=r"call\(\) got an unexpected .*'time_out_s'"):
        example.call(time_out_s=1.0)
    with pytest.raises(ValueError, match="timeout_s must be a positive number"):
        example.call(timeout_s=1e300)


def test_more_ctas_than_memory_holds_are_refused() -> None:
    example = Example((4, 4))
    with pytest.raises(ValueError, match=r"num_sms must be fewer: emulating 200000 CTAs .* GiB"):
        example.ranks.call(example.ys, example.weights, num_sms=100_000)
    example.call()
    example.assert_exact()
