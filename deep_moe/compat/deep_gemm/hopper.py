"""The names that sgl-deep-gemm has for Hopper: tokens with a float32 scale for every 128 values,
and FP8 weights with one for every 128 x 128."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import deep_moe
from deep_moe.described import described_as
from deep_moe.fused.checks import require_type
from deep_moe.targets import target_of_capability
from deep_moe.weights.layers import MegaMoEWeights

from .mega import ACTIVATION, FP8_TYPE, Pair, SymmBuffer, fill_from_model, mega_moe_pre_dispatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .mega import DeepGemmActivation

CAPABILITY = (9, 0)
GROUP_SIZE = 128


@described_as(SymmBuffer)
def get_symm_buffer_for_sm90_mega_moe(
    group: ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool = True,
    activation: DeepGemmActivation = ACTIVATION,
    *,
    device: torch.device | str | int | None = None,
) -> SymmBuffer:
    """A `SymmBuffer` for calls of `fp8_mega_moe` on Hopper, whose x_sf is float32 [max tokens,
    hidden/128], any positive numbers. Every rank of `group` must call this.

    Other arguments are as of `SymmBuffer`.

    Args:
        group: as of `deep_moe.get_symm_buffer_for_mega_moe`.
        hidden: values of a token, a multiple of 128.
        use_fp8_dispatch: True only.
    """
    if not use_fp8_dispatch:
        raise ValueError("use_fp8_dispatch must be True: tokens travel as FP8; got False")
    return SymmBuffer(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        mma_type=FP8_TYPE,
        activation=activation,
        token_format="fp8_128",
        device=device,
    )


def transform_weights_for_mega_moe_sm90(l1_weights: Pair, l2_weights: Pair) -> MegaMoEWeights:
    """(l1, l2) for `fp8_mega_moe` on Hopper: float8_e4m3fn [E, 2*I, H] and [E, H, I] with scales
    for every 128 x 128, as `deep_moe.transform_weights_for_mega_moe` takes them.

    Args:
        l1_weights: float8_e4m3fn [E, 2*I, H], gate rows before up rows, and float32 scales [E,
            2*I/128, H/128].
        l2_weights: float8_e4m3fn [E, H, I], and float32 scales [E, H/128, I/128].
    """
    target = target_of_capability(CAPABILITY)
    assert target is not None
    return deep_moe.transform_weights_for_mega_moe(
        l1_weights, l2_weights, target.name, weights="fp8", token_format="fp8_128"
    )


@described_as(mega_moe_pre_dispatch)
def mega_moe_pre_dispatch_sm90(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buf_x: torch.Tensor,
    buf_x_sf: torch.Tensor,
    buf_topk_idx: torch.Tensor,
    buf_topk_weights: torch.Tensor,
    num_tokens: int,
    group_size: int = GROUP_SIZE,
    routed_scaling_factor: float = 1.0,
) -> None:
    """`mega_moe_pre_dispatch` into a buffer of `get_symm_buffer_for_sm90_mega_moe`.

    Other arguments are as of `mega_moe_pre_dispatch`.

    Args:
        group_size: only the default.
        routed_scaling_factor: what the routing weights are multiplied by.
    """
    if group_size != GROUP_SIZE:
        raise ValueError(
            f"group_size must be {GROUP_SIZE}, values that share a scale; got {group_size}"
        )
    require_type("buf_x_sf", buf_x_sf, torch.Tensor, "a tensor")
    if buf_x_sf.dtype != torch.float32:
        raise TypeError(
            f"buf_x_sf must be float32, of get_symm_buffer_for_sm90_mega_moe; got {buf_x_sf.dtype}"
        )
    views = (buf_x, buf_x_sf, buf_topk_idx, buf_topk_weights)
    fill_from_model(x, topk_idx, topk_weights, views, num_tokens)
    if routed_scaling_factor != 1.0:
        buf_topk_weights[:num_tokens] *= routed_scaling_factor
