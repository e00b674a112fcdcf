"""The layer of experts of liger-cute-kernels, for training.py and training_ranks.py: one kernel for
each pass, over ranks that share an NVLink domain, also over one. Needs `pip install
liger-cute-kernels[cu12]`, whose libraries were made with CUDA 12.

Its backward pass takes what its forward pass left in symmetric memory, of which it has as much as
`configured` says: one forward pass may wait for its backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ENVIRONMENT = {  # of NVSHMEM: ranks of one host, no network card, no multicast
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Calls:
    """The library's three calls. gate, up: [experts of the rank, intermediate, hidden]; down:
    [experts of the rank, hidden, intermediate]; team: the ranks, in the library's terms."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    pop: Callable[[int], None]
    team: int


@contextmanager
def runtime(device: torch.device) -> Iterator[None]:
    """The library's: once in a process, and not beside another user of NVSHMEM. A process without
    ranks becomes the only one of its group."""
    from liger_cute_kernels import nvshmem

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(device)
    is_alone = not dist.is_initialized()
    if is_alone:
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT
        )
    try:
        yield
        torch.cuda.synchronize(device)
        nvshmem.finalize()
    finally:
        if is_alone:
            dist.destroy_process_group()


@contextmanager
def configured(
    device: torch.device, *, num_tokens: int, hidden: int, num_experts: int, num_topk: int
) -> Iterator[Calls]:
    """The calls for a layer's sizes, within `runtime`. num_experts: of all ranks. Every rank calls
    it."""
    from liger_cute_kernels import MoEConfig, configure, nvshmem, tvm_ffi

    configure(
        device=device,
        moe=MoEConfig(
            max_tokens=num_tokens,
            hidden_size=hidden,
            num_experts=num_experts,
            top_k=num_topk,
            num_hosts=1,
            gpus_per_host=dist.get_world_size(),
        ),
    )
    team = nvshmem.resolve_team(dist.group.WORLD)
    yield Calls(tvm_ffi.moe_fused_fwd_bf16, tvm_ffi.moe_fused_bwd_bf16, tvm_ffi.moe_pop_fwd, team)
    torch.cuda.synchronize(device)
    nvshmem.pool_clear_all()


class LigerLayer:
    """layer(x, topk_idx, topk_weights, gate, up, down): int32 topk_idx and BF16 topk_weights, and
    weights as `Calls` has them. num_experts: of all ranks."""

    def __init__(self, calls: Calls, num_experts: int) -> None:
        self.calls, self.num_experts = calls, num_experts

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Layer.apply(self, *tensors)
        return out


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: LigerLayer, x: torch.Tensor, *tensors: torch.Tensor) -> Any:
        topk_idx, *_ = tensors
        calls = layer.calls
        sizes = (layer.num_experts, topk_idx.shape[1], calls.team)
        out, x_sorted, y, offsets, slots, tile_experts, tile_m = calls.forward(x, *tensors, *sizes)
        ctx.layer, ctx.sizes = layer, sizes
        # Three of these lie on the host and say where symmetric memory is.
        ctx.kept = (y, x_sorted, slots, tile_experts, offsets)
        ctx.tile_m = tile_m
        ctx.save_for_backward(*tensors)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        calls: Calls = ctx.layer.calls
        d_x, d_gate, d_up, d_down, d_topk_weights = calls.backward(
            d_out.contiguous(), *ctx.kept, *ctx.saved_tensors, *ctx.sizes, ctx.tile_m
        )
        calls.pop(calls.team)
        return None, d_x, None, d_topk_weights, d_gate, d_up, d_down
