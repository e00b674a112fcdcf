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
from deep_moe.activations import Activation, Swiglu, SwigluOai
from deep_moe.compat.deep_gemm.operands import packed_weights
from deep_moe.errors import CheckpointError, DeepMoEError
from deep_moe.formats.block_scaled import unpack_ue8m0
from deep_moe.integrations import served_experts
from deep_moe.integrations.shared_buffers import LayerSizes
from deep_moe.trial.rank_processes import run_on_ranks
from deep_moe.weights import weight_format
from tests.pairs import formats

vllm = pytest.importorskip("vllm", reason="make test-serving installs it")

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 128, 8, 2
MAX_TOKENS = 32
NAME = "model.layers.0.mlp.experts"
CASES = [(weights, arch) for weights in ("mxfp4", "fp8", "bf16") for arch in ("sm_90a", "sm_100a")]

Weights = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def checkpoint(weights: str, seed: int = 0) -> Weights:
    """Values and scales of both layers, as `transform_weights_for_mega_moe` takes them."""
    generator = torch.Generator().manual_seed(seed)
    block = (1, 32) if weights == "mxfp4" else (128, 128)
    made = []
    for num_rows, num_columns in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
        x = torch.randn(EXPERTS, num_rows, num_columns, generator=generator) / num_columns**0.5
        if weights == "bf16":
            made.append(weight_format(weights).quantize(x))
            continue
        values, sf = weight_format(weights).quantize(x, block)
        if weights == "fp8":
            sf = sf.log2().round().exp2()  # which every target applies
        made.append((values, sf))
    return made[0], made[1]


def loaded_forms(weights: str, layer: tuple[torch.Tensor, torch.Tensor]) -> Iterator[Any]:
    """(suffix of vLLM's name, tensor as checkpoints have it)."""
    values, sf = layer
    if weights == "mxfp4":
        yield "weight", values.view(torch.uint8)
        yield "weight_scale", unpack_ue8m0(sf).view(torch.float8_e8m0fnu)
    elif weights == "bf16":
        yield "weight", values
    else:
        yield "weight", values
        yield "weight_scale_inv", sf


def quantization(weights: str) -> Any:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

    if weights == "bf16":
        return None
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
        top_k=arguments.pop("top_k", TOPK),
        hidden_size=HIDDEN,
        intermediate_size=arguments.pop("intermediate_size", INTERMEDIATE),
        params_dtype=torch.bfloat16,
        quant_config=quantization(weights),
        prefix=arguments.pop("prefix", NAME),
        custom_routing_function=route,
        **arguments,
    )


def load(runner: Any, weights: str, source: Weights, leave_out: int | None = None) -> None:
    """As vLLM does: the parts of a checkpoint, then what follows."""
    load_parts(runner, weights, source, leave_out)
    layer = runner.routed_experts
    layer.quant_method.process_weights_after_loading(layer)


def load_parts(runner: Any, weights: str, source: Weights, leave_out: int | None = None) -> None:
    """A tensor of one expert at a time."""
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
                param.weight_loader(param, part, f"a.models.{suffix}", shard, i)
        for suffix, tensor in loaded_forms(weights, l2):
            name = f"w2_{suffix}"
            param = getattr(layer, name)
            param.weight_loader(param, tensor[i], f"a.models.{suffix}", "w2", i)


