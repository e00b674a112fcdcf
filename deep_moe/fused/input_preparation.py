"""A call's inputs from what a model has: one kernel quantizes the tokens and converts the router's
output, straight into the symmetric buffer.

For PyTorch it is one operator, `deep_moe::prepare_inputs`, which writes the four views that
`deep_moe::mega_moe` reads; so a compiler keeps the two in order.

As in call_plan.py, what follows from the tensors' forms is worked out once and found again by them;
their addresses are looked at in every call.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from deep_moe import jit
from deep_moe.heuristics.prepare_inputs import PrepareInputsConfig
from deep_moe.jit.cache import CompiledKernel
from deep_moe.jit.kernel_args import PrepareInputsArgs
from deep_moe.jit.launch import CudaLauncher, MemoryRegion, RankLaunch, run_emulated
from deep_moe.targets import EMULATED

from .bounded_cache import BoundedCache
from .buffer import SymmBuffer
from .checks import (
    check_contiguous,
    check_start,
    check_tensor,
    form,
    refuse_gradients,
    require_type,
)
from .eager import is_seen_by_nobody
from .gpu import Gpu, gpu_of
from .rank_buffer import used

_TOPK_IDX_DTYPES = (torch.int64, torch.int32)
_TOPK_WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
_NOTHING = nullcontext()
_X_ALIGNMENT = 16  # bytes that a lane loads at once


@dataclass(frozen=True)
class PreparationPlan:
    """What launches for tensors of the same form share. gpu, launcher: None in the emulator."""

    config: PrepareInputsConfig
    num_chunks: int
    num_slots: int
    num_ctas: int
    gpu: Gpu | None
    launcher: CudaLauncher | None


_plans: BoundedCache[tuple[Any, ...], PreparationPlan] = BoundedCache(8192)


def prepare_inputs(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    sym_buffer: SymmBuffer,
    *,
    arch: str | None = None,
) -> None:
    """Fill the first rows of `sym_buffer`'s four views, in one launch on the current stream.

    x: bfloat16 [tokens, hidden]; quantized as `deep_moe.formats.quantize_e4m3_ue8m0` does.
    topk_idx: int64 or int32 [tokens, topk], global expert ids, -1 for an unused slot.
    topk_weights: float32 or bfloat16 [tokens, topk].
    arch: a target's name; by default that of the buffer's GPU, sm_100a on a CPU, where the
        kernel runs in the emulator.

    Tokens may be 0. Later rows keep what they hold. Nothing waits for the GPU, and the launch can
    be captured in a CUDA graph. Expert ids are looked at by `fp8_fp4_mega_moe`, not here. There is
    no backward pass: x and topk_weights that require a gradient are refused where gradients are
    enabled.
    """
    is_direct = is_seen_by_nobody((x, topk_idx, topk_weights))
    if not is_direct:  # otherwise they are tensors
        require_type("x", x, torch.Tensor, "a tensor")
        require_type("topk_idx", topk_idx, torch.Tensor, "a tensor")
        require_type("topk_weights", topk_weights, torch.Tensor, "a tensor")
    require_type("sym_buffer", sym_buffer, SymmBuffer, "a SymmBuffer")
    if arch is not None:
        require_type("arch", arch, str, "a str or None")
    if torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad):
        refuse_gradients(x=x, topk_weights=topk_weights)
    sym_buffer.raise_if_closed()
    # A GPU's launches are in order; the emulator runs here and now, beside another thread's call.
    in_emulator = is_direct and sym_buffer.gpu is None
    with used([sym_buffer]) if in_emulator else _NOTHING:
        (_prepare_inputs if is_direct else _prepare_inputs_op)(
            x,
            topk_idx,
            topk_weights,
            sym_buffer.x,
            sym_buffer.x_sf,
            sym_buffer.topk_idx,
            sym_buffer.topk_weights,
            arch,
        )


torch.library.define(
    "deep_moe::prepare_inputs",
    "(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor(a!) input_x, Tensor(b!) input_x_sf, "
    "Tensor(c!) input_topk_idx, Tensor(d!) input_topk_weights, str? arch=None) -> ()",
)
_prepare_inputs_op = torch.ops.deep_moe.prepare_inputs.default


def _prepare_inputs(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    input_x: torch.Tensor,
    input_x_sf: torch.Tensor,
    input_topk_idx: torch.Tensor,
    input_topk_weights: torch.Tensor,
    arch: str | None = None,
) -> None:
    x_address = x.data_ptr()
    key = (
        x_address % _X_ALIGNMENT,
        form(x),
        form(topk_idx),
        form(topk_weights),
        input_x.shape,
        input_x.device,
        input_topk_idx.shape,
        arch,
    )
    plan = _plans.get(key)
    if plan is None:
        check_inputs(x, topk_idx, topk_weights, input_x, input_topk_idx)
        plan = _plans.put(key, _make_plan(x, topk_idx, topk_weights, input_x.device, arch))
    # The kernel reads and writes in no particular order.
    buffer_address = input_x.untyped_storage().data_ptr()
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if tensor.untyped_storage().data_ptr() == buffer_address:
            raise ValueError(f"{name} must not lie in the buffer that is written; got a view of it")
    if plan.num_chunks == 0:
        return
    args = PrepareInputsArgs(
        x_address,
        topk_idx.data_ptr(),
        topk_weights.data_ptr(),
        input_x.data_ptr(),
        input_x_sf.data_ptr(),
        input_topk_idx.data_ptr(),
        input_topk_weights.data_ptr(),
        plan.num_chunks,
        plan.num_slots,
    )
    if plan.gpu is not None:
        assert plan.launcher is not None
        plan.launcher.launch(args, plan.num_ctas, plan.gpu.current_stream())
        return
    read = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
    # Only these rows: the emulator refuses to write to any other.
    written = {
        "sym_buffer.x": input_x,
        "sym_buffer.x_sf": input_x_sf,
        "sym_buffer.topk_idx": input_topk_idx,
        "sym_buffer.topk_weights": input_topk_weights,
    }
    memory = [MemoryRegion.of_tensor(name, read[name], is_writable=False) for name in read]
    memory += [
        MemoryRegion.of_tensor(name, written[name][: x.shape[0]], is_writable=True)
        for name in written
    ]
    config = plan.config
    launch = RankLaunch(
        0, _kernel(config), plan.num_ctas, config.num_threads, 0, args, tuple(memory)
    )
    run_emulated([launch], seed=0, checks=True, clock="virtual")


torch.library.impl("deep_moe::prepare_inputs", "CompositeExplicitAutograd", _prepare_inputs)


@torch.library.register_fake("deep_moe::prepare_inputs")
def _prepare_inputs_fake(*_: object) -> None:
    """The operator only writes to tensors that it is given."""


def check_inputs(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    input_x: torch.Tensor,
    input_topk_idx: torch.Tensor,
) -> None:
    """Raise if the form of the first three does not fit a buffer with the other two."""
    if x.ndim != 2:
        raise ValueError(f"x must be 2-dimensional [tokens, hidden]; got shape {tuple(x.shape)}")
    num_tokens = x.shape[0]
    max_tokens, hidden = input_x.shape
    device = input_x.device
    check_tensor("x", x, torch.bfloat16, (num_tokens, hidden), device)
    if num_tokens > max_tokens:
        raise ValueError(
            f"x must have at most num_max_tokens_per_rank ({max_tokens}) tokens; got {num_tokens}"
        )
    slots = (num_tokens, input_topk_idx.shape[1])
    check_tensor("topk_idx", topk_idx, _TOPK_IDX_DTYPES, slots, device)
    check_tensor("topk_weights", topk_weights, _TOPK_WEIGHT_DTYPES, slots, device)
    check_contiguous("x", x)
    check_contiguous("topk_idx", topk_idx)
    check_contiguous("topk_weights", topk_weights)
    check_start("x", x, _X_ALIGNMENT)


def _make_plan(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    device: torch.device,
    arch: str | None,
) -> PreparationPlan:
    gpu = gpu_of(device)
    own = EMULATED.name if gpu is None else gpu.target.name
    config = PrepareInputsConfig(
        has_int32_topk_idx=topk_idx.dtype == torch.int32,
        has_bf16_topk_weights=topk_weights.dtype == torch.bfloat16,
        arch=own if arch is None else arch,
    )
    if config.arch != own and gpu is not None:
        raise ValueError(f"arch must be {own}, that of {device}, or None; got {arch!r}")
    num_chunks = config.num_chunks(x.numel())
    return PreparationPlan(
        config=config,
        num_chunks=num_chunks,
        num_slots=topk_idx.numel(),
        num_ctas=config.num_ctas(num_chunks),
        gpu=gpu,
        launcher=None if gpu is None else _cuda_launcher(config, gpu),
    )


@lru_cache(maxsize=64)
def _kernel(config: PrepareInputsConfig) -> CompiledKernel:
    return jit.build_prepare_inputs(config)


@lru_cache(maxsize=64)
def _cuda_launcher(config: PrepareInputsConfig, gpu: Gpu) -> CudaLauncher:
    """One per kernel and device: a module belongs to the device's context."""
    return gpu.load(_kernel(config), num_threads=config.num_threads)
