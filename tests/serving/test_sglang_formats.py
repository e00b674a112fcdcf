"""SGLang's own methods make parameters for each format and load the parts of checkpoints; the
kernel runs what they mean."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from deep_moe.activations import SwigluOai
from deep_moe.errors import DeepMoEError
from deep_moe.integrations import served_experts
from deep_moe.integrations.sglang import hooks
from deep_moe.integrations.sglang import loading as sglang_loading
from tests.checkpoint.written import (
    Written,
    columns_first,
    compressed,
    fp8_blocks,
    fp8_whole,
    int4,
    modelopt,
    mxfp8,
    nvfp4,
)

if importlib.util.find_spec("sglang") is None:
    pytest.skip("make test-serving installs sglang", allow_module_level=True)

from . import sglang_stage
from .test_sglang import block, empty_layer, forward, started
from .test_vllm import EXPERTS, HIDDEN, INTERMEDIATE, called_directly, tokens
from .test_vllm_formats import source

SIZES = {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
Parts = dict[tuple[int, str], Written]
FLOAT8 = {"num_bits": 8, "type": "float"}


def quantization_args(**own: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(**own)


def scheme(name: str, *arguments: Any) -> Callable[[Any], None]:
    """A scheme of compressed-tensors. arguments: functions that make them, for some classes exist
    when SGLang does only."""

    def attach(experts: Any) -> None:
        file, _, kind = name.rpartition(".")
        folder = "layers.quantization.compressed_tensors"
        own = getattr(sglang_stage.module(f"{folder}.schemes.{file}"), kind)
        experts.scheme = own(*(make() for make in arguments))
        methods = sglang_stage.module(f"{folder}.compressed_tensors")
        experts.quant_method = methods.CompressedTensorsFusedMoEMethod(None)

    return attach


def method(file: str, kind: str, **config: Any) -> Callable[[Any], None]:
    """One of other exporters. config: what it reads of SGLang's."""

    def attach(experts: Any) -> None:
        made = getattr(sglang_stage.module(f"layers.quantization.{file}"), kind)
        own = {"get_name": lambda: file, **config}
        experts.quant_config = SimpleNamespace(**own)
        experts.quant_method = made(experts.quant_config)

    return attach


def scheme_of(
    exporter: str, file: str, kind: str, method: str, *arguments: Any
) -> Callable[[Any], None]:
    """A scheme of another exporter, and the method that passes on to it."""

    def attach(experts: Any) -> None:
        folder = f"layers.quantization.{exporter}"
        experts.scheme = getattr(sglang_stage.module(f"{folder}.schemes.{file}"), kind)(*arguments)
        methods = sglang_stage.module(f"{folder}.{exporter}")
        experts.quant_config = SimpleNamespace(get_name=lambda: exporter)
        experts.quant_method = object.__new__(getattr(methods, method))

    return attach


def on_blackwell(attach: Callable[[Any], None]) -> Callable[[Any], None]:
    """Some of SGLang's methods are for these GPUs only."""

    def attach_there(experts: Any) -> None:
        sglang_stage.module("runtime_context").get_platform().is_blackwell = True
        attach(experts)

    return attach_there


def unquantized(experts: Any) -> None:
    made = sglang_stage.module("layers.quantization.unquant").UnquantizedFusedMoEMethod
    experts.quant_method = made()


def pack_quantized() -> Any:
    args = quantization_args(num_bits=4, type="int", strategy="group", group_size=128)
    return SimpleNamespace(
        quant_format="pack-quantized", target_scheme_map={"Linear": {"weights": args}}
    )


def int4_args(**own: Any) -> Callable[[], Any]:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | own
    return lambda: quantization_args(**args)


def float8_args(**own: Any) -> Callable[[], Any]:
    return lambda: quantization_args(**FLOAT8 | own)


class Case(NamedTuple):
    """pair: of the emulated kernel. write: a matrix, by rows and columns. attach: SGLang's method
    to a layer."""

    pair: str
    write: Callable[[int, int], Written]
    attach: Callable[[Any], None]


FP8_CONFIG = {
    "weight_block_size": None,
    "is_fp4_experts": False,
    "dequant_fp4_to_fp8": False,
    "convert_mxfp8_to_block_fp8": None,
    "is_checkpoint_fp8_serialized": True,
    "activation_scheme": "static",
}
WNA16 = "compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE"
W8A8 = "compressed_tensors_w8a8_fp8_moe.CompressedTensorsW8A8Fp8MoE"
TOKEN = float8_args(strategy="token", dynamic=True)


def quark_fp8(scheme: str, *, is_dynamic: bool) -> Callable[[Any], None]:
    args = {"qscheme": scheme, "is_dynamic": is_dynamic}
    return scheme_of(
        "quark",
        "quark_w8a8_fp8_moe",
        "QuarkW8A8FP8MoE",
        "QuarkFusedMoEMethod",
        {"qscheme": scheme},
        args,
    )


