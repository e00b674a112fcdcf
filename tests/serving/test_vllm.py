"""vLLM's own factory, router, runner, layer and modular kernel run our experts, emulated."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe.activations import Swiglu
from deep_moe.errors import CheckpointError, DeepMoEError
from deep_moe.formats.block_scaled import unpack_ue8m0
from deep_moe.formats.weight_formats import weight_format
from deep_moe.integrations import served_experts
from deep_moe.trial.rank_processes import run_on_ranks

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 128, 8, 2
MAX_TOKENS = 32
NAME = "model.layers.0.mlp.experts"
CASES = [("mxfp4", "sm_90a"), ("mxfp4", "sm_100a"), ("fp8", "sm_90a"), ("fp8", "sm_100a")]

Weights = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def checkpoint(weights: str, seed: int = 0, intermediate: int = INTERMEDIATE) -> Weights:
    """Values and scales of both layers, as `transform_weights_for_mega_moe` takes them."""
    generator = torch.Generator().manual_seed(seed)
    block = (1, 32) if weights == "mxfp4" else (128, 128)
    made = []
    for num_rows, num_columns in ((2 * intermediate, HIDDEN), (HIDDEN, intermediate)):
        x = torch.randn(EXPERTS, num_rows, num_columns, generator=generator) / num_columns**0.5
        values, sf = weight_format(weights).quantize(x, block)
        made.append((values, sf))
    return made[0], made[1]


def loaded_forms(weights: str, layer: tuple[torch.Tensor, torch.Tensor]) -> Iterator[Any]:
    """(suffix of vLLM's name, tensor as checkpoints have it)."""
    values, sf = layer
    if weights == "mxfp4":
        yield "weight", values.view(torch.uint8)
        yield "weight_scale", unpack_ue8m0(sf).view(torch.float8_e8m0fnu)
    else:
        yield "weight", values
        yield "weight_scale_inv", sf.float() if sf.dtype == torch.float8_e8m0fnu else sf


def quantization(weights: str) -> Any:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

    if weights == "mxfp4":
        return Mxfp4Config()
    return Fp8Config(activation_scheme="dynamic", weight_block_size=[128, 128])


@contextlib.contextmanager
def world(rank: int = 0, folder: str = "", tp: int = 1, dp: int = 1, **parallel: Any) -> Any:
    """vLLM's groups, and its config as the current one. In a group of several ranks, torch's own
    process group is there already."""
    from vllm.config import (
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import (
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    config = VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp,
            data_parallel_size=dp,
            data_parallel_rank=rank // tp,
            enable_expert_parallel=tp * dp > 1 and parallel.pop("expert_parallel", True),
            **parallel,
        ),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=4,
            is_encoder_decoder=False,
        ),
    )
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        else:
            init_distributed_environment(tp, rank % tp, "env://", rank, "gloo")
        initialize_model_parallel(tp, backend="gloo")
        try:
            yield config
        finally:
            served_experts.buffers.close()
            destroy_model_parallel()


def route(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool) -> Any:
    """A model's own routing function."""
    weights, ids = gating_output.softmax(-1).topk(topk)
    return weights, ids.to(torch.int32)


def make_runner(weights: str, **arguments: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    return FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=TOPK,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        params_dtype=torch.bfloat16,
        quant_config=quantization(weights),
        prefix=arguments.pop("prefix", NAME),
        custom_routing_function=route,
        **arguments,
    )


def load(runner: Any, weights: str, source: Weights, leave_out: int | None = None) -> None:
    """As vLLM's loaders do, a tensor of one expert at a time, then let it process them."""
    layer = runner.routed_experts
    l1, l2 = source
    for i in range(EXPERTS):
        if i == leave_out:
            continue
        for suffix, tensor in loaded_forms(weights, l1):
            gate, up = tensor[i].chunk(2)
            name = f"w13_{suffix}"
            for shard, part in (("w1", gate), ("w3", up)):
                param = getattr(layer, name)
                param.weight_loader(param, part, f"experts.{name}", shard, i)
        for suffix, tensor in loaded_forms(weights, l2):
            name = f"w2_{suffix}"
            param = getattr(layer, name)
            param.weight_loader(param, tensor[i], f"experts.{name}", "w2", i)
    layer.quant_method.process_weights_after_loading(layer)


def tokens(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    return x, torch.randn(num_tokens, EXPERTS, generator=generator)


def called_directly(
    weights: str, arch: str, source: Weights, x: Any, logits: Any, limit: float = math.inf
) -> torch.Tensor:
    """By the public API, without vLLM, all experts on one rank."""
    topk_weights, ids = route(x, logits, TOPK, True)
    intermediate = source[0][0].shape[1] // 2
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, EXPERTS, MAX_TOKENS, TOPK, HIDDEN, intermediate, weights=weights, device="cpu"
    )
    transformed = deep_moe.transform_weights_for_mega_moe(*source, arch, weights=weights)
    deep_moe.prepare_inputs(x, ids, topk_weights, buffer, arch=arch)
    y = torch.empty_like(x)
    call = deep_moe.fp8_mega_moe if weights == "fp8" else deep_moe.fp8_fp4_mega_moe
    call(y, *transformed, buffer, activation=Swiglu(limit), arch=arch)
    return y


def forward(runner: Any, config: Any, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, config), torch.inference_mode():
        return runner(x, logits)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin, as vLLM runs it, for a target that is emulated."""
    from vllm.model_executor.custom_op import op_registry_oot

    from deep_moe.integrations.vllm import SWITCH, register

    monkeypatch.setattr(served_experts, "buffers", served_experts.SharedBuffers())

    def install(arch: str = "sm_100a") -> None:
        monkeypatch.setenv(SWITCH, arch)
        register()
        register()  # vLLM may do so again

    yield install
    op_registry_oot.pop("RoutedExperts", None)


@pytest.mark.parametrize(("weights", "arch"), CASES)
def test_a_layer_gives_what_the_kernel_gives(installed, weights, arch, caplog):
    installed(arch)
    source, (x, logits) = checkpoint(weights), tokens(5)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = make_runner(weights, swiglu_limit=1.0)
        load(runner, weights, source)
        result = forward(runner, config, x, logits)
    assert torch.equal(result, called_directly(weights, arch, source, x, logits, limit=1.0))
    assert result.abs().max() > 0.01
    assert caplog.messages == [f"{NAME}: experts run by deep_moe ({weights})"]
