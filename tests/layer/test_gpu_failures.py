"""Ranks that come late or never, calls that run out of time with blocks in flight, and GPUs that do
other work: the right result or a clear error, never a hang, and a buffer that works after reset."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.fused import peers
from deep_moe.heuristics import MoEShape
from deep_moe.jit.status import StatusCode
from tests.layer import routing
from tests.layer.busy_gpu import SmHolder
from tests.layer.conftest import ALL, RunRanks
from tests.layer.rank_layer import RankLayer, make_buffer
from tests.layer.rank_pool import Place, Rank

NUM_TOKENS = 40

EMULATED = pytest.param(Place.CPU, 2, marks=pytest.mark.slow, id="emulated")
ALONE = pytest.param(Place.GPUS, 1, marks=pytest.mark.gpu, id="one_gpu")
TOGETHER = pytest.param(Place.GPUS, ALL, marks=pytest.mark.gpu, id="all_gpus")
SHARED = pytest.param(Place.SHARED_GPUS, 3, marks=pytest.mark.gpu, id="shared_gpus")


def on(*places: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("place", "num_ranks"), places)


def make_shape(num_ranks: int) -> MoEShape:
    return MoEShape(
        num_ranks=num_ranks,
        num_experts=3 * num_ranks,
        num_topk=2,
        hidden=256,
        intermediate_hidden=128,
        num_max_tokens_per_rank=NUM_TOKENS,
    )


class Scene:
    """An exact layer and one call of it, which has run once: compiled, loaded, right."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.layer = RankLayer(rank, make_shape(rank.num_ranks), exact=True)
        num_tokens = NUM_TOKENS if rank.is_gpu else 5
        self.tokens = routing.make_tokens(self.layer.shape, num_tokens, exact=True, seed=rank.idx)
        # What a wait may take where a peer fails. The emulator, whose ranks share the CPUs with
        # other tests, is never done in half a second.
        self.limit_s = 0.5 if rank.is_gpu else 3.0
        self.expect_right()

    def expect_right(self, **options: Any) -> None:
        comparison = self.layer.compare_call(self.tokens, **options)
        assert comparison.is_exact, comparison

    def call(self) -> None:
        self.layer.call(self.tokens, timeout_s=self.limit_s)

    def expect_timeout(self, call: Callable[[], None] | None = None) -> str:
        """The text of the error; every later call is refused."""
        with pytest.raises(MegaMoETimeoutError) as caught:
            (call or self.call)()
        with pytest.raises(MegaMoEError, match=r"reset\(\) on every rank"):
            self.layer.call(self.tokens)
        return str(caught.value)

    def expect_recovery(self) -> None:
        self.layer.buffer.reset()
        for _ in range(3):
            self.expect_right()
        self.rank.barrier()


def come_late(rank: Rank) -> str:
    scene = Scene(rank)
    rank.barrier()
    if rank.is_last:
        time.sleep(1)
    scene.expect_right(timeout_s=30.0)

    rank.barrier()
    if rank.is_last:
        time.sleep(2 * scene.limit_s)
    text = scene.expect_timeout()
    scene.expect_recovery()
    return text


