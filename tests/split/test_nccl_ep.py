"""What the transport by NCCL EP refuses; what it carries is compared in the tests of the layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

from deep_moe.split.nccl_ep import NcclEpExchange
from deep_moe.split.two_level import TwoLevelMoE

from . import nccl_ep_stand_in
from .test_two_level_low_latency import SIZES, make


def test_without_the_package(run_ranks) -> None:
    def work(rank: int) -> None:
        with pytest.raises(
            ImportError, match=r"transport='nccl_ep' needs NCCL EP: nccl-extensions"
        ):
            make(2, transport="nccl_ep")

    run_ranks(2, work)


def test_ranks_with_another_transport(run_ranks) -> None:
    def work(rank: int) -> None:
        nccl_ep_stand_in.install()
        with pytest.raises(ValueError, match="transport must be the same on every rank"):
            make(2, transport=("torch", "nccl_ep")[rank])

    run_ranks(2, work)


def test_the_communicator_is_of_the_layers_gpu(run_ranks, monkeypatch) -> None:
    """Which need not be the current one; NCCL EP takes that."""
    current = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def work(rank: int) -> None:
        nccl_ep_stand_in.install()
        monkeypatch.setattr(torch.cuda, "device", device)
        asked: list[torch.device] = []
        monkeypatch.setattr(
            sys.modules["nccl.ep.interop.torch"],
            "get_nccl_comm_from_group",
            lambda group: asked.extend(current),
        )
        NcclEpExchange(dist.group.WORLD, torch.device("cuda", 1), 600.0, 32)
        NcclEpExchange(dist.group.WORLD, torch.device("cpu"), 600.0, 32)
        assert asked == [torch.device("cuda", 1)]

    run_ranks(1, work)


def test_a_first_exchange_in_inference_mode(run_ranks) -> None:
    """What it makes serves outside of it, too."""

    def work(rank: int) -> None:
        nccl_ep_stand_in.install()
        exchange = NcclEpExchange(dist.group.WORLD, torch.device("cpu"), 600.0, 32)
        for mode in (torch.inference_mode, nullcontext):
            received, sent = torch.zeros(2, 3, 8).byte(), torch.zeros(2, 3, 8).byte() + rank
            with mode():
                exchange.exchange(received.unbind(), sent.unbind(), 0)
            assert [block.unique().tolist() for block in received] == [[0], [1]]
        exchange.close()

    run_ranks(2, work)


def test_what_kernels_are_made_with(run_ranks, monkeypatch) -> None:
    """They end by a trap, which names nobody, so ranks give up before they do. They have the SMs
    that the layer's kernels leave."""

    def work(rank: int) -> None:
        nccl_ep_stand_in.install()
        made: list[nccl_ep_stand_in.GroupConfig] = []
        create = nccl_ep_stand_in.Group.create
        monkeypatch.setattr(
            nccl_ep_stand_in.Group,
            "create",
            lambda comm, config: made.append(config) or create(comm, config),
        )
        layer = make(2, transport="nccl_ep", timeout_s=300.0, num_transport_sms=5)
        x = torch.zeros(1, SIZES["hidden"]).bfloat16()
        layer.dispatch(x, torch.zeros(1, SIZES["num_topk"], dtype=torch.int64))
        layer.close()
        assert {config.max_num_sms for config in made} == {5}
        assert all(300 < config.timeout_ns / 1e9 < 600 for config in made)

    run_ranks(2, work)


def test_exact_sizes() -> None:
    with pytest.raises(ValueError, match="exact_sizes must be False with transport='nccl_ep'"):
        TwoLevelMoE(
            *(None, None, 8, 4, 3, 256, 128),
            exact_sizes=True,
            transport="nccl_ep",
            device="cpu",
        )


def test_a_masked_domain(run_ranks) -> None:
    """It has no block."""

    def work(rank: int) -> None:
        nccl_ep_stand_in.install()
        layer = make(3, num_experts=9, transport="nccl_ep")
        with pytest.raises(ValueError, match=r"transport='nccl_ep' exchanges .* reset\(groups\)"):
            layer.mask_ranks([(rank + 1) % 3])
        exchange = NcclEpExchange(dist.group.WORLD, torch.device("cpu"), 600.0, 32)
        block = torch.zeros(2, 8).byte()
        blocks = [None if peer == (rank + 1) % 3 else block for peer in range(3)]
        with pytest.raises(ValueError, match="with no domain masked"):
            exchange.exchange(blocks, blocks, 0)
        layer.close()

    run_ranks(3, work)
