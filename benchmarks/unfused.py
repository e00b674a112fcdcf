"""The layer in five steps, as one has it without this library: NCCL's all-to-all, a grouped
product, SwiGLU, a grouped product, NCCL's all-to-all. Weights are FP8 with a scale per row: PyTorch
has no FP4 product for Hopper. With this library the steps are `deep_moe.ThroughputMoE`, which
benchmarks/split_path.py times beside these."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deep_moe.activations import Activation
from deep_moe.heuristics import MoEShape
from deep_moe.trial.calls import model_inputs
from deep_moe.trial.synthetic import Layer, Tokens

from .problem import fp8_weights

ROW_ALIGNMENT = 16  # rows of an expert start at a multiple of this


class UnfusedLayer:
    """One rank's part. Counts go to the host, as all-to-all needs them there."""

    def __init__(self, shape: MoEShape, layer: Layer, group: dist.ProcessGroup | None) -> None:
        self.shape = shape
        self.group = group
        self.w1, self.s1 = fp8_weights(shape.weights, layer.l1, 1, 0)
        self.w2, self.s2 = fp8_weights(shape.weights, layer.l2, 1, 0)

    def prepare(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens as this path takes them, E4M3 with one scale each."""
        return _quantize_rows(model_inputs(tokens)[0].float())

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        shape, device = self.shape, x.device
        num_ranks, num_local = shape.num_ranks, shape.num_experts_per_rank
        # 1. To the ranks of the experts: slots in the order of experts.
        slots = topk_idx.flatten()
        order = slots.argsort()
        sent = torch.bincount(slots, minlength=shape.num_experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        send_sizes = sent.view(num_ranks, -1).sum(1).tolist()
        receive_sizes = received.view(num_ranks, -1).sum(1).tolist()
        source_rows = order // shape.num_topk

        def to_experts(values: torch.Tensor) -> torch.Tensor:
            out = values.new_empty((sum(receive_sizes), *values.shape[1:]))
            dist.all_to_all_single(out, values, receive_sizes, send_sizes, group=self.group)
            return out

        rows = to_experts(x.view(torch.uint8)[source_rows]).view(x.dtype)
        sides = torch.stack([x_scale[source_rows], topk_weights.flatten()[order]], dim=1)
        scale, weight = to_experts(sides).unbind(1)
        # Rows came by source rank, then expert; they go together by expert.
        counts = received.view(num_ranks, num_local)
        experts = torch.arange(num_local, device=device).repeat(num_ranks)
        expert_of_row = experts.repeat_interleave(counts.flatten(), output_size=rows.shape[0])
        by_expert = expert_of_row.argsort(stable=True)
        per_expert = counts.sum(0)
        padded = (per_expert + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
        ends = padded.cumsum(0)
        starts = ends - padded
        firsts = per_expert.cumsum(0) - per_expert
        sorted_experts = expert_of_row[by_expert]
        place = torch.arange(rows.shape[0], device=device)
        place = place - firsts[sorted_experts] + starts[sorted_experts]
        num_padded = rows.shape[0] + num_local * ROW_ALIGNMENT
        tiles = rows.view(torch.uint8).new_zeros((num_padded, shape.hidden))
        tiles[place] = rows.view(torch.uint8)[by_expert]
        tile_scale = scale.new_ones(num_padded)
        tile_scale[place] = scale[by_expert]
        tile_weight = weight.new_zeros(num_padded)
        tile_weight[place] = weight[by_expert]
        ends = ends.int()
        out = self._experts(tiles.view(x.dtype), tile_scale, tile_weight, ends, activation)
        # 5. Back, and the sum over slots.
        answers = torch.empty((rows.shape[0], shape.hidden), dtype=out.dtype, device=device)
        answers[by_expert] = out[place]
        returned = torch.empty((slots.numel(), shape.hidden), dtype=out.dtype, device=device)
        dist.all_to_all_single(returned, answers, send_sizes, receive_sizes, group=self.group)
        in_order = torch.empty_like(returned)
        in_order[order] = returned
        return in_order.view(-1, shape.num_topk, shape.hidden).float().sum(1).bfloat16()

    def _experts(
        self,
        rows: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        ends: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        """Steps 2 to 4, of rows by expert with a scale and a routing weight each."""
        sums = grouped_product(rows, scale, self.w1, self.s1, ends)
        activated = activation.of_linear1(sums.float()) * weight.unsqueeze(1)
        return grouped_product(*_quantize_rows(activated), self.w2, self.s2, ends)


def grouped_product(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """bfloat16 [rows, N]: each expert's rows, which end at `ends`, times its [N, K] weights. Rows
    behind the last expert's are left as they are."""
    if rows.is_cuda:
        return torch._scaled_grouped_mm(
            rows,
            weights.transpose(1, 2),
            row_scale,
            weight_scale.squeeze(2),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    out = torch.zeros(rows.shape[0], weights.shape[1])
    start = 0
    for expert_idx, end in enumerate(ends.tolist()):
        scaled = weights[expert_idx].float() * weight_scale[expert_idx]
        out[start:end] = rows[start:end].float() * row_scale[start:end, None] @ scaled.T
        start = end
    return out.bfloat16()


def _quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one float32 scale per row."""
    scale = values.abs().amax(dim=1).clamp(min=2.0**-100) / 448
    return (values / scale.unsqueeze(1)).to(torch.float8_e4m3fn), scale