@on(EMULATED, TOGETHER, SHARED)
def test_a_late_rank(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    """B5: in time for the limit it changes nothing. Else those who waited name it, and it names
    them, who have given up when it comes."""
    *early, late = run_ranks(place, num_ranks, come_late)
    for rank, text in enumerate(early):
        assert text.startswith(f"rank {rank}, "), text
        assert f"(missing: rank {len(early)})" in text, text
    assert late.startswith(f"rank {len(early)}, "), late
    assert "missing: rank" in late, late


def never_come(rank: Rank) -> str:
    scene = Scene(rank)
    text = ""
    rank.barrier()
    started = time.monotonic()
    if not rank.is_last:
        text = scene.expect_timeout()
        assert time.monotonic() - started < 20
    scene.expect_recovery()
    return text


@on(EMULATED, TOGETHER, SHARED)
def test_a_rank_that_never_comes(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    *texts, _ = run_ranks(place, num_ranks, never_come)
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}, "), text
        assert f"(missing: rank {len(texts)})" in text, text


def miss_a_replay(rank: Rank) -> str:
    scene = Scene(rank)
    layer = scene.layer
    y = layer.new_y(scene.tokens.num_tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        layer.launch(y, timeout_s=scene.limit_s)
    expected = layer.expected(scene.tokens)

    def replay() -> None:
        y.fill_(torch.nan)
        graph.replay()
        layer.finish()

    rank.barrier()
    text = "" if rank.is_last else scene.expect_timeout(replay)
    layer.buffer.reset()
    for _ in range(3):
        rank.barrier()
        replay()
        assert torch.equal(y, expected)
    rank.barrier()
    return text


@on(TOGETHER)
def test_a_rank_that_misses_a_replay(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    """The same graph works again after reset."""
    *texts, _ = run_ranks(place, num_ranks, miss_a_replay)
    for text in texts:
        assert f"(missing: rank {len(texts)})" in text, text


def block_the_pool(rank: Rank, layer: RankLayer) -> None:
    """Let rank 0 wait for tokens of one of its pool blocks that never arrive. Its warps are in the
    middle of their work then: other blocks are loaded, multiplied and stored, and only the limit of
    waiting, or the host, ends the call."""
    if rank.idx == 0:
        counts = layer.buffer.layout["l1_arrival_count"]
        words = layer.buffer.memory.tensor[counts.offset : counts.end].view(torch.int32)
        words[1] += 1 << 20
        rank.synchronize()
    rank.barrier()


def give_up_in_flight(rank: Rank) -> str:
    scene = Scene(rank)
    block_the_pool(rank, scene.layer)
    text = scene.expect_timeout()
    scene.expect_recovery()
    return text


@on(EMULATED, ALONE, TOGETHER, SHARED)
def test_running_out_of_time_with_blocks_in_flight(
    run_ranks: RunRanks, place: Place, num_ranks: int
) -> None:
    text, *others = run_ranks(place, num_ranks, give_up_in_flight)
    assert text.startswith("rank 0, "), text
    # Of the waits that the block holds up, the one for its tokens.
    assert "for tokens of a pool block, before Linear1 loads them:" in text, text
    for rank, other in enumerate(others, start=1):
        assert other.startswith(f"rank {rank}, "), other
        assert "(missing: rank 0)" in other, other


def stop_in_flight(rank: Rank) -> tuple[float, str]:
    """The host of every rank ends its kernel, which else would wait for minutes."""
    scene = Scene(rank)
    layer = scene.layer
    block_the_pool(rank, layer)
    y = layer.new_y(scene.tokens.num_tokens)
    started = time.monotonic()
    layer.launch(y, timeout_s=300.0)
    time.sleep(0.5)
    layer.buffer.memory.status.code = StatusCode.REFUSED_BY_PEER
    with pytest.raises(MegaMoEError) as caught:
        layer.finish()
    seconds = time.monotonic() - started
    scene.expect_recovery()
    return seconds, str(caught.value)


@on(ALONE, TOGETHER)
def test_the_host_ends_a_call_with_blocks_in_flight(
    run_ranks: RunRanks, place: Place, num_ranks: int
) -> None:
    for rank, (seconds, text) in enumerate(run_ranks(place, num_ranks, stop_in_flight)):
        assert seconds < 10
        assert text == f"rank {rank} stopped: another rank refused its call"


def work_beside_a_busy_stream(rank: Rank) -> tuple[float, float]:
    """Some SMs of rank 0 are held for longer than the kernel waits for its own CTAs. Returns how
    long this rank's call took, and the same with fewer CTAs than there are free SMs."""
    scene = Scene(rank)
    total = torch.cuda.get_device_properties(rank.device).multi_processor_count
    fewer = {"num_sms": total - 32}
    scene.expect_right(**fewer)
    holder = SmHolder(16) if rank.idx == 0 else None
    # A rank that waits for rank 0 must wait longer; alone there is nobody to wait for.
    timeout_s = 0.1 if rank.num_ranks == 1 else 10.0
    seconds = []
    for options in ({}, fewer):
        rank.barrier()
        if holder is not None:
            holder.hold(16, 1.0)
        rank.barrier()
        started = time.monotonic()
        # Nothing here may wait for the other stream, as a transfer from pageable memory may.
        y = scene.layer.new_y(scene.tokens.num_tokens)
        scene.layer.launch(y, timeout_s=timeout_s, **options)
        torch.cuda.current_stream().synchronize()
        seconds.append(time.monotonic() - started)
        scene.layer.finish()
        assert torch.equal(y, scene.layer.expected(scene.tokens))
    rank.barrier()
    return seconds[0], seconds[1]


@on(ALONE, TOGETHER)
def test_a_busy_side_stream(run_ranks: RunRanks, place: Place, num_ranks: int) -> None:
    """B4: CTAs that find no room wait before the kernel begins, not inside of it; and a call that
    leaves SMs to others need not wait for them."""
    for blocked_s, free_s in run_ranks(place, num_ranks, work_beside_a_busy_stream):
        assert blocked_s > 0.5
        assert free_s < 0.5


def make_buffers_of_unlinked_ranks(rank: Rank) -> str:
    """The last rank finds its GPU not to be linked to others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "link_of_gpus", lambda own, peer: not rank.is_last)
        with pytest.raises(ValueError, match="linked by NVLink") as caught:
            make_buffer(rank, make_shape(rank.num_ranks))
    Scene(rank).expect_recovery()
    return str(caught.value)


@on(TOGETHER)
def test_ranks_without_a_link_are_refused(
    run_ranks: RunRanks, place: Place, num_ranks: int
) -> None:
    """B6: on every rank, and the group works on."""
    texts = run_ranks(place, num_ranks, make_buffers_of_unlinked_ranks)
    for text in texts:
        assert f"the GPU of rank {len(texts) - 1} is not linked to that of rank 0" in text


def make_buffers_on_one_gpu(rank: Rank) -> str:
    """As ranks do that did not ask for a shared GPU."""
    torch.cuda.set_device(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
        with pytest.raises(ValueError, match="use the same GPU") as caught:
            make_buffer(
                dataclasses.replace(rank, device=torch.device("cuda", 0)),
                make_shape(rank.num_ranks),
            )
    torch.cuda.set_device(rank.device)
    return str(caught.value)


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_are_refused(run_ranks: RunRanks) -> None:
    """B6."""
    for text in run_ranks(Place.SHARED_GPUS, 2, make_buffers_on_one_gpu):
        assert "call torch.cuda.set_device" in text, text
