"""What the transport by NCCL EP refuses; what it carries is compared in the tests of the layers."""

from __future__ import annotations

import pytest
import torch

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
        layer.mask_ranks([(rank + 1) % 3])
        x = torch.zeros(1, SIZES["hidden"]).bfloat16()
        with pytest.raises(ValueError, match="with no domain masked"):
            layer.dispatch(x, torch.zeros(1, SIZES["num_topk"], dtype=torch.int64))
        layer.close()

    run_ranks(3, work)
