"""A whole expert-parallel MoE layer as one persistent CUDA kernel, on GPUs or emulated on a CPU.

Public names are imported when they are first used: `import deep_moe` loads neither torch nor CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .lazy import names_on_use

if TYPE_CHECKING:
    from . import activations, balancing, checkpoint, compat, integrations
    from .biases.per_expert import (
        MegaMoEBiases,
        inverse_transform_biases,
        transform_biases_for_mega_moe,
    )
    from .errors import (
        CacheError,
        CheckpointError,
        CompileError,
        DeepMoEError,
        ForeignTokensError,
        LostDomainError,
        MegaMoEError,
        MegaMoETimeoutError,
        MissingPackageError,
        RequantizationWarning,
    )
    from .formats.mx import dequantize_mxfp8, quantize_mxfp8
    from .formats.nvfp4 import dequantize_nvfp4_tokens, quantize_nvfp4_tokens
    from .fused.buffer import SymmBuffer, buffer_size, get_symm_buffer_for_mega_moe
    from .fused.compiling_kernels import CompilingKernels, compile_ahead
    from .fused.emulated_ranks import EmulatedRanks
    from .fused.input_preparation import prepare_inputs, route_and_prepare_inputs
    from .fused.mega_moe import fp8_fp4_mega_moe, mega_moe
    from .heuristics.router import Router
    from .split.all_to_all_layer import EPAll2AllLayer, EPAllToAllLayoutDesc
    from .split.domain_groups import DomainGroups, make_domain_groups
    from .split.emulated_all_to_all import EmulatedAllToAll
    from .split.emulated_throughput import EmulatedThroughputAllToAll
    from .split.grouped_experts import (
        GroupedExperts,
        grouped_experts,
        grouped_experts_workspace_size,
    )
    from .split.handle import Dispatched, DispatchHandle
    from .split.layer import DispatchMetaInfo, EPLowLatencyAllToAllLayer
    from .split.low_latency import LowLatencyAllToAll
    from .split.throughput import AllToAll, AllToAllHandle, Received
    from .split.throughput_moe import ThroughputMoE
    from .split.two_level import TwoLevelMoE
    from .split.two_level_low_latency import TwoLevelLowLatencyAllToAll
    from .split.two_level_throughput import TwoLevelAllToAll
    from .training.frozen import frozen_weights
    from .training.functional import moe
    from .training.grouped_product import grouped_product
    from .training.layer import MoELayer
    from .training.quantized_activation import quantized_activation
    from .weights.int4.quantizing import dequantize_int4, quantize_int4
    from .weights.layers import MegaMoEWeights
    from .weights.mxfp4.quantizing import dequantize_mxfp4, quantize_mxfp4
    from .weights.nvfp4.quantizing import dequantize_nvfp4, quantize_nvfp4
    from .weights.transform import (
        empty_weights_for_mega_moe,
        inverse_transform_weights,
        transform_weights_for_mega_moe,
    )

__version__ = "0.1.0"

if not (Path(__file__).parent / "jit").is_dir():
    from .source_checkout import path_entry

    __path__.append(path_entry(Path(__file__).resolve().parent.parent))

_MODULES = {
    "AllToAll": "split.throughput",
    "AllToAllHandle": "split.throughput",
    "CacheError": "errors",
    "CheckpointError": "errors",
    "CompileError": "errors",
    "CompilingKernels": "fused.compiling_kernels",
    "DeepMoEError": "errors",
    "DispatchHandle": "split.handle",
    "DispatchMetaInfo": "split.layer",
    "Dispatched": "split.handle",
    "DomainGroups": "split.domain_groups",
    "EPAll2AllLayer": "split.all_to_all_layer",
    "EPAllToAllLayoutDesc": "split.all_to_all_layer",
    "EPLowLatencyAllToAllLayer": "split.layer",
    "EmulatedAllToAll": "split.emulated_all_to_all",
    "EmulatedRanks": "fused.emulated_ranks",
    "ForeignTokensError": "errors",
    "GroupedExperts": "split.grouped_experts",
    "LostDomainError": "errors",
    "EmulatedThroughputAllToAll": "split.emulated_throughput",
    "LowLatencyAllToAll": "split.low_latency",
    "MegaMoEBiases": "biases.per_expert",
    "MegaMoEError": "errors",
    "MegaMoETimeoutError": "errors",
    "MegaMoEWeights": "weights.layers",
    "MoELayer": "training.layer",
    "MissingPackageError": "errors",
    "Received": "split.throughput",
    "RequantizationWarning": "errors",
    "Router": "heuristics.router",
    "SymmBuffer": "fused.buffer",
    "ThroughputMoE": "split.throughput_moe",
    "TwoLevelAllToAll": "split.two_level_throughput",
    "TwoLevelLowLatencyAllToAll": "split.two_level_low_latency",
    "TwoLevelMoE": "split.two_level",
    "buffer_size": "fused.buffer",
    "compile_ahead": "fused.compiling_kernels",
    "dequantize_int4": "weights.int4.quantizing",
    "dequantize_mxfp4": "weights.mxfp4.quantizing",
    "dequantize_mxfp8": "formats.mx",
    "dequantize_nvfp4": "weights.nvfp4.quantizing",
    "dequantize_nvfp4_tokens": "formats.nvfp4",
    "empty_weights_for_mega_moe": "weights.transform",
    "fp8_fp4_mega_moe": "fused.mega_moe",
    "frozen_weights": "training.frozen",
    "get_symm_buffer_for_mega_moe": "fused.buffer",
    "grouped_experts": "split.grouped_experts",
    "grouped_experts_workspace_size": "split.grouped_experts",
    "grouped_product": "training.grouped_product",
    "inverse_transform_biases": "biases.per_expert",
    "inverse_transform_weights": "weights.transform",
    "mega_moe": "fused.mega_moe",
    "make_domain_groups": "split.domain_groups",
    "moe": "training.functional",
    "quantized_activation": "training.quantized_activation",
    "prepare_inputs": "fused.input_preparation",
    "quantize_int4": "weights.int4.quantizing",
    "quantize_mxfp4": "weights.mxfp4.quantizing",
    "quantize_mxfp8": "formats.mx",
    "quantize_nvfp4": "weights.nvfp4.quantizing",
    "quantize_nvfp4_tokens": "formats.nvfp4",
    "route_and_prepare_inputs": "fused.input_preparation",
    "transform_biases_for_mega_moe": "biases.per_expert",
    "transform_weights_for_mega_moe": "weights.transform",
}
_SUBMODULES = ("activations", "balancing", "checkpoint", "compat", "integrations")

__all__ = [
    "AllToAll",
    "AllToAllHandle",
    "CacheError",
    "CheckpointError",
    "CompileError",
    "CompilingKernels",
    "DeepMoEError",
    "DispatchHandle",
    "DispatchMetaInfo",
    "Dispatched",
    "DomainGroups",
    "EPAll2AllLayer",
    "EPAllToAllLayoutDesc",
    "EPLowLatencyAllToAllLayer",
    "EmulatedAllToAll",
    "EmulatedRanks",
    "EmulatedThroughputAllToAll",
    "ForeignTokensError",
    "GroupedExperts",
    "LostDomainError",
    "LowLatencyAllToAll",
    "MegaMoEBiases",
    "MegaMoEError",
    "MegaMoETimeoutError",
    "MegaMoEWeights",
    "MissingPackageError",
    "MoELayer",
    "Received",
    "RequantizationWarning",
    "Router",
    "SymmBuffer",
    "ThroughputMoE",
    "TwoLevelAllToAll",
    "TwoLevelLowLatencyAllToAll",
    "TwoLevelMoE",
    "activations",
    "balancing",
    "buffer_size",
    "checkpoint",
    "compat",
    "compile_ahead",
    "dequantize_int4",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_nvfp4_tokens",
    "empty_weights_for_mega_moe",
    "fp8_fp4_mega_moe",
    "frozen_weights",
    "get_symm_buffer_for_mega_moe",
    "grouped_experts",
    "grouped_experts_workspace_size",
    "grouped_product",
    "integrations",
    "inverse_transform_biases",
    "inverse_transform_weights",
    "make_domain_groups",
    "mega_moe",
    "moe",
    "prepare_inputs",
    "quantize_int4",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_nvfp4_tokens",
    "quantized_activation",
    "route_and_prepare_inputs",
    "transform_biases_for_mega_moe",
    "transform_weights_for_mega_moe",
]

if not TYPE_CHECKING:  # so that type checkers find names that do not exist
    __getattr__, __dir__ = names_on_use(__name__, _MODULES, _SUBMODULES)
