"""SGLang's loader of NVFP4 fills the parameters of its method; the kernel runs what they mean."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_moe.integrations import served_experts
from tests.checkpoint.written import Written, nvfp4

if importlib.util.find_spec("sglang") is None:
    pytest.skip("make test-serving installs sglang", allow_module_level=True)

from . import sglang_stage
from .test_sglang import block, empty_layer, forward, started
from .test_vllm import EXPERTS, HIDDEN, INTERMEDIATE, called_directly, tokens
from .test_vllm_formats import source

SIZES = {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
Parts = dict[tuple[int, str], Written]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    served_experts.buffers.close()


def made_parts(seed: int = 0) -> Parts:
    torch.manual_seed(seed)
    return {
        (expert, shard): nvfp4(*size, is_divided=False)
        for expert in range(EXPERTS)
        for shard, size in SIZES.items()
    }


def nvfp4_layer() -> Any:
    """`FusedMoE` as it is when SGLang's method of NVFP4 has made its parameters."""
    experts = empty_layer("mxfp4", swiglu_limit=1.0)
    experts.quant_method = sglang_stage.module("layers.quantization.modelopt_quant").__dict__[
        "ModelOptNvFp4FusedMoEMethod"
    ]()
    for name in list(experts._parameters):
        del experts._parameters[name]
    for layer, rows, columns in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
        made = {
            "weight": torch.zeros(EXPERTS, rows, columns // 2, dtype=torch.uint8),
            "weight_scale": torch.zeros(EXPERTS, rows, columns // 16).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.zeros((EXPERTS, 2) if layer == "w13" else (EXPERTS,)),
        }
        for suffix, tensor in made.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            parameter.weight_loader = experts.weight_loader
            experts.register_parameter(f"{layer}_{suffix}", parameter)
    return experts


def load(experts: Any, parts: Parts) -> None:
    for (expert, shard), written in parts.items():
        for suffix, tensor in written.tensors.items():
            name = ("w2" if shard == "w2" else "w13") + suffix.replace(".", "_")
            parameter = getattr(experts, name)
            parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)


def test_a_layer_gives_what_the_kernel_gives(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = started(monkeypatch.setenv, "sm_90a")
    x, logits = tokens(5)
    experts = nvfp4_layer()
    for seed in (0, 1):  # others replace the first
        parts = made_parts(seed)
        load(experts, parts)
        with caplog.at_level(logging.INFO, "sglang.deep_moe"):
            experts.quant_method.process_weights_after_loading(experts)
        result = forward(module, block(experts), x, logits)
        expected = called_directly("nvfp4", "sm_90a", source("nvfp4", parts), x, logits, limit=1.0)
        assert torch.equal(result, expected + x)
    assert caplog.messages == ["layer 3: experts run by deep_moe (nvfp4, 1 rank)"]


def test_made_up_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module = started(monkeypatch.setenv, "sm_90a")
    runtime = sglang_stage.module("runtime_context")
    monkeypatch.setattr(runtime, "get_model", lambda: SimpleNamespace(load_format="dummy"))
    x, logits = tokens(5)
    experts = nvfp4_layer()
    for parameter in experts.parameters():
        parameter.data.view(torch.uint8).random_(0, 256)
    experts.quant_method.process_weights_after_loading(experts)
    assert forward(module, block(experts), x, logits).isfinite().all()


def test_a_layer_that_cannot_be_taken_is_sglangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch.setenv, "sm_90a")
    experts = nvfp4_layer()
    parts = made_parts()
    parts[3, "w2"].tensors[".weight_scale"].view(torch.uint8)[5, 3] = 0xFF
    load(experts, parts)
    with (
        caplog.at_level(logging.INFO, "sglang.deep_moe"),
        pytest.raises(AssertionError, match="do not come here"),  # SGLang's own, in its stand-in
    ):
        experts.quant_method.process_weights_after_loading(experts)
    assert caplog.messages == [
        "layer 3: experts run by SGLang: expert 3: w2_weight_scale must hold numbers without a "
        "sign; got NaN (E4M3 byte 0xff) in row 5, column 3"
    ]
