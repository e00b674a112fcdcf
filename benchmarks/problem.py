"""The problem that is timed: weights and tokens made on the GPU, what a call of it costs at least,
and a sample of its result from the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_moe.formats import (
    GROUP_SIZE,
    dequantize_e2m1_ue8m0,
    pack_ue8m0,
    quantize_e4m3_ue8m0,
)
from deep_moe.heuristics import MoEShape
from deep_moe.reference import Numerics, combine_slots, expert_output, valid_slots
from deep_moe.synthetic import Layer, Tokens
from deep_moe.weights import LayerWeights

FP4_BYTES_PER_WEIGHT = 17 / 32  # a nibble, and a scale byte for 32
_UE8M0_OF_ONE = 127
# Root mean square of the 8 magnitudes of E2M1, about 2^1.5.
_E2M1_SIZE_LOG2 = 1.5


def expert_layer(shape: MoEShape, expert_idx: int, seed: int, device: torch.device) -> Layer:
    """Random weights of one expert, the same on every rank."""
    generator = torch.Generator(device).manual_seed(1_000_003 * seed + expert_idx)

    def linear(num_rows: int, num_columns: int) -> LayerWeights:
        packed = torch.randint(
            -128,
            128,
            (1, num_rows, num_columns // 2),
            dtype=torch.int8,
            device=device,
            generator=generator,
        )
        # So that outputs are about as large as inputs; neighbouring groups differ.
        usual = _UE8M0_OF_ONE - round((num_columns.bit_length() - 1) / 2 + _E2M1_SIZE_LOG2)
        sf = torch.randint(
            usual - 1,
            usual + 2,
            (1, num_rows, num_columns // GROUP_SIZE),
            dtype=torch.uint8,
            device=device,
            generator=generator,
        )
        return LayerWeights(packed, pack_ue8m0(sf))

    l1 = linear(2 * shape.intermediate_hidden, shape.hidden)
    return Layer(l1, linear(shape.hidden, shape.intermediate_hidden))


def rank_layer(shape: MoEShape, rank: int, seed: int, device: torch.device) -> Layer:
    """Weights of a rank's experts."""
    num_local = shape.num_experts_per_rank
    experts = [expert_layer(shape, rank * num_local + i, seed, device) for i in range(num_local)]

    def stacked(pairs: list[LayerWeights]) -> LayerWeights:
        return LayerWeights(*(torch.cat(tensors) for tensors in zip(*pairs, strict=True)))

    return Layer(stacked([e.l1 for e in experts]), stacked([e.l2 for e in experts]))


def rank_tokens(
    shape: MoEShape, num_tokens: int, rank: int, seed: int, device: torch.device
) -> Tokens:
    """Normally distributed tokens of a rank, each to different experts chosen at random."""
    generator = torch.Generator(device).manual_seed(1_000_003 * seed + 7919 * rank + num_tokens)
    x = torch.randn(num_tokens, shape.hidden, device=device, generator=generator)
    order = torch.rand(num_tokens, shape.num_experts, device=device, generator=generator)
    weights = torch.rand(num_tokens, shape.num_topk, device=device, generator=generator) + 0.1
    return Tokens(
        *quantize_e4m3_ue8m0(x),
        order.topk(shape.num_topk, dim=1).indices,
        weights / weights.sum(dim=1, keepdim=True),
    )


