"""DeepEP's low-latency calls: what its own test asks of them, and how vLLM and SGLang use them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_moe.compat.deep_ep
from deep_moe.compat.deep_ep import Buffer, EventOverlap
from deep_moe.fused.rank_buffer import ClosedBufferError

from ..fused.conftest import run_ranks  # noqa: F401 (a fixture)
from .deep_ep_calls import (
    FORMATS,
    HIDDEN,
    NUM_EXPERTS,
    NUM_TOKENS,
    check_every_kind_of_call,
    distance,
    floats,
    make,
)


@pytest.fixture
def buffer() -> Buffer:
    return make()


def test_every_kind_of_call_on_one_rank(buffer: Buffer) -> None:
    check_every_kind_of_call(buffer, 0, 1, (False, True))
    buffer.destroy()


@pytest.mark.slow
def test_every_kind_of_call_on_two_ranks(run_ranks) -> None:  # noqa: F811
    def work(rank: int) -> None:
        buffer = make(2, dist.group.WORLD)
        assert (buffer.rank, buffer.group_size) == (rank, 2)
        check_every_kind_of_call(buffer, rank, 2, (False, True))
        buffer.destroy()

    run_ranks(2, work)


@pytest.mark.parametrize(("use_fp8", "round_scale", "use_ue8m0"), FORMATS)
def test_shapes_and_strides(
    buffer: Buffer, use_fp8: bool, round_scale: bool, use_ue8m0: bool
) -> None:
    x, ids = torch.randn(2, HIDDEN).bfloat16(), torch.tensor([[0, 1, -1], [5, 0, 2]])
    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, NUM_TOKENS, NUM_EXPERTS, None, None, use_fp8, round_scale, use_ue8m0
    )
    values = recv_x[0] if use_fp8 else recv_x
    assert values.shape == (NUM_EXPERTS, NUM_TOKENS, HIDDEN)
    assert values.dtype == (torch.float8_e4m3fn if use_fp8 else torch.bfloat16)
    if use_fp8:
        num_words = HIDDEN // (512 if use_ue8m0 else 128)
        assert recv_x[1].shape == (NUM_EXPERTS, NUM_TOKENS, num_words)
        assert recv_x[1].stride() == (num_words * NUM_TOKENS, 1, NUM_TOKENS)
        assert recv_x[1].dtype == (torch.int if use_ue8m0 else torch.float)
    assert (recv_count.dtype, recv_count.tolist()) == (torch.int, [2, 1, 1, 0, 0, 1])
    src_info, layout_range, *sizes = handle
    assert (src_info.dtype, src_info.shape) == (torch.int, (NUM_EXPERTS, NUM_TOKENS))
    assert (layout_range.dtype, layout_range.shape) == (torch.int64, (NUM_EXPERTS, 1))
    assert sizes == [NUM_TOKENS, HIDDEN, NUM_EXPERTS]
    assert src_info[0, :2].tolist() == [0, 1]
    assert hook is None
    with pytest.raises(ValueError, match="event must be that of a call with async_finish=True"):
        event.current_stream_wait()


def test_combine_finds_rows_by_their_expert(buffer: Buffer) -> None:
    """In whatever slot it names them, as DeepEP's does."""
    ids = torch.tensor([[0, 3, 5], [4, -1, 2], [1, 2, 3], [-1, -1, -1]])
    weights = torch.tensor([[1.0, 10, 100], [2, 20, 200], [3, 30, 300], [4, 40, 400]])
    x = torch.ones(4, HIDDEN).bfloat16()
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
        x, ids, NUM_TOKENS, NUM_EXPERTS, use_fp8=False
    )
    assert isinstance(recv_x, torch.Tensor)
    recv_x *= torch.arange(1, NUM_EXPERTS + 1)[:, None, None]  # by expert
    wanted = (weights * torch.where(ids < 0, 0, ids + 1)).sum(1)
    for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2]):
        y, _, _ = buffer.low_latency_combine(recv_x, ids[:, order], weights[:, order], handle)
        assert torch.equal(y, wanted.bfloat16()[:, None].expand_as(y))
    fewer = torch.where(ids == 3, -1, ids)[:, [2, 1, 0]]
    y, _, _ = buffer.low_latency_combine(recv_x, fewer, weights[:, [2, 1, 0]], handle)
    wanted -= (weights * (ids == 3)).sum(1) * 4
    assert torch.equal(y, wanted.bfloat16()[:, None].expand_as(y))
    with pytest.raises(TypeError, match="topk_idx must be"):
        buffer.low_latency_combine(recv_x, ids.float(), weights, handle)
    with pytest.raises(ValueError, match="topk_weights must"):
        buffer.low_latency_combine(recv_x, ids.clone(), weights[:, :2], handle)
    buffer.destroy()


