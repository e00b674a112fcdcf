"""vLLM's own methods for formats of ModelOpt and compressed-tensors make parameters and load the
parts of checkpoints; the kernel runs what they mean."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.activations import Activation, GeluTanh, Relu2
from deep_moe.errors import CheckpointError
from deep_moe.weights.layers import LayerWeights
from tests.checkpoint.written import (
    Written,
    columns_first,
    compressed,
    fp8_blocks,
    fp8_whole,
    int4,
    modelopt,
    mxfp4,
    mxfp8,
    nvfp4,
    quark,
)

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

from .test_vllm import (  # noqa: E402, F401
    EXPERTS,
    HIDDEN,
    NAME,
    TOPK,
    called_directly,
    forward,
    installed,
    lines,
    route,
    tokens,
    world,
)

INTERMEDIATE = 128
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FLOAT8 = {"num_bits": 8, "type": "float"}


def mxfp4_of(rows: int, columns: int) -> Written:
    """The same bytes that MXFP8's scales have, over codes of four bits."""
    made = int4(rows, columns, 32, is_twos_complement=True)
    scales = torch.randint(115, 125, (rows, columns // 32), dtype=torch.uint8)
    tensors = {".weight_packed": made.tensors[".weight"].view(torch.uint8), ".weight_scale": scales}
    return Written(tensors, made.values, {})


def quant_config(case: str) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization import modelopt as vllm_modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )

    _, write, config = CASES[case]
    if isinstance(config, dict):
        document = write(32, 256).config | config
        return get_quantization_config(document["quant_method"]).from_config(document)
    if isinstance(config, str):
        document = write(32, 256).config
        return getattr(vllm_modelopt, config).from_config(document)
    style, activations = config
    document = write(32, 256).config or compressed(**FLOAT8 | {"num_bits": 4}, group_size=32)
    weights = document["config_groups"]["group_0"]["weights"]
    weights |= {"symmetric": True, "dynamic": False}
    if weights.get("group_size") == 32 and weights["type"] == "float":
        weights |= {"strategy": "group", "scale_dtype": "torch.uint8"}
    document["config_groups"]["group_0"]["input_activations"] = activations
    return CompressedTensorsConfig.from_config(document | {"format": style})


def quark_of(written: Written, tokens: Any, *weight: dict[str, Any]) -> Written:
    """A config of AMD Quark. weight: one after the other, where there are several."""
    weights = [{"is_dynamic": False, "symmetric": True} | own for own in weight]
    made = quark(written).config
    made["global_quant_config"] |= {
        "weight": weights if len(weights) > 1 else weights[0],
        "input_tensors": tokens,
        "output_tensors": None,
    }
    made |= {"layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"]}
    return written._replace(
        config=made | {"export": {"pack_method": "order", "kv_cache_group": []}}
    )


def auto_round(written: Written, bits: int) -> Written:
    """MX formats as AutoRound writes them for compressed-tensors."""
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": True}
    config |= {"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"}
    tokens = {"act_bits": bits, "act_data_type": "mx_fp", "act_group_size": 32}
    return written._replace(config=config | tokens | {"act_sym": True, "act_dynamic": True})


def of_quark_nvfp4(rows: int, columns: int) -> Written:
    """ModelOpt's tensors, but for the name of the tokens' scale."""
    written = nvfp4(rows, columns, is_divided=False)
    return written._replace(tensors=written.tensors | {".input_scale_2": torch.rand(())})


