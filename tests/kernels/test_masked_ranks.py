"""Calls that leave ranks out: the others neither wait for them nor look at their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.heuristics import MoEShape
from deep_moe.trial.synthetic import Tokens, exact_layer, exact_tokens
from tests.everyday import parametrize

from .layer_case import LayerCase

SHAPE = MoEShape(
    num_ranks=3,
    num_experts=6,
    num_topk=2,
    hidden=128,
    intermediate_hidden=128,
    num_max_tokens_per_rank=72,
)
COUNTS = (24, 5, 72)  # the last rank's so many that all CTAs send them, on SM90


class MaskedCase(LayerCase):
    """A layer whose calls leave the ranks in `masked` out."""

    def __init__(self, shape: MoEShape, arch: str) -> None:
        super().__init__(shape, exact_layer(shape, seed=1), arch=arch)
        self.masked_ranks = torch.zeros(shape.num_ranks, dtype=torch.int32)

    def mask(self, *ranks: int) -> None:
        self.masked_ranks.zero_()
        self.masked_ranks[list(ranks)] = 1

    def tokens(self, seed: int, counts: Sequence[int] = COUNTS) -> list[Tokens]:
        return [exact_tokens(self.shape, n, seed=9 * seed + n) for n in counts]

    def run(self, tokens: Sequence[Tokens], **options: Any) -> list[torch.Tensor]:
        """The active ranks' y; of the others, as it was."""
        active = (self.masked_ranks == 0).nonzero().flatten().tolist()
        most = self.shape.num_max_tokens_per_rank  # one kernel for all
        options = {"ranks": active, "num_sms": 2, "expected_tokens_per_rank": most, **options}
        masks = [self.masked_ranks] * self.shape.num_ranks
        return self.call(tokens, masked_ranks=masks, **options)

    def without_masked(self, tokens: Sequence[Tokens]) -> list[Tokens]:
        """The tokens with slots of masked ranks' experts unused."""
        owners = torch.arange(self.shape.num_experts) // self.shape.num_experts_per_rank
        is_dead = self.masked_ranks[owners] != 0
        given = []
        for own in tokens:
            ids = own.topk_idx
            given.append(replace(own, topk_idx=ids.where((ids < 0) | ~is_dead[ids], -1)))
        return given

    def check(
        self,
        tokens: Sequence[Tokens],
        onto: Sequence[torch.Tensor] | None = None,
        **options: Any,
    ) -> list[torch.Tensor]:
        """Every bit of the active ranks' y, and no word of a masked rank's buffer is another."""
        buffers = self.ranks.buffers
        before = {}
        for rank in self.masked_ranks.nonzero().flatten().tolist():
            buffer, own = buffers[rank], tokens[rank]
            buffer.x[: own.num_tokens].copy_(own.x)  # as `call` fills them
            buffer.x_sf[: own.num_tokens].copy_(own.x_sf)
            buffer.topk_idx[: own.num_tokens].copy_(own.topk_idx)
            buffer.topk_weights[: own.num_tokens].copy_(own.topk_weights)
            before[rank] = buffer.memory.tensor.clone()
        ys = self.run(tokens, onto=onto, **options)
        for rank, expected in enumerate(self.expected(self.without_masked(tokens), onto=onto)):
            if rank in before:
                assert torch.equal(buffers[rank].memory.tensor, before[rank])
                if onto is None:
                    assert ys[rank].isnan().all()
                else:
                    assert torch.equal(ys[rank], onto[rank])
            else:
                assert torch.equal(ys[rank], expected), rank
        self.check_control_words()
        return ys


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_90a"])
def test_the_mask_may_change_between_any_two_calls(arch: str) -> None:
    """After an odd number of calls and after an even one: the barriers' words are up or down."""
    case = MaskedCase(SHAPE, arch)
    for seed, masked in enumerate([(), (1,), (1,), (1, 2), (1, 2)]):
        case.mask(*masked)
        case.check(case.tokens(seed))


@parametrize(
    ("arch", "num_shared"),
    [("sm_90a", 2), ("sm_100a", 0), ("sm_90a", 0), ("sm_100a", 2)],
    everyday=[("sm_90a", 2), ("sm_100a", 0)],
)
def test_a_rank_that_never_came(arch: str, num_shared: int) -> None:
    """Many tokens want its experts, and some only them: with shared experts these are all they
    get, else zeros."""
    case = MaskedCase(replace(SHAPE, num_shared_experts=num_shared), arch)
    case.mask(0)
    tokens = case.tokens(3)
    for own in tokens:
        own.topk_idx[::2, 0] = 1
        own.topk_idx[::4, 1] = 0
    ys = case.check(tokens)
    assert ys[1][::4].any() == (num_shared != 0)


