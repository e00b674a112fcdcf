"""The steps by our kernels: on a GPU, or in the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_moe.activations import GatedActivation
from deep_moe.formats.block_scaled import GROUP_SIZE
from deep_moe.fused.gpu import Gpu
from deep_moe.heuristics.products import K_GROUP
from deep_moe.heuristics.training import (
    VALUES_PER_CHUNK,
    ActivateRowsBackwardConfig,
    ActivateRowsConfig,
    CountSlotsConfig,
    DequantizeRowsConfig,
    GatherRowsConfig,
    PlaceSlotsConfig,
    QuantizeColumnsConfig,
    QuantizeRowsConfig,
    QuantizeWeightsConfig,
    RoundWeightsConfig,
    ScanCountsConfig,
    ScatterRowsConfig,
    num_padded_rows,
)
from deep_moe.jit.cpp_structs import CppStruct
from deep_moe.jit.kernel_args import (
    ActivateRowsArgs,
    ActivateRowsBackwardArgs,
    GatherRowsArgs,
    QuantizeColumnsArgs,
    QuantizeRowsArgs,
    QuantizeWeightsArgs,
    RoundWeightsArgs,
    RouteSlotsArgs,
    RowsArgs,
    ScatterRowsArgs,
)

from .grouped_product import multiply, sum_rows
from .launching import config_of, launch
from .quantized import (
    QuantizedColumns,
    QuantizedWeights,
    max_row_blocks,
    parts_of_rows,
    quantized_width,
)
from .rows import Rows, aligned
from .steps import Biases


@dataclass(frozen=True)
class KernelSteps:
    """arch: a target's name. gpu: None in the emulator. All tensors are BF16 and contiguous, but
    for gate, up and their gradients, which may be halves of longer rows."""

    arch: str
    gpu: Gpu | None

    def route(self, topk_idx: torch.Tensor, num_experts: int) -> Rows:
        num_slots = topk_idx.numel()
        count, place = (
            config_of(
                kind,
                num_experts=num_experts,
                has_int32_topk_idx=topk_idx.dtype == torch.int32,
                arch=self.arch,
            )
            for kind in (CountSlotsConfig, PlaceSlotsConfig)
        )
        num_segments = count.num_segments(num_slots)

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=topk_idx.device)

        counts = ints(num_segments, num_experts)
        rows = Rows(
            ints(num_experts),
            ints(*topk_idx.shape),
            ints(num_padded_rows(num_slots, num_experts)),
        )
        args = RouteSlotsArgs(
            topk_idx.data_ptr(),
            counts.data_ptr(),
            rows.offs.data_ptr(),
            rows.row_of_slot.data_ptr(),
            rows.slot_of_row.data_ptr(),
            num_slots,
            rows.num_rows,
            num_segments,
        )
        read = {"topk_idx": topk_idx}
        written = {
            "segment_counts": counts,
            "offs": rows.offs,
            "row_of_slot": rows.row_of_slot,
            "slot_of_row": rows.slot_of_row,
        }
        launch(self.gpu, count, args, num_segments, read, written)
        scan = config_of(ScanCountsConfig.of_experts, num_experts=num_experts, arch=self.arch)
        launch(self.gpu, scan, args, 1, read, written)
        launch(self.gpu, place, args, num_segments, read, written)
        return rows

    def gather(
        self, tokens: torch.Tensor, rows: Rows, *, rounds_to_mxfp8: bool = False
    ) -> torch.Tensor:
        tokens = aligned(tokens)
        hidden = tokens.shape[1]
        gathered = tokens.new_empty(rows.num_rows, hidden)
        num_chunks = hidden // VALUES_PER_CHUNK
        args = GatherRowsArgs(
            _rows_args(rows),
            rows.row_of_slot.data_ptr(),
            tokens.data_ptr(),
            gathered.data_ptr(),
            rows.num_tokens,
            rows.num_topk,
            num_chunks,
        )
        config = config_of(GatherRowsConfig, rounds_to_mxfp8=rounds_to_mxfp8, arch=self.arch)
        read = {"tokens": tokens, "row_of_slot": rows.row_of_slot, **_row_tensors(rows)}
        num_ctas = config.num_ctas_of(rows.num_tokens, num_chunks, rows.num_rows)
        launch(self.gpu, config, args, num_ctas, read, {"gathered": gathered})
        return gathered

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
        intermediate = gate.shape[1]
        width = quantized_width(intermediate) if quantizes else intermediate
        activated = gate.new_empty(rows.num_rows, width)
        args = ActivateRowsArgs(
            _rows_args(rows),
            gate.data_ptr(),
            up.data_ptr(),
            0 if biases is None else biases.gate.data_ptr(),
            0 if biases is None else biases.up.data_ptr(),
            activated.data_ptr(),
            intermediate // VALUES_PER_CHUNK,
            gate.stride(0) // VALUES_PER_CHUNK,
        )
        config = config_of(
            ActivateRowsConfig,
            applied=activation,
            has_biases=biases is not None,
            rounds_to_mxfp8=rounds_to_mxfp8,
            quantizes=quantizes,
            arch=self.arch,
        )
        read = {"gate": gate, "up": up, **_row_tensors(rows), **_bias_tensors(biases)}
        launch(
            self.gpu, config, args, config.num_ctas(rows.num_rows), read, {"activated": activated}
        )
        return activated

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
        activated = torch.empty_like(d_activated)
        d_topk_weights = torch.zeros_like(topk_weights)
        args = ActivateRowsBackwardArgs(
            _rows_args(rows),
            gate.data_ptr(),
            up.data_ptr(),
            0 if biases is None else biases.gate.data_ptr(),
            0 if biases is None else biases.up.data_ptr(),
            d_activated.data_ptr(),
            topk_weights.data_ptr(),
            0 if biases is None or d_rows is None else d_rows.data_ptr(),
            0 if biases is None else biases.down.data_ptr(),
            activated.data_ptr(),
            d_gate.data_ptr(),
            d_up.data_ptr(),
            d_topk_weights.data_ptr(),
            gate.shape[1] // VALUES_PER_CHUNK,
            0 if d_rows is None else d_rows.shape[1] // VALUES_PER_CHUNK,
            gate.stride(0) // VALUES_PER_CHUNK,
            d_gate.stride(0) // VALUES_PER_CHUNK,
        )
        config = config_of(
            ActivateRowsBackwardConfig,
            applied=activation,
            has_biases=biases is not None,
            arch=self.arch,
        )
        read = {
            "gate": gate,
            "up": up,
            "d_activated": d_activated,
            "topk_weights": topk_weights,
            **_row_tensors(rows),
            **_bias_tensors(biases),
        }
        if biases is not None and d_rows is not None:
            read["d_rows"] = d_rows
        written = {
            "activated": activated,
            "d_gate": d_gate,
            "d_up": d_up,
            "d_topk_weights": d_topk_weights,
        }
        launch(self.gpu, config, args, config.num_ctas(rows.num_rows), read, written)
        return activated, d_topk_weights

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
        hidden = first.shape[1]
        num_chunks = hidden // VALUES_PER_CHUNK
        tokens = first.new_empty(rows.num_tokens, hidden) if out is None else out
        args = ScatterRowsArgs(
            rows.offs.data_ptr(),
            rows.row_of_slot.data_ptr(),
            first.data_ptr(),
            0 if second is None else second.data_ptr(),
            0 if topk_weights is None else topk_weights.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            tokens.data_ptr(),
            rows.offs.shape[0],
            rows.num_tokens,
            rows.num_topk,
            num_chunks,
        )
        config = config_of(
            ScatterRowsConfig,
            num_sources=1 if second is None else 2,
            has_topk_weights=topk_weights is not None,
            has_biases=bias is not None,
            arch=self.arch,
        )
        given = {"second": second, "topk_weights": topk_weights, "bias": bias}
        read = {"first": first, "offs": rows.offs, "row_of_slot": rows.row_of_slot}
        read |= {name: tensor for name, tensor in given.items() if tensor is not None}
        warps_per_token = -(-num_chunks // 32)
        num_ctas = config.num_ctas(rows.num_tokens * warps_per_token)
        launch(self.gpu, config, args, num_ctas, read, {"tokens": tokens})
        return tokens

    def quantize_rows(self, values: torch.Tensor) -> torch.Tensor:
        values = aligned(values)
        num_rows, num_values = values.shape
        quantized = values.new_empty(num_rows, quantized_width(num_values))
        num_chunks = num_values // VALUES_PER_CHUNK
        args = QuantizeRowsArgs(values.data_ptr(), quantized.data_ptr(), num_rows, num_chunks)
        config = config_of(QuantizeRowsConfig, arch=self.arch)
        num_ctas = config.num_ctas(num_rows)
        launch(self.gpu, config, args, num_ctas, {"values": values}, {"quantized": quantized})
        return quantized

    def dequantize_rows(self, rows: torch.Tensor, num_values: int) -> torch.Tensor:
        values = rows.new_empty(rows.shape[0], num_values)
        num_chunks = num_values // VALUES_PER_CHUNK
        args = QuantizeRowsArgs(values.data_ptr(), rows.data_ptr(), rows.shape[0], num_chunks)
        config = config_of(DequantizeRowsConfig, arch=self.arch)
        num_ctas = config.num_ctas(rows.shape[0])
        launch(self.gpu, config, args, num_ctas, {"quantized": rows}, {"values": values})
        return values

    def quantize_weights(self, weights: torch.Tensor) -> QuantizedWeights:
        if weights.is_contiguous():
            return self._quantized(weights, transposed=True)[0]
        return self._quantized(weights.transpose(1, 2), same=True)[0]

    def quantize_weights_both_ways(
        self, weights: torch.Tensor
    ) -> tuple[QuantizedWeights, QuantizedWeights]:
        if weights.is_contiguous():
            same, transposed = self._quantized(weights, same=True, transposed=True)
            return transposed, same
        same, transposed = self._quantized(weights.transpose(1, 2), same=True, transposed=True)
        return same, transposed

    def _quantized(
        self, weights: torch.Tensor, *, same: bool = False, transposed: bool = False
    ) -> list[QuantizedWeights]:
        """Of contiguous [experts, rows, columns]: in the same layout, transposed, or both."""
        weights = aligned(weights)
        num_experts, *sizes = weights.shape
        found = [
            QuantizedWeights(
                weights.new_empty(num_experts, *shape, dtype=torch.float8_e4m3fn),
                weights.new_empty(
                    num_experts, *(-(-size // K_GROUP) for size in shape), dtype=torch.float32
                ),
            )
            if is_wanted
            else None
            for is_wanted, shape in ((same, sizes), (transposed, sizes[::-1]))
        ]
        self._launch_weights(weights, found[0], found[1])
        return [one for one in found if one is not None]

    def num_differences(self, weights: torch.Tensor, quantized: QuantizedWeights) -> torch.Tensor:
        differences = torch.zeros(1, dtype=torch.int32, device=weights.device)
        if weights.is_contiguous():
            self._launch_weights(aligned(weights), None, quantized, differences)
        else:
            matrices = aligned(weights.transpose(1, 2))
            self._launch_weights(matrices, quantized, None, differences)
        return differences

    def _launch_weights(
        self,
        weights: torch.Tensor,
        same: QuantizedWeights | None,
        transposed: QuantizedWeights | None,
        differences: torch.Tensor | None = None,
    ) -> None:
        """Of contiguous [experts, rows, columns]: writes the results that are not None; or, with
        differences, compares them."""
        pointers: list[int] = []
        results: dict[str, torch.Tensor] = {}
        num_ctas = 0
        for name, one in (("same", same), ("transposed", transposed)):
            pointers += (0, 0) if one is None else (one.values.data_ptr(), one.scales.data_ptr())
            if one is not None:
                results |= {name: one.values, f"{name}_scales": one.scales}
                num_ctas = one.scales.numel()
        args = QuantizeWeightsArgs(
            weights.data_ptr(),
            *pointers,
            0 if differences is None else differences.data_ptr(),
            *weights.shape[1:],
        )
        config = config_of(
            QuantizeWeightsConfig,
            has_same=same is not None,
            has_transposed=transposed is not None,
            compares=differences is not None,
            arch=self.arch,
        )
        read, written = {"weights": weights}, results
        if differences is not None:
            read, written = read | results, {"num_differences": differences}
        launch(self.gpu, config, args, num_ctas, read, written)

    def quantized_product(
        self, inputs: torch.Tensor, weights: QuantizedWeights, rows: Rows
    ) -> torch.Tensor:
        _num_experts, num_columns, num_values = weights.values.shape
        values, scales = parts_of_rows(inputs, num_values)
        product = inputs.new_empty(rows.num_rows, num_columns)
        multiply(
            values,
            scales,
            weights.values,
            weights.scales,
            product,
            self.gpu,
            self.arch,
            expert_end=rows.offs,
        )
        return product

    def quantize_columns(
        self, values: torch.Tensor, rows: Rows, *, gathers: bool = False
    ) -> QuantizedColumns:
        return self._quantized_columns(values, rows, None, gathers=gathers)

    def quantize_both(
        self, values: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, QuantizedColumns]:
        quantized = values.new_empty(values.shape[0], quantized_width(values.shape[1]))
        return quantized, self._quantized_columns(values, rows, quantized)

    def _quantized_columns(
        self,
        values: torch.Tensor,
        rows: Rows,
        quantized: torch.Tensor | None,
        *,
        gathers: bool = False,
    ) -> QuantizedColumns:
        """quantized: where rows are stored, too, or None."""
        values = aligned(values)
        num_columns, num_experts = values.shape[1], rows.offs.shape[0]
        num_blocks = max_row_blocks(rows.num_rows, num_experts)
        num_column_blocks = num_columns // K_GROUP
        columns = QuantizedColumns(
            values.new_empty(num_blocks, num_columns, K_GROUP, dtype=torch.float8_e4m3fn),
            values.new_empty(num_blocks, num_column_blocks, dtype=torch.float32),
        )
        args = QuantizeColumnsArgs(
            _rows_args(rows),
            values.data_ptr(),
            columns.values.data_ptr(),
            columns.scales.data_ptr(),
            0 if quantized is None else quantized.data_ptr(),
            rows.num_topk,
            num_columns,
        )
        config = config_of(
            QuantizeColumnsConfig,
            gathers=gathers,
            stores_rows=quantized is not None,
            arch=self.arch,
        )
        read = {"values": values, **_row_tensors(rows)}
        written = {"columns": columns.values, "scales": columns.scales}
        if quantized is not None:
            written["quantized"] = quantized
        launch(self.gpu, config, args, num_blocks * num_column_blocks, read, written)
        return columns

    def quantized_weight_gradient(
        self,
        inputs: QuantizedColumns,
        d_outputs: QuantizedColumns,
        rows: Rows,
        *,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sums is not None and not sums.is_contiguous() and sums.mT.is_contiguous():
            self.quantized_weight_gradient(d_outputs, inputs, rows, sums=sums.mT)
            return sums
        if sums is not None and sums.is_contiguous() and sums.data_ptr() % 16 == 0:
            sum_rows(inputs, d_outputs, rows.offs, sums, self.gpu, self.arch, adds=True)
            return sums
        sizes = inputs.values.shape[1], d_outputs.values.shape[1]
        gradient = inputs.values.new_empty(rows.offs.shape[0], *sizes, dtype=torch.bfloat16)
        sum_rows(inputs, d_outputs, rows.offs, gradient, self.gpu, self.arch)
        return gradient if sums is None else sums.add_(gradient)

    def round_weights(self, weights: torch.Tensor) -> torch.Tensor:
        rounded = torch.empty_like(weights)
        num_groups = weights.shape[0] * weights.shape[1] // GROUP_SIZE
        num_pairs = weights.shape[2] // 2
        args = RoundWeightsArgs(weights.data_ptr(), rounded.data_ptr(), num_groups, num_pairs)
        config = config_of(RoundWeightsConfig, arch=self.arch)
        num_ctas = -(-num_groups * num_pairs // config.num_threads)
        launch(self.gpu, config, args, num_ctas, {"weights": weights}, {"rounded": rounded})
        return rounded


def _rows_args(rows: Rows) -> CppStruct:
    return RowsArgs(
        rows.offs.data_ptr(), rows.slot_of_row.data_ptr(), rows.offs.shape[0], rows.num_rows
    )


def _row_tensors(rows: Rows) -> dict[str, torch.Tensor]:
    return {"offs": rows.offs, "slot_of_row": rows.slot_of_row}


def _bias_tensors(biases: Biases | None) -> dict[str, torch.Tensor]:
    if biases is None:
        return {}
    return {"gate_bias": biases.gate, "up_bias": biases.up, "down_bias": biases.down}
