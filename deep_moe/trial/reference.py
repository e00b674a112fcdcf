"""The layer in plain PyTorch, expert by expert: what the kernels are compared with.

It shares nothing with the kernels: no tiles, no pools, no transformed weights. Products of
quantized values are summed in float64; everything that the layer rounds is rounded here in the
same place. It runs on CPU and GPU tensors.

Where each kernel rounds, its `Numerics` say (deep_moe/formats/numerics.py).
"""

from __future__ import annotations

import torch

from deep_moe.activations import DEFAULT_ACTIVATION, Activation, activation_of
from deep_moe.formats.numerics import Numerics
from deep_moe.targets import EMULATED
from deep_moe.weights.layers import LayerTensors, Pair, one_expert


def reference_mega_moe(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    l1_weights: LayerTensors,
    l2_weights: LayerTensors,
    *,
    activation: str | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    numerics: Numerics | None = None,
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
    in calls. numerics: which kernel's, by default of what a CPU emulates, with MXFP4. l1_bias,
    l2_bias: [experts, 2*I] and [experts, H], or none.
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
    l1_weights: LayerTensors,
    l2_weights: LayerTensors,
    *,
    activation: str | Activation = DEFAULT_ACTIVATION,
    activation_clamp: float | None = None,
    numerics: Numerics | None = None,
    l1_bias: torch.Tensor | None = None,
    l2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each slot adds to its token: bfloat16 [tokens, topk, hidden], zero in unused slots."""
    applied = activation_of(activation, activation_clamp)
    if numerics is None:
        numerics = EMULATED.weights_of().numerics
    num_tokens, num_topk = topk_idx.shape
    contributions = torch.zeros(
        (num_tokens, num_topk, l2_weights[0].shape[1]), dtype=torch.bfloat16, device=x.device
    )
    for expert_idx in range(l1_weights[0].shape[0]):
        token_idx, slot_idx = (topk_idx == expert_idx).nonzero(as_tuple=True)
        if token_idx.numel() == 0:
            continue
        tokens = numerics.tokens(x[token_idx], x_sf[token_idx])
        contributions[token_idx, slot_idx] = expert_output(
            tokens,
            topk_weights[token_idx, slot_idx],
            one_expert(l1_weights, expert_idx),
            one_expert(l2_weights, expert_idx),
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
    l1_weights: LayerTensors,
    l2_weights: LayerTensors,
    *,
    activation: Activation,
    numerics: Numerics,
    biases: Pair | None = None,
) -> torch.Tensor:
    """One expert on float64 tokens [n, H] with routing weights [n]: bfloat16 [n, H].

    biases: [2*I] and [H]. With them the routing weight comes behind Linear2's, in FP32, and
    Linear1's output is quantized as for weight 1; so it is where numerics weigh results.
    """
    is_weighed_behind = biases is not None or numerics.weighs_results
    # [n, 2*I], or [n, I] without a gate
    accumulator = tokens @ numerics.weights(l1_weights, activation.num_l1_matrices).T
    if biases is not None:
        accumulator += biases[0]
    rows = round_to_bf16(accumulator).float()
    inner_weights = torch.ones_like(weights) if is_weighed_behind else weights
    activated = activation.of_linear1(rows) * inner_weights.unsqueeze(1)
    quantized = numerics.requantize(activated, inner_weights)
    accumulator = quantized @ numerics.weights(l2_weights, 1).T
    if biases is not None:
        accumulator = accumulator + biases[1]
    if is_weighed_behind:
        accumulator = accumulator.float() * weights.float().unsqueeze(1)
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