def awq(**config: Any) -> Callable[[Any], None]:
    own = {"weight_bits": 4, "group_size": 128, "zero_point": False, "pack_factor": 8} | config
    return scheme_of("awq", "awq_moe", "AWQMoEScheme", "AWQMoEMethod", SimpleNamespace(**own))


CASES = {
    "BF16": Case("bf16", lambda *size: bf16(*size), unquantized),
    "NVFP4 of ModelOpt": Case(
        "nvfp4",
        lambda *size: nvfp4(*size, is_divided=False, is_static=True),
        method(
            "modelopt_quant",
            "ModelOptNvFp4FusedMoEMethod",
            group_size=16,
            is_checkpoint_nvfp4_serialized=True,
        ),
    ),
    "NVFP4 of compressed-tensors, static": Case(
        "nvfp4",
        lambda *size: nvfp4(*size, is_divided=True, is_static=True),
        scheme("compressed_tensors_w4a16_nvfp4_moe.CompressedTensorsW4A16Nvfp4MoE", lambda: True),
    ),
    "NVFP4 of compressed-tensors, up before gate": Case(
        "nvfp4",
        lambda *size: nvfp4(*size, is_divided=True, is_static=True),
        on_blackwell(scheme("compressed_tensors_w4a4_nvfp4_moe.CompressedTensorsW4A4Nvfp4MoE")),
    ),
    "INT4, groups of 32": Case(
        "int4",
        lambda *size: int4(*size, 32, is_twos_complement=False),
        scheme(WNA16, pack_quantized, int4_args()),
    ),
    "INT4, groups of 128": Case(
        "int4",
        lambda *size: int4(*size, 128, is_twos_complement=False),
        scheme(WNA16, pack_quantized, int4_args(group_size=128)),
    ),
    "INT4 for Triton": Case(
        "int4",
        lambda *size: int4(*size, 32, is_twos_complement=False),
        scheme(WNA16.replace("WNA16MoE", "WNA16TritonMoE"), pack_quantized, int4_args()),
    ),
    "INT4 beside FP8 tokens": Case(
        "int4",
        lambda *size: int4(*size, 128, is_twos_complement=False),
        scheme(
            "compressed_tensors_w4a8_fp8_moe.CompressedTensorsW4AFP8MoE",
            pack_quantized,
            int4_args(group_size=128),
            TOKEN,
        ),
    ),
    "w4afp8": Case(
        "int4",
        lambda *size: int4(*size, 128, is_twos_complement=True),
        method("w4afp8", "W4AFp8MoEMethod", group_size=128),
    ),
    "MXFP8": Case(
        "mxfp8 x bf16",
        lambda *size: mxfp8(*size, ".weight_scale_inv", {}),
        method(
            "fp8",
            "Fp8MoEMethod",
            **FP8_CONFIG
            | {"use_mxfp8": True, "weight_block_size": [1, 32], "activation_scheme": "dynamic"},
        ),
    ),
    "FP8, rows": Case(
        "fp8 x fp8_token",
        lambda rows, columns: fp8_whole(rows, columns, (rows, 1), compressed()),
        scheme(W8A8, float8_args(strategy="channel"), TOKEN),
    ),
    "FP8, matrices": Case(
        "fp8 x fp8_token",
        lambda *size: fp8_whole(*size, (1,), compressed()),
        scheme(W8A8, float8_args(strategy="tensor"), float8_args(strategy="tensor", dynamic=True)),
    ),
    "FP8, blocks": Case(
        "fp8",
        lambda *size: fp8_blocks(*size, is_modelopt=False),
        scheme(
            W8A8,
            float8_args(strategy="block", block_structure=[128, 128]),
            float8_args(strategy="group", group_size=128, dynamic=True),
        ),
    ),
    "FP8 of ModelOpt": Case(
        "fp8 x fp8_token",
        lambda *size: fp8_whole(*size, (), modelopt("FP8")),
        method("modelopt_quant", "ModelOptFp8MoEMethod", is_checkpoint_fp8_serialized=True),
    ),
    "FP8 of Quark, rows": Case(
        "fp8 x fp8_token",
        lambda rows, columns: fp8_whole(rows, columns, (rows,), {}),
        quark_fp8("per_channel", is_dynamic=True),
    ),
    "FP8 of Quark, static": Case(
        "fp8 x fp8_token",
        lambda *size: fp8_whole(*size, (), {}),
        quark_fp8("per_tensor", is_dynamic=False),
    ),
    "AWQ": Case("int4", lambda *size: columns_first(*size, is_awq=True), awq()),
    "FP8, static": Case(
        "fp8 x fp8_token",
        lambda *size: fp8_whole(*size, (), {}),
        method("fp8", "Fp8MoEMethod", **FP8_CONFIG),
    ),
}


