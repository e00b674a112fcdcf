"""Weights and scales as callers of DeepGEMM have them, to what deep_moe takes."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import (
    GROUP_SIZE,
    WORD_SIZE,
    pack_ue8m0_groups,
    ue8m0_of_floats,
)
from deep_moe.heuristics.segments import ceil_div
from deep_moe.heuristics.shape import MAX_SIZE, require_int
from deep_moe.tensor_memory import check_dense, check_memory
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights, layer_weights

_PACKED_DTYPES = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
_BYTE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_RECIPES = ((1, GROUP_SIZE), (1, 1, GROUP_SIZE))


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: tuple[int, int, int] | tuple[int, int],
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales as four UE8M0 bytes in each int32, [num_groups, mn, k/128], or [mn, k/128] without
    num_groups, in rows: `transform_weights_for_mega_moe` and a buffer's `x_sf` take any strides.

    Args:
        sf: one scale for each 32 values along k: float32 powers of two, float8_e8m0fnu or uint8
            [.., mn, k/32], or packed int32 [.., mn, k/128].
        mn: rows of the matrix.
        k: values of a row, a multiple of 128.
        recipe: (1, 32), or (1, 1, 32) with `is_sfa`.
        num_groups: matrices, or None where `sf` is of one.
        is_sfa: whether `sf` is of the left operand; with a recipe of three numbers only.
        disable_ue8m0_cast: only False.
        psum_layout: only None.

    Raises ValueError for other recipes and shapes, and for a float32 scale that is no power of two:
    UE8M0 would not hold it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape, dtype or device that is not allowed; the text
            names it.
    """
    if not isinstance(recipe, (tuple, list)) or tuple(recipe) not in _RECIPES:
        raise ValueError(
            f"recipe must be (1, 32) or (1, 1, 32), a scale for 32 values along k; got {recipe!r}"
        )
    sizes = {"mn": mn, "k": k} | ({} if num_groups is None else {"num_groups": num_groups})
    for name, size in sizes.items():
        require_int(name, size, "at least 1")
        if not 1 <= size < MAX_SIZE:
            raise ValueError(f"{name} must be at least 1 and below 2^31; got {size}")
    if (len(recipe) == 3) != (is_sfa is not None):
        raise ValueError(f"is_sfa must go with a recipe of three numbers; got {is_sfa}, {recipe}")
    if disable_ue8m0_cast:
        raise ValueError("disable_ue8m0_cast must be False: scales are UE8M0; got True")
    if psum_layout is not None:
        raise ValueError("psum_layout must be None: no grouped GEMM reads these scales")
    if k % WORD_SIZE:
        raise ValueError(f"k must be a multiple of {WORD_SIZE}; got {k}")
    rows = (mn,) if num_groups is None else (num_groups, mn)
    return packed_scales("sf", sf, rows, k)


def packed_weights(name: str, value: object) -> LayerWeights:
    """A pair in any of the formats as (int8 [E, N, K/2], int32 [E, N, K/128])."""
    weight, sf = layer_weights(name, value, weight_format("mxfp4"))
    if weight.dtype not in _PACKED_DTYPES:
        raise TypeError(
            f"{name}[0] must be packed E2M1, int8, uint8 or float4_e2m1fn_x2; got {weight.dtype}"
        )
    if weight.dim() != 3:
        raise ValueError(f"{name}[0] must have shape [E, N, K/2]; got {tuple(weight.shape)}")
    num_experts, num_rows, num_bytes = weight.shape
    packed = weight.view(torch.int8)
    return LayerWeights(
        packed, packed_scales(f"{name}[1]", sf, (num_experts, num_rows), 2 * num_bytes)
    )


def packed_scales(name: str, sf: torch.Tensor, rows: tuple[int, ...], k: int) -> torch.Tensor:
    """Scales of one per 32 values along k, in any of the formats, as int32 [*rows, k/128], the
    last word filled with zeros."""
    if not isinstance(sf, torch.Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(sf).__name__}")
    check_dense(name, sf)
    is_packed = sf.dtype == torch.int32
    if not is_packed and sf.dtype not in (torch.float32, *_BYTE_DTYPES):
        raise TypeError(
            f"{name} must be float32, float8_e8m0fnu, uint8, or int32 with four in each; "
            f"got {sf.dtype}"
        )
    # Of the last word of a row, some bytes may belong to no value.
    expected = (*rows, ceil_div(k, WORD_SIZE if is_packed else GROUP_SIZE))
    if tuple(sf.shape) != expected:
        raise ValueError(
            f"{name} must hold one scale per {GROUP_SIZE} values, shape {expected}; "
            f"got {tuple(sf.shape)}"
        )
    check_memory(name, sf)
    if is_packed:
        return sf
    return pack_ue8m0_groups(
        _bytes_of_floats(name, sf) if sf.dtype == torch.float32 else sf.view(torch.uint8)
    )


def _bytes_of_floats(name: str, sf: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes of float32 powers of two, or an error that names the first other number."""
    scale_bytes, is_wrong = ue8m0_of_floats(sf)
    wrong = is_wrong.nonzero()
    if wrong.numel():
        index = tuple(wrong[0].tolist())
        raise ValueError(
            f"{name} must hold powers of two, 2^-127 to 2^127; got {sf[index].item()} at "
            f"{list(index)}"
        )
    return scale_bytes