def test_waiting_is_counted(buffer: Buffer) -> None:
    x, ids = torch.randn(2, HIDDEN).bfloat16(), torch.tensor([[0, 1, -1], [5, 0, 2]])
    dispatch_cost, combine_cost = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
        x,
        ids,
        NUM_TOKENS,
        NUM_EXPERTS,
        dispatch_wait_recv_cost_stats=dispatch_cost,
        use_fp8=False,
    )
    buffer.low_latency_combine(
        recv_x, ids, torch.ones(2, 3), handle, combine_wait_recv_cost_stats=combine_cost
    )
    assert int(dispatch_cost) > 0
    assert int(combine_cost) > 0


def test_calls_of_other_sizes_lay_the_buffer_out_anew(buffer: Buffer) -> None:
    weights = torch.ones(2, 1)
    old = None
    for hidden, topk, most in ((128, 1, 3), (512, 3, 5), (512, 2, 5), (128, 1, 3)):
        x = torch.randn(2, hidden).bfloat16()
        ids = torch.tensor([[3, 1, 0], [2, 5, 4]])[:, :topk].contiguous()
        weights = torch.full((2, topk), 1 / topk)
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            x, ids, most, NUM_EXPERTS, use_fp8=False
        )
        if old is not None:
            with pytest.raises(ValueError, match="handle must be of a dispatch since the memory"):
                buffer.low_latency_combine(*old)
        y, _, _ = buffer.low_latency_combine(recv_x, ids, weights, handle)
        assert distance(y, x) < 1e-5
        old = (recv_x, ids, weights, handle)
    buffer.clean_low_latency_buffer(3, 128, NUM_EXPERTS)
    with pytest.raises(ValueError, match=r"since the last reset\(\)"):
        buffer.low_latency_combine(*old)
    buffer.clean_low_latency_buffer(5, 512, NUM_EXPERTS)
    buffer.low_latency_dispatch(torch.zeros(1, 512).bfloat16(), ids[:1], 5, NUM_EXPERTS)


def test_what_the_size_hint_says_is_enough() -> None:
    num_bytes = Buffer.get_low_latency_rdma_size_hint(4, 256, 1, 8)
    x = torch.randn(4, 256).bfloat16()
    ids = torch.arange(8).expand(4, 8).contiguous()
    large, small = make(num_rdma_bytes=num_bytes), make(num_rdma_bytes=num_bytes - 1)
    large.low_latency_dispatch(x, ids, 4, 8)
    with pytest.raises(ValueError, match=f"num_rdma_bytes must be at least {num_bytes}"):
        small.low_latency_dispatch(x, ids, 4, 8)


