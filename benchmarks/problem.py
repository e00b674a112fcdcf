"""The problem that is timed: what a call of it costs at least, a sample of its result from the
reference, and its weights for kernels that know FP8 only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_moe.activations import Activation
from deep_moe.heuristics import MoEShape
from deep_moe.targets import target_of_device
from deep_moe.targets.target import TargetWeights
from deep_moe.trial.bounds import Bounds, SlotBounds, combined_bounds, expert_bounds
from deep_moe.trial.comparison import Comparison, compare
from deep_moe.trial.real_size import expert_layer, rank_layer
from deep_moe.trial.reference import with_shared_slots
from deep_moe.trial.synthetic import Layer, Tokens
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights, one_expert


def rank_weights(shape: MoEShape, rank: int, seed: int, device: torch.device) -> Layer:
    """A rank's experts, with scales that the device's kernel applies as they are."""
    return rank_layer(shape, rank, seed, device, _on_target(shape, device).scale_block)


def _on_target(shape: MoEShape, device: torch.device) -> TargetWeights:
    return target_of_device(device).weights_of(shape.weights, shape.token_format)


def bytes_per_weight(layer: Layer) -> float:
    """Scales are counted with the weights that they belong to.

    >>> l1 = LayerWeights(torch.zeros(1, 256, 64).char(), torch.zeros(1, 256, 1).int())
    >>> l2 = LayerWeights(torch.zeros(1, 128, 64).char(), torch.zeros(1, 128, 1).int())
    >>> bytes_per_weight(Layer(l1, l2)), 17 / 32
    (0.53125, 0.53125)
    """
    num_bytes = sum(tensor.nbytes for pair in (layer.l1, layer.l2) for tensor in pair)
    num_rows = layer.l1.weight.shape[:2].numel()
    hidden = layer.l2.weight.shape[1]
    return num_bytes / (num_rows * hidden * 3 / 2)


def reference_sample(
    shape: MoEShape,
    tokens: Tokens,
    rows: torch.Tensor,
    seed: int,
    on_target: TargetWeights,
    activation: Activation,
) -> Bounds:
    """The bounds of some tokens' outputs on a GPU; the experts they name are made again one by
    one."""
    device = tokens.x.device
    numerics = on_target.numerics
    x = numerics.tokens(tokens.x[rows], tokens.x_sf[rows])

    def of_expert(expert_idx: int, token_idx: torch.Tensor, weights: torch.Tensor) -> SlotBounds:
        layer = expert_layer(shape, expert_idx, seed, device, on_target.scale_block)
        return expert_bounds(
            x[token_idx],
            weights,
            one_expert(layer.l1, 0),
            one_expert(layer.l2, 0),
            numerics=numerics,
            sum_bits=numerics.sum_bits,
            activation=activation,
        )

    num_experts = shape.num_experts + shape.num_shared_experts
    routing = with_shared_slots(
        tokens.topk_idx[rows], tokens.topk_weights[rows], num_experts, shape.num_shared_experts
    )
    return combined_bounds(*routing, num_experts, shape.hidden, of_expert)


def checked_sample(
    shape: MoEShape,
    tokens: Tokens,
    y: torch.Tensor,
    num_checked_tokens: int,
    seed: int,
    activation: Activation,
) -> Comparison:
    """Some tokens of a call's result beside the reference. RuntimeError if they differ."""
    count = min(num_checked_tokens, tokens.num_tokens)
    rows = torch.linspace(0, tokens.num_tokens - 1, count, device=y.device).long()
    expected = reference_sample(shape, tokens, rows, seed, _on_target(shape, y.device), activation)
    comparison = compare(y[rows], expected)
    if not comparison.is_right:
        raise RuntimeError(f"the result differs from the reference: {comparison}")
    return comparison


