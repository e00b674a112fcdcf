"""The steps in PyTorch: for CPUs and for float64."""

from __future__ import annotations

import torch

from deep_moe.activations import GatedActivation
from deep_moe.formats.block_scaled import GROUP_SIZE, quantize_e4m3_groups, ue8m0_to_float
from deep_moe.formats.float_scaled import dequantize_e4m3_float
from deep_moe.heuristics.products import K_GROUP
from deep_moe.heuristics.training import ROW_ALIGNMENT, num_padded_rows

from .quantized import (
    QuantizedColumns,
    QuantizedWeights,
    num_other_bytes,
    parts_of_rows,
    quantized_columns,
    quantized_rows,
    quantized_weights,
)
from .rows import Rows
from .steps import Biases


class PlainSteps:
    """BF16 is computed with in float32 and rounded at the end of each step; float64 as it is."""

    def route(self, topk_idx: torch.Tensor, num_experts: int) -> Rows:
        experts = topk_idx.reshape(-1).long()
        is_used = (experts >= 0) & (experts < num_experts)
        experts = experts.where(is_used, num_experts)
        order = experts.argsort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        padded = (counts[:-1] + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT
        offs = padded.cumsum(0)
        # Place of each slot among its expert's; slots without an expert are sorted last.
        sorted_experts = experts[order]
        place = torch.arange(len(order), device=order.device)
        place -= (counts.cumsum(0) - counts)[sorted_experts]
        begin = torch.cat([offs - padded, offs.new_full((1,), 0)])
        row = (begin[sorted_experts] + place).where(sorted_experts < num_experts, -1)
        row_of_slot = torch.empty_like(row).scatter_(0, order, row)
        num_rows = num_padded_rows(len(order), num_experts)
        # One row more takes the slots that have none.
        slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=order.device)
        slot_of_row[row_of_slot] = torch.arange(len(order), device=order.device)
        return Rows(
            offs.int(), row_of_slot.view(topk_idx.shape).int(), slot_of_row[:num_rows].int()
        )

    def gather(
        self, tokens: torch.Tensor, rows: Rows, *, rounds_to_mxfp8: bool = False
    ) -> torch.Tensor:
        slots = rows.slot_of_row.long()
        gathered = tokens[slots.clamp(min=0) // rows.num_topk]
        gathered = gathered.masked_fill((slots < 0).unsqueeze(1), 0)
        return mxfp8_rounded(gathered) if rounds_to_mxfp8 else gathered

    def activate(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        biases: Biases | None,
        activation: GatedActivation,
        rows: Rows,
        *,
        rounds_to_mxfp8: bool = False,
        quantizes: bool = False,
    ) -> torch.Tensor:
        wide_gate, wide_up = _with_biases(gate, up, biases, rows)
        activated = activation(wide_gate, wide_up).to(gate.dtype)
        activated = activated.masked_fill((rows.slot_of_row < 0).unsqueeze(1), 0)
        if quantizes:
            return quantized_rows(activated)
        return mxfp8_rounded(activated) if rounds_to_mxfp8 else activated

    def activate_backward(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        biases: Biases | None,
        activation: GatedActivation,
        rows: Rows,
        *,
        d_activated: torch.Tensor,
        d_rows: torch.Tensor | None,
        topk_weights: torch.Tensor,
        d_gate: torch.Tensor,
        d_up: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide_gate, wide_up = _with_biases(gate, up, biases, rows)
        wide = wide_gate.dtype
        slots = rows.slot_of_row.long()
        is_padding = (slots < 0).unsqueeze(1)
        weight = topk_weights.reshape(-1)[slots.clamp(min=0)].unsqueeze(1)
        gate_factor, up_factor = activation.gate_factor(wide_gate), activation.up_factor(wide_up)
        activated = gate_factor * up_factor
        d_wide = d_activated.to(wide)
        d_weight = (activated * d_wide).sum(1)
        if biases is not None:
            assert d_rows is not None
            experts = _expert_of_row(rows)
            d_weight = d_weight + (biases.down[experts] * d_rows.to(wide)).sum(1)
        d_weighted = d_wide * weight
        d_gate.copy_(
            (d_weighted * activation.gate_slope(wide_gate) * up_factor).masked_fill(is_padding, 0)
        )
        d_up.copy_(
            (d_weighted * activation.up_slope(wide_up) * gate_factor).masked_fill(is_padding, 0)
        )
        # One more takes what padding would give.
        d_topk_weights = topk_weights.new_zeros(topk_weights.numel() + 1)
        d_topk_weights[slots] = d_weight.to(topk_weights.dtype)
        weighted = (activated * weight).masked_fill(is_padding, 0).to(gate.dtype)
        return weighted, d_topk_weights[:-1].view(topk_weights.shape)

    def scatter(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None,
        rows: Rows,
        *,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        wide = _wide(first.dtype)
        total = first.new_zeros(rows.num_tokens, first.shape[1], dtype=wide)
        experts = _expert_of_row(rows) if bias is not None else None
        for k in range(rows.num_topk):
            row = rows.row_of_slot[:, k].long()
            is_used = (row >= 0).unsqueeze(1)
            row = row.clamp(min=0)
            value = first[row].to(wide)
            if second is not None:
                value = value + second[row].to(wide)
            if bias is not None:
                assert experts is not None
                value = value + bias[experts[row]]
            if topk_weights is not None:
                value = topk_weights[:, k : k + 1] * value
            total = (total + value).where(is_used, total)
        return total.to(first.dtype) if out is None else out.copy_(total)

    def quantize_rows(self, values: torch.Tensor) -> torch.Tensor:
        return quantized_rows(values)

    def dequantize_rows(self, rows: torch.Tensor, num_values: int) -> torch.Tensor:
        return dequantize_e4m3_float(*parts_of_rows(rows, num_values), torch.bfloat16)

    def quantize_weights(self, weights: torch.Tensor) -> QuantizedWeights:
        return quantized_weights(weights)

    def quantize_weights_both_ways(
        self, weights: torch.Tensor
    ) -> tuple[QuantizedWeights, QuantizedWeights]:
        return quantized_weights(weights), quantized_weights(weights.transpose(1, 2))

    def num_differences(self, weights: torch.Tensor, quantized: QuantizedWeights) -> torch.Tensor:
        now = quantized_weights(weights)
        values = num_other_bytes(now.values, quantized.values)
        return values + num_other_bytes(now.scales, quantized.scales)

    def quantized_product(
        self, inputs: torch.Tensor, weights: QuantizedWeights, rows: Rows
    ) -> torch.Tensor:
        _num_experts, num_columns, num_values = weights.values.shape
        values, scales = parts_of_rows(inputs, num_values)
        wide = dequantize_e4m3_float(values, scales)
        product = inputs.new_zeros(inputs.shape[0], num_columns)
        begin = 0
        for expert, end in enumerate(rows.offs.tolist()):
            blocks = weights.scales[expert].repeat_interleave(K_GROUP, 0)[:num_columns]
            matrix = weights.values[expert].float() * blocks.repeat_interleave(K_GROUP, 1)
            product[begin:end] = (wide[begin:end] @ matrix.t()).to(product.dtype)
            begin = end
        return product

    def quantize_columns(
        self, values: torch.Tensor, rows: Rows, *, gathers: bool = False
    ) -> QuantizedColumns:
        return quantized_columns(self.gather(values, rows) if gathers else values, rows.offs)

    def quantize_both(
        self, values: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, QuantizedColumns]:
        return quantized_rows(values), quantized_columns(values, rows.offs)

    def quantized_weight_gradient(
        self,
        inputs: QuantizedColumns,
        d_outputs: QuantizedColumns,
        rows: Rows,
        *,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        offs = rows.offs.tolist()
        sizes = inputs.values.shape[1], d_outputs.values.shape[1]
        gradient = sums
        if gradient is None:
            gradient = torch.empty(len(offs), *sizes, dtype=torch.bfloat16, device=rows.offs.device)
        begin, block = 0, 0
        for expert, end in enumerate(offs):
            num_blocks = max(-(-(end - begin) // K_GROUP), 1)
            own = slice(block, block + num_blocks)
            x, d = (
                part.values[own].float() * part.scales[own].repeat_interleave(K_GROUP, 1)[..., None]
                for part in (inputs, d_outputs)
            )
            product = torch.einsum("bir,bjr->ij", x, d).to(gradient.dtype)
            gradient[expert] = product if sums is None else sums[expert] + product
            begin, block = end, block + num_blocks
        return gradient

    def round_weights(self, weights: torch.Tensor) -> torch.Tensor:
        rounded = torch.empty_like(weights)
        for expert, values in enumerate(weights):  # one at a time: each is widened
            rounded[expert] = mxfp8_rounded(values.t().contiguous()).t()
        return rounded


def mxfp8_rounded(values: torch.Tensor) -> torch.Tensor:
    """BF16 [..., K] as E4M3 with a UE8M0 scale for every 32, and back."""
    groups = values.float().unflatten(-1, (-1, GROUP_SIZE))
    quantized, sf = quantize_e4m3_groups(groups)
    scales = ue8m0_to_float(sf, torch.float32).unsqueeze(-1)
    return (quantized.float() * scales).flatten(-2).to(values.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _with_biases(
    gate: torch.Tensor, up: torch.Tensor, biases: Biases | None, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(gate.dtype)
    gate, up = gate.to(wide), up.to(wide)
    if biases is None:
        return gate, up
    experts = _expert_of_row(rows)
    return gate + biases.gate[experts], up + biases.up[experts]


def _expert_of_row(rows: Rows) -> torch.Tensor:
    """Of rows behind the last expert's end any."""
    row = torch.arange(rows.num_rows, dtype=torch.int32, device=rows.offs.device)
    experts = torch.searchsorted(rows.offs, row, right=True)
    return experts.clamp(max=rows.offs.shape[0] - 1)
