"""The layer in plain PyTorch, expert by expert: what the kernels are compared with.

It shares nothing with the kernels: no tiles, no pools, no transformed weights. Products of
quantized values are summed in float64; everything that the layer rounds is rounded here in the
same place. It runs on CPU and GPU tensors.

Activations are scaled as the formats say, one scale per 32 values (`MXFP8`). The SM90 kernel
departs from that in two places, because its tensor cores know no scales (`SM90`). Which target
computes which way, deep_moe.targets says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, Activation, activation_of
from deep_moe.formats.block_scaled import (
    GROUP_SIZE,
    dequantize_e4m3_ue8m0,
    quantize_e4m3_groups,
    ue8m0_to_float,
    unpack_ue8m0,
)
from deep_moe.formats.weight_formats import weight_format

Pair = tuple[torch.Tensor, torch.Tensor]

FP32_SUM_BITS = 24
HOPPER_SUM_BITS = 13
SM90_SCALE_BLOCK = 128  # intermediate values that share a scale
SM90_MIN_SCALE_BYTE = 67  # 2^-60, so that sums can be rescaled in FP32
SM90_MAX_SCALE_BYTE = 247  # the largest that quantizing to E4M3 asks for
SM90_SMALLEST_AMAX = 2.0**-3  # of a token's scale; smaller blocks have a scale of their own


@dataclass(frozen=True)
class Numerics:
    """How activations become what the tensor cores multiply.

    tokens: a token's E4M3 values [n, H] and packed scales as float64. weights: one expert's values
    and scales of a layer, as checkpoints have them, which are so many matrices one below the other,
    as float64 [N, K]. Linear1's output has a scale
    for every `scale_block` values; scale_bytes: these scales, as UE8M0 bytes [n, blocks], from the
    blocks' largest magnitudes, float32 [n, blocks], and the routing weights [n]. A larger magnitude
    never has a smaller scale. Where both are None it is BF16, without scales. sum_bits: what
    hardware keeps of a sum of products, over `sum_block` values along K or, if None, all of them;
    the reference keeps all. sum_products: that one instruction adds to a sum.
    multiplies_block_scales: whether such sums are multiplied by a product of two scales, which is
    rounded to FP32.
    """

    tokens: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weights: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    scale_block: int | None
    scale_bytes: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    sum_bits: int
    sum_block: int | None = None
    sum_products: int = GROUP_SIZE
    multiplies_block_scales: bool = False

    def requantize(self, activated: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """float32 [n, I] after the activation, with its routing weights [n] in it, through E4M3 or
        BF16: float64 [n, I]."""
        if self.scale_block is None or self.scale_bytes is None:
            return activated.to(torch.bfloat16).double()
        blocks = self.blocks(activated, self.scale_block)
        scale_bytes = self.scale_bytes(blocks.abs().amax(dim=-1), weights)
        values, _ = quantize_e4m3_groups(blocks, scale_bytes=scale_bytes)
        scaled = values.float().double() * ue8m0_to_float(scale_bytes).unsqueeze(-1)
        return scaled.flatten(-2)[..., : activated.shape[-1]]

    @staticmethod
    def blocks(values: torch.Tensor, scale_block: int) -> torch.Tensor:
        """[n, I] as [n, blocks, scale_block], the last filled with zeros."""
        missing = -values.shape[-1] % scale_block
        whole = torch.nn.functional.pad(values, (0, missing)) if missing else values
        return whole.unflatten(-1, (-1, scale_block))


def _exact_tokens(x: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
    return dequantize_e4m3_ue8m0(x, x_sf, torch.float64)


def float_scaled_tokens(x: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
    """Tokens with a float32 scale for every 128 values, exact in float64."""
    return x.float().double() * x_sf.double().repeat_interleave(SM90_SCALE_BLOCK, dim=-1)


def _smallest_scale_bytes(amax: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
    _, scale_bytes = quantize_e4m3_groups(amax.unsqueeze(-1))
    return scale_bytes


def fold_token_scales(x: torch.Tensor, x_sf: torch.Tensor) -> torch.Tensor:
    """A token keeps its largest group scale; the other groups are brought to it in E4M3, rounded to
    nearest even. That changes values which thereby become subnormal, below 2^-6 of that scale."""
    scale_bytes = unpack_ue8m0(x_sf)[..., : x.shape[-1] // GROUP_SIZE].int()
    largest = scale_bytes.amax(dim=-1, keepdim=True)
    ratios = torch.exp2((scale_bytes - largest).double()).repeat_interleave(GROUP_SIZE, dim=-1)
    # float32 holds every product that E4M3 does not round to zero.
    folded = (x.float().double() * ratios).float().to(torch.float8_e4m3fn)
    return folded.float().double() * ue8m0_to_float(largest)


def sm90_token_scale_bytes(weights: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes [n] of 2^(floor(log2 |weight|) - 1), within what SM90 uses."""
    exponents = (weights.float().abs().view(torch.int32) >> 23) - 1
    return exponents.clamp(SM90_MIN_SCALE_BYTE, SM90_MAX_SCALE_BYTE)


