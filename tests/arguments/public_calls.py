"""Every public callable with arguments that it takes, small enough for the emulator."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

import deep_moe
from deep_moe.checkpoint import load_experts, save_experts
from deep_moe.compat import deep_ep, deep_gemm
from deep_moe.targets import target_of
from deep_moe.weights import weight_format
from deep_moe.weights.layers import LayerWeights
from tests.pairs import formats

# Of all layers here.
E, T, K, H, I = 4, 4, 2, 128, 128  # noqa: E741
SAVED = tempfile.TemporaryDirectory(prefix="deep_moe_saved_")  # until the process ends
SIZES = {
    "num_experts": E,
    "num_max_tokens_per_rank": T,
    "num_topk": K,
    "hidden": H,
    "intermediate_hidden": I,
}
Arguments = dict[str, Any]
# A function and what it is to be called with.
Call = tuple[Callable[..., Any], Arguments]


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def routing(dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    ids = torch.arange(T * K, dtype=dtype).reshape(T, K) % E
    return {"topk_idx": ids, "topk_weights": torch.full((T, K), 0.5)}


def source_weights(weights: str) -> tuple[Any, Any]:
    l1, l2 = bf16(E, 2 * I, H), bf16(E, H, I)
    if weights == "bf16":
        return l1, l2
    quantize = weight_format(weights).quantize
    block = next(own for own in target_of("sm_90a").weights if own.weights == weights).scale_block
    return quantize(l1.float(), block, 2), quantize(l2.float(), block, 1)


def transformed(pair: str, arch: str = "sm_90a") -> deep_moe.MegaMoEWeights:
    names = formats(pair)
    return deep_moe.transform_weights_for_mega_moe(*source_weights(names["weights"]), arch, **names)


def laid_out(pair: str, arch: str = "sm_90a") -> dict[str, Any]:
    weights = transformed(pair, arch)
    return {"l1_weights": weights.l1, "l2_weights": weights.l2}


def symm_buffer(pair: str, **more: Any) -> deep_moe.SymmBuffer:
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, *SIZES.values(), **formats(pair), device="cpu", **more
    )
    buffer.topk_idx.fill_(-1)
    return buffer


def fused_call(pair: str, *, with_layers: bool = False) -> Call:
    stats = torch.zeros(E, dtype=torch.int32)
    function = deep_moe.fp8_fp4_mega_moe if with_layers else deep_moe.mega_moe
    weights = laid_out(pair) if with_layers else {"weights": transformed(pair)}
    given = {"y": bf16(T, H), **weights, "sym_buffer": symm_buffer(pair)}
    options = {"arch": "sm_90a", "num_sms": 2}
    return function, {**given, "cumulative_local_expert_recv_stats": stats, **options}


def call_with_biases() -> Call:
    biases = deep_moe.transform_biases_for_mega_moe(
        torch.zeros(E, 2 * I), torch.zeros(E, H), "sm_90a", weights="bf16"
    )
    function, given = fused_call("bf16")
    given["sym_buffer"] = symm_buffer("bf16", biases=True)
    return function, {**given, "l1_bias": biases.l1, "l2_bias": biases.l2}


def prepare_inputs() -> Call:
    optional = {
        "token_mask": torch.ones(T, dtype=torch.bool),
        "expert_map": torch.arange(E),
        "expert_load": torch.zeros(E, dtype=torch.int32),
    }
    given = {"x": bf16(T, H), **routing(), "sym_buffer": symm_buffer("bf16")}
    return deep_moe.prepare_inputs, {**given, **optional, "arch": "sm_90a"}


def emulated_ranks_call() -> Call:
    ranks = deep_moe.EmulatedRanks(1, *SIZES.values(), weights="bf16")
    for buffer in ranks.buffers:
        buffer.topk_idx.fill_(-1)
    given: Arguments = {"ys": [bf16(T, H)], "weights": [transformed("bf16")]}
    stats = [torch.zeros(E, dtype=torch.int32)]
    return ranks.call, {**given, "stats": stats, "arch": "sm_90a", "num_sms": 2}


GROUPED = {"weights": "bf16", "arch": "sm_90a", "num_sms": 2}


def grouped_rows() -> Arguments:
    rows = {"x": bf16(E, 8, H), "scales": None, "weights": transformed("bf16")}
    counts = {"expert_count": torch.full((E,), 1, dtype=torch.int32)}
    return {**rows, **counts, "out": bf16(E, 8, H), "expected_rows": 4}


def grouped_object() -> Call:
    experts = deep_moe.GroupedExperts(16, H, I, E, device="cpu", **GROUPED)
    return experts.__call__, grouped_rows()


def grouped_function() -> Call:
    more: Arguments = {"intermediate_hidden": I, "max_rows": 16, "arch": "sm_90a", "num_sms": 2}
    return deep_moe.grouped_experts, {**grouped_rows(), **more}


def grouped_product() -> Call:
    def e4m3(*shape: int) -> torch.Tensor:
        return torch.zeros(shape).to(torch.float8_e4m3fn)

    rows = {"x": e4m3(16, 256), "x_sf": torch.ones(16, 2)}
    weights = {"weight": e4m3(E, 136, 256), "weight_sf": torch.ones(E, 2, 2)}
    counts = {"expert_count": torch.ones(E).int(), "expert_begin": torch.arange(E).int()}
    out = {"out": bf16(16, 136), "arch": "sm_90a"}
    return deep_moe.grouped_product, {**rows, **weights, **counts, **out}


def quantized_activation() -> Call:
    counts = {"expert_count": torch.ones(E).int(), "expert_begin": torch.arange(E).int()}
    options = {"row_weights": torch.ones(16), "activation_clamp": 1.0, "arch": None}
    return deep_moe.quantized_activation, {"linear1": bf16(16, 512), **counts, **options}


def low_latency() -> deep_moe.LowLatencyAllToAll:
    return deep_moe.LowLatencyAllToAll(
        None, T, H, E, K, token_format="bf16", num_sms=1, device="cpu"
    )


def low_latency_dispatch() -> Call:
    statistics = {
        "expert_totals": torch.zeros(E, dtype=torch.int32),
        "wait_cycles": torch.zeros(1, dtype=torch.int64),
    }
    given = {"x": bf16(T, H), "topk_idx": routing()["topk_idx"]}
    return low_latency().dispatch, {**given, **statistics, "token_format": None, "receive": True}


def low_latency_combine() -> Call:
    layer = low_latency()
    rows = layer.dispatch(bf16(T, H), routing()["topk_idx"])
    given = {"y": torch.ones_like(rows.recv_x), **routing(), "handle": rows.handle}
    options = {"zero_copy": False, "receive": True, "again": False}
    wait_cycles = torch.zeros(1, dtype=torch.int64)
    return layer.combine, {**given, "out": bf16(T, H), **options, "wait_cycles": wait_cycles}


def all_to_all() -> deep_moe.AllToAll:
    options: Arguments = {"num_sms": 2, "expert_alignment": 8, "device": "cpu"}
    return deep_moe.AllToAll(None, T, H, E, K, 64, **options)


def all_to_all_dispatch() -> Call:
    given = {"x": bf16(T, H), **routing(), "token_format": "bf16"}
    return all_to_all().dispatch, given


def all_to_all_combine() -> Call:
    layer = all_to_all()
    _, handle = layer.dispatch(bf16(T, H), routing()["topk_idx"])
    weights = routing()["topk_weights"]
    return layer.combine, {
        "y": bf16(64, H),
        "handle": handle,
        "topk_weights": weights,
        "out": bf16(T, H),
    }


def return_scalars() -> Call:
    layer = all_to_all()
    _, handle = layer.dispatch(bf16(T, H), routing()["topk_idx"])
    return layer.return_scalars, {"values": torch.ones(64), "handle": handle}


THROUGHPUT = (T, H, I, E, K)


def throughput_moe() -> deep_moe.ThroughputMoE:
    options: Arguments = {"weights": "bf16", "arch": "sm_90a", "num_sms": 2, "device": "cpu"}
    return deep_moe.ThroughputMoE(None, *THROUGHPUT, **options)


def throughput_call() -> Call:
    given = {"x": bf16(T, H), **routing(), "weights": transformed("bf16"), "out": bf16(T, H)}
    return throughput_moe().__call__, given


def throughput_dispatch() -> Call:
    return throughput_moe().dispatch, {"x": bf16(T, H), "topk_idx": routing()["topk_idx"]}


def two_level_call() -> Call:
    layer = deep_moe.TwoLevelMoE(None, None, *SIZES.values(), weights="bf16", device="cpu")
    stats = torch.zeros(E, dtype=torch.int32)
    given = {"x": bf16(T, H), **routing(), "weights": transformed("bf16"), "out": bf16(T, H)}
    statistics = {"cumulative_local_expert_recv_stats": stats}
    return layer.call, {**given, **statistics, "arch": "sm_90a", "num_sms": 2}


def two_level_low_latency() -> deep_moe.TwoLevelLowLatencyAllToAll:
    return deep_moe.TwoLevelLowLatencyAllToAll(
        None, None, T, H, E, K, token_format="bf16", num_sms=1, device="cpu"
    )


def two_level_dispatch() -> Call:
    statistics = {
        "expert_totals": torch.zeros(E, dtype=torch.int32),
        "wait_cycles": torch.zeros(1, dtype=torch.int64),
    }
    given = {"x": bf16(T, H), "topk_idx": routing()["topk_idx"]}
    return two_level_low_latency().dispatch, {**given, **statistics, "receive": True}


def two_level_combine() -> Call:
    layer = two_level_low_latency()
    rows = layer.dispatch(bf16(T, H), routing()["topk_idx"])
    given = {"y": torch.ones_like(rows.recv_x), **routing(), "handle": rows.handle}
    options = {"zero_copy": False, "receive": True, "again": False}
    wait_cycles = torch.zeros(1, dtype=torch.int64)
    return layer.combine, {**given, "out": bf16(T, H), **options, "wait_cycles": wait_cycles}


def two_level_all_to_all() -> deep_moe.TwoLevelAllToAll:
    options: Arguments = {"num_sms": 2, "expert_alignment": 8, "device": "cpu"}
    return deep_moe.TwoLevelAllToAll(None, None, T, H, E, K, 64, **options)


def two_level_all_to_all_dispatch() -> Call:
    return two_level_all_to_all().dispatch, {"x": bf16(T, H), **routing()}


def two_level_all_to_all_combine() -> Call:
    layer = two_level_all_to_all()
    _, handle = layer.dispatch(bf16(T, H), routing()["topk_idx"])
    weights = routing()["topk_weights"]
    given = {"y": bf16(64, H), "handle": handle, "topk_weights": weights}
    return layer.combine, {**given, "out": bf16(T, H)}


def moe_call() -> Call:
    weights = {"w1": bf16(E, H, I), "w3": bf16(E, H, I), "w2": bf16(E, I, H)}
    biases = {"b1": torch.zeros(E, I), "b3": torch.zeros(E, I), "b2": torch.zeros(E, H)}
    return deep_moe.moe, {"x": bf16(T, H), **routing(), **weights, **biases}


def layer_forward() -> Call:
    layer = deep_moe.MoELayer(H, I, E)
    return layer.forward, {"x": bf16(T, H), **routing()}


def load_transposed() -> Call:
    layer = deep_moe.MoELayer(H, I, E)
    return layer.load_transposed, {"l1": bf16(E, 2 * I, H), "l2": bf16(E, H, I)}


def transform_weights(pair: str) -> Call:
    names = formats(pair)
    l1, l2 = source_weights(names["weights"])
    out = deep_moe.empty_weights_for_mega_moe(E, H, I, arch="sm_90a", **names)
    given = {"l1_weights": l1, "l2_weights": l2, "arch": "sm_90a"}
    return deep_moe.transform_weights_for_mega_moe, {**given, **names, "out": out}


def inverse_transform_weights() -> Call:
    given = {**laid_out("mxfp4"), "arch": "sm_90a", "hidden": H, "intermediate_hidden": I}
    return deep_moe.inverse_transform_weights, {**given, "weights": "mxfp4"}


def transform_biases() -> Call:
    given = {"l1_bias": torch.zeros(E, 2 * I), "l2_bias": torch.zeros(E, H)}
    return deep_moe.transform_biases_for_mega_moe, {**given, "arch": "sm_90a", "weights": "bf16"}


def inverse_transform_biases() -> Call:
    function, given = transform_biases()
    biases = function(**given)
    return deep_moe.inverse_transform_biases, {
        "l1_bias": biases.l1,
        "l2_bias": biases.l2,
        "hidden": H,
        "intermediate_hidden": I,
        "arch": "sm_90a",
        "weights": "bf16",
    }


def dequantize(quantize: Callable[..., Any], function: Callable[..., Any]) -> Call:
    *names, _ = inspect.signature(function).parameters
    given = dict(zip(names, quantize(torch.ones(E, 8, H)), strict=True))
    return function, {**given, "dtype": torch.float32}


def deep_ep_buffer() -> deep_ep.Buffer:
    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(T, H, 1, E)
    return deep_ep.Buffer(None, 0, size, low_latency_mode=True, num_qps_per_rank=1, device="cpu")


def deep_ep_dispatch() -> Call:
    sizes = {"num_max_dispatch_tokens_per_rank": T, "num_experts": E}
    given = {"x": bf16(T, H), "topk_idx": routing()["topk_idx"], **sizes, "use_fp8": False}
    return deep_ep_buffer().low_latency_dispatch, given


def deep_ep_combine() -> Call:
    buffer = deep_ep_buffer()
    x, _, handle, _, _ = buffer.low_latency_dispatch(
        bf16(T, H), routing()["topk_idx"], T, E, use_fp8=False
    )
    assert isinstance(x, torch.Tensor)
    given = {"x": torch.ones_like(x), **routing(), "handle": handle, "out": bf16(T, H)}
    return buffer.low_latency_combine, given


def deep_gemm_buffer(**more: Any) -> Call:
    given = {"group": None, **SIZES, "mma_type": "fp8xfp8", "activation": "swiglu", "device": "cpu"}
    return deep_gemm.get_symm_buffer_for_mega_moe, {**given, **more}


def deep_gemm_call(name: str, mma_type: str, weights: str) -> Call:
    function, given = deep_gemm_buffer(mma_type=mma_type)
    buffer = function(**given)
    buffer.topk_idx.fill_(-1)
    arguments = {"y": bf16(T, H), **laid_out(weights), "sym_buffer": buffer, "arch": "sm_90a"}
    return getattr(deep_gemm, name), {**arguments, "activation": "swiglu", "fast_math": True}


def elastic_buffer() -> deep_ep.ElasticBuffer:
    return deep_ep.ElasticBuffer(
        None, num_max_tokens_per_rank=T, hidden=H, num_topk=K, device="cpu"
    )


def elastic_dispatch() -> Call:
    given = {"x": bf16(T, H), **routing(), "num_experts": E, "expert_alignment": 8}
    stats = {"cumulative_local_expert_recv_stats": torch.zeros(E, dtype=torch.int32)}
    flags = {"do_handle_copy": True, "do_expand": True, "use_tma_aligned_col_major_sf": False}
    return elastic_buffer().dispatch, {**given, **stats, **flags}


def elastic_combine() -> Call:
    buffer = elastic_buffer()
    rows, _, weights, handle, _ = buffer.dispatch(
        bf16(T, H), **routing(), num_experts=E, do_expand=True
    )
    return buffer.combine, {"x": rows, "handle": handle, "topk_weights": weights}


def deep_gemm_pre_dispatch() -> Call:
    function, given = deep_gemm_buffer()
    buffer = function(**given)
    views = {
        name: getattr(buffer, name.removeprefix("buf_"))
        for name in ("buf_x", "buf_x_sf", "buf_topk_idx", "buf_topk_weights")
    }
    given = {"x": bf16(T, H), **routing(), **views, "num_tokens": T}
    return deep_gemm.mega_moe_pre_dispatch, given


def deep_gemm_scales() -> Call:
    given = {"sf": torch.ones(E, 8, H // 32), "mn": 8, "k": H, "recipe": (1, 32), "num_groups": E}
    return deep_gemm.transform_sf_into_required_layout, given


def deep_gemm_weights() -> Call:
    l1, l2 = source_weights("mxfp4")
    given = {"l1_weights": l1, "l2_weights": l2, "activation": "swiglu", "mma_type": "fp8xfp4"}
    return deep_gemm.transform_weights_for_mega_moe, {**given, "arch": "sm_90a"}


def constructor(made: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Call]:
    """Arguments by the names of the signature."""
    positional = inspect.signature(made).bind_partial(*arguments).arguments
    return lambda: (made, {**positional, **options})


def saving(weights: str) -> Call:
    l1, l2 = (LayerWeights(*own) for own in source_weights(weights))
    given = {"folder": tempfile.mkdtemp(dir=SAVED.name), "layers": {0: (l1, l2)}}
    return save_experts, {**given, "experts_per_file": 8, "overwrite": True}


def loading(weights: str) -> Call:
    save, given = saving(weights)
    save(**given)
    numbers = {"layer": 0, "num_experts": E, "rank_idx": 0, "num_ranks": 1, "experts": [1, 0]}
    more = {"naming": "experts", "num_shared_experts": 0, "device": "cpu"}
    return load_experts, {"path": given["folder"], **numbers, **more}


LAYER_OPTIONS: Arguments = {"num_sms": 2, "timeout_s": 60.0, "checked": True, "schedule_seed": 0}

CALLS: dict[str, Callable[[], Call]] = {
    "fp8_fp4_mega_moe": lambda: fused_call("mxfp4", with_layers=True),
    "mega_moe, mxfp4": lambda: fused_call("mxfp4"),
    "mega_moe, fp8": lambda: fused_call("fp8"),
    "mega_moe, bf16": lambda: fused_call("bf16"),
    "mega_moe, mxfp4 x bf16": lambda: fused_call("mxfp4 x bf16"),
    "mega_moe, biases": call_with_biases,
    "prepare_inputs": prepare_inputs,
    "EmulatedRanks.call": emulated_ranks_call,
    "GroupedExperts()": grouped_object,
    "grouped_experts": grouped_function,
    "grouped_product": grouped_product,
    "quantized_activation": quantized_activation,
    "LowLatencyAllToAll.dispatch": low_latency_dispatch,
    "LowLatencyAllToAll.combine": low_latency_combine,
    "AllToAll.dispatch": all_to_all_dispatch,
    "AllToAll.combine": all_to_all_combine,
    "AllToAll.return_scalars": return_scalars,
    "ThroughputMoE()": throughput_call,
    "ThroughputMoE.dispatch": throughput_dispatch,
    "TwoLevelMoE.call": two_level_call,
    "TwoLevelAllToAll.dispatch": two_level_all_to_all_dispatch,
    "TwoLevelAllToAll.combine": two_level_all_to_all_combine,
    "TwoLevelLowLatencyAllToAll.dispatch": two_level_dispatch,
    "TwoLevelLowLatencyAllToAll.combine": two_level_combine,
    "moe": moe_call,
    "MoELayer.forward": layer_forward,
    "MoELayer.load_transposed": load_transposed,
    "transform_weights_for_mega_moe, mxfp4": lambda: transform_weights("mxfp4"),
    "transform_weights_for_mega_moe, fp8": lambda: transform_weights("fp8"),
    "transform_weights_for_mega_moe, bf16": lambda: transform_weights("bf16"),
    "transform_weights_for_mega_moe, mxfp4 x bf16": lambda: transform_weights("mxfp4 x bf16"),
    "transform_weights_for_mega_moe, nvfp4": lambda: transform_weights("nvfp4"),
    "transform_weights_for_mega_moe, int4": lambda: transform_weights("int4"),
    "transform_weights_for_mega_moe, mxfp8": lambda: transform_weights("mxfp8"),
    "save_experts, mxfp4": lambda: saving("mxfp4"),
    "save_experts, fp8": lambda: saving("fp8"),
    "save_experts, nvfp4": lambda: saving("nvfp4"),
    "save_experts, int4": lambda: saving("int4"),
    "save_experts, mxfp8": lambda: saving("mxfp8"),
    "load_experts": lambda: loading("mxfp4"),
    "inverse_transform_weights": inverse_transform_weights,
    "transform_biases_for_mega_moe": transform_biases,
    "inverse_transform_biases": inverse_transform_biases,
    "quantize_int4": lambda: (deep_moe.quantize_int4, {"x": bf16(E, 8, H), "group_size": 128}),
    "quantize_mxfp4": lambda: (deep_moe.quantize_mxfp4, {"x": bf16(E, 8, H)}),
    "quantize_mxfp8": lambda: (deep_moe.quantize_mxfp8, {"x": bf16(8, H)}),
    "quantize_nvfp4": lambda: (deep_moe.quantize_nvfp4, {"x": bf16(E, 8, H), "num_matrices": 2}),
    "dequantize_int4": lambda: dequantize(deep_moe.quantize_int4, deep_moe.dequantize_int4),
    "dequantize_mxfp4": lambda: dequantize(deep_moe.quantize_mxfp4, deep_moe.dequantize_mxfp4),
    "dequantize_mxfp8": lambda: dequantize(deep_moe.quantize_mxfp8, deep_moe.dequantize_mxfp8),
    "dequantize_nvfp4": lambda: dequantize(deep_moe.quantize_nvfp4, deep_moe.dequantize_nvfp4),
    "deep_ep.Buffer.low_latency_dispatch": deep_ep_dispatch,
    "deep_ep.Buffer.low_latency_combine": deep_ep_combine,
    "deep_ep.ElasticBuffer.dispatch": elastic_dispatch,
    "deep_ep.ElasticBuffer.combine": elastic_combine,
    "deep_gemm.fp8_fp4_mega_moe": lambda: deep_gemm_call("fp8_fp4_mega_moe", "fp8xfp4", "mxfp4"),
    "deep_gemm.fp8_mega_moe": lambda: deep_gemm_call("fp8_mega_moe", "fp8xfp8", "fp8"),
    "deep_gemm.bf16_mega_moe": lambda: deep_gemm_call("bf16_mega_moe", "bf16xbf16", "bf16"),
    "deep_gemm.get_symm_buffer_for_mega_moe": deep_gemm_buffer,
    "deep_gemm.mega_moe_pre_dispatch": deep_gemm_pre_dispatch,
    "deep_gemm.transform_sf_into_required_layout": deep_gemm_scales,
    "deep_gemm.transform_weights_for_mega_moe": deep_gemm_weights,
    "get_symm_buffer_for_mega_moe": constructor(
        deep_moe.get_symm_buffer_for_mega_moe,
        None,
        *SIZES.values(),
        weights="bf16",
        num_shared_experts=0,
        num_pool_tokens=None,
        biases=False,
        token_format="bf16",
        device="cpu",
    ),
    "buffer_size": constructor(deep_moe.buffer_size, 1, *SIZES.values(), weights="bf16"),
    "EmulatedRanks": constructor(deep_moe.EmulatedRanks, 1, *SIZES.values(), weights="bf16"),
    "empty_weights_for_mega_moe": constructor(
        deep_moe.empty_weights_for_mega_moe, E, H, I, arch="sm_90a", device="cpu", weights="bf16"
    ),
    "GroupedExperts": constructor(
        deep_moe.GroupedExperts,
        *(16, H, I, E),
        **GROUPED,
        biases=False,
        token_format=None,
        activation="swiglu",
        activation_clamp=None,
        fast_math=True,
        num_pool_tokens=None,
        device="cpu",
        overrides=None,
        timeout_s=60.0,
        checked=True,
        schedule_seed=0,
    ),
    "grouped_experts_workspace_size": constructor(
        deep_moe.grouped_experts_workspace_size, 16, H, I, E, weights="bf16", num_pool_tokens=None
    ),
    "LowLatencyAllToAll": constructor(
        deep_moe.LowLatencyAllToAll,
        *(None, T, H, E, K),
        token_format="bf16",
        any_format=False,
        zero_copy=False,
        scales_by_column=False,
        placement="ranks",
        device="cpu",
        arch="sm_90a",
        enable_profiling=False,
        **LAYER_OPTIONS,
    ),
    "AllToAll": constructor(
        deep_moe.AllToAll,
        *(None, T, H, E, K, 64),
        expert_alignment=8,
        token_format="bf16",
        device="cpu",
        arch="sm_90a",
        **LAYER_OPTIONS,
        enable_profiling=False,
    ),
    "ThroughputMoE": constructor(
        deep_moe.ThroughputMoE,
        *(None, *THROUGHPUT),
        max_recv_rows=None,
        weights="bf16",
        biases=False,
        token_format=None,
        activation="swiglu",
        activation_clamp=None,
        fast_math=True,
        num_pool_tokens=None,
        overrides=None,
        device="cpu",
        arch="sm_90a",
        **LAYER_OPTIONS,
        enable_profiling=False,
    ),
    "TwoLevelMoE": constructor(
        deep_moe.TwoLevelMoE,
        *(None, None, *SIZES.values()),
        weights="bf16",
        num_shared_experts=0,
        num_pool_tokens=None,
        biases=False,
        num_max_foreign_tokens=None,
        num_chunks=1,
        exact_sizes=False,
        num_transport_sms=2,
        timeout_s=60.0,
        device="cpu",
    ),
    "TwoLevelAllToAll": constructor(
        deep_moe.TwoLevelAllToAll,
        *(None, None, T, H, E, K, 64),
        expert_alignment=8,
        token_format="bf16",
        num_max_foreign_tokens=None,
        num_transport_sms=2,
        device="cpu",
        arch="sm_90a",
        **LAYER_OPTIONS,
        enable_profiling=False,
    ),
    "TwoLevelLowLatencyAllToAll": constructor(
        deep_moe.TwoLevelLowLatencyAllToAll,
        *(None, None, T, H, E, K),
        token_format="bf16",
        zero_copy=False,
        scales_by_column=False,
        placement="ranks",
        num_max_foreign_tokens=None,
        num_transport_sms=2,
        device="cpu",
        arch="sm_90a",
        enable_profiling=False,
        **LAYER_OPTIONS,
    ),
    "EmulatedAllToAll": constructor(
        deep_moe.EmulatedAllToAll, 1, T, H, E, K, token_format="bf16", num_sms=1
    ),
    "EmulatedThroughputAllToAll": constructor(
        deep_moe.EmulatedThroughputAllToAll, 1, T, H, E, K, 64, expert_alignment=8, num_sms=1
    ),
    "MoELayer": constructor(
        deep_moe.MoELayer,
        *(H, I, E),
        group=None,
        fuse_w1_w3=False,
        biases=False,
        precision="bf16",
        recompute=False,
        activation="swiglu",
        activation_clamp=None,
        max_recv_slots=None,
        keep_received=False,
        quantize_kept=False,
        fuse_wgrad_accumulation=False,
        quantize_gathered=False,
        arch=None,
        forward="training",
        device=None,
        dtype=torch.bfloat16,
    ),
    "deep_ep.Buffer": constructor(
        deep_ep.Buffer,
        None,
        num_nvl_bytes=0,
        num_rdma_bytes=1 << 20,
        low_latency_mode=True,
        num_qps_per_rank=1,
        device="cpu",
        timeout_s=60.0,
    ),
}


def tensors_of(arguments: Arguments) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor with the way to it: a name, then places in tuples and lists."""

    def within(way: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield way, value
        elif type(value) in (tuple, list, LayerWeights) or hasattr(value, "_fields"):
            for place, item in enumerate(value):
                yield from within((*way, place), item)
        elif isinstance(value, deep_moe.MegaMoEWeights):
            yield from within((*way, "l1"), value.l1)
            yield from within((*way, "l2"), value.l2)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from within((*way, key), item)

    for name, value in arguments.items():
        yield from within((name,), value)
