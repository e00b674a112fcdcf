"""A process that is killed in a fused call: the others name it, and go on without it."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import deep_moe
from deep_moe.errors import MegaMoETimeoutError
from deep_moe.heuristics import MoEShape
from deep_moe.trial.reference import reference_mega_moe
from deep_moe.trial.synthetic import exact_layer, exact_tokens
from tests.split.test_killed_rank import KILLED, check_survivors


class Survivor:
    """One rank of a layer, and what it has to get."""

    def __init__(self, rank: int, num_ranks: int, device: str) -> None:
        self.shape = MoEShape(
            num_ranks=num_ranks,
            num_experts=2 * num_ranks,
            num_topk=2,
            hidden=128,
            intermediate_hidden=128,
            num_max_tokens_per_rank=4,
        )
        self.rank = rank
        self.buffer = deep_moe.get_symm_buffer_for_mega_moe(
            dist.group.WORLD, **self.shape.buffer_arguments, device=device
        )
        self.layer = exact_layer(self.shape, seed=1)
        on_device = [
            tuple(tensor.to(self.buffer.device) for tensor in pair)
            for pair in self.layer.of_rank(rank, num_ranks)
        ]
        arch = self.buffer.target.name
        self.weights = deep_moe.transform_weights_for_mega_moe(*on_device, arch=arch)
        self.masked_ranks = torch.zeros(num_ranks, dtype=torch.int32, device=self.buffer.device)

    def call(self, seed: int, timeout_s: float = 600.0) -> torch.Tensor:
        tokens = exact_tokens(self.shape, 4, seed=seed + 100 * self.rank)
        buffer = self.buffer
        buffer.x.copy_(tokens.x)
        buffer.x_sf.copy_(tokens.x_sf)
        buffer.topk_idx.copy_(tokens.topk_idx)
        buffer.topk_weights.copy_(tokens.topk_weights)
        y = torch.full((4, self.shape.hidden), torch.nan, dtype=torch.bfloat16)
        y = y.to(buffer.device)
        options = {"masked_ranks": self.masked_ranks, "timeout_s": timeout_s}
        if buffer.is_emulated:
            options["num_sms"] = 2
        deep_moe.mega_moe(y, self.weights, buffer, **options)
        on_host = y.cpu()
        buffer.raise_if_failed()
        return on_host

    def check_call(self, seed: int) -> None:
        tokens = exact_tokens(self.shape, 4, seed=seed + 100 * self.rank)
        ids = tokens.topk_idx
        is_dead = self.masked_ranks.cpu()[ids.clamp(min=0) // self.shape.num_experts_per_rank] != 0
        tokens = replace(tokens, topk_idx=ids.where(~is_dead, -1))
        target = self.buffer.target.weights_of(self.shape.weights, self.shape.token_format)
        expected = reference_mega_moe(*self.layer.operands(tokens), numerics=target.numerics)
        assert torch.equal(self.call(seed), expected)


def live_through_it(rank: int, num_ranks: int, device: str, is_dead: Path) -> None:
    alive = dist.new_group([other for other in range(num_ranks) if other != KILLED])
    survivor = Survivor(rank, num_ranks, device)
    for seed in range(3):
        survivor.check_call(seed)
    if rank == KILLED:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        survivor.call(3)  # the others come later
        time.sleep(600)
    while not is_dead.exists():
        time.sleep(0.05)
    with pytest.raises(MegaMoETimeoutError, match=f"missing: rank {KILLED}\\)"):
        survivor.call(3, timeout_s=3.0)
    survivor.buffer.reset(alive)
    survivor.masked_ranks[KILLED] = 1
    for seed in range(3, 6):
        survivor.check_call(seed)


@pytest.mark.slow
def test_survivors_name_a_killed_rank_and_go_on(tmp_path: Path) -> None:
    check_survivors(live_through_it, 3, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank needs a GPU of its own")
def test_survivors_on_gpus(tmp_path: Path) -> None:
    check_survivors(live_through_it, torch.cuda.device_count(), "cuda", tmp_path)
