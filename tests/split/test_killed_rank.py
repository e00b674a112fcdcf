"""A process that is killed in the middle of a call: the others name it, and go on without it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_moe.errors import MegaMoETimeoutError
from deep_moe.split.handle import Dispatched
from deep_moe.split.low_latency import LowLatencyAllToAll
from deep_moe.split.throughput import AllToAll, Received
from tests.everyday import parametrize

from .reference import Inputs, bits, check_dispatched, expected_out, random_inputs
from .throughput_reference import check_received, expected_sums, without_masked
from .throughput_reference import random_inputs as random_many

KILLED = 1


class Survivor:
    """One rank of a layer, and what it has to get."""

    def __init__(self, layer: LowLatencyAllToAll) -> None:
        self.layer = layer
        self.rank, self.device = layer.rank, layer.device

    def inputs(self, seed: int) -> Inputs:
        return random_inputs(self.layer.shape, [4] * self.layer.shape.num_ranks, seed)

    def send(self, inputs: Inputs) -> Dispatched:
        x, ids = inputs.xs[self.rank], inputs.topk_idxs[self.rank]
        return self.layer.dispatch(x.to(self.device), ids.to(self.device), receive=False)

    def receive(self, result: Dispatched, inputs: Inputs, masked: list[int]) -> None:
        self.layer.receive(result.handle)
        on_host = [None if t is None else t.cpu() for t in result[:5]]
        self.layer.check()
        given = Dispatched(*on_host, result.handle)
        shape = self.layer.shape
        check_dispatched(shape, given, self.rank, inputs.xs, inputs.topk_idxs, masked)

    def combine(self, result: Dispatched, inputs: Inputs) -> torch.Tensor:
        parts = (inputs.ys, inputs.topk_idxs, inputs.topk_weights)
        y, ids, weights = (of_ranks[self.rank].to(self.device) for of_ranks in parts)
        out = self.layer.combine(y, ids, weights, result.handle).cpu()
        self.layer.check()
        return out

    def check_call(self, seed: int, masked: list[int]) -> None:
        inputs = self.inputs(seed)
        result = self.send(inputs)
        self.receive(result, inputs, masked)
        out = self.combine(result, inputs)
        weights = inputs.topk_weights[self.rank]
        shape, ids = self.layer.shape, inputs.topk_idxs
        expected = expected_out(shape, self.rank, ids, weights, inputs.ys, masked)
        assert torch.equal(bits(out), bits(expected))


def wait_and_be_killed(survivor: Survivor, result: Dispatched) -> None:
    """While it waits for the others' tokens, which come later."""
    if survivor.device.type == "cuda":
        torch.cuda.synchronize()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    survivor.layer.receive(result.handle)
    time.sleep(600)


def live_through_it(rank: int, num_ranks: int, device: str, is_dead: Path) -> None:
    alive = dist.new_group([other for other in range(num_ranks) if other != KILLED])
    layer = LowLatencyAllToAll(
        dist.group.WORLD, 4, 128, 2 * num_ranks, 2, num_sms=2, timeout_s=3.0, device=device
    )
    survivor = Survivor(layer)
    for seed in range(2):
        survivor.check_call(seed, [])
    inputs = survivor.inputs(2)
    if rank == KILLED:
        wait_and_be_killed(survivor, survivor.send(inputs))
    while not is_dead.exists():
        time.sleep(0.05)
    result = survivor.send(inputs)
    survivor.receive(result, inputs, [])  # its tokens have come
    with pytest.raises(MegaMoETimeoutError, match=f"missing: rank {KILLED}"):
        survivor.combine(result, inputs)
    layer.reset(alive)
    layer.mask_ranks([KILLED])
    for seed in range(3):
        survivor.check_call(seed, [KILLED])