def tokens(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    return x, torch.randn(num_tokens, EXPERTS, generator=generator)


def called_directly(
    weights: str,
    arch: str,
    source: Weights,
    x: Any,
    logits: Any,
    limit: float = math.inf,
    token_format: str | None = None,
    activation: Activation | None = None,
    token_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """By the public API, without vLLM, all experts on one rank."""
    pair = formats(weights) | ({"token_format": token_format} if token_format else {})
    topk_weights, ids = route(x, logits, TOPK, True)
    intermediate = source[0][0].shape[1] // 2
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None,
        EXPERTS,
        MAX_TOKENS,
        TOPK,
        HIDDEN,
        intermediate,
        **pair,
        device="cpu",
    )
    transformed = deep_moe.transform_weights_for_mega_moe(*source, arch, **pair)
    deep_moe.prepare_inputs(x, ids, topk_weights, buffer, token_scale=token_scale, arch=arch)
    y = torch.empty_like(x)
    deep_moe.mega_moe(y, transformed, buffer, activation=activation or Swiglu(limit), arch=arch)
    return y


def forward(
    runner: Any, config: Any, x: torch.Tensor, logits: torch.Tensor, **context: Any
) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    context.setdefault("num_tokens", x.shape[0])
    with set_forward_context(None, config, **context), torch.inference_mode():
        return runner(x, logits)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin, as vLLM runs it, for a target that is emulated."""
    from vllm.model_executor.custom_op import op_registry_oot

    yield lambda arch="sm_100a": install(monkeypatch.setenv, arch)
    for name in ("RoutedExperts", "GptOssRoutedExperts"):
        op_registry_oot.pop(name, None)


def install(setenv: Any, arch: str) -> None:
    from deep_moe.integrations.vllm import SWITCH_VARIABLE, register

    setenv(SWITCH_VARIABLE, arch)
    register()
    register()  # vLLM may do so again


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "vllm.deep_moe"]


def served(
    caplog: pytest.LogCaptureFixture, weights: str, source: Weights, x: Any, logits: Any
) -> torch.Tensor:
    """By a layer of vLLM's that has just been loaded; its lines are in caplog."""
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = make_runner(weights, swiglu_limit=1.0)
        load(runner, weights, source)
        return forward(runner, config, x, logits)


@pytest.mark.parametrize(("weights", "arch"), CASES)
def test_a_layer_gives_what_the_kernel_gives(installed, weights, arch, caplog):
    installed(arch)
    source, (x, logits) = checkpoint(weights), tokens(5)
    result = served(caplog, weights, source, x, logits)
    assert torch.equal(result, called_directly(weights, arch, source, x, logits, limit=1.0))
    assert result.abs().max() > 0.01
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe ({weights})"]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_tokens_in_bf16_beside_mxfp4(installed, caplog, monkeypatch, arch):
    monkeypatch.setenv("DEEP_MOE_TOKEN_FORMAT", "bf16")
    installed(arch)
    source, (x, logits) = checkpoint("mxfp4"), tokens(5)
    result = served(caplog, "mxfp4", source, x, logits)
    assert torch.equal(result, called_directly("mxfp4 x bf16", arch, source, x, logits, limit=1))
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe (mxfp4)"]


def test_float_scales_of_tokens_beside_fp8(installed, caplog, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_TOKEN_FORMAT", "fp8_128")
    installed("sm_90a")
    source, (x, logits) = checkpoint("fp8"), tokens(5)
    result = served(caplog, "fp8", source, x, logits)
    own, default = (
        called_directly("fp8", "sm_90a", source, x, logits, 1.0, scales)
        for scales in ("fp8_128", "mxfp8")
    )
    assert torch.equal(result, own)
    assert not torch.equal(result, default)
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe (fp8)"]


GPT_OSS_SIZES = {"hidden_size": 160, "intermediate_size": 96}


def gpt_oss_checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    """A layer's tensors by vLLM's names, as its loader of gpt-oss brings them: all experts in one,
    rows of gate and up in turn."""
    generator = torch.Generator().manual_seed(seed)
    hidden, intermediate = GPT_OSS_SIZES.values()
    made = {}
    for layer, rows, columns in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        values, sf = deep_moe.quantize_mxfp4(
            torch.randn(EXPERTS, rows, columns, generator=generator) / columns**0.5
        )
        made[f"{layer}_weight"] = values.view(torch.uint8)
        made[f"{layer}_weight_scale"] = unpack_ue8m0(sf)[..., : columns // 32].contiguous()
        made[f"{layer}_bias"] = torch.randn(EXPERTS, rows, generator=generator).bfloat16()
    return made


def make_gpt_oss_runner() -> Any:
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    return FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=TOPK,
        **GPT_OSS_SIZES,
        params_dtype=torch.bfloat16,
        quant_config=GptOssMxfp4Config(),
        prefix=NAME,
        custom_routing_function=route,
        has_bias=True,
        activation="swigluoai",
        routed_experts_cls=GptOssRoutedExperts,
    )


def load_gpt_oss(runner: Any, source: dict[str, torch.Tensor], own: slice = slice(None)) -> None:
    layer = runner.routed_experts
    for name, tensor in source.items():
        param = getattr(layer, name)
        param.weight_loader(param, tensor[own], weight_name=name, shard_id=None, expert_id=None)
    layer.quant_method.process_weights_after_loading(layer)


def gpt_oss_called_directly(
    arch: str, source: dict[str, torch.Tensor], x: torch.Tensor, logits: torch.Tensor
) -> torch.Tensor:
    def in_order(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[:, ::2], rows[:, 1::2]], 1)

    pairs = [
        packed_weights(
            layer, (order(source[f"{layer}_weight"]), order(source[f"{layer}_weight_scale"]))
        )
        for layer, order in (("w13", in_order), ("w2", torch.clone))
    ]
    sizes = LayerSizes(EXPERTS, TOPK, *GPT_OSS_SIZES.values(), "mxfp4", "mxfp8", biases=True)
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None,
        EXPERTS,
        MAX_TOKENS,
        TOPK,
        sizes.hidden,
        sizes.intermediate_hidden,
        biases=True,
        device="cpu",
    )
    biases = deep_moe.transform_biases_for_mega_moe(
        in_order(source["w13_bias"]), source["w2_bias"], arch, weights="mxfp4"
    )
    topk_weights, ids = route(x, logits, TOPK, True)
    deep_moe.prepare_inputs(x, ids, topk_weights, buffer, arch=arch)
    y = torch.empty_like(x)
    deep_moe.fp8_fp4_mega_moe(
        y,
        *deep_moe.transform_weights_for_mega_moe(*pairs, arch),
        buffer,
        activation=SwigluOai(1.702, 7.0),
        l1_bias=biases.l1,
        l2_bias=biases.l2,
        arch=arch,
    )
    return y


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_gpt_oss(installed, arch, caplog, monkeypatch):
    """vLLM's own class of its experts, sizes that the kernel pads, biases. Experts are permuted."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    # It is asked of a model's config, of which there is none here.
    monkeypatch.setattr(mxfp4, "_user_moe_activation_override", lambda: None)
    installed(arch)
    source = gpt_oss_checkpoint()
    x, logits = tokens(5)
    x = x[:, : GPT_OSS_SIZES["hidden_size"]].contiguous()
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = make_gpt_oss_runner()
        load_gpt_oss(runner, source)
        result = forward(runner, config, x, logits)
        for tensor in runner.routed_experts.get_expert_weights():
            tensor.copy_(tensor[order].clone())
        permuted = forward(runner, config, x, logits[:, order])
    assert torch.equal(result, gpt_oss_called_directly(arch, source, x, logits))
    assert torch.equal(permuted, result)
    assert result.abs().max() > 0.01
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe (mxfp4)"]


def test_vllms_own_kernel_and_stages_are_around_it(installed):
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.prepare_finalize import (
        MoEPrepareAndFinalizeNoDPEPModular,
    )

    installed()
    with world():
        runner = make_runner("mxfp4")
        load(runner, "mxfp4", checkpoint("mxfp4"))
        kernel = runner.routed_experts.quant_method.moe_kernel
    assert isinstance(kernel, mk.FusedMoEKernel)
    assert isinstance(kernel.prepare_finalize, MoEPrepareAndFinalizeNoDPEPModular)
    assert not kernel.output_is_reduced()  # tensor parallel ranks hold slices


def test_padded_rows_cost_nothing_and_are_zero(installed):
    installed()
    source, (x, logits) = checkpoint("mxfp4"), tokens(6)
    topk_weights, ids = route(x, logits, TOPK, True)
    ids[4:] = -1
    with world():
        runner = make_runner("mxfp4")
        load(runner, "mxfp4", source)
        result = runner.routed_experts.forward_modular(x, topk_weights, ids)
    expected = called_directly("mxfp4", "sm_100a", source, x[:4], logits[:4])
    assert torch.equal(result[:4], expected)
    assert (result[4:] == 0).all()


@pytest.mark.parametrize(("weights", "arch"), CASES)
def test_a_load_balancer_permutes_experts_in_place(installed, weights, arch):
    installed(arch)
    source, (x, logits) = checkpoint(weights), tokens(5)
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    with world() as config:
        runner = make_runner(weights)
        load(runner, weights, source)
        expected = forward(runner, config, x, logits)
        moved = list(runner.routed_experts.get_expert_weights())
        assert len(moved) == (2 if weights == "bf16" else 4)
        for tensor in moved:
            tensor.copy_(tensor[order].clone())
        result = forward(runner, config, x, logits[:, order])
    assert torch.equal(result, expected)


def test_new_weights_go_into_the_same_memory(installed):
    from vllm.model_executor.model_loader.reload import layerwise

    installed()
    (x, logits), other = tokens(5), checkpoint("mxfp4", seed=9)
    with world() as config:
        runner = make_runner("mxfp4")
        layerwise.record_metadata_for_reloading(runner)
        load(runner, "mxfp4", checkpoint("mxfp4"))
        addresses = [p.data_ptr() for p in runner.routed_experts.parameters()]
        before = forward(runner, config, x, logits)
        layerwise.initialize_layerwise_reload(runner)
        load_parts(runner, "mxfp4", other)
        layerwise.finalize_layerwise_reload(runner, None)
        after = forward(runner, config, x, logits)
    assert [p.data_ptr() for p in runner.routed_experts.parameters()] == addresses
    assert not torch.equal(before, after)
    assert torch.equal(after, called_directly("mxfp4", "sm_100a", other, x, logits))


def test_parts_of_a_checkpoint_are_not_written_into_the_kernels_layout(installed):
    """As where a trainer calls a model's load_weights, without vLLM's reloading around it."""
    installed()
    (x, logits), source = tokens(5), checkpoint("mxfp4")
    with world() as config:
        runner = make_runner("mxfp4")
        load(runner, "mxfp4", source)
        with pytest.raises(
            DeepMoEError, match=rf"^{NAME}: w13_weight holds the layout .* reload_w"
        ):
            load_parts(runner, "mxfp4", checkpoint("mxfp4", seed=9))
        after = forward(runner, config, x, logits)
    assert torch.equal(after, called_directly("mxfp4", "sm_100a", source, x, logits))


def test_what_was_laid_out_is_not_laid_out_again(installed):
    installed()
    (x, logits), source = tokens(5), checkpoint("mxfp4")
    with world() as config:
        runner = make_runner("mxfp4")
        load(runner, "mxfp4", source)
        layer = runner.routed_experts
        layer.quant_method.process_weights_after_loading(layer)
        after = forward(runner, config, x, logits)
    assert torch.equal(after, called_directly("mxfp4", "sm_100a", source, x, logits))


@pytest.mark.parametrize("path", ["fused", "low_latency"])
def test_memory_that_another_gave_a_parameter_is_refused(installed, path, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_VLLM_PATH", path)
    installed()
    with world() as config:
        runner = make_runner("mxfp4")
        load(runner, "mxfp4", checkpoint("mxfp4"))
        layer = runner.routed_experts
        layer.w2_weight.data = layer.w2_weight.data.clone()
        with pytest.raises(DeepMoEError, match=rf"^{NAME}: w2_weight has other memory"):
            forward(runner, config, *tokens(5))
        with pytest.raises(DeepMoEError, match=rf"^{NAME}: new weights must bring all tensors"):
            layer.quant_method.process_weights_after_loading(layer)


def test_weights_that_no_loader_brought_are_vllms(installed, caplog):
    """As `--load-format sharded_state` copies them in: maybe in the layout of another kernel."""
    installed()
    with world():
        runner = make_runner("mxfp4")
        layer = runner.routed_experts
        taken = []
        engine = layer.quant_method.engine
        engine.process_weights_after_loading = taken.append
        layer.quant_method.process_weights_after_loading(layer)
    assert taken == [layer]
    assert "weights came past vLLM's loaders of experts" in lines(caplog)[0]


def test_new_weights_without_a_tensor_are_refused(installed):
    """Of a tensor that nothing was loaded of vLLM lays out what the memory held."""
    from vllm.model_executor.model_loader.reload import layerwise

    installed()
    with world():
        runner = make_runner("mxfp4")
        layerwise.record_metadata_for_reloading(runner)
        load(runner, "mxfp4", checkpoint("mxfp4"))
        layerwise.initialize_layerwise_reload(runner)
        param = runner.routed_experts.w13_weight
        ((_, values), _) = loaded_forms("mxfp4", checkpoint("mxfp4")[0])
        for i in range(EXPERTS):
            for shard, part in zip(("w1", "w3"), values[i].chunk(2), strict=True):
                param.weight_loader(param, part, "a.models.weight", shard, i)
        words = "no w1, w3 for w13_weight_scale, w2 for w2_weight, w2 for w2_weight_scale of expert"
        with pytest.raises(CheckpointError, match=words):
            layerwise.finalize_layerwise_reload(runner, None)


def test_shared_experts_run_outside_and_are_added(installed):
    installed()
    source, (x, logits) = checkpoint("mxfp4"), tokens(5)
    shared = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
    with world() as config:
        runner = make_runner("mxfp4", shared_experts=shared)
        load(runner, "mxfp4", source)
        result = forward(runner, config, x, logits)
    with torch.inference_mode():
        expected = shared(x) + called_directly("mxfp4", "sm_100a", source, x, logits)
    assert torch.equal(result, expected)


def test_layers_of_a_draft_model_share_the_buffer(installed):
    installed()
    with world() as config:
        runners = [
            make_runner("mxfp4", prefix=name) for name in (NAME, "model.layers.1.mtp.experts")
        ]
        for seed, runner in enumerate(runners):
            source, (x, logits) = checkpoint("mxfp4", seed), tokens(3)
            load(runner, "mxfp4", source)
            result = forward(runner, config, x, logits)
            assert torch.equal(result, called_directly("mxfp4", "sm_100a", source, x, logits))
        first, second = (r.routed_experts.quant_method.served.buffer() for r in runners)
        assert first is second


def test_a_checkpoint_without_an_expert_is_refused(installed):
    installed()
    with world():
        runner = make_runner("mxfp4")
        with pytest.raises(
            CheckpointError, match=r"no w1, w3 for w13_weight, .* of experts 5, as vLLM"
        ):
            load(runner, "mxfp4", checkpoint("mxfp4"), leave_out=5)


def test_too_many_tokens_are_refused_by_number(installed):
    installed()
    with world() as config:
        runner = make_runner("mxfp4")
        load(runner, "mxfp4", checkpoint("mxfp4"))
        with pytest.raises(ValueError, match=f"at most {MAX_TOKENS} tokens.*got {MAX_TOKENS + 1}"):
            forward(runner, config, *tokens(MAX_TOKENS + 1))


FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"has_bias": True}, "experts have biases"),
    "activation": ({"activation": "gelu"}, "the kernel has no activation gelu"),
    "sizes": ({"intermediate_size": 80}, "intermediate_hidden must be a positive multiple of 32"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_the_kernel_does_not_run_goes_vllms_way_with_one_line(installed, caplog, name):
    arguments, reason = FALLBACKS[name]
    installed()
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world():
        runner = make_runner("mxfp4", **arguments)
    (line,) = lines(caplog)
    assert line.startswith(f"{NAME}: experts run by vLLM (Mxfp4MoEMethod): {reason}")
    assert type(runner.routed_experts.quant_method).__name__ == "Mxfp4MoEMethod"


def test_scales_that_the_target_cannot_apply_give_the_layer_back(installed, caplog, monkeypatch):
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    taken: list[Any] = []
    monkeypatch.setattr(
        Fp8MoEMethod, "process_weights_after_loading", lambda self, layer: taken.append(layer)
    )
    installed("sm_100a")
    l1, l2 = checkpoint("fp8")
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world():
        runner = make_runner("fp8")
        load(runner, "fp8", ((l1[0], l1[1] * 1.5), l2))
    layer = runner.routed_experts
    assert taken == [layer]
    assert isinstance(layer.quant_method, Fp8MoEMethod)
    assert torch.equal(layer.w13_weight.data.view(torch.uint8), l1[0].view(torch.uint8))
    (line,) = lines(caplog)
    assert "experts run by vLLM (Fp8MoEMethod): expert 0" in line
    assert "must be a power of two" in line


def test_scales_that_the_target_cannot_apply_are_rounded_if_asked(installed, caplog, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_REQUANTIZE", "1")
    installed("sm_100a")
    (values, sf), l2 = checkpoint("fp8")
    source, (x, logits) = ((values, sf * 1.5), l2), tokens(5)
    result = served(caplog, "fp8", source, x, logits)
    # Which applies such scales.
    exact = called_directly("fp8", "sm_90a", source, x, logits, limit=1.0)
    angle = torch.nn.functional.cosine_similarity(result.float(), exact.float())
    assert (1 - angle).max() < 3e-3
    (line,) = lines(caplog)
    assert line.startswith(f"{NAME}: experts run by deep_moe (fp8, weights rounded anew, by up to ")


def test_vllms_own_option_asks_for_it(installed, caplog):
    """In any of vLLM's spellings, and its commands list the name."""
    from vllm.config.kernel import KernelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    installed("sm_90a")
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    asked = parser.parse_args(["--moe-backend", "deep-moe"]).moe_backend
    with pytest.raises(ValueError, match="deep_moe"):
        KernelConfig(moe_backend="deep_mow")
    source, (x, logits) = checkpoint("mxfp4"), tokens(5)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        config.kernel_config = KernelConfig(moe_backend=asked)
        runner = make_runner("mxfp4", swiglu_limit=1.0)
        load(runner, "mxfp4", source)
        result = forward(runner, config, x, logits)
    assert torch.equal(result, called_directly("mxfp4", "sm_90a", source, x, logits, limit=1.0))
    assert lines(caplog) == [f"{NAME}: experts run by deep_moe (mxfp4)"]