def _sm90_scale_bytes(amax: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Blocks that lie well in E4M3's range by the token's scale, which follows from its routing
    weight, have that one, the others the smallest that holds them."""
    token_bytes = sm90_token_scale_bytes(weights).unsqueeze(-1)
    _, own_bytes = quantize_e4m3_groups(amax.unsqueeze(-1), min_scale_byte=SM90_MIN_SCALE_BYTE)
    is_large_enough = amax.double() >= SM90_SMALLEST_AMAX * ue8m0_to_float(token_bytes)
    fits = (own_bytes <= token_bytes) & is_large_enough | (amax == 0)
    return torch.where(fits, token_bytes, own_bytes)


_mxfp4_weights = weight_format("mxfp4").dequantize

# With MXFP4 weights.
MXFP8 = Numerics(_exact_tokens, _mxfp4_weights, GROUP_SIZE, _smallest_scale_bytes, FP32_SUM_BITS)
SM90 = Numerics(
    fold_token_scales, _mxfp4_weights, SM90_SCALE_BLOCK, _sm90_scale_bytes, HOPPER_SUM_BITS
)
BF16 = Numerics(
    lambda x, _: x.double(),
    weight_format("bf16").dequantize,
    None,
    None,
    FP32_SUM_BITS,
    sum_products=16,
)


def reference_mega_moe(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    *,
    activation: str | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    numerics: Numerics = MXFP8,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
    num_shared_experts: int = 0,
    y: torch.Tensor | None = None,
    weights_in_combine: bool = False,
) -> torch.Tensor:
    """The bfloat16 output [tokens, hidden] for tokens of any rank, or of all of them one after the
    other.

    x: float8_e4m3fn [tokens, hidden] and x_sf: int32 [tokens, hidden/128], or what the call takes
    for the format of the weights; topk_idx: int64
    [tokens, topk], global expert ids; topk_weights: float32 [tokens, topk].
    l1_weights, l2_weights: as in checkpoints (before `transform_weights_for_mega_moe`), with the
    experts of all ranks, in the format of `numerics`: for MXFP4 (int8 [experts, 2*I, H/2], int32
    [experts, 2*I, H/128]) and (int8 [experts, H, I/2], int32 [experts, H, I/128]).

    num_shared_experts: the last ones of these weights are shared: no id names them, and every token
    goes to each of them with weight 1, in slots behind its own. y: what a call that accumulates
    found there, bfloat16.

    Slots whose id is not an expert are ignored; an expert named in several slots of a token counts
    in each. A token that holds NaN or infinities spoils no other. activation, activation_clamp: as
    in calls. numerics: which kernel's. l1_bias, l2_bias: [experts, 2*I] and [experts, H], or none.
    weights_in_combine: of the split path, whose experts' rows are rounded to BF16 without their
    routing weights; combine multiplies by these in FP32.
    """
    topk_idx, topk_weights = with_shared_slots(
        topk_idx, topk_weights, l1_weights[0].shape[0], num_shared_experts
    )
    contributions = slot_contributions(
        x,
        x_sf,
        topk_idx,
        torch.ones_like(topk_weights) if weights_in_combine else topk_weights,
        l1_weights,
        l2_weights,
        activation=activation,
        activation_clamp=activation_clamp,
        numerics=numerics,
        l1_bias=l1_bias,
        l2_bias=l2_bias,
    )
    if weights_in_combine:
        contributions = contributions.float() * topk_weights.float().unsqueeze(2)
    return combine_slots(contributions, valid_slots(topk_idx, l1_weights[0].shape[0]), y)


def with_shared_slots(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, num_shared_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing [tokens, topk] with slots for shared experts behind its own, where these are the last
    ones of `num_experts`: [tokens, topk + shared]. Ids that name no routed expert become -1."""
    if not num_shared_experts:
        return topk_idx, topk_weights
    num_routed = num_experts - num_shared_experts
    shared = torch.arange(num_routed, num_experts, device=topk_idx.device)
    shared = shared.expand(topk_idx.shape[0], num_shared_experts)
    routed = topk_idx.where(valid_slots(topk_idx, num_routed), -1)
    ones = torch.ones_like(shared, dtype=topk_weights.dtype)
    return torch.cat([routed, shared], dim=1), torch.cat([topk_weights, ones], dim=1)


def valid_slots(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Which slots [tokens, topk] name an expert."""
    return (topk_idx >= 0) & (topk_idx < num_experts)


def slot_contributions(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    *,
    activation: str | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    numerics: Numerics = MXFP8,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each slot adds to its token: bfloat16 [tokens, topk, hidden], zero in unused slots."""
    applied = activation_of(activation, activation_clamp)
    num_tokens, num_topk = topk_idx.shape
    contributions = torch.zeros(
        (num_tokens, num_topk, x.shape[1]), dtype=torch.bfloat16, device=x.device
    )
    for expert_idx in range(l1_weights[0].shape[0]):
        token_idx, slot_idx = (topk_idx == expert_idx).nonzero(as_tuple=True)
        if token_idx.numel() == 0:
            continue
        tokens = numerics.tokens(x[token_idx], x_sf[token_idx])
        contributions[token_idx, slot_idx] = expert_output(
            tokens,
            topk_weights[token_idx, slot_idx],
            (l1_weights[0][expert_idx], l1_weights[1][expert_idx]),
            (l2_weights[0][expert_idx], l2_weights[1][expert_idx]),
            activation=applied,
            numerics=numerics,
            biases=biases_of_expert(l1_bias, l2_bias, expert_idx),
        )
    return contributions


def biases_of_expert(
    l1_bias: torch.Tensor | None, l2_bias: torch.Tensor | None, expert_idx: int
) -> Pair | None:
    """Of both layers, [2*I] and [H], in FP32 as kernels have them."""
    if l1_bias is None or l2_bias is None:
        return None
    return l1_bias[expert_idx].float(), l2_bias[expert_idx].float()


def expert_output(
    tokens: torch.Tensor,
    weights: torch.Tensor,
    l1_weights: Pair,
    l2_weights: Pair,
    *,
    activation: Activation,
    numerics: Numerics,
    biases: Pair | None = None,
) -> torch.Tensor:
    """One expert on float64 tokens [n, H] with routing weights [n]: bfloat16 [n, H].

    biases: [2*I] and [H]. With them the routing weight comes behind Linear2's, in FP32, and
    Linear1's output is quantized as for weight 1.
    """
    accumulator = tokens @ numerics.weights(*l1_weights, 2).T  # [n, 2*I]
    if biases is not None:
        accumulator += biases[0]
    gate, up = round_to_bf16(accumulator).float().chunk(2, dim=1)
    inner_weights = weights if biases is None else torch.ones_like(weights)
    activated = activation(gate, up) * inner_weights.unsqueeze(1)
    quantized = numerics.requantize(activated, inner_weights)
    accumulator = quantized @ numerics.weights(*l2_weights, 1).T
    if biases is not None:
        accumulator = (accumulator + biases[1]).float() * weights.float().unsqueeze(1)
    return round_to_bf16(accumulator)


def combine_slots(
    contributions: torch.Tensor, valid: torch.Tensor, y: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum `y`, if given, and the valid slots of each token in slot order in float32, then round
    once to bfloat16."""
    total = torch.zeros_like(contributions[:, 0], dtype=torch.float32)
    if y is not None:
        total = total + y.float()
    for slot_idx in range(contributions.shape[1]):
        used = valid[:, slot_idx].unsqueeze(1)
        total = torch.where(used, total + contributions[:, slot_idx].float(), total)
    return total.to(torch.bfloat16)


def round_to_bf16(accumulator: torch.Tensor) -> torch.Tensor:
    """As the kernel's epilogues see it: the accumulator is float32, then bfloat16."""
    return accumulator.float().to(torch.bfloat16)
