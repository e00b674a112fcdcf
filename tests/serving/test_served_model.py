"""vLLM builds and loads the whole model that `examples/serve_vllm.py` writes, in each of its
formats: its config says nothing but experts is quantized, and the kernel gets these."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest
import torch

import deep_moe
from deep_moe.checkpoint import load_experts
from deep_moe.integrations import served_experts
from tests.examples.test_served_model import QUANTIZED, SMALL, example
from tests.pairs import formats

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

from .test_vllm import NAME, installed, lines  # noqa: E402, F401
from .test_vllm_formats import some_backend  # noqa: E402, F401

MAX_TOKENS = 32
# Those that vLLM knows, and the kernel's pair of formats.
PAIRS = {
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "fp8_rows": "fp8 x fp8_token",
    "mxfp8": "mxfp8 x bf16",
    "nvfp4": "nvfp4",
    "int4": "int4",
}


@pytest.mark.parametrize("weights", PAIRS)
def test_vllm_loads_the_model(
    installed,  # noqa: F811
    some_backend,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    weights: str,
) -> None:
    from vllm.config import (
        DeviceConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.layers import utils as layer_utils
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.model_loader import get_model

    assert {*PAIRS, "mxfp4_in_fp8"} == QUANTIZED.keys()
    served_model = example("served_model", monkeypatch)
    monkeypatch.setattr(served_model, "VOCABULARY", 64)
    parser = argparse.ArgumentParser()
    served_model.add_model_options(parser)
    served_model.add_engine_options(parser)
    folder = tmp_path / "a"
    served_model.write_models(folder, tmp_path / "b", parser.parse_args(SMALL), weights)
    installed("sm_90a")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # there is no accelerator
    # It lays matrices out by a compiled operator for CPUs.
    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", lambda *_, **__: None)
    limits = {"max_model_len": MAX_TOKENS}
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", **limits
        ),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=MAX_TOKENS, max_num_seqs=4, is_encoder_decoder=False, **limits
        ),
    )
    with set_current_vllm_config(config), caplog.at_level(logging.INFO, "vllm.deep_moe"):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1, backend="gloo")
        try:
            model = get_model(vllm_config=config)
        finally:
            served_experts.buffers.close()
            destroy_model_parallel()
    pair = formats(PAIRS[weights])
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe ({pair['weights']})"]
    linear = [module for module in model.modules() if isinstance(module, LinearBase)]
    assert {type(module.quant_method) for module in linear} == {UnquantizedLinearMethod}
    served = model.model.layers[0].mlp.experts.routed_experts.quant_method.served.tensors()
    made = deep_moe.transform_weights_for_mega_moe(*load_experts(folder, 0), "sm_90a", **pair)
    for tensor, expected in zip(served, (*made.l1, *made.l2), strict=True):
        assert torch.equal(*(own.flatten().view(torch.uint8) for own in (tensor, expected)))