# Shape, tokens of each rank, and overrides.
RING = replace(SHAPE, num_max_tokens_per_rank=400, num_pool_tokens=384)
WAYS: dict[str, tuple[MoEShape, tuple[int, ...], dict[str, int]]] = {
    "clusters": (SHAPE, COUNTS, {"cluster_size": 2}),
    "ring": (RING, (300, 5, 240), {"block_m": 64}),
    "clusters and ring": (RING, (300, 5, 240), {"block_m": 64, "cluster_size": 2}),
}


@parametrize(
    ("arch", "way"),
    [
        ("sm_90a", "clusters"),
        ("sm_90a", "ring"),
        ("sm_90a", "clusters and ring"),
        ("sm_100a", "ring"),
    ],
    everyday=[("sm_90a", "clusters"), ("sm_90a", "ring")],
)
def test_other_ways_through_the_kernel(arch: str, way: str) -> None:
    """Clusters of two CTAs, and a pool whose rows are used again, with no rank masked and with
    one. Most slots name one expert of that rank: of many tokens, its list takes further pages,
    which are not asked for when it is masked."""
    shape, counts, overrides = WAYS[way]
    case = MaskedCase(shape, arch)
    tokens = case.tokens(4, counts)
    for masked in ((), (1,)):
        case.mask(*masked)
        for own in tokens:
            own.topk_idx[4:] = 2  # rank 1's
        per_rank = shape.num_experts_per_rank
        stats = [torch.zeros(per_rank, dtype=torch.int32) for _ in tokens]
        case.check(tokens, overrides=overrides, stats=stats)
        sent = [own for rank, own in enumerate(case.without_masked(tokens)) if rank not in masked]
        slots = torch.cat([own.topk_idx.flatten() for own in sent])
        received = torch.bincount(slots[slots >= 0], minlength=shape.num_experts)
        assert torch.cat(stats).tolist() == received.tolist()


@parametrize("arch", ["sm_90a", "sm_100a"], everyday=["sm_90a"])
def test_results_are_added_to_what_y_holds(arch: str) -> None:
    """A token that has only experts of masked ranks keeps its row."""
    case = MaskedCase(SHAPE, arch)
    case.mask(0)
    tokens = case.tokens(5)
    onto = [torch.full((n, SHAPE.hidden), 3.25, dtype=torch.bfloat16) for n in COUNTS]
    for own in tokens:
        own.topk_idx[::4] = torch.tensor([0, 1])
    ys = case.check(tokens, onto)
    assert torch.equal(ys[2][::4], onto[2][::4])
    assert not torch.equal(ys[2], onto[2])


def test_survivors_name_the_dead_and_go_on_after_a_reset() -> None:
    case = MaskedCase(SHAPE, "sm_90a")
    tokens = case.tokens(1)
    with pytest.raises(MegaMoETimeoutError, match=r"missing: rank 1\)"):
        case.run(tokens, ranks=[0, 2], timeout_s=0.05)
    case.ranks.reset()
    case.mask(1)
    case.check(tokens)
    # A call that it missed, and no reset: its barriers are in another round.
    case.mask()
    with pytest.raises(MegaMoETimeoutError, match=r"missing: rank 1\)"):
        case.run(tokens, timeout_s=0.05)
    case.ranks.reset()
    case.check(tokens)
    # Of the others, a masked one is not named.
    case.mask(1)
    with pytest.raises(MegaMoETimeoutError, match=r"missing: rank 2\)"):
        case.run(tokens, ranks=[0], timeout_s=0.05)


def test_a_masked_rank_that_calls_stops_alone() -> None:
    """Checked, before its kernel starts; unchecked, in the kernel, which tells others nothing."""
    case = MaskedCase(SHAPE, "sm_90a")
    case.mask(1)
    tokens = case.tokens(1)
    with pytest.raises(ValueError, match=r"masked_ranks\[1\] must leave out other ranks"):
        case.run(tokens, ranks=[1])
    others = [case.ranks.buffers[rank].memory.tensor for rank in (0, 2)]
    with pytest.raises(MegaMoEError, match="rank 1 stopped: masked_ranks must leave out other"):
        case.run(tokens, ranks=[1], checked=False)
    for memory in others:
        layout = case.ranks.buffers[0].layout
        assert not memory[: layout.mark("control_bytes")].any()


def test_the_mask_of_another_form_is_refused() -> None:
    case = MaskedCase(SHAPE, "sm_90a")
    tokens = case.tokens(1)
    for wrong, words in (
        (torch.zeros(3), "must be torch.int32; got torch.float32"),
        (torch.zeros(2, dtype=torch.int32), r"must have shape \(3,\) for this buffer; got \(2,\)"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), "must be on cpu, as the buffer is"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"masked_ranks\[0\] {words}"):
            case.call(tokens, masked_ranks=[wrong] * 3)
    with pytest.raises(TypeError, match="masked_ranks must be a list, an entry for each rank"):
        case.call(tokens, masked_ranks=case.masked_ranks)
