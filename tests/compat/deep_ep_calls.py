"""DeepEP's low-latency calls as its own test makes them: every kind, on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from deep_moe.compat.deep_ep import Buffer

HIDDEN, NUM_EXPERTS, NUM_TOPK, NUM_TOKENS = 512, 6, 3, 5
FORMATS = (  # use_fp8, round_scale, use_ue8m0
    (False, False, False),
    (True, False, False),
    (True, True, False),
    (True, True, True),
)
LOW_HALF = (1 << 32) - 1


def make(num_ranks: int = 1, group: Any = None, **changes: Any) -> Buffer:
    sizes = (NUM_TOKENS, HIDDEN, num_ranks, NUM_EXPERTS)
    num_bytes = Buffer.get_low_latency_rdma_size_hint(*sizes)
    arguments = {
        "num_rdma_bytes": num_bytes,
        "low_latency_mode": True,
        "num_qps_per_rank": NUM_EXPERTS // num_ranks,
        "device": "cpu",
    }
    return Buffer(group, **{**arguments, **changes})


def floats(recv_x: Any, local: int) -> torch.Tensor:
    """What an expert received."""
    if isinstance(recv_x, torch.Tensor):
        return recv_x[local].float()
    values, scales = recv_x[0][local], recv_x[1][local]
    if scales.dtype == torch.int32:
        assert scales.shape == (values.shape[0], HIDDEN // 512)
        shifts = torch.tensor([0, 8, 16, 24], device=scales.device)
        exponents = scales.unsqueeze(-1) >> shifts & 0xFF
        scales = 2.0 ** (exponents.flatten(-2) - 127)
    groups = values.float().unflatten(-1, (-1, 128))
    return (groups * scales.unsqueeze(-1)).flatten(-2)


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def check_every_kind_of_call(
    buffer: Buffer, rank: int, num_ranks: int, hooks: Any, device: torch.device | str = "cpu"
) -> None:
    """Tokens tell their rank and index, so that who receives one knows whose it is."""
    group = buffer.group
    num_local = NUM_EXPERTS // num_ranks
    generator = torch.Generator().manual_seed(rank)
    tagged = torch.full((NUM_TOKENS, HIDDEN), 2.0**rank).bfloat16()
    tagged[:, -128:] = torch.arange(NUM_TOKENS).bfloat16().view(-1, 1)
    normal = 0.1 * torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    topk_idx = scores.topk(NUM_TOPK, dim=-1).indices
    topk_idx[0, 1] = topk_idx[3, 2] = -1
    topk_weights = torch.rand(NUM_TOKENS, NUM_TOPK, generator=generator)
    tagged, normal, topk_idx, topk_weights = (
        tensor.to(device) for tensor in (tagged, normal, topk_idx, topk_weights)
    )
    all_topk_idx = [torch.empty_like(topk_idx) for _ in range(num_ranks)]
    if group is None:
        all_topk_idx = [topk_idx]
    else:
        dist.all_gather(all_topk_idx, topk_idx, group=group)
    num_calls = 0
    for x in (tagged, normal):
        for use_fp8, round_scale, use_ue8m0 in FORMATS:
            for has_hook in hooks:
                num_calls += 1
                totals = torch.zeros(num_local, dtype=torch.int, device=device)
                for _ in range(num_calls % 2 + 1):  # some dispatches have no combine
                    totals.zero_()
                    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
                        x,
                        topk_idx,
                        NUM_TOKENS,
                        NUM_EXPERTS,
                        use_fp8=use_fp8,
                        round_scale=round_scale,
                        use_ue8m0=use_ue8m0,
                        cumulative_local_expert_recv_stats=totals,
                        async_finish=not has_hook,
                        return_recv_hook=has_hook,
                    )
                    event.current_stream_wait() if hook is None else hook()
                size = (num_local, num_ranks * NUM_TOKENS, HIDDEN)
                rows = torch.zeros(size, dtype=torch.bfloat16, device=device)
                assert torch.equal(totals, recv_count)
                for local in range(num_local):
                    expert, count = rank * num_local + local, int(recv_count[local])
                    src_info, ranges = handle[0][local], handle[1][local]
                    assert count == int((ranges & LOW_HALF).sum())
                    assert count == sum(int((ids == expert).sum()) for ids in all_topk_idx)
                    received = floats(recv_x, local)[:count]
                    rows[local, :count] = received.bfloat16()
                    if x is normal:
                        continue
                    for source in range(num_ranks):
                        begin, num = int(ranges[source] >> 32), int(ranges[source] & LOW_HALF)
                        assert num == int((all_topk_idx[source] == expert).sum())
                        own = received[begin : begin + num]
                        tokens = src_info[begin : begin + num].view(-1, 1).float()
                        rounding = 1e-6 if use_fp8 and not round_scale else 0.0
                        for part, tag in ((own[:, :-128], 2.0**source), (own[:, -128:], tokens)):
                            assert torch.all((part - tag).abs() <= rounding * part.abs())
                used = topk_weights.masked_fill(topk_idx == -1, 0)
                expected = x * used.sum(dim=1).view(-1, 1)
                for zero_copy in (False, True):
                    if zero_copy:
                        buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
                    out = torch.empty_like(x)
                    combined, event, hook = buffer.low_latency_combine(
                        rows,
                        topk_idx,
                        topk_weights,
                        handle,
                        async_finish=not has_hook,
                        zero_copy=zero_copy,
                        return_recv_hook=has_hook,
                        out=out,
                    )
                    event.current_stream_wait() if hook is None else hook()
                    assert combined is out
                    assert distance(expected, combined) < (7e-4 if use_fp8 else 1e-5)