def fp8_weights(
    name: str, weights: LayerWeights, block_rows: int, block_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the format `name` as E4M3 with one float32 scale per block: [E, N, K] and
    [E, N/rows, K/columns]. A block of 0 columns is a whole row. Weights that have such scales
    keep their values."""
    known = weight_format(name)
    values, scales = [], []
    for one in zip(*weights, strict=True):
        dense = known.dequantize(one).float()
        columns = block_columns or dense.shape[1]
        blocks = dense.unflatten(1, (-1, columns)).unflatten(0, (-1, block_rows))
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=2.0**-100) / 448
        values.append((blocks / scale).reshape(dense.shape).to(torch.float8_e4m3fn))
        scales.append(scale.squeeze(3).squeeze(1))
    return torch.stack(values), torch.stack(scales)


@dataclass(frozen=True)
class MachineRates:
    """What one GPU has been seen to do; the defaults are an H200's, measured 2026-11-20."""

    weight_bytes_per_s: float = 4.44e12  # reads from HBM
    flops: float = 1.49e15  # dense FP8 product, 8192^3
    link_bytes_per_s: float = 394e9  # copies to or from peers, each way
    gpu: str = "NVIDIA H200"

    @classmethod
    def of_device(cls, device: torch.device) -> MachineRates:
        is_gpu = device.type == "cuda"
        return cls.of(torch.cuda.get_device_name(device) if is_gpu else "emulator")

    @classmethod
    def of(cls, gpu: str) -> MachineRates:
        """gpu: as CUDA names it. An H200's rates, under its name, for one that was not measured.

        >>> MachineRates.of("NVIDIA H100 80GB HBM3").weight_bytes_per_s / 1e12
        3.11
        >>> MachineRates.of("emulator").gpu
        'NVIDIA H200'
        """
        return next((rates for rates in MEASURED_RATES if rates.gpu == gpu), cls())


# As `python -m benchmarks.rates` takes them. An H100's: 300 in a row, one GPU of 700 W, 2026-11-23.
# Its links are those of an H200; they were not measured.
MEASURED_RATES = (MachineRates(), MachineRates(3.11e12, 1.38e15, gpu="NVIDIA H100 80GB HBM3"))


@dataclass(frozen=True)
class CallCosts:
    """What a rank's part of a call moves and computes."""

    flops: float  # the mean over ranks
    busiest_flops: float  # the rank with most
    weight_bytes: float  # the rank that reads most
    link_bytes: float  # in one direction, the busiest link

    def floor_s(self, rates: MachineRates) -> float:
        """The time below which no kernel can be."""
        return max(
            self.busiest_flops / rates.flops,
            self.weight_bytes / rates.weight_bytes_per_s,
            self.link_bytes / rates.link_bytes_per_s,
        )


def call_costs(shape: MoEShape, sent: torch.Tensor, bytes_per_weight: float) -> CallCosts:
    """sent: [ranks, experts of all ranks], tokens that each rank has for each expert. A rank reads
    the weights of those of its experts that received a token, and of the shared ones, to which all
    of its own tokens go.

    >>> shape = MoEShape(2, 4, 2, 256, 128, 8)
    >>> costs = call_costs(shape, torch.tensor([[3, 0, 2, 1], [0, 0, 2, 0]]), 0.5)
    >>> costs.flops, costs.busiest_flops, costs.weight_bytes == 2 * 3 * 256 * 128 * 0.5
    (786432.0, 983040.0, True)
    """
    weights_per_expert = 3 * shape.hidden * shape.intermediate_hidden
    per_rank = sent.view(shape.num_ranks, shape.num_ranks, -1)  # [source, owner, local expert]
    slots = per_rank.sum(dim=2)
    received = slots.sum(dim=0)
    num_active = (per_rank.sum(dim=0) > 0).sum(dim=1).max() + shape.num_shared_experts
    computed = received + sent.sum(dim=1) // shape.num_topk * shape.num_shared_experts
    # A token comes with a scale byte per 32 values and goes back as BF16.
    bytes_there, bytes_back = shape.hidden * 33 / 32, shape.hidden * 2.0
    away = slots - slots.diag().diag()
    sends, receives = away.sum(dim=1), away.sum(dim=0)
    link_bytes = torch.maximum(
        sends * bytes_there + receives * bytes_back, receives * bytes_there + sends * bytes_back
    )
    return CallCosts(
        flops=2.0 * int(computed.sum()) / shape.num_ranks * weights_per_expert,
        busiest_flops=2.0 * int(computed.max()) * weights_per_expert,
        weight_bytes=int(num_active) * weights_per_expert * bytes_per_weight,
        link_bytes=float(link_bytes.max()),
    )