def bf16(rows: int, columns: int) -> Written:
    weight = torch.randn(rows, columns).bfloat16()
    return Written({".weight": weight}, weight.double(), {})


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    served_experts.buffers.close()


def made_parts(case: str, seed: int = 0) -> Parts:
    torch.manual_seed(seed)
    parts = {
        (expert, shard): CASES[case].write(*size)
        for expert in range(EXPERTS)
        for shard, size in SIZES.items()
    }
    for written in parts.values():  # which SGLang wants to be the same of gate and up
        if ".input_scale" in written.tensors:
            written.tensors[".input_scale"].fill_(0.5)
    return parts


def layer_of(case: str, **changes: Any) -> Any:
    """`FusedMoE` as it is when SGLang's method has made its parameters."""
    experts = empty_layer("mxfp4", **{"swiglu_limit": 1.0} | changes)
    for name in list(experts._parameters):
        del experts._parameters[name]
    CASES[case].attach(experts)
    experts.quant_method.create_weights(
        layer=experts,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        weight_loader=experts.weight_loader,
    )
    return experts


def load(experts: Any, parts: Parts) -> None:
    for (expert, shard), written in parts.items():
        for suffix, tensor in written.tensors.items():
            name = ("w2" if shard == "w2" else "w13") + suffix.replace(".", "_")
            parameter = getattr(experts, name)
            parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)


def expected(case: str, parts: Parts, x: Any, logits: Any, **more: Any) -> torch.Tensor:
    pair = CASES[case].pair
    given = source(pair, parts)
    if pair == "bf16":
        given = tuple(own.weight for own in given)
    return called_directly(pair, "sm_90a", given, x, logits, **more)