def test_masked_ranks(run_ranks) -> None:  # noqa: F811
    """A rank that is left out, and comes back."""

    def work(rank: int) -> None:
        buffer = make(2, dist.group.WORLD, enable_shrink=True, explicitly_destroy=True)
        x = torch.full((2, HIDDEN), rank + 1.0).bfloat16()
        ids = torch.tensor([[0, 3, -1], [5, 2, 1]])
        weights = torch.ones(2, 3)
        status = torch.full((2,), 7, dtype=torch.int)

        def sums() -> list[float]:
            recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
                x, ids, NUM_TOKENS, NUM_EXPERTS, use_fp8=False
            )
            y, _, _ = buffer.low_latency_combine(recv_x, ids, weights, handle)
            return y[:, 0].tolist()

        assert sums() == [2.0 * (rank + 1), 3.0 * (rank + 1)]
        dist.barrier()
        if rank == 0:
            buffer.low_latency_update_mask_buffer(1, True)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 1]
            assert sums() == [1.0, 2.0]
            buffer.low_latency_update_mask_buffer(1, False)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0]
            with pytest.raises(ValueError, match="rank_to_mask must be another rank, 0 to 1"):
                buffer.low_latency_update_mask_buffer(0, True)
            buffer.low_latency_update_mask_buffer(1, True)
            buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(NUM_TOKENS, HIDDEN, NUM_EXPERTS)
        assert sums() == [2.0 * (rank + 1), 3.0 * (rank + 1)]
        buffer.destroy()

    run_ranks(2, work)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"low_latency_mode": False}, "low_latency_mode must be True"),
        ({"allow_nvlink_for_low_latency_mode": False}, "allow_nvlink_for_low_latency_mode must"),
        ({"num_rdma_bytes": 0}, "num_rdma_bytes must be what get_low_latency_rdma_size_hint"),
        ({"comm": object()}, "comm must be None"),
    ],
)
def test_what_a_buffer_is_made_with(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**changes)


def test_more_than_one_node_is_refused(run_ranks, monkeypatch) -> None:  # noqa: F811
    def work(rank: int) -> None:
        monkeypatch.setattr("deep_moe.fused.symm_memory.machine_id", lambda: f"node {rank}")
        with pytest.raises(ValueError, match="it runs on another machine"):
            make(2, dist.group.WORLD)

    run_ranks(2, work)


def test_what_is_refused_in_a_call(buffer: Buffer) -> None:
    x, ids = torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, 1, dtype=torch.int64)

    def dispatch(**options: Any) -> Any:
        return buffer.low_latency_dispatch(x, ids, NUM_TOKENS, NUM_EXPERTS, **options)

    with pytest.raises(ValueError, match="use_ue8m0 must come with round_scale"):
        dispatch(use_ue8m0=True)
    with pytest.raises(ValueError, match="use_ue8m0 must come with round_scale"):
        dispatch(round_scale=True, use_fp8=False)
    with pytest.raises(ValueError, match="async_finish and return_recv_hook must not both"):
        dispatch(async_finish=True, return_recv_hook=True)
    with pytest.raises(ValueError, match=r"x must be \[tokens, hidden\] and topk_idx"):
        buffer.low_latency_dispatch(x[0], ids, NUM_TOKENS, NUM_EXPERTS)
    with pytest.raises(ValueError, match="num_max_dispatch_tokens_per_rank must be 1 to 1024; got"):
        buffer.low_latency_dispatch(x, ids, 1025, NUM_EXPERTS)
    recv_x, _, handle, _, _ = dispatch(use_fp8=False)
    weights = torch.ones(2, 1)
    with pytest.raises(ValueError, match="use_logfmt must be False"):
        buffer.low_latency_combine(recv_x, ids, weights, handle, use_logfmt=True)
    with pytest.raises(TypeError, match="handle must be what low_latency_dispatch returned"):
        buffer.low_latency_combine(recv_x, ids, weights, tuple(handle))
    with pytest.raises(ValueError, match=r"mask_status must be int32 \[1\]; got"):
        buffer.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AttributeError, match=r"no attribute 'internode_dispatch'.*without the"):
        buffer.internode_dispatch(x)
    with pytest.raises(ValueError, match="Config is of the throughput kernels"):
        deep_moe.compat.deep_ep.Config(20, 24, 256)
    with pytest.raises(AttributeError, match="'init_jit': it is DeepEP's all-to-alls, Buffer, "):
        _ = deep_moe.compat.deep_ep.init_jit
    buffer.destroy()
    with pytest.raises(ClosedBufferError, match="Buffer must be open; this one was destroyed"):
        dispatch()


