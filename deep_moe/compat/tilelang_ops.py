"""The step between the grouped products of DeepGEMM's unfused layer, by the name and arguments that
its own comparison calls it by, run by PyTorch.

>>> import torch
>>> values, sf = swiglu_apply_weight_to_fp8(
...     torch.ones(2, 256).bfloat16(), torch.tensor([2.0, 1.0]), avail_tokens=torch.tensor(1),
...     num_per_channels=32, use_col_major_scales=True, round_scale=True, ue8m0_scale=True,
...     output_bf16=False, clamp_value=None, fast_math=True)
>>> values.shape, sf.shape, values[0, 0].item() * 2.0 ** ((sf[0, 0].item() & 255) - 127)
(torch.Size([2, 128]), torch.Size([2, 1]), 1.5)
"""

from __future__ import annotations

import math

import torch

from deep_moe.activations import Swiglu
from deep_moe.formats.block_scaled import quantize_e4m3_ue8m0
from deep_moe.formats.float_scaled import quantize_e4m3_float
from deep_moe.fused.checks import check_tensor, require_type

from .deep_ep.elastic import by_column

__all__ = ["swiglu_apply_weight_to_fp8"]

# num_per_channels, and what goes with it of round_scale and ue8m0_scale.
_SCALES = {32: True, 128: False}


@torch.no_grad()
def swiglu_apply_weight_to_fp8(
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    avail_tokens: torch.Tensor | None,
    num_per_channels: int,
    use_col_major_scales: bool,
    round_scale: bool,
    ue8m0_scale: bool,
    output_bf16: bool,
    clamp_value: float | None = None,
    fast_math: bool = True,
) -> tuple[torch.Tensor, ...]:
    """`topk_weights * silu(gate) * up` of Linear1's output, quantized for Linear2: float8_e4m3fn
    [M, I] and its scales, which grouped products of `compat.deep_gemm` take.

    Args:
        x: bfloat16 [M, 2 * I], gate first. I is a multiple of 128.
        topk_weights: float32 [M], the routing weight of each row; None for 1.
        avail_tokens: an integer of no dimension, on x's device: so many rows are computed, and the
            rest are zero. The host does not read it. None: all rows.
        num_per_channels: 32, with round_scale and ue8m0_scale: a UE8M0 byte for 32 values, four of
            them an int32 [M, I/128]. 128, without both: float32 [M, I/128].
        use_col_major_scales: scales of neighbouring rows lie side by side.
        round_scale: as num_per_channels has it.
        ue8m0_scale: as num_per_channels has it.
        output_bf16: give the products in BF16, too, as a third tensor.
        clamp_value: gate is at most this, and up at most this in size; None: no bound.
        fast_math: both give the same here.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value, shape or dtype that is not allowed; the text names it.
    """
    require_type("x", x, torch.Tensor, "a tensor")
    if x.ndim != 2 or not x.shape[1] or x.shape[1] % 256:
        raise ValueError(f"x must be [M, 2 * I], I a multiple of 128; got {tuple(x.shape)}")
    check_tensor("x", x, torch.bfloat16, x.shape, x.device)
    num_rows = x.shape[0]
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights, torch.float32, (num_rows,), x.device)
    if avail_tokens is not None:
        check_tensor("avail_tokens", avail_tokens, (torch.int32, torch.int64), (), x.device)
    if num_per_channels not in _SCALES:
        raise ValueError(f"num_per_channels must be 32 or 128; got {num_per_channels!r}")
    for name, given in {"round_scale": round_scale, "ue8m0_scale": ue8m0_scale}.items():
        require_type(name, given, bool, "a bool")
        if given != _SCALES[num_per_channels]:
            raise ValueError(
                f"{name} must be {_SCALES[num_per_channels]} with num_per_channels "
                f"{num_per_channels}; got {given}"
            )
    y = Swiglu(math.inf if clamp_value is None else clamp_value).of_linear1(x.float())
    if topk_weights is not None:
        y = y * topk_weights.unsqueeze(1)
    if avail_tokens is not None:
        is_used = torch.arange(num_rows, device=x.device) < avail_tokens
        y = y.where(is_used.unsqueeze(1), 0.0)
    values, sf = quantize_e4m3_ue8m0(y) if num_per_channels == 32 else quantize_e4m3_float(y)
    if use_col_major_scales:
        sf = by_column(sf)
    return (values, sf, y.bfloat16()) if output_bf16 else (values, sf)