class ManyTokens:
    """One rank of a layer for many tokens, and what it has to get."""

    def __init__(self, layer: AllToAll) -> None:
        self.layer = layer
        num_ranks = layer.shape.num_ranks
        self.masked_ranks = torch.zeros(num_ranks, dtype=torch.int32, device=layer.device)

    def check_call(self, seed: int, masked: list[int]) -> None:
        layer, rank, device = self.layer, self.layer.rank, self.layer.device
        inputs = random_many(layer.shape, [4] * layer.shape.num_ranks, seed)
        x, ids, y = (
            of_ranks[rank].to(device) for of_ranks in (inputs.xs, inputs.topk_idxs, inputs.ys)
        )
        received, handle = layer.dispatch(x, ids, masked_ranks=self.masked_ranks)
        on_host = Received._make(None if t is None else t.cpu() for t in received)
        layer.check()
        used = without_masked(layer.shape, inputs.topk_idxs, masked)
        check_received(layer.shape, on_host, rank, used, inputs.xs)
        out = layer.combine(y, handle, masked_ranks=self.masked_ranks).cpu()
        layer.check()
        assert torch.equal(bits(out), bits(expected_sums(layer.shape, rank, used, inputs.ys)))


def live_with_many_tokens(rank: int, num_ranks: int, device: str, is_dead: Path) -> None:
    """The dead rank's tokens may have come, or some of them."""
    alive = dist.new_group([other for other in range(num_ranks) if other != KILLED])
    layer = AllToAll(
        *(dist.group.WORLD, 4, 128, 2 * num_ranks, 2, 16 * num_ranks),
        expert_alignment=4,
        num_sms=2,
        timeout_s=3.0,
        device=device,
    )
    survivor = ManyTokens(layer)
    for seed in range(2):
        survivor.check_call(seed, [])
    if rank == KILLED:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        survivor.check_call(2, [])  # the others come later
        time.sleep(600)
    while not is_dead.exists():
        time.sleep(0.05)
    with pytest.raises(MegaMoETimeoutError, match=rf"missing: rank {KILLED}\)"):
        survivor.check_call(2, [])
    layer.reset(alive)
    survivor.masked_ranks[KILLED] = 1
    for seed in range(2, 5):
        survivor.check_call(seed, [KILLED])


# What a rank does: its number, that of all, the device, and a file that is there when the one to be
# killed is dead. A kernel of a process outlives the signal by seconds, until the driver has it off
# the GPU, and would finish its call with ranks that came too early.
Life = Callable[[int, int, str, Path], None]


def be_a_rank(
    life: Life, rank: int, num_ranks: int, device: str, folder: Path, answers: Any
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{folder / 'store'}"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_ranks)
    try:
        life(rank, num_ranks, device, folder / "is_dead")
        answers.put((rank, ""))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    os._exit(0)  # the group would wait for the dead


def check_survivors(life: Life, num_ranks: int, device: str, folder: Path) -> None:
    # CUDA cannot be used in a forked process once its parent has used it.
    context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    answers = context.Queue()
    processes = [
        context.Process(target=be_a_rank, args=(life, rank, num_ranks, device, folder, answers))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        processes[KILLED].join(timeout=200)  # returns when all that was its is closed
        (folder / "is_dead").touch()
        given = [answers.get(timeout=300) for _ in range(num_ranks - 1)]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    assert sorted(given) == [(rank, "") for rank in range(num_ranks) if rank != KILLED]
    assert processes[KILLED].exitcode == -signal.SIGKILL


LIVES = [live_through_it, live_with_many_tokens]


@parametrize("life", LIVES, everyday=[live_through_it])
def test_survivors_name_a_killed_rank_and_go_on(life: Life, tmp_path: Path) -> None:
    check_survivors(life, 3, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a rank needs a GPU of its own")
@pytest.mark.parametrize("life", LIVES)
def test_survivors_on_gpus(life: Life, tmp_path: Path) -> None:
    check_survivors(life, torch.cuda.device_count(), "cuda", tmp_path)
