"""Checks of weights that formats share. Each error names the tensor, what is allowed, and what was
given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from deep_moe.formats.sizes import SIZE_UNIT

if TYPE_CHECKING:
    from .layers import LayerWeights, WeightSizes

_NAN_BYTE = 255  # of UE8M0


def check_layers(
    l1: LayerWeights,
    l2: LayerWeights,
    *,
    values_per_byte: int,
    check_dtypes: Callable[[str, LayerWeights], None],
    check_scales: Callable[[str, torch.Tensor, tuple[int, int, int], int], None],
) -> WeightSizes:
    """Sizes of weights [E, 2*I, H], or without a gate [E, I, H], and [E, H, I], so many values in a
    byte. check_dtypes and check_scales are told the layer's name; the latter its (E, N, K), too,
    and how many matrices these rows are."""
    from .layers import WeightSizes

    per_byte = "" if values_per_byte == 1 else f"/{values_per_byte}"
    l2_axes = f"[E, H, I{per_byte}]"
    has_gate = not _has_rows_of_up_alone(l1.weight, l2.weight, values_per_byte)
    num_l1_matrices = 2 if has_gate else 1
    l1_axes = f"[E, {'2*I' if has_gate else 'I'}, H{per_byte}]"

    def check_layer(
        name: str, layer: LayerWeights, axes: str, num_matrices: int
    ) -> tuple[int, int, int]:
        check_dtypes(name, layer)
        sizes = _sizes(f"{name}[0]", layer.weight, axes, values_per_byte)
        if sizes[1] % (num_matrices * SIZE_UNIT):
            raise ValueError(
                f"{name}[0] must have {num_matrices}*I rows with I a multiple of {SIZE_UNIT}; "
                f"got shape {tuple(layer.weight.shape)}"
            )
        check_scales(f"{name}[1]", layer.sf, sizes, num_matrices)
        if layer.global_sf is not None:
            _check_global_form(f"{name}[2]", layer.global_sf, (sizes[0], num_matrices))
        return sizes

    num_experts, num_l1_rows, hidden = check_layer("l1_weights", l1, l1_axes, num_l1_matrices)
    check_layer("l2_weights", l2, l2_axes, 1)
    intermediate = num_l1_rows // num_l1_matrices
    expected = (num_experts, hidden, intermediate // values_per_byte)
    if tuple(l2.weight.shape) != expected:
        raise ValueError(
            f"l2_weights[0] must have shape {l2_axes} = {expected} to go with l1_weights; "
            f"got {tuple(l2.weight.shape)}"
        )
    for layer_name, layer in (("l1_weights", l1), ("l2_weights", l2)):
        for i, tensor in enumerate(layer):
            if tensor.device != l1.weight.device:
                raise ValueError(
                    f"{layer_name}[{i}] must be on {l1.weight.device} like l1_weights[0]; "
                    f"got {tensor.device}"
                )
    return WeightSizes(num_experts, hidden, intermediate, has_gate)


def _has_rows_of_up_alone(l1: torch.Tensor, l2: torch.Tensor, values_per_byte: int) -> bool:
    """Whether Linear1 has as many rows as Linear2 has columns."""
    return l1.dim() == l2.dim() == 3 and l1.shape[1] == l2.shape[2] * values_per_byte


def _check_global_form(name: str, global_sf: torch.Tensor, expected: tuple[int, int]) -> None:
    if global_sf.dtype != torch.float32:
        raise TypeError(f"{name} must be float32; got {global_sf.dtype}")
    if tuple(global_sf.shape) != expected:
        raise ValueError(
            f"{name} must hold one scale per expert and matrix, shape {expected}; got "
            f"{tuple(global_sf.shape)}"
        )


def _sizes(
    name: str, weight: torch.Tensor, axes: str, values_per_byte: int
) -> tuple[int, int, int]:
    """(experts, rows, values per row)."""
    if weight.dim() != 3 or weight.shape[0] == 0:
        raise ValueError(f"{name} must have shape {axes}, E >= 1; got {tuple(weight.shape)}")
    num_experts, num_rows, num_bytes = weight.shape
    num_values = num_bytes * values_per_byte
    if num_rows == 0 or num_rows % SIZE_UNIT or num_values == 0 or num_values % SIZE_UNIT:
        raise ValueError(
            f"{name} must have shape {axes} with H and I positive multiples of {SIZE_UNIT}; "
            f"got {tuple(weight.shape)}"
        )
    return num_experts, num_rows, num_values


def check_global_scales(name: str, global_sf: torch.Tensor) -> None:
    """Raise unless scales of matrices [E, matrices] are numbers of at least 0."""
    wrong = ~((global_sf >= 0) & global_sf.isfinite())
    if bool(wrong.any()):
        expert_idx, matrix = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expert {expert_idx}, matrix {matrix} must have a scale that is a number of "
            f"at least 0; got {global_sf[expert_idx, matrix].item()}"
        )


def check_no_nan_scale(name: str, sf: torch.Tensor) -> None:
    """Raise if a UE8M0 scale [E, N, ...], in elements of any size, is NaN. Expert by expert, to
    need little memory; one wait for a GPU."""
    highest = [own.contiguous().view(torch.uint8).amax(dim=-1) for own in sf]
    is_nan = torch.stack(highest) == _NAN_BYTE
    if bool(is_nan.any()):
        expert_idx, row = is_nan.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: expert {expert_idx}, row {row} must have scales that are numbers; got NaN "
            f"(UE8M0 byte {_NAN_BYTE})"
        )