def test_what_was_asked_for_and_cannot_run_is_an_error(installed):
    from vllm.config.kernel import KernelConfig

    installed("sm_100a")
    l1, l2 = checkpoint("fp8")
    with world() as config:
        config.kernel_config = KernelConfig(moe_backend="deep_moe")
        asked = "moe_backend='deep_moe' was asked for, but deep_moe cannot run the experts"
        with pytest.raises(DeepMoEError, match=f"^{NAME}: {asked}: experts have biases; with"):
            make_runner("mxfp4", has_bias=True)
        runner = make_runner("fp8", prefix="other")
        with pytest.raises(DeepMoEError, match=f"^other: {asked}: expert 0.*power of two"):
            load(runner, "fp8", ((l1[0], l1[1] * 1.5), l2))


def test_without_a_gpu_vllm_runs_experts_itself(installed, caplog):
    installed("1")
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world():
        make_runner("mxfp4")
    assert lines(caplog) == [
        f"{NAME}: experts run by vLLM (Mxfp4MoEMethod): there is no NVIDIA GPU"
    ]


def test_switched_off_it_changes_nothing(installed):
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    installed("0")
    with world():
        assert type(make_runner("mxfp4").routed_experts) is RoutedExperts


def test_another_plugin_in_its_place_is_named(installed, caplog):
    from vllm.model_executor.custom_op import op_registry_oot

    op_registry_oot["RoutedExperts"] = torch.nn.Linear
    installed()
    assert "vLLM runs all experts itself, without deep_moe: another plugin, torch.nn" in caplog.text
    assert op_registry_oot["RoutedExperts"] is torch.nn.Linear