E4M3 = {"dtype": "fp8_e4m3"}
DYNAMIC_QUARK = {"is_dynamic": True, "symmetric": True}
# Formats, who writes a matrix, and vLLM's config: a class of ModelOpt's, a format of
# compressed-tensors with what it says of tokens, or what else another exporter's has.
CASES: dict[str, tuple[str, Callable[[int, int], Written], Any]] = {
    "ModelOptNvFp4FusedMoE": (
        "nvfp4",
        lambda *size: nvfp4(*size, is_divided=False, is_static=True),
        "ModelOptNvFp4Config",
    ),
    "CompressedTensorsW4A4Nvfp4MoEMethod": (
        "nvfp4",
        lambda *size: nvfp4(*size, is_divided=True),
        ("nvfp4-pack-quantized", None),
    ),
    "CompressedTensorsWNA16MoEMethod": (
        "int4",
        lambda *size: int4(*size, 32, is_twos_complement=False),
        ("pack-quantized", None),
    ),
    "CompressedTensorsWNA16MoEMethod, 128": (
        "int4",
        lambda *size: int4(*size, 128, is_twos_complement=False),
        ("pack-quantized", None),
    ),
    "AutoGPTQMoEMethod": (
        "int4",
        lambda *size: columns_first(*size, is_awq=False),
        {"quant_method": "auto_gptq", "lm_head": False, "dynamic": {}},
    ),
    "AutoAWQMoEMethod": (
        "int4",
        lambda *size: columns_first(*size, is_awq=True),
        {"quant_method": "auto_awq"},
    ),
    "QuarkW8A8Fp8MoEMethod, rows": (
        "fp8 x fp8_token",
        lambda rows, columns: quark_of(
            fp8_whole(rows, columns, (rows,), {}),
            DYNAMIC_QUARK | E4M3 | {"qscheme": "per_channel"},
            E4M3 | {"qscheme": "per_channel"},
        ),
        {},
    ),
    "QuarkW8A8Fp8MoEMethod, matrices": (
        "fp8 x fp8_token",
        lambda *size: quark_of(
            fp8_whole(*size, (), {}),
            DYNAMIC_QUARK | E4M3 | {"qscheme": "per_tensor", "is_dynamic": False},
            E4M3 | {"qscheme": "per_tensor"},
        ),
        {},
    ),
    "QuarkW8A8Fp8MoEMethod, blocks": (
        "fp8",
        lambda *size: quark_of(
            fp8_blocks(*size, is_modelopt=False),
            DYNAMIC_QUARK | E4M3 | {"qscheme": "per_group", "group_size": 128},
            E4M3 | {"qscheme": "per_block", "block_size": [128, 128]},
        ),
        {},
    ),
    "QuarkOCP_MX_MoEMethod": (
        "mxfp4",
        lambda *size: quark_of(
            mxfp4(*size),
            DYNAMIC_QUARK
            | {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        ),
        {},
    ),
    "QuarkW8A8Mxfp8MoEMethod": (
        "mxfp8 x bf16",
        lambda *size: quark_of(
            mxfp8(*size, ".weight_scale", {}),
            DYNAMIC_QUARK
            | E4M3
            | {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            E4M3 | {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        ),
        {},
    ),
    "QuarkNvfp4MoEMethod": (
        "nvfp4",
        lambda *size: quark_of(
            of_quark_nvfp4(*size),
            [
                DYNAMIC_QUARK | {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
                DYNAMIC_QUARK | E4M3 | {"qscheme": "per_tensor", "is_dynamic": False},
            ],
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
            E4M3 | {"qscheme": "per_tensor"},
        ),
        {},
    ),
    "INCMxfp4MoEMethod": (
        "mxfp4",
        lambda *size: auto_round(mxfp4(*size, ".weight_packed"), 4),
        {"quant_method": "inc"},
    ),
    "INCMxfp8MoEMethod": (
        "mxfp8 x bf16",
        lambda *size: auto_round(mxfp8(*size, ".weight_scale", {}), 8),
        {"quant_method": "inc"},
    ),
    "CompressedTensorsW4A4Mxfp4MoEMethod": ("mxfp4", mxfp4_of, ("mxfp4-pack-quantized", None)),
    "ModelOptMxFp8FusedMoE": (
        "mxfp8 x bf16",
        lambda *size: mxfp8(*size, ".weight_scale", modelopt("MXFP8", group_size=32)),
        "ModelOptMxFp8Config",
    ),
    "CompressedTensorsW8A8Mxfp8MoEMethod": (
        "mxfp8 x bf16",
        lambda *size: mxfp8(*size, ".weight_scale", compressed(**FLOAT8, group_size=32)),
        (
            "mxfp8-quantized",
            FLOAT8
            | {"strategy": "group", "group_size": 32, "dynamic": True}
            | {"symmetric": True, "scale_dtype": "torch.uint8"},
        ),
    ),
    "CompressedTensorsW8A8Fp8MoEMethod, blocks": (
        "fp8",
        lambda *size: fp8_blocks(*size, is_modelopt=False),
        ("float-quantized", DYNAMIC | {"strategy": "group", "group_size": 128}),
    ),
    "CompressedTensorsW8A8Fp8MoEMethod, rows": (
        "fp8 x fp8_token",
        lambda rows, columns: fp8_whole(
            rows, columns, (rows, 1), compressed(**FLOAT8, strategy="channel")
        ),
        ("float-quantized", DYNAMIC),
    ),
    "CompressedTensorsW8A8Fp8MoEMethod, matrices": (
        "fp8 x fp8_token",
        lambda *size: fp8_whole(*size, (1,), compressed(**FLOAT8, strategy="tensor")),
        ("float-quantized", DYNAMIC | {"strategy": "tensor"}),
    ),
    "ModelOptFp8MoEMethod": (
        "fp8 x fp8_token",
        lambda *size: fp8_whole(*size, (), modelopt("FP8")),
        "ModelOptFp8Config",
    ),
}


@pytest.fixture
def some_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no kernel of its own for some formats on a CPU; it makes parameters all the same."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import auto_awq
    from vllm.model_executor.layers.quantization import modelopt as vllm_modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors_moe,
    )
    from vllm.model_executor.layers.quantization.quark import quark_moe

    def nvfp4_backend(**_: Any) -> Any:
        return NvFp4MoeBackend.MARLIN, MarlinExperts

    package = compressed_tensors_moe.__name__
    monkeypatch.setattr(vllm_modelopt, "select_nvfp4_moe_backend", nvfp4_backend)
    monkeypatch.setattr(
        f"{package}.compressed_tensors_moe_w4a4_nvfp4.select_nvfp4_moe_backend", nvfp4_backend
    )
    for module in (
        f"{package}.compressed_tensors_moe_wna16",
        "vllm.model_executor.layers.quantization.auto_gptq",
        "vllm.model_executor.layers.quantization.auto_awq",
    ):
        monkeypatch.setattr(
            f"{module}.select_wna16_moe_backend",
            lambda *_, **__: (WNA16MoEBackend.HUMMING, None),
        )
    monkeypatch.setattr(auto_awq, "check_moe_marlin_supports_layer", lambda *_, **__: True)
    monkeypatch.setattr(quark_moe, "select_nvfp4_moe_backend", nvfp4_backend)
    monkeypatch.setattr(
        quark_moe,
        "select_mxfp4_moe_backend",
        lambda *_, **__: (Mxfp4MoeBackend.MARLIN, MarlinExperts),
    )
    # Quark's methods ask for the model's type.
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3_moe"))
    monkeypatch.setattr(
        quark_moe, "get_current_vllm_config", lambda: SimpleNamespace(model_config=model)
    )


def make_runner(case: str, **more: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    return FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=TOPK,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        quant_config=quant_config(case),
        prefix=NAME,
        custom_routing_function=route,
        **(more or {"swiglu_limit": 1.0}),
    )


def load_parts(runner: Any, parts: dict[tuple[int, str], Written]) -> None:
    layer = runner.routed_experts
    for (expert, shard), written in parts.items():
        for suffix, tensor in written.tensors.items():
            name = ("w2" if shard == "w2" else "w13") + suffix.replace(".", "_")
            param = getattr(layer, name)
            param.weight_loader(param, tensor, f"a.{name}", shard, expert)


def source(weights: str, parts: dict[tuple[int, str], Written]) -> tuple[LayerWeights, ...]:
    """What the parts mean, in the form that `transform_weights_for_mega_moe` takes."""
    from deep_moe.weights import folder_module

    forms = folder_module(weights.split(" ")[0], "checkpoint").FORMS
    layers = []
    for all_shards in (("w1", "w3"), ("w2",)):
        shards = [shard for shard in all_shards if (0, shard) in parts]
        rows: list[list[torch.Tensor]] = []
        for expert in range(EXPERTS):
            made = []
            for shard in shards:
                tensors = parts[expert, shard].tensors
                fitting = [
                    (form, own, form.plain({key: tensors[own[key]] for key in own}))
                    for form in forms
                    for own in form.spellings
                    if set(own.values()) <= tensors.keys()
                    and tensors[own["weight"]].dtype in form.dtypes["weight"]
                ]
                form, suffixes, keyed = max(fitting, key=lambda own: own[0].is_like(own[2]))
                found = form.of(suffixes, keyed)
                keyed = keyed if type(found) is form else found.plain(keyed)
                num_rows, num_columns = keyed["weight"].shape
                num_columns *= found.values_per_element
                empty = found.empty(1, num_rows, num_columns, torch.device("cpu"), 1)
                found.put(suffixes, keyed, LayerWeights(*(own[0] for own in empty)))
                made.append(empty)
            rows.append([torch.cat(own, dim=1) for own in zip(*made, strict=True)])
        layers.append(LayerWeights(*(torch.cat(own) for own in zip(*rows, strict=True))))
    return tuple(layers)


def made_parts(case: str, seed: int = 0) -> dict[tuple[int, str], Written]:
    torch.manual_seed(seed)
    write = CASES[case][1]
    sizes = {
        "w1": (INTERMEDIATE, HIDDEN),
        "w3": (INTERMEDIATE, HIDDEN),
        "w2": (HIDDEN, INTERMEDIATE),
    }
    return {(e, shard): write(*size) for e in range(EXPERTS) for shard, size in sizes.items()}


# Blackwell's own pairs, beside those of Hopper.
ON_SM100 = {
    "ModelOptMxFp8FusedMoE": "mxfp8 x mxfp8",
    "CompressedTensorsW8A8Mxfp8MoEMethod": "mxfp8 x mxfp8",
    "CompressedTensorsW4A4Mxfp4MoEMethod": "mxfp4",
    "ModelOptNvFp4FusedMoE": "nvfp4 x nvfp4",
}
RUNS = [(case, "sm_90a", CASES[case][0]) for case in CASES]
RUNS += [(case, "sm_100a", pair) for case, pair in ON_SM100.items()]


@pytest.mark.parametrize(("case", "arch", "weights"), RUNS)
def test_a_layer_gives_what_the_kernel_gives(
    installed: Any,  # noqa: F811
    some_backend: None,
    caplog: pytest.LogCaptureFixture,
    case: str,
    arch: str,
    weights: str,
) -> None:
    installed(arch)
    parts = made_parts(case)
    x, logits = tokens(5)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = make_runner(case)
        layer = runner.routed_experts
        assert type(layer.quant_method.engine).__name__ == case.partition(",")[0]
        load_parts(runner, parts)
        layer.quant_method.process_weights_after_loading(layer)
        result = forward(runner, config, x, logits)
    expected = called_directly(weights, arch, source(weights, parts), x, logits, limit=1.0)
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe ({weights.split(' ')[0]})"]
    assert result.abs().max() > 0
    assert torch.equal(result, expected)


# Beside which tokens get one scale each, and the name of the checkpoint's scales.
STATIC = [
    ("ModelOptNvFp4FusedMoE", "sm_100a", "nvfp4 x nvfp4", ".input_scale"),
    ("CompressedTensorsW4A4Nvfp4MoEMethod", "sm_100a", "nvfp4 x nvfp4", ".input_global_scale"),
    ("QuarkNvfp4MoEMethod", "sm_100a", "nvfp4 x nvfp4", ".input_scale_2"),
    ("ModelOptFp8MoEMethod", "sm_90a", "fp8 x fp8_token", ".input_scale"),
]


def with_token_scales(
    parts: dict[tuple[int, str], Written], suffix: str
) -> tuple[dict[tuple[int, str], Written], torch.Tensor]:
    """And the largest by which tokens are quantized."""
    made = {}
    for place, (key, written) in enumerate(parts.items()):
        scale = torch.tensor(0.002 * (1 + place % 7) / 7)
        if suffix == ".input_global_scale":
            scale = (1 / scale).reshape(1)
        made[key] = written._replace(tensors=written.tensors | {suffix: scale})
    first = torch.stack(
        [own.tensors[suffix].reshape(1) for key, own in made.items() if key[1] != "w2"]
    )
    return made, (1 / first.min() if suffix == ".input_global_scale" else first.max()).reshape(1)


@pytest.mark.parametrize(("case", "arch", "pair", "suffix"), STATIC)
def test_tokens_by_the_checkpoints_scale(
    installed: Any,  # noqa: F811
    some_backend: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    arch: str,
    pair: str,
    suffix: str,
) -> None:
    """If it is asked for."""
    monkeypatch.setenv("DEEP_MOE_TOKEN_SCALES", "checkpoint")
    installed(arch)
    x, logits = tokens(5)
    parts, scale = with_token_scales(made_parts(case), suffix)
    given = source(pair, parts)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = make_runner(case)
        layer = runner.routed_experts
        load_parts(runner, parts)
        layer.quant_method.process_weights_after_loading(layer)
        own = layer.quant_method.served.token_scale
        assert torch.equal(own, scale)
        result = forward(runner, config, x, logits)
    assert lines(caplog) == [
        f"{NAME}: experts run by deep_moe ({pair.split(' ')[0]}, tokens by the checkpoint's scale)"
    ]
    expected = called_directly(pair, arch, given, x, logits, limit=1.0, token_scale=scale)
    assert torch.equal(result, expected)
    assert not torch.equal(result, called_directly(pair, arch, given, x, logits, limit=1.0))


@pytest.mark.parametrize("given", ["none", "of one matrix", "negative"])
def test_scales_of_tokens_that_are_not_there_or_no_scales(
    installed: Any,  # noqa: F811
    some_backend: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    """Without any, tokens have their own, whatever is asked for."""
    monkeypatch.setenv("DEEP_MOE_TOKEN_SCALES", "checkpoint")
    installed("sm_90a")
    case = "ModelOptFp8MoEMethod"
    parts = made_parts(case)
    for key, written in parts.items():
        written.tensors[".input_scale"].fill_(-1)
        if given == "none" or (given == "of one matrix" and key != (3, "w1")):
            del written.tensors[".input_scale"]
    x, logits = tokens(5)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = make_runner(case)
        load_parts(runner, parts)
        layer = runner.routed_experts
        layer.quant_method.engine.process_weights_after_loading = lambda layer: None
        if given == "of one matrix":
            with pytest.raises(CheckpointError, match=r"w3 for w13_input_scale of experts 3"):
                layer.quant_method.process_weights_after_loading(layer)
            return
        layer.quant_method.process_weights_after_loading(layer)
        result = forward(runner, config, x, logits) if given == "none" else None
    if result is None:
        assert lines(caplog) == [
            f"{NAME}: experts run by vLLM ({case}): w13_input_scale must hold positive numbers; "
            "got -1.0 in row 0"
        ]
        return
    weights = source("fp8", parts)
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe (fp8)"]
    assert torch.equal(result, called_directly(CASES[case][0], "sm_90a", weights, x, logits, 1.0))


@pytest.mark.parametrize("case", CASES)
def test_made_up_weights(
    installed: Any,  # noqa: F811
    some_backend: None,
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    """vLLM fills parameters with anything that it likes: scales below zero, bytes of any value."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    weights = CASES[case][0]
    installed("sm_90a")
    x, logits = tokens(5)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        config.load_config.load_format = "dummy"
        runner = make_runner(case)
        layer = runner.routed_experts
        for name, parameter in layer.named_parameters():
            initialize_single_dummy_weight(parameter, name=name)
            if parameter.dtype == torch.int32:  # which vLLM leaves as it was
                parameter.data.view(torch.uint8).random_(0, 256)
        layer.quant_method.process_weights_after_loading(layer)
        result = forward(runner, config, x, logits)
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe ({weights.split(' ')[0]})"]
    assert result.isfinite().all()


@pytest.mark.parametrize("case", ["ModelOptFp8MoEMethod", "CompressedTensorsW4A4Mxfp4MoEMethod"])
def test_experts_are_permuted(
    installed: Any,  # noqa: F811
    some_backend: None,
    case: str,
) -> None:
    """By vLLM's load balancer: scales of matrices, too, go with their experts."""
    installed("sm_90a")
    parts = made_parts(case)
    x, logits = tokens(5)
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    with world() as config:
        runner = make_runner(case)
        load_parts(runner, parts)
        layer = runner.routed_experts
        layer.quant_method.process_weights_after_loading(layer)
        result = forward(runner, config, x, logits)
        for tensor in layer.get_expert_weights():
            tensor.copy_(tensor[order].clone())
        permuted = forward(runner, config, x, logits[:, order])
    assert torch.equal(permuted, result)


def test_a_layer_that_cannot_be_taken_is_vllms(
    installed: Any,  # noqa: F811
    some_backend: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    installed("sm_90a")
    case = "ModelOptFp8MoEMethod"
    parts = made_parts(case)
    parts[3, "w3"].tensors[".weight_scale"].fill_(float("nan"))
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world():
        runner = make_runner(case)
        load_parts(runner, parts)
        layer = runner.routed_experts
        engine = layer.quant_method.engine
        taken = []
        engine.process_weights_after_loading = taken.append
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.quant_method is engine
    assert taken == [layer]
    (line,) = lines(caplog)
    assert line == (
        f"{NAME}: experts run by vLLM (ModelOptFp8MoEMethod): expert 3: w13_weight_scale must hold "
        "positive numbers; got nan in row 0"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"zero_point": True}, "integers have zero points"),
        (
            {"group_size": 64},
            "integers have a scale for each group of 64 values, not for each group of 32 or 128",
        ),
        (
            None,
            "expert 3: w13_qzeros must hold zero points of 8 alone, those of symmetric codes; got "
            "5, 7",
        ),
    ],
)
def test_awq_that_is_not_symmetric_is_vllms(
    installed: Any,  # noqa: F811
    some_backend: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any] | None,
    reason: str,
) -> None:
    """By its config, or, where that says nothing, by its zero points."""
    installed("sm_90a")
    case = "AutoAWQMoEMethod"
    pair, write, config = CASES[case]
    monkeypatch.setitem(CASES, case, (pair, write, config | (change or {})))
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world():
        runner = make_runner(case)
        layer = runner.routed_experts
        if change is None:
            parts = made_parts(case)
            parts[3, "w3"].tensors[".qzeros"][1, 2] = 0x5788_8888
            load_parts(runner, parts)
            layer.quant_method.engine.process_weights_after_loading = lambda layer: None
            layer.quant_method.process_weights_after_loading(layer)
    assert lines(caplog) == [f"{NAME}: experts run by vLLM (AutoAWQMoEMethod): {reason}"]


class _Platform:
    """The platform, but for what `own` has."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        from vllm.platforms import current_platform

        return getattr(self._own if hasattr(self._own, name) else current_platform, name)


@pytest.mark.parametrize(
    ("name", "activation"), [("relu2_no_mul", Relu2()), ("gelu_tanh", GeluTanh())]
)
def test_other_activations(
    installed: Any,  # noqa: F811
    some_backend: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    activation: Activation,
) -> None:
    """Of Nemotron-3, whose experts have no gate, and of Gemma-4."""
    from vllm.model_executor.layers.fused_moe import config as vllm_config

    # vLLM has kernels of its own for experts without gate on GPUs only.
    platform = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False)
    monkeypatch.setattr(vllm_config, "current_platform", _Platform(platform))
    installed("sm_90a")
    case = "ModelOptNvFp4FusedMoE"
    parts = made_parts(case)
    if not activation.has_gate:
        parts = {key: own for key, own in parts.items() if key[1] != "w3"}
    x, logits = tokens(5)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        names = {} if activation.has_gate else {"ckpt_names": ("up_proj", "down_proj", None)}
        runner = make_runner(case, activation=name, **names)
        load_parts(runner, parts)
        layer = runner.routed_experts
        layer.quant_method.process_weights_after_loading(layer)
        result = forward(runner, config, x, logits)
    topk_weights, ids = route(x, logits, TOPK, True)
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None,
        EXPERTS,
        32,
        TOPK,
        HIDDEN,
        INTERMEDIATE,
        weights="nvfp4",
        token_format="bf16",
        device="cpu",
    )
    weights = deep_moe.transform_weights_for_mega_moe(
        *source("nvfp4", parts), "sm_90a", weights="nvfp4"
    )
    deep_moe.prepare_inputs(x, ids, topk_weights, buffer, arch="sm_90a")
    expected = torch.empty_like(x)
    deep_moe.mega_moe(expected, weights, buffer, activation=activation, arch="sm_90a")
    assert torch.equal(result, expected)
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe (nvfp4)"]