@pytest.mark.parametrize("case", CASES)
def test_a_layer_gives_what_the_kernel_gives(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    module = started(monkeypatch.setenv, "sm_90a")
    x, logits = tokens(5)
    experts = layer_of(case)
    results = []
    for seed in (0, 1):  # others replace the first
        parts = made_parts(case, seed)
        experts.quant_method.restore_weights_before_loading(experts)
        load(experts, parts)
        with caplog.at_level(logging.INFO, "sglang.deep_moe"):
            experts.quant_method.process_weights_after_loading(experts)
        results.append(forward(module, block(experts), x, logits))
        assert torch.equal(results[-1], expected(case, parts, x, logits, limit=1.0) + x)
    assert not torch.equal(*results)
    weights = CASES[case].pair.partition(" ")[0]
    assert caplog.messages == [f"layer 3: experts run by deep_moe ({weights}, 1 rank)"]


@pytest.mark.parametrize("case", ["FP8 of ModelOpt", "FP8 of Quark, static", "FP8, rows"])
def test_tokens_by_the_checkpoints_scale(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """If it is asked for, and there: an update brings another, into the same memory."""
    monkeypatch.setenv("DEEP_MOE_TOKEN_SCALES", "checkpoint")
    module = started(monkeypatch.setenv, "sm_90a")
    x, logits = tokens(5)
    experts, addresses = layer_of(case), set()
    for seed, number in ((0, 0.002), (1, 0.001)):
        parts = made_parts(case, seed)
        for written in parts.values():
            if ".input_scale" in written.tensors:
                written.tensors[".input_scale"].fill_(number)
        load(experts, parts)
        if seed == 0:
            with caplog.at_level(logging.INFO, "sglang.deep_moe"):
                experts.quant_method.process_weights_after_loading(experts)
        else:
            assert sglang_loading._end_of_update([experts]) is None
        scale = hooks.served_of(experts).token_scale
        if case == "FP8, rows":
            assert scale is None
        else:
            torch.testing.assert_close(scale, torch.tensor([number]), rtol=0, atol=0)
            addresses.add(scale.data_ptr())
        result = forward(module, block(experts), x, logits)
        own = expected(case, parts, x, logits, limit=1.0)
        by_scale = expected(case, parts, x, logits, limit=1.0, token_scale=scale)
        assert torch.equal(result, by_scale + x)
        assert torch.equal(own, by_scale) == (scale is None)
    assert len(addresses) <= 1
    more = "" if case == "FP8, rows" else ", tokens by the checkpoint's scale"
    assert caplog.messages == [f"layer 3: experts run by deep_moe (fp8, 1 rank{more})"]


@pytest.mark.parametrize("case", ["NVFP4 of ModelOpt", "INT4, groups of 32", "FP8, rows"])
def test_made_up_weights(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    module = started(monkeypatch.setenv, "sm_90a")
    runtime = sglang_stage.module("runtime_context")
    monkeypatch.setattr(runtime, "get_model", lambda: SimpleNamespace(load_format="dummy"))
    x, logits = tokens(5)
    experts = layer_of(case)
    for parameter in experts.parameters():
        parameter.data.view(torch.uint8).random_(0, 256)
    experts.quant_method.process_weights_after_loading(experts)
    assert forward(module, block(experts), x, logits).isfinite().all()


def test_weights_that_cannot_be_taken_are_sglangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch.setenv, "sm_90a")
    experts, parts = layer_of("NVFP4 of ModelOpt"), made_parts("NVFP4 of ModelOpt")
    parts[3, "w2"].tensors[".weight_scale"].view(torch.uint8)[5, 3] = 0xFF
    load(experts, parts)
    with (
        caplog.at_level(logging.INFO, "sglang.deep_moe"),
        pytest.raises(ModuleNotFoundError, match="deep_gemm"),  # SGLang's own way
    ):
        experts.quant_method.process_weights_after_loading(experts)
    assert caplog.messages == [
        "layer 3: experts run by SGLang: expert 3: w2_weight_scale must hold numbers without a "
        "sign; got NaN (E4M3 byte 0xff) in row 5, column 3"
    ]
    assert not experts._mega_moe_weights_built


def test_scales_that_are_no_numbers_of_their_type_are_sglangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch.setenv, "sm_90a")
    experts, parts = layer_of("w4afp8"), made_parts("w4afp8")
    tensors = parts[3, "w2"].tensors
    tensors[".weight_scale_inv"] = tensors[".weight_scale_inv"].float()
    tensors[".weight_scale_inv"][5, 0] = 0.1
    load(experts, parts)
    with caplog.at_level(logging.INFO, "sglang.deep_moe"):
        experts.quant_method.process_weights_after_loading(experts)
    assert caplog.messages == [
        "layer 3: experts run by SGLang: expert 3: w2_weight_scale_inv must hold numbers of "
        "torch.bfloat16, as checkpoints have them; got 0.10000000149011612 in row 5"
    ]
    # SGLang has gone its own way, and rounded them.
    assert experts.w2_weight_scale_inv.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("exporter", "args", "reason"),
    [
        ("compressed-tensors", {"symmetric": False}, "integers have zero points"),
        ("AWQ", {"zero_point": True}, "integers have zero points"),
        ("compressed-tensors", {"actorder": "group"}, "columns are in another order"),
        ("compressed-tensors", {"num_bits": 8}, "integers have 8 bits"),
        (
            "AWQ",
            {"group_size": 64},
            "integers have a scale for each group of 64 values, not for each group of 32 or 128",
        ),
        (
            "compressed-tensors",
            {"group_size": 64},
            "integers have a scale for each group of 64 values, not for each group of 32 or 128",
        ),
    ],
)
def test_other_integers_are_sglangs(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    exporter: str,
    args: dict[str, Any],
    reason: str,
) -> None:
    started(monkeypatch.setenv, "sm_90a")
    attach = awq(**args) if exporter == "AWQ" else scheme(WNA16, pack_quantized, int4_args(**args))
    monkeypatch.setitem(CASES, "other", Case("int4", int4, attach))
    experts = layer_of("other")
    experts.scheme.process_weights_after_loading = lambda layer: None  # SGLang's own way
    with caplog.at_level(logging.INFO, "sglang.deep_moe"):
        experts.quant_method.process_weights_after_loading(experts)
    assert caplog.messages == [f"layer 3: experts run by SGLang: {reason}"]


def test_a_model_that_calls_experts_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch.setenv, "sm_90a")
    experts = layer_of("INT4, groups of 32")
    load(experts, made_parts("INT4, groups of 32"))
    experts.quant_method.process_weights_after_loading(experts)
    with pytest.raises(DeepMoEError, match=r"^layer 3: .* DEEP_MOE_SGLANG=0 serves it without"):
        experts(torch.zeros(5, HIDDEN), None)


def test_the_activation_of_minimax_m3(monkeypatch: pytest.MonkeyPatch) -> None:
    module = started(monkeypatch.setenv, "sm_90a")
    config = {
        "swiglu_limit": None,
        "gemm1_alpha": 1.702,
        "gemm1_beta": 1.0,
        "gemm1_clamp_limit": 7.0,
        "gate_up_interleaved": False,
    }
    experts, parts = layer_of("MXFP8", **config), made_parts("MXFP8")
    load(experts, parts)
    experts.quant_method.process_weights_after_loading(experts)
    x, logits = tokens(5)
    routed = block(experts).topk(x, logits)
    with torch.inference_mode():
        result = module.run_mega_routed_experts(
            experts,
            x,
            routed.topk_ids,
            routed.topk_weights,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            top_k=routed.topk_ids.shape[1],
            num_tokens=len(x),
            activation="swigluoai",
            activation_clamp=7.0,
        )
    activation = SwigluOai(1.702, 7.0)
    assert torch.equal(result, expected("MXFP8", parts, x, logits, activation=activation))
