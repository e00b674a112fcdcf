"""A layer over two domains of two ranks: a process for each rank, gloo between domains, the
emulator inside them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import deep_moe
from deep_moe.errors import DeepMoEError, ForeignTokensError, LostDomainError, MegaMoETimeoutError
from deep_moe.formats.numerics import FP32_SUM_BITS
from deep_moe.heuristics import MoEShape
from deep_moe.split.domain_groups import make_domain_groups
from deep_moe.split.two_level import TwoLevelMoE
from deep_moe.targets import target_of
from deep_moe.trial.calls import fill_inputs, model_inputs, rank_operands
from deep_moe.trial.comparison import compare
from deep_moe.trial.synthetic import (
    Layer,
    Tokens,
    exact_layer,
    exact_tokens,
    name_twice,
    random_layer,
    random_tokens,
)
from deep_moe.trial.two_level import make_layer, two_level_bounds
from tests.pairs import formats

from . import nccl_ep_stand_in

ARCH = "sm_90a"
CALL = {"arch": ARCH, "num_sms": 2, "checked": False}
SHAPE = MoEShape(4, 8, 3, 256, 128, 9)
COUNTS = (9, 0, 5, 3)
CPU = torch.device("cpu")


def layer_of(shape: MoEShape, exact: bool) -> Layer:
    block = target_of(ARCH).weights_of(shape.weights, shape.token_format).scale_block
    return (exact_layer if exact else random_layer)(shape, scale_block=block)


def tokens_of(shape: MoEShape, exact: bool, rank: int, **more: Any) -> tuple[torch.Tensor, Tokens]:
    """The input, and what the layer makes of it."""
    make = exact_tokens if exact else random_tokens
    return model_inputs(make(shape, COUNTS[rank], seed=rank, **more))


def bounds_of(shape: MoEShape, num_domains: int, domain: int, layer: Layer, tokens: Tokens):
    numerics = target_of(ARCH).weights_of(shape.weights, shape.token_format).numerics
    return two_level_bounds(
        shape, num_domains, domain, layer, tokens, numerics=numerics, sum_bits=FP32_SUM_BITS
    )


def one_domain(
    shape: MoEShape, layer: Layer, rank: int, tokens: Tokens, **biases: Any
) -> torch.Tensor:
    """The fused call over all ranks."""
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        dist.group.WORLD,
        shape.num_experts,
        shape.num_max_tokens_per_rank,
        shape.num_topk,
        shape.hidden,
        shape.intermediate_hidden,
    )
    fill_inputs(buffer, tokens)
    y = torch.empty(tokens.num_tokens, shape.hidden, dtype=torch.bfloat16)
    weights, _ = rank_operands(shape, layer, rank, CPU, ARCH)
    deep_moe.fp8_fp4_mega_moe(y, *weights, buffer, **CALL)
    dist.barrier()
    buffer.close()
    return y


@pytest.mark.parametrize(
    ("arguments", "shared"),
    [
        pytest.param({}, 0, id="fixed", marks=pytest.mark.slow),
        pytest.param({"num_chunks": 2, "exact_sizes": True}, 0, id="exact_in_chunks"),
        pytest.param({"num_chunks": 2}, 1, id="shared_expert", marks=pytest.mark.slow),
        pytest.param({"num_chunks": 2, "transport": "nccl_ep"}, 0, id="nccl_ep"),
    ],
)
def test_an_exact_layer_agrees_bit_for_bit(run_ranks, arguments, shared) -> None:
    shape = replace(SHAPE, num_shared_experts=shared)
    layer = layer_of(shape, exact=True)

    def work(rank: int) -> None:
        nccl_ep_stand_in.install()
        moe = make_layer(shape, 2, CPU, **arguments)
        weights, _ = rank_operands(shape, layer, rank, CPU, ARCH)
        assert moe.nbytes == sum(moe.shape.buffer_bytes.values())
        held = [moe._sent, moe._received, moe._rows, *moe._staged]
        held += [moe._own_ids, moe._id_in_domain]
        between = moe.shape.buffer_bytes["tokens between domains"]
        in_buffer = moe._buffer.x.untyped_storage().data_ptr()
        own = [tensor for tensor in held if tensor.untyped_storage().data_ptr() != in_buffer]
        assert sum(tensor.nbytes for tensor in own) == between
        for call in range(2):  # the second one finds what the first has left
            more = {"num_unused_slots": call}
            x, tokens = tokens_of(shape, True, rank, **more)
            stats = torch.zeros(shape.num_experts_per_rank, dtype=torch.int32)
            y = moe.call(x, tokens.topk_idx, tokens.topk_weights, weights, stats, **CALL)
            assert compare(y, bounds_of(shape, 2, rank // 2, layer, tokens).y).is_exact
            named = [tokens_of(shape, True, other, **more)[1].topk_idx for other in range(4)]
            local = torch.cat([ids.flatten() for ids in named]) - 2 * rank
            assert stats.tolist() == [int((local == expert).sum()) for expert in range(2)]
        moe.check()
        dist.barrier()
        uses_nccl_ep = arguments.get("transport") == "nccl_ep"
        assert (nccl_ep_stand_in.Group.num_open > 0) == uses_nccl_ep
        moe.close()
        assert nccl_ep_stand_in.Group.num_open == 0

    run_ranks(4, work)


def test_a_random_layer_is_one_domains_but_for_the_rounding_of_partial_sums(run_ranks) -> None:
    """Tokens whose experts are all in one domain have the same bits. Some have slots of -1, and
    some name an expert twice."""
    layer = layer_of(SHAPE, exact=False)

    def work(rank: int) -> tuple[int, int]:
        moe = make_layer(SHAPE, 2, CPU)
        weights, _ = rank_operands(SHAPE, layer, rank, CPU, ARCH)
        x, tokens = tokens_of(SHAPE, False, rank, num_unused_slots=1)
        tokens = name_twice(tokens)
        y = moe.call(x, tokens.topk_idx, tokens.topk_weights, weights, **CALL)
        assert compare(y, bounds_of(SHAPE, 2, rank // 2, layer, tokens)).is_right
        whole = one_domain(SHAPE, layer, rank, tokens)
        domains = [(tokens.topk_idx // 4 == domain).any(dim=1) for domain in range(2)]
        in_one = ~(domains[0] & domains[1])
        assert torch.equal(y[in_one], whole[in_one])
        parts = [
            bounds_of(SHAPE, 1, 0, layer, replace(tokens, topk_idx=ids)).y.float().abs()
            for ids in (tokens.topk_idx.where(tokens.topk_idx // 4 == d, -1) for d in (0, 1))
        ]
        # Half a BF16 unit for each partial sum, and for both results.
        room = 2.0**-8 * (parts[0] + parts[1] + y.float().abs() + whole.float().abs())
        assert ((y.float() - whole.float()).abs() <= room).all()
        dist.barrier()
        moe.close()
        return int(in_one.sum()), int((~in_one).sum())

    counts = run_ranks(4, work)
    assert all(sum(of_kind) > 0 for of_kind in zip(*counts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("exact_sizes", [False, True])
def test_more_domains_than_slots(run_ranks, exact_sizes) -> None:
    """Three domains of one rank, so that one has others on both sides."""
    shape = MoEShape(3, 6, 2, 256, 128, 9)
    layer = layer_of(shape, exact=True)

    def work(rank: int) -> None:
        moe = make_layer(shape, 3, CPU, num_chunks=2, exact_sizes=exact_sizes)
        weights, _ = rank_operands(shape, layer, rank, CPU, ARCH)
        x, tokens = tokens_of(shape, True, rank)
        y = moe.call(x, tokens.topk_idx, tokens.topk_weights, weights, **CALL)
        assert compare(y, bounds_of(shape, 3, rank, layer, tokens).y).is_exact
        dist.barrier()
        moe.close()
        with pytest.raises(ValueError, match="closed"):
            moe.call(x, tokens.topk_idx, tokens.topk_weights, weights, **CALL)

    run_ranks(3, work)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", "bf16", "mxfp4 x bf16", "nvfp4"])
def test_other_formats_and_biases(run_ranks, weights) -> None:
    """Two domains of one rank each."""
    shape = MoEShape(2, 6, 2, 256, 128, 9, **formats(weights), biases=weights != "fp8")
    layer = layer_of(shape, exact=True)

    def work(rank: int) -> None:
        moe = make_layer(shape, 2, CPU, num_chunks=2)
        operands, biases = rank_operands(shape, layer, rank, CPU, ARCH)
        x, tokens = tokens_of(shape, True, rank)
        out = torch.empty_like(x)
        routing = tokens.topk_idx.int(), tokens.topk_weights
        assert moe.call(x, *routing, operands, out=out, **biases, **CALL) is out
        assert compare(out, bounds_of(shape, 2, rank, layer, tokens).y).is_exact
        dist.barrier()
        moe.close()

    run_ranks(2, work)


class SmallKernels(TorchDispatchMode):
    """Counts the operators that launch a kernel on a GPU, but for the fused call."""

    VIEWS = ("view", "slice", "select", "unsqueeze", "expand", "as_strided", "detach", "t", "alias")
    OTHERS = ("transpose", "reshape", "_reshape_alias", "empty", "empty_like", "new_empty", "item")
    NO_KERNEL = frozenset((*VIEWS, *OTHERS, "scalar_tensor", "mega_moe"))

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        namespace, name = function._schema.name.split("::")
        self.number += namespace != "c10d" and name not in self.NO_KERNEL
        return function(*args, **(kwargs or {}))


def test_a_call_has_as_many_small_kernels_as_its_cost_says(run_ranks) -> None:
    shape = MoEShape(2, 6, 2, 256, 128, 9)
    layer = layer_of(shape, exact=True)

    def work(rank: int) -> list[int]:
        numbers = []
        weights, _ = rank_operands(shape, layer, rank, CPU, ARCH)
        x, tokens = tokens_of(shape, True, 0)
        for num_chunks in (1, 3):
            moe = make_layer(shape, 2, CPU, num_chunks=num_chunks)
            with SmallKernels() as small:
                moe.call(x, tokens.topk_idx, tokens.topk_weights, weights, **CALL)
            numbers.append(small.number)
            dist.barrier()
            moe.close()
        return numbers

    # docs/two-level.md: with one chunk and two domains rows are written where they are sent from.
    assert run_ranks(2, work)[0] == pytest.approx([15, 6 + 12 * 3], rel=0.05)


@pytest.mark.parametrize(
    ("num_domains", "arguments"),
    [
        pytest.param(2, {}, id="one_place"),
        pytest.param(2, {"num_chunks": 2}, id="chunks"),
        pytest.param(2, {"num_max_foreign_tokens": 24}, id="shared_room"),
        pytest.param(4, {"num_chunks": 3}, id="four_domains", marks=pytest.mark.slow),
        pytest.param(4, {"exact_sizes": True}, id="exact", marks=pytest.mark.slow),
    ],
)
def test_calls_travel_in_the_sizes_that_they_tell(run_ranks, num_domains, arguments) -> None:
    """A layer with room for many tokens, and calls of few, of more, and of few again."""
    shape = replace(SHAPE, num_experts=16, num_max_tokens_per_rank=48)
    layer = layer_of(shape, exact=True)

    def work(rank: int) -> None:
        moe = make_layer(shape, num_domains, CPU, **arguments)
        weights, _ = rank_operands(shape, layer, rank, CPU, ARCH)
        sent: list[int] = []
        exchange = moe._transport.exchange

        def counted(received, rows, *splits):
            sent.append(sum(splits[1]))
            return exchange(received, rows, *splits)

        moe._transport.exchange = counted
        domain = rank * num_domains // 4
        for seed, most in enumerate((9, 20, None, 9)):
            x, tokens = tokens_of(shape, True, rank, num_unused_slots=seed % 2)
            routing = tokens.topk_idx, tokens.topk_weights
            sent.clear()
            y = moe.call(x, *routing, weights, most_tokens=most, **CALL)
            assert compare(y, bounds_of(shape, num_domains, domain, layer, tokens).y).is_exact
            if moe.shape.exact_sizes:
                continue
            chunks = moe.shape.num_chunks
            rows = -(-(most or 48) // chunks)
            if moe.shape.num_max_foreign_tokens is not None:
                rows = min(rows, 24)
            # Tokens there, and sums back.
            assert sent == [(num_domains - 1) * rows] * (2 * chunks)
        with pytest.raises(ValueError, match=r"most_tokens must be .* \(48\), or None; got 49"):
            moe.call(x, *routing, weights, most_tokens=49, **CALL)
        with pytest.raises(TypeError, match="most_tokens must be an int"):
            moe.call(x, *routing, weights, most_tokens=9.0, **CALL)
        if x.shape[0] > 2:
            with pytest.raises(ValueError, match=rf"most_tokens must be {x.shape[0]}, .*; got 2"):
                moe.call(x, *routing, weights, most_tokens=2, **CALL)
        dist.barrier()
        moe.close()

    run_ranks(4, work)


def test_too_many_foreign_tokens_are_an_error_on_all_ranks_and_the_layer_goes_on(run_ranks) -> None:
    """Rank 2 sends too many. With exact sizes nothing is computed."""
    layer = layer_of(SHAPE, exact=True)

    def work(rank: int) -> list[str]:
        weights, _ = rank_operands(SHAPE, layer, rank, CPU, ARCH)
        x = torch.zeros(4, SHAPE.hidden, dtype=torch.bfloat16)
        few, many = (torch.full((4, 3), -1) for _ in range(2))
        few[0, 0] = many[0, 0] = (rank * 2 + 4) % 8  # of the other domain
        if rank == 2:
            many[:3, 0] = 0
        messages = []
        for exact_sizes in (False, True):
            moe = make_layer(SHAPE, 2, CPU, num_max_foreign_tokens=2, exact_sizes=exact_sizes)
            with pytest.raises(ForeignTokensError) as caught:
                moe.call(x, many, torch.ones(4, 3), weights, **CALL)
            messages.append(str(caught.value))
            y = moe.call(x, few, torch.ones(4, 3), weights, **CALL)
            assert (y == 0).all()
            dist.barrier()
            moe.close()
        return messages

    messages = run_ranks(4, work)
    assert all(of_rank == messages[0] for of_rank in messages)
    fixed, exact = messages[0]
    assert "rank 0 of domain 1 has 3 tokens for domain 0 in chunk 0" in fixed
    assert "rank 0 of domain 0 is sent 3 tokens by other domains in chunk 0" in exact
    assert "num_max_foreign_tokens must be larger" in fixed
    assert "2 in 1 chunks leave room for 2" in fixed


def test_a_domain_that_is_lost_is_named(run_ranks) -> None:
    """Its processes end. The others say so, and say it again if they are asked."""
    layer = layer_of(SHAPE, exact=True)

    def work(rank: int) -> str:
        moe = make_layer(SHAPE, 2, CPU, timeout_s=2.0)
        weights, _ = rank_operands(SHAPE, layer, rank, CPU, ARCH)
        if rank // 2 == 1:
            return ""
        x, tokens = tokens_of(SHAPE, True, rank)
        arguments = x, tokens.topk_idx, tokens.topk_weights, weights
        with pytest.raises(LostDomainError) as caught:
            moe.call(*arguments, **CALL)
        with pytest.raises(LostDomainError, match=r"call reset\(groups\) with groups of"):
            moe.call(*arguments, **CALL)
        return str(caught.value)

    first, second, *_ = run_ranks(4, work)
    assert "domain 1 is lost: its rank 0 does not answer" in first
    assert "domain 1 is lost: its rank 1 does not answer" in second


@pytest.mark.slow
def test_a_rank_that_is_lost_is_named_to_those_who_wait_for_who_knew_it(run_ranks) -> None:
    """Rank 1 of domain 1 ends. Rank 1 of domain 0 finds that out and stops; rank 0 of domain 0,
    which waits for it in the kernel, is told why. Rank 0 of domain 1 misses its neighbour."""
    layer = layer_of(SHAPE, exact=True)

    def work(rank: int) -> str:
        moe = make_layer(SHAPE, 2, CPU, timeout_s=2.0)
        weights, _ = rank_operands(SHAPE, layer, rank, CPU, ARCH)
        if rank == 3:
            return ""
        x, tokens = tokens_of(SHAPE, True, rank)
        with pytest.raises((LostDomainError, MegaMoETimeoutError)) as caught:
            moe.call(x, tokens.topk_idx, tokens.topk_weights, weights, **CALL, timeout_s=6.0)
        time.sleep(5.0)  # whose store the others ask lives on
        return f"{type(caught.value).__name__}: {caught.value}"

    waits, finds, misses, _ = run_ranks(4, work)
    lost = "domain 1 is lost: its rank 1 does not answer"
    assert finds.startswith(f"LostDomainError: {lost}")
    assert waits.startswith("MegaMoETimeoutError: domain 0: rank 0")
    assert waits.endswith(f"({lost}, says a rank of domain 0)")
    assert misses.startswith("MegaMoETimeoutError: domain 1: rank 0")
    assert "missing: rank 1" in misses


def test_what_is_refused(run_ranks) -> None:
    def work(rank: int) -> None:
        groups = make_domain_groups(2)
        sizes = (8, 9, 3, 256, 128)
        with pytest.raises(ValueError, match="hidden must be the same on every rank; got 128"):
            TwoLevelMoE(*groups, 8, 9, 3, 256 if rank else 128, 128)
        with pytest.raises(ValueError, match="cross_group must be ranks with the same rank in"):
            TwoLevelMoE(groups.domain, groups.domain, *sizes)
        with pytest.raises(TypeError, match="cross_group must be a torch"):
            TwoLevelMoE(groups.domain, "all", *sizes)
        with pytest.raises(ValueError, match="num_domains must divide the 4 ranks"):
            make_domain_groups(3)
        with pytest.raises(ValueError, match="num_transport_sms must be at least 0"):
            TwoLevelMoE(*groups, *sizes, num_transport_sms=-1)
        with pytest.raises(ValueError, match="timeout_s must be a positive number"):
            TwoLevelMoE(*groups, *sizes, timeout_s=0)
        moe = TwoLevelMoE(*groups, *sizes)
        x, weights = torch.zeros(2, 256).bfloat16(), torch.ones(2, 3)
        nobody, many = torch.full((2, 3), -1), torch.zeros(10, 256).bfloat16()
        experts = deep_moe.empty_weights_for_mega_moe(2, 256, 128)
        with pytest.raises(ValueError, match="topk_idx must hold expert ids 0 to 7"):
            moe.call(x, nobody + 9, weights, experts)
        with pytest.raises(ValueError, match="x must have at most num_max_tokens_per_rank"):
            moe.call(many, torch.full((10, 3), -1), torch.ones(10, 3), experts)
        wants_gradient = x.clone().requires_grad_()
        with pytest.raises(ValueError, match="x must not require a gradient"):
            moe.call(wants_gradient, nobody, weights, experts)
        with pytest.raises(TypeError, match="out must be torch"):
            moe.call(x, nobody, weights, experts, out=torch.zeros(2, 256))
        with pytest.raises(TypeError, match="unexpected keyword argument 'masked_ranks'"):
            moe.call(x, nobody, weights, experts, masked_ranks=torch.zeros(4, dtype=torch.int32))
        with pytest.raises(TypeError, match="unexpected keyword argument 'chunks'"):
            moe.call(x, nobody, weights, experts, chunks=1)
        with pytest.raises(ValueError, match=r"accumulate must be False: .* got True"):
            moe.call(x, nobody, weights, experts, accumulate=True)
        dist.barrier()
        moe.close()

    run_ranks(4, work)


def test_what_a_rank_alone_is_refused() -> None:
    with pytest.raises(TypeError, match="num_shared_experts must be an int, 0 to 4; got '1'"):
        TwoLevelMoE(None, None, 4, 9, 2, 256, 128, device="cpu", num_shared_experts="1")
    with pytest.raises(ValueError, match="num_shared_experts must be 0 to 4; got -1"):
        TwoLevelMoE(None, None, 4, 9, 2, 256, 128, device="cpu", num_shared_experts=-1)
    with pytest.raises(MemoryError, match="what the given sizes take, is more than this machine"):
        TwoLevelMoE(None, None, 4, 2**30, 2, 256, 128, device="cpu")
    moe = TwoLevelMoE(None, None, 4, 9, 2, 256, 128, device="cpu")
    experts = deep_moe.empty_weights_for_mega_moe(4, 256, 128)
    given = {"x": torch.zeros(2, 256).bfloat16(), "topk_idx": torch.full((2, 2), -1)}
    given["topk_weights"] = torch.ones(2, 2)
    for name, tensor in given.items():  # on another device an operator has shapes and no values
        with pytest.raises(ValueError, match=f"{name} must be on cpu.*; got meta"):
            moe.call(*{**given, name: tensor.to("meta")}.values(), experts)
    with pytest.raises(ValueError, match=r"x must be 2-dimensional .*; got shape \(\)"):
        moe.call(**{**given, "x": torch.tensor(1.0)}, weights=experts)
    moe.close()


def test_a_second_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stage its tokens over those of the first."""
    moe = TwoLevelMoE(None, None, 4, 9, 2, 256, 128, device="cpu")
    experts = deep_moe.empty_weights_for_mega_moe(4, 256, 128)
    given = (torch.zeros(2, 256).bfloat16(), torch.full((2, 2), -1), torch.ones(2, 2), experts)
    found: list[BaseException] = []

    def call_too() -> None:
        with pytest.raises(DeepMoEError, match="TwoLevelMoE is in use by another thread") as raised:
            moe.call(*given)
        found.append(raised.value)

    def stage(*_: object) -> None:
        thread = threading.Thread(target=call_too)
        thread.start()
        thread.join()
        raise KeyError("staged")

    monkeypatch.setattr(moe, "_stage", stage)
    for num_found in (1, 2):  # a call that fails gives its turn back
        with pytest.raises(KeyError):
            moe.call(*given)
        assert len(found) == num_found
    moe.close()


def test_a_rank_alone_is_one_domain() -> None:
    shape = MoEShape(1, 4, 2, 256, 128, 9)
    layer = layer_of(shape, exact=True)
    moe = TwoLevelMoE(None, None, 4, 9, 2, 256, 128, device="cpu", num_chunks=2)
    weights, _ = rank_operands(shape, layer, 0, CPU, ARCH)
    x, tokens = tokens_of(shape, True, 0)
    y = moe.call(x, tokens.topk_idx, tokens.topk_weights, weights, **CALL)
    assert compare(y, bounds_of(shape, 1, 0, layer, tokens).y).is_exact
    moe.check()
    moe.close()
    held = [value for value in vars(moe).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in (*held, *moe._staged)) == moe._worst.nbytes == 8