@pytest.fixture
def as_deep_ep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", deep_moe.compat.deep_ep)


@pytest.mark.usefixtures("as_deep_ep")
@pytest.mark.parametrize("use_hook", [False, True])
def test_as_vllm_uses_it(use_hook: bool) -> None:
    """The buffer by keywords; a hook, or none; sums into a tensor that the caller has."""
    import deep_ep

    assert "num_sms" in vars(deep_ep.Buffer)
    buffer = deep_ep.Buffer(
        group=None,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=4, hidden=256, num_ranks=1, num_experts=4
        ),
        low_latency_mode=True,
        num_qps_per_rank=4,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        device="cpu",
    )
    a1, ids = torch.randn(3, 256).bfloat16(), torch.tensor([[0, 3], [2, -1], [1, 2]])
    expert_x, expert_num_tokens, handle, _, hook = buffer.low_latency_dispatch(
        a1,
        ids,
        4,
        4,
        use_fp8=True,
        round_scale=True,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=use_hook,
    )
    if use_hook:
        hook()
    values, scales = expert_x
    assert values.is_contiguous()
    y = (values.float().view(4, -1, 128) * scales.contiguous().view(4, -1, 1)).view(4, 4, 256)
    assert expert_num_tokens.tolist() == [1, 1, 2, 1]
    output = torch.empty_like(a1)
    _, _, hook = buffer.low_latency_combine(
        y.nan_to_num().bfloat16(),
        ids,
        torch.full((3, 2), 0.5),
        handle,
        async_finish=False,
        zero_copy=False,
        return_recv_hook=use_hook,
        out=output,
    )
    if use_hook:
        hook()
    used = (ids != -1).sum(dim=1).view(-1, 1)
    assert distance(output, a1 * used / 2) < 7e-4


@pytest.mark.usefixtures("as_deep_ep")
def test_as_sglang_uses_it() -> None:
    """The buffer by position; cleaned before low-latency calls; hooks on the current stream."""
    from deep_ep import Buffer as Given
    from deep_ep import Config

    assert issubclass(Config, object)
    assert Given.num_sms % 2 == 0
    size = Given.get_low_latency_rdma_size_hint(4, 512, 1, 4)
    buffer = Given(None, 0, size, low_latency_mode=True, num_qps_per_rank=4, allow_mnnvl=True,
                   device="cpu")  # fmt: skip
    buffer.clean_low_latency_buffer(4, 512, 4)
    x, ids = torch.randn(4, 512).bfloat16(), torch.tensor([[0], [1], [2], [3]])
    for use_hook in (True, False):
        hidden_states, masked_m, handle, event, hook = buffer.low_latency_dispatch(
            x,
            ids,
            4,
            4,
            use_fp8=True,
            async_finish=not use_hook,
            return_recv_hook=use_hook,
            round_scale=True,
            use_ue8m0=True,
        )
        hook() if use_hook else event.current_stream_wait()
        assert masked_m.tolist() == [1, 1, 1, 1]
        y = torch.stack([floats(hidden_states, local) for local in range(4)])
        combined, event, hook = buffer.low_latency_combine(
            x=y.nan_to_num().bfloat16(),
            topk_idx=ids,
            topk_weights=torch.ones(4, 1),
            handle=handle,
            async_finish=not use_hook,
            return_recv_hook=use_hook,
        )
        hook() if use_hook else event.current_stream_wait()
        assert distance(combined, x) < 7e-4


def test_events() -> None:
    event = Buffer.capture()
    event.current_stream_wait()
    with event as entered:
        assert entered is event
    with EventOverlap():
        pass
