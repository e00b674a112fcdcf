"""`quantized_activation`: the step between two grouped products, as a call of its own."""

from __future__ import annotations

import torch

from deep_moe.activations import Activation, ActivationName
from deep_moe.fused.checks import check_contiguous, check_start, require_type
from deep_moe.heuristics.products import K_GROUP
from deep_moe.heuristics.training import MAX_EXPERTS
from deep_moe.targets import target_of
from deep_moe.tensor_memory import check_dense, check_memory

from .operators import gated_activation_of
from .quantized import parts_of_rows
from .rows import Rows
from .steps_for import steps_for

_ALIGNMENT = 16  # bytes


@torch.no_grad()
def quantized_activation(
    linear1: torch.Tensor,
    expert_count: torch.Tensor,
    expert_begin: torch.Tensor | None = None,
    *,
    row_weights: torch.Tensor | None = None,
    activation: ActivationName | Activation = "swiglu",
    activation_clamp: float | None = None,
    arch: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_weights * activation(gate, up)` of Linear1's output, as E4M3 with float32 scales: what
    `grouped_product` takes for Linear2.

    The activation's output is rounded to BF16, then to E4M3 by the largest of each 128 values. The
    row's weight is multiplied into its scales: it rounds nothing but them.

    Args:
        linear1: bfloat16 [rows, 2 * I] with expert_begin, otherwise [experts, N_e, 2 * I], gate
            first, as `grouped_product` gives it. I is a multiple of 128. Contiguous.
        expert_count: int32 [experts], on the device. The host does not read it.
        expert_begin: int32 [experts], each expert's first row; None for linear1 [experts, N_e,
            2 * I]. As in `grouped_product`.
        row_weights: float32 [rows] or [experts, N_e], the routing weight of each row, of any sign;
            None for 1.
        activation: one with a gate, as in `fp8_fp4_mega_moe`.
        activation_clamp: as in `fp8_fp4_mega_moe`.
        arch: on a CPU, None for PyTorch, or a target's name, whose kernel then runs in the
            emulator; on a GPU its own target or None.

    Returns float8_e4m3fn [rows, I] and float32 [rows, I/128], or [experts, N_e, ..] of both. Rows
    of the values lie apart by a multiple of 16 bytes. Rows of no expert are zero, with any scales.

    >>> import torch
    >>> linear1, count = torch.ones(1, 2, 256).bfloat16(), torch.tensor([1]).int()
    >>> values, scales = quantized_activation(linear1, count, row_weights=torch.full((1, 2), 0.5))
    >>> round(float(values[0, 0, 0]) * float(scales[0, 0, 0]), 4)  # half of silu(1) in BF16
    0.3652

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
        CompileError: NVRTC refused the kernel.
    """
    kind = gated_activation_of(activation, activation_clamp)
    _check(linear1, expert_count, expert_begin, row_weights)
    if arch is not None:
        target_of(arch)
    leading, width = linear1.shape[:-1], linear1.shape[-1]
    intermediate = width // 2
    rows_of_all = linear1.view(-1, width)
    steps = steps_for(linear1, arch)
    rows = _rows(rows_of_all.shape[0], leading, expert_count, expert_begin)
    if not rows.num_rows:
        values = linear1.new_empty(*leading, intermediate, dtype=torch.float8_e4m3fn)
        return values, linear1.new_empty(*leading, intermediate // K_GROUP, dtype=torch.float32)
    gate, up = rows_of_all.chunk(2, dim=1)
    quantized = steps.activate(gate, up, None, kind, rows, quantizes=True)
    values, scales = parts_of_rows(quantized, intermediate)
    if row_weights is not None:
        scales.mul_(row_weights.reshape(-1, 1))
    return values.unflatten(0, leading), scales.unflatten(0, leading)


def _rows(
    num_rows: int,
    leading: torch.Size,
    expert_count: torch.Tensor,
    expert_begin: torch.Tensor | None,
) -> Rows:
    """All rows as one expert's, of which those of no expert are padding. Nothing waits."""
    device = expert_count.device
    row = torch.arange(num_rows, dtype=torch.int32, device=device)
    if expert_begin is None:
        rows_per_expert = max(leading[1], 1)
        first = row % rows_per_expert
        is_used = first < expert_count.repeat_interleave(leading[1], output_size=num_rows)
    else:
        # How many experts' rows begin, less how many end, up to here.
        steps = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        begin = expert_begin.long()
        end = begin + expert_count.long().clamp(min=0)
        one = torch.ones_like(expert_count)
        steps.index_add_(0, begin.clamp(0, num_rows), one)
        steps.index_add_(0, end.clamp(0, num_rows), -one)
        is_used = steps[:-1].cumsum(0) > 0
    slots = row.masked_fill(~is_used, -1)
    offs = torch.full((1,), num_rows, dtype=torch.int32, device=device)
    return Rows(offs, row.unsqueeze(1), slots)


def _check(
    linear1: torch.Tensor,
    expert_count: torch.Tensor,
    expert_begin: torch.Tensor | None,
    row_weights: torch.Tensor | None,
) -> None:
    """Types, shapes and layouts. Nothing here looks at a value."""
    for name, tensor in (("linear1", linear1), ("expert_count", expert_count)):
        require_type(name, tensor, torch.Tensor, "a tensor")
    if expert_count.ndim != 1 or not 1 <= expert_count.shape[0] <= MAX_EXPERTS:
        raise ValueError(
            f"expert_count must have one number for each of 1 to {MAX_EXPERTS} experts; got shape "
            f"{tuple(expert_count.shape)}"
        )
    num_experts = expert_count.shape[0]
    if expert_begin is None:
        if linear1.ndim != 3 or linear1.shape[0] != num_experts:
            raise ValueError(
                f"linear1 must be [{num_experts} experts, rows, 2 * I] without expert_begin; got "
                f"shape {tuple(linear1.shape)}"
            )
    elif linear1.ndim != 2:
        raise ValueError(
            f"linear1 must be [rows, 2 * I] with expert_begin; got shape {tuple(linear1.shape)}"
        )
    if linear1.shape[-1] == 0 or linear1.shape[-1] % (2 * K_GROUP):
        raise ValueError(
            f"linear1 must have a positive multiple of {2 * K_GROUP} columns; got "
            f"{linear1.shape[-1]}"
        )
    leading = linear1.shape[:-1]
    if leading.numel() >= 1 << 30:
        raise ValueError(f"linear1 must have fewer than 2**30 rows; got {leading.numel()}")
    wanted = {
        "linear1": (linear1, torch.bfloat16, linear1.shape),
        "expert_count": (expert_count, torch.int32, torch.Size([num_experts])),
        "expert_begin": (expert_begin, torch.int32, torch.Size([num_experts])),
        "row_weights": (row_weights, torch.float32, leading),
    }
    for name, (given, dtype, shape) in wanted.items():
        if given is None:
            continue
        require_type(name, given, torch.Tensor, "a tensor")
        check_dense(name, given)
        if given.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}; got {given.dtype}")
        if given.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}; got {tuple(given.shape)}")
        if given.device != linear1.device:
            raise ValueError(
                f"{name} must be on {linear1.device}, as linear1 is; got {given.device}"
            )
        check_memory(name, given)
        check_contiguous(name, given)
    check_start("linear1", linear1, _ALIGNMENT)
