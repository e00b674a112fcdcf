"""How weights lie for the SM100 kernel: the rows of gate and up alternate in runs of 8, so that a
tile of the accumulator holds matching pairs, and scales, in words of four UE8M0 bytes [E, N,
K/128], lie MN-major with the rows of each 128 in the order that one `tcgen05.cp` spreads over
tensor memory.

Without a gate, runs of 16 of the first and the second half of each 128 rows of Linear1 alternate,
so that an epilogue warp has 16 neighbours of either half."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deep_moe.heuristics.shape import MoEShape
from deep_moe.weights.layers import (
    ExpertWeights,
    KernelLayer,
    LayerWeights,
    MegaMoEWeights,
    TensorForms,
    WeightSizes,
    axis_sizes,
    check_form,
    contiguous_copy,
    shape_of_weights,
)

if TYPE_CHECKING:
    from deep_moe.targets.target import TargetWeights

GATE_UP_RUN = 8  # consecutive rows of gate, then of up
UP_RUN = 16  # without a gate: of the first half of 128, then of the second
SF_BLOCK = 128  # rows whose scales are permuted among themselves


def interleave_gate_up(rows: torch.Tensor, out: torch.Tensor, step: int = 1) -> torch.Tensor:
    """[E, 2*I, ...] with gate rows before up rows, to runs of 8 in turn, in contiguous `out`. step:
    a run takes every so manieth row, and those between them come in the runs that follow."""
    num_groups = rows.shape[1] // (2 * GATE_UP_RUN * step)
    runs = rows.unflatten(1, (2, num_groups, GATE_UP_RUN, step))
    further = range(5, runs.dim())
    out.unflatten(1, (num_groups, step, 2, GATE_UP_RUN)).copy_(
        runs.permute(0, 2, 4, 1, 3, *further)
    )
    return out


def separate_gate_up(rows: torch.Tensor, step: int = 1) -> torch.Tensor:
    """The inverse of `interleave_gate_up`. A copy."""
    num_groups = rows.shape[1] // (2 * GATE_UP_RUN * step)
    runs = rows.unflatten(1, (num_groups, step, 2, GATE_UP_RUN))
    further = range(5, runs.dim())
    return contiguous_copy(runs.permute(0, 3, 1, 4, 2, *further)).reshape(rows.shape)


def interleave_l1(
    rows: torch.Tensor, out: torch.Tensor, has_gate: bool, step: int = 1
) -> torch.Tensor:
    """Linear1's rows [E, N, ...] in the order of the kernel, in contiguous `out`. step: as in
    `interleave_gate_up`, within the runs of 16 that there are without a gate."""
    if has_gate:
        return interleave_gate_up(rows, out, step)
    num_runs = SF_BLOCK // 2 // UP_RUN
    halves = rows.unflatten(1, (-1, 2, num_runs, UP_RUN // step, step))
    further = range(6, halves.dim())
    out.unflatten(1, (-1, num_runs, 2, step, UP_RUN // step)).copy_(
        halves.permute(0, 1, 3, 2, 5, 4, *further)
    )
    return out


def separate_l1(rows: torch.Tensor, has_gate: bool, step: int = 1) -> torch.Tensor:
    """The inverse of `interleave_l1`. A copy."""
    if has_gate:
        return separate_gate_up(rows, step)
    runs = rows.unflatten(1, (-1, SF_BLOCK // 2 // UP_RUN, 2, step, UP_RUN // step))
    further = range(6, runs.dim())
    return contiguous_copy(runs.permute(0, 1, 3, 2, 5, 4, *further)).reshape(rows.shape)


def permute_sf_rows(sf: torch.Tensor) -> torch.Tensor:
    """Scales [E, N, W] to MN-major [E, W, N], where row r of each 128 goes to (r%32)*4 + r/32."""
    blocks = sf.transpose(1, 2).unflatten(2, (sf.shape[1] // SF_BLOCK, 4, 32))
    return contiguous_copy(blocks.transpose(-1, -2)).flatten(2)


def restore_sf_rows(sf: torch.Tensor) -> torch.Tensor:
    """The inverse of `permute_sf_rows`. A copy."""
    blocks = sf.unflatten(2, (sf.shape[2] // SF_BLOCK, 32, 4)).transpose(-1, -2)
    return contiguous_copy(blocks.flatten(2).transpose(1, 2))


def transform_scaled(l1: LayerWeights, l2: LayerWeights, out: MegaMoEWeights) -> None:
    """Interleave and permute, as above. Scales: int32 [E, N, K/128]."""
    interleave_l1(l1.weight, out.l1.weight, out.has_gate)
    l1_sf = torch.empty(l1.sf.shape, dtype=l1.sf.dtype, device=l1.sf.device)
    out.l1.sf.copy_(permute_sf_rows(interleave_l1(l1.sf, l1_sf, out.has_gate)))
    out.l2.weight.copy_(l2.weight)
    out.l2.sf.copy_(permute_sf_rows(l2.sf))


def transformed_shape(
    l1: KernelLayer, has_gate: bool, own: TargetWeights, *, values_per_byte: int
) -> MoEShape:
    """Whose first layer this is, once it is laid out."""
    num_l1_matrices = 2 if has_gate else 1
    per_byte = "" if values_per_byte == 1 else f"/{values_per_byte}"
    axes = f"[E, {'2*I' if has_gate else 'I'}, H{per_byte}]"
    num_experts, num_l1_rows, num_bytes = axis_sizes("l1_weights[0]", l1.weight, axes)
    return shape_of_weights(
        WeightSizes(
            num_experts, values_per_byte * num_bytes, num_l1_rows // num_l1_matrices, has_gate
        ),
        own.weights,
        own.token_format,
    )


def inverse_scaled(
    l1: KernelLayer,
    l2: KernelLayer,
    has_gate: bool,
    own: TargetWeights,
    *,
    dtype: torch.dtype,
    values_per_byte: int,
) -> ExpertWeights:
    shape = transformed_shape(l1, has_gate, own, values_per_byte=values_per_byte)
    expected = scaled_tensors(shape, dtype=dtype, values_per_byte=values_per_byte)
    check_form({"l1_weights": l1, "l2_weights": l2}, expected)
    return ExpertWeights(
        LayerWeights(
            separate_l1(l1.weight, has_gate), separate_l1(restore_sf_rows(l1.sf), has_gate)
        ),
        LayerWeights(contiguous_copy(l2.weight), restore_sf_rows(l2.sf)),
    )


def scaled_tensors(shape: MoEShape, *, dtype: torch.dtype, values_per_byte: int) -> TensorForms:
    num_experts, hidden = shape.num_local_experts, shape.hidden
    intermediate = shape.intermediate_hidden
    return {
        "l1_weights[0]": (dtype, (num_experts, shape.num_l1_rows, hidden // values_per_byte)),
        "l1_weights[1]": (torch.int32, (num_experts, hidden // 128, shape.num_l1_rows)),
        "l2_weights[0]": (dtype, (num_experts, hidden, intermediate // values_per_byte)),
        "l2_weights[1]": (torch.int32, (num_experts, intermediate // 128, hidden)),
    }
