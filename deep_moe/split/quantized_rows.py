"""Rows of BF16 or FP16 as E4M3 with scales, outside of the kernels that do so on the way."""

from __future__ import annotations

import torch

from deep_moe.formats.block_scaled import pack_ue8m0, quantize_e4m3_ue8m0
from deep_moe.formats.float_scaled import GROUP_SIZE, quantize_e4m3_float
from deep_moe.fused.input_preparation import prepare_rows
from deep_moe.tokens import TokenFormat

# A router's output that says nothing: what quantizes takes one, and gives it back.
Unrouted = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def unrouted(num_rows: int, num_topk: int, device: torch.device) -> Unrouted:
    """For so many rows: int64 and float32 [rows, topk], twice."""
    size = (num_rows, num_topk)
    ids = [torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2)]
    weights = [torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2)]
    return ids[0], weights[0], ids[1], weights[1]


def quantize_rows(
    x: torch.Tensor,
    tokens: TokenFormat,
    values: torch.Tensor,
    scales: torch.Tensor,
    scratch: Unrouted,
    arch: str | None,
    *,
    packs: bool,
) -> None:
    """x [rows, hidden] into the first rows of `values` and `scales`, of which there are as many as
    in `scratch`. packs: scales as experts take them, where those that travel are not packed.

    In one kernel where that which prepares inputs knows the format; the bits are the same.
    """
    num_rows = x.shape[0]
    is_usual = tokens.values_per_scale in (32, GROUP_SIZE) and tokens.is_of_products
    if is_usual and x.dtype == torch.bfloat16 and tokens.values_per_word == GROUP_SIZE:
        ids, weights, ids_out, weights_out = scratch
        rows = (values, scales, ids_out, weights_out)
        prepare_rows(x, ids[:num_rows], weights[:num_rows], rows, arch)
        return
    if tokens.values_per_scale < tokens.values_per_word and not tokens.packs_scales:
        own_values, own_scales = quantize_e4m3_ue8m0(x.float())
    else:
        own_values, own_scales = quantize_e4m3_float(
            x, powers_of_two=tokens.rounds_scales, group_size=tokens.values_per_scale
        )
        if packs and tokens.packs_scales:
            own_scales = pack_ue8m0((own_scales.view(torch.int32) >> 23).to(torch.uint8))
    values[:num_rows].copy_(own_values)
    scales[:num_rows].copy_(own_scales)