def reference_sample(
    shape: MoEShape,
    tokens: Tokens,
    rows: torch.Tensor,
    seed: int,
    numerics: Numerics,
    activation_clamp: float | None,
) -> torch.Tensor:
    """The reference of some tokens; the experts they name are made again one by one."""
    idx, weights = tokens.topk_idx[rows], tokens.topk_weights[rows]
    x = numerics.tokens(tokens.x[rows], tokens.x_sf[rows])
    contributions = torch.zeros(
        (*idx.shape, shape.hidden), dtype=torch.bfloat16, device=tokens.x.device
    )
    for expert_idx in idx.unique().tolist():
        token, slot = (idx == expert_idx).nonzero(as_tuple=True)
        layer = expert_layer(shape, expert_idx, seed, tokens.x.device)
        contributions[token, slot] = expert_output(
            x[token],
            weights[token, slot],
            (layer.l1.weight[0], layer.l1.sf[0]),
            (layer.l2.weight[0], layer.l2.sf[0]),
            activation_clamp=activation_clamp,
            numerics=numerics,
        )
    return combine_slots(contributions, valid_slots(idx, shape.num_experts))


def fp8_weights(weights: LayerWeights, block_rows: int, block_columns: int) -> tuple:
    """FP4 weights as E4M3 with one float32 scale per block: [E, N, K] and [E, N/rows, K/columns].
    A block of 0 columns is a whole row. For kernels without FP4."""
    num_experts, num_rows, num_packed = weights.weight.shape
    num_columns = 2 * num_packed
    block_columns = block_columns or num_columns
    values = torch.empty(
        (num_experts, num_rows, num_columns),
        dtype=torch.float8_e4m3fn,
        device=weights.weight.device,
    )
    scales = torch.empty(
        (num_experts, num_rows // block_rows, num_columns // block_columns),
        device=weights.weight.device,
    )
    for expert_idx in range(num_experts):
        dense = dequantize_e2m1_ue8m0(weights.weight[expert_idx], weights.sf[expert_idx]).float()
        blocks = dense.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=2.0**-100) / 448
        values[expert_idx] = (blocks / scale).reshape(dense.shape).to(torch.float8_e4m3fn)
        scales[expert_idx] = scale.squeeze(3).squeeze(1)
    return values, scales


@dataclass(frozen=True)
class MachineRates:
    """What one GPU has been seen to do; the defaults are an H200's, measured 2026-11-20."""

    weight_bytes_per_s: float = 4.44e12  # reads from HBM
    flops: float = 1.49e15  # dense FP8 product, 8192^3
    link_bytes_per_s: float = 394e9  # copies to or from peers, each way


@dataclass(frozen=True)
class CallCosts:
    """What one rank's part of a call moves and computes."""

    flops: float
    weight_bytes: float
    link_bytes: float  # in one direction

    def floor_s(self, rates: MachineRates) -> float:
        """The time below which no kernel can be."""
        return max(
            self.flops / rates.flops,
            self.weight_bytes / rates.weight_bytes_per_s,
            self.link_bytes / rates.link_bytes_per_s,
        )


def call_costs(shape: MoEShape, received_tokens: torch.Tensor) -> CallCosts:
    """received_tokens: [experts of all ranks]. The mean over ranks of FLOPs and bytes on links, and
    the most weights that a rank reads: those of its experts that received a token.

    >>> shape = MoEShape(2, 4, 2, 256, 128, 8)
    >>> costs = call_costs(shape, torch.tensor([3, 0, 4, 1]))
    >>> costs.flops, costs.weight_bytes == 2 * 3 * 256 * 128 * FP4_BYTES_PER_WEIGHT
    (786432.0, True)
    """
    weights_per_expert = 3 * shape.hidden * shape.intermediate_hidden
    num_slots = int(received_tokens.sum()) / shape.num_ranks
    num_active = (received_tokens.view(shape.num_ranks, -1) > 0).sum(dim=1).max()
    # A token comes with a scale byte per 32 values and goes back as BF16.
    bytes_per_slot = shape.hidden * (33 / 32 + 2)
    remote_share = (shape.num_ranks - 1) / shape.num_ranks
    return CallCosts(
        flops=2.0 * num_slots * weights_per_expert,
        weight_bytes=int(num_active) * weights_per_expert * FP4_BYTES_PER_WEIGHT,
        link_bytes=num_slots * remote_share * bytes_per_slot,
    )