def test_two_ranks_run_gpt_oss():
    run_on_ranks(run_gpt_oss_ranks, 2, "cpu", start_method="spawn")


def run_gpt_oss_ranks(device: torch.device) -> None:
    """Each rank loads its experts; both hold the same tokens."""
    import os

    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    mxfp4._user_moe_activation_override = lambda: None
    rank = torch.distributed.get_rank()
    install(os.environ.__setitem__, "sm_90a")
    source = gpt_oss_checkpoint()
    x, logits = tokens(5)
    x = x[:, : GPT_OSS_SIZES["hidden_size"]].contiguous()
    expected = gpt_oss_called_directly("sm_90a", source, x, logits)
    with world(rank=rank, tp=2) as config:
        runner = make_gpt_oss_runner()
        load_gpt_oss(runner, source, slice(rank * EXPERTS // 2, (rank + 1) * EXPERTS // 2))
        result = forward(runner, config, x, logits)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("parallel", ["tp_ep", "dp_ep", "tp"])
def test_two_ranks_give_what_one_gives(parallel):
    run_on_ranks(run_two_ranks, 2, "cpu", parallel, start_method="spawn")


def run_two_ranks(device: torch.device, parallel: str) -> None:
    """Every rank compares its own rows with all experts on one rank."""
    import os

    rank = torch.distributed.get_rank()
    arch = "sm_90a"
    install(os.environ.__setitem__, arch)
    source = checkpoint("mxfp4")
    options: dict[str, Any] = {
        "tp_ep": {"tp": 2},
        "dp_ep": {"dp": 2},
        "tp": {"tp": 2, "expert_parallel": False},
    }[parallel]
    # Both ranks of tensor parallelism hold the same tokens, of which there is an odd number.
    x, logits = tokens(3 + 2 * rank, seed=rank) if parallel == "dp_ep" else tokens(5)
    intermediate = 2 * INTERMEDIATE if parallel == "tp" else INTERMEDIATE
    if parallel == "tp":
        source = wide_checkpoint()
    expected = called_directly("mxfp4", arch, source, x, logits)
    with world(rank=rank, **options) as config:
        runner = make_runner("mxfp4", intermediate_size=intermediate)
        load(runner, "mxfp4", source)
        if parallel == "dp_ep":
            counts = torch.tensor([3, 5])
            result = forward(runner, config, x, logits, num_tokens_across_dp=counts)
        else:
            result = forward(runner, config, x, logits)
    if parallel == "tp":  # two sums, each rounded to bfloat16
        assert torch.allclose(result.float(), expected.float(), rtol=0.02, atol=0.02)
        assert expected.abs().max() > 0.1
    else:
        assert torch.equal(result, expected)


def test_sequence_parallelism_gives_every_rank_a_share():
    run_on_ranks(run_sequence_parallel, 4, "cpu", start_method="spawn")


def run_sequence_parallel(device: torch.device) -> None:
    """Two pairs of ranks: vLLM's model has cut each pair's tokens into equal parts already."""
    import os

    rank = torch.distributed.get_rank()
    arch = "sm_90a"
    install(os.environ.__setitem__, arch)
    source = checkpoint("mxfp4")
    x, logits = tokens((2, 3)[rank // 2], seed=rank)
    expected = called_directly("mxfp4", arch, source, x, logits)
    with world(rank=rank, tp=2, dp=2) as config:
        assert config.parallel_config.use_sequence_parallel_moe
        runner = make_runner("mxfp4", is_sequence_parallel=True)
        load(runner, "mxfp4", source)
        method = runner.routed_experts.quant_method
        assert (method.plan.num_ranks, method.plan.num_sharers) == (4, 1)
        counts = torch.tensor([4, 6])
        context = {"num_tokens": int(counts[rank // 2]), "num_tokens_across_dp": counts}
        result = forward(runner, config, x, logits, **context)
    assert torch.equal(result, expected)


def wide_checkpoint() -> Weights:
    """Experts twice as wide, gate rows of both slices before up rows of both."""
    (v1, s1), (v2, s2) = checkpoint("mxfp4", 1)
    (w1, t1), (w2, t2) = checkpoint("mxfp4", 2)

    def rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (gate, up), (other_gate, other_up) = a.chunk(2, 1), b.chunk(2, 1)
        return torch.cat([gate, other_gate, up, other_up], 1)

    return (rows(v1, w1), rows(s1, t1)), (torch.cat([v2, w2], 2), torch.cat([s2, t2], 2))


def test_the_fakes_of_the_other_tests_have_vllms_names():
    import dataclasses

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    from tests.integrations import vllm_fakes

    for kind, fake in (
        (FusedMoEConfig, vllm_fakes.CONFIG),
        (FusedMoEParallelConfig, vllm_fakes.PARALLEL),
    ):
        known = {field.name for field in dataclasses.fields(kind)} | set(vars(kind))
        assert set(fake) <= known, set(fake) - known
    assert {"silu", "situ", "swigluoai_uninterleave"} <= {kind.value for kind in MoEActivation}
    with world():
        layer = make_runner("mxfp4").routed_experts
    assert isinstance(layer.expert_map_manager, ExpertMapManager)
    for name, default in vllm_fakes.PLACEMENT.items():
        assert getattr(layer.expert_map_manager, name) == default
    for name, default in vllm_fakes.LAYER.items():
        assert getattr(layer, name) == default
    for name, default in vllm_fakes.PARALLEL.items():
        assert getattr(layer.moe_config.moe_parallel_config, name) == default
