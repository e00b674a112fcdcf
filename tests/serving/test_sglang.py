"""SGLang's own forward pass of fused experts, and its own registry of hooks, run ours, emulated."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_moe.formats.block_scaled import ue8m0_to_float, unpack_ue8m0
from deep_moe.integrations import served_experts
from deep_moe.integrations.sglang import SWITCH_VARIABLE, hooks, register
from deep_moe.trial.rank_processes import run_on_ranks

if importlib.util.find_spec("sglang") is None:
    pytest.skip("make test-serving installs sglang", allow_module_level=True)

from . import sglang_stage
from .test_vllm import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MAX_TOKENS,
    TOPK,
    Weights,
    called_directly,
    checkpoint,
    route,
    tokens,
)

CASES = [("mxfp4", "sm_90a"), ("mxfp4", "sm_100a"), ("fp8", "sm_90a"), ("fp8", "sm_100a")]
ONE_RANK = SimpleNamespace(world_size=1, device_group=None, cpu_group=None)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    served_experts.buffers.close()


def started(setenv: Any, arch: str, group: Any = ONE_RANK) -> Any:
    """SGLang's module, as its processes have it when plugins are loaded."""
    module = sglang_stage.set_up(group, MAX_TOKENS)
    from sglang.srt.plugins.hook_registry import HookRegistry

    setenv(SWITCH_VARIABLE, arch)
    register()
    register()
    HookRegistry.apply_hooks()
    return module


def layer(weights: str, source: Weights, rank: int = 0, num_ranks: int = 1, **changes: Any) -> Any:
    """SGLang's `FusedMoE`, into which its own loader has loaded a checkpoint."""
    experts = empty_layer(weights, rank, num_ranks, **changes)
    load(experts, weights, source)
    return experts


def empty_layer(weights: str, rank: int = 0, num_ranks: int = 1, **changes: Any) -> Any:
    """`FusedMoE` as it is when its method has made the tensors that are loaded into. It is not
    initialized by itself, as that asks for a server's arguments."""
    fused_moe = sglang_stage.module("layers.moe.fused_moe_triton.layer").FusedMoE
    experts = fused_moe.__new__(fused_moe)
    torch.nn.Module.__init__(experts)
    config = {
        "num_fused_shared_experts": 0,
        "apply_router_weight_on_input": False,
        "activation": "silu",
        "is_gated": True,
        "gemm1_alpha": None,
        "gemm1_beta": None,
        "gemm1_clamp_limit": None,
        "gate_up_interleaved": True,
        "swiglu_limit": None,
    }
    attributes = {
        "layer_id": 3,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS // num_ranks,
        "_num_local_routed": EXPERTS // num_ranks,
        "top_k": TOPK,
        "moe_tp_size": 1,
        "moe_tp_rank": 0,
        "moe_ep_size": num_ranks,
        "moe_ep_rank": rank,
        "_expert_storage_rank": rank,
        "with_bias": False,
        "quant_config": None,
        "weight_load_method": None,
        "uses_expert_location": True,
        "use_presharded_weights": False,
        "use_triton_kernels": False,
        "use_flashinfer_trtllm_moe": False,
        "_has_fused_shared": False,
        "_mega_moe_nvfp4": False,
        "_mega_moe_w4a4": False,
        "_mega_moe_weights_built": False,
    }
    experts.moe_runner_config = SimpleNamespace(
        **{name: changes.get(name, value) for name, value in config.items()}
    )
    for name, value in attributes.items():
        setattr(experts, name, changes.get(name, value))
    experts.quant_method = Method(weights)
    values, columns = (torch.int8, 2) if weights == "mxfp4" else (torch.float8_e4m3fn, 1)
    block = (1, 32) if weights == "mxfp4" else (128, 128)
    for name, rows, width in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
        num_local = experts.num_local_experts
        scales = num_local, rows // block[0], width // block[1]
        made = {
            "weight": torch.zeros(num_local, rows, width // columns).to(values),
            "weight_scale_inv": torch.ones(scales),
        }
        for suffix, tensor in made.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            parameter.weight_loader = experts.weight_loader
            if suffix == "weight_scale_inv":
                parameter.quant_method = "block"
            experts.register_parameter(f"{name}_{suffix}", parameter)
    return experts


class Method:
    """As SGLang's method of FP8 calls what lays weights out, whenever some were loaded."""

    def __init__(self, weights: str) -> None:
        self.is_fp4_expert = weights == "mxfp4"

    def process_weights_after_loading(self, layer: Any) -> None:
        if not self.is_fp4_expert:
            sglang_stage.module("layers.moe.mega_moe_sm90").build_sm90_mega_moe_experts_weights(
                layer
            )
            return
        layer.w13_weight.data = layer.w13_weight.data.view(torch.int8)
        layer.w2_weight.data = layer.w2_weight.data.view(torch.int8)
        sglang_stage.module("layers.moe.mega_moe").build_mega_moe_experts_weights(layer)


class Model(torch.nn.Module):
    """One with a layer of experts, which finds loaders as SGLang's models do."""

    def __init__(self, experts: Any, num_experts: int = EXPERTS) -> None:
        super().__init__()
        self.experts = experts
        self.mapping = type(experts).make_expert_params_mapping("w1", "w2", "w3", num_experts)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            for own, part, expert_idx, shard in self.mapping:
                if part in name:
                    parameter = parameters[name.replace(part, own)]
                    parameter.weight_loader(
                        parameter,
                        tensor,
                        name.replace(part, own),
                        shard_id=shard,
                        expert_id=expert_idx,
                    )


def named(weights: str, source: Weights) -> list[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors, in the order of their names."""
    made = {}
    for layer_name, (values, sf) in zip(("w13", "w2"), source, strict=True):
        scales = sf
        if weights == "mxfp4":
            scales = ue8m0_to_float(unpack_ue8m0(sf), torch.float32)
        for suffix, tensor in (("weight", values), ("weight_scale_inv", scales)):
            for i, own in enumerate(tensor):
                shards = zip(("w1", "w3"), own.chunk(2), strict=True)
                for shard, part in shards if layer_name == "w13" else [("w2", own)]:
                    made[f"experts.{i}.{shard}.{suffix}"] = part
    return sorted(made.items())


def load(experts: Any, weights: str, source: Weights) -> None:
    Model(experts).load_weights(named(weights, source))


def block(experts: Any, scale: float = 1.0) -> Any:
    """The model's module around it."""

    def topk(hidden_states: Any, logits: Any) -> Any:
        weights, ids = route(hidden_states, logits, TOPK, True)
        return SimpleNamespace(topk_ids=ids, topk_weights=weights)

    return SimpleNamespace(
        experts=experts,
        config=SimpleNamespace(
            hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts_per_tok=TOPK
        ),
        num_fused_shared_experts=0,
        mega_shared_l1_weights=None,
        mega_shared_l2_weights=None,
        n_shared_experts=1,
        shared_experts_is_fp8=True,
        shared_experts_weight_block_size=[128, 128],
        alt_stream=None,
        is_hash=False,
        routed_scaling_factor_fused_in_topk=False,
        routed_scaling_factor=scale,
        topk=topk,
        _forward_shared_experts=lambda hidden_states: hidden_states,
    )


def forward(module: Any, moe: Any, x: Any, logits: Any) -> torch.Tensor:
    moe.gate = lambda hidden_states, forward_batch=None: logits
    assert module.should_use_mega_moe(moe, x)
    with torch.inference_mode():
        return module.forward_mega_moe(moe, x)


@pytest.mark.parametrize(("weights", "arch"), CASES)
def test_sglangs_forward_gives_what_the_kernel_gives(weights, arch, caplog, monkeypatch):
    module = started(monkeypatch.setenv, arch)
    source, (x, logits) = checkpoint(weights), tokens(5)
    experts = layer(weights, source, swiglu_limit=1.0)
    with caplog.at_level(logging.INFO, "sglang.deep_moe"):
        module.build_mega_moe_experts_weights(experts)
    result = forward(module, block(experts), x, logits)
    shared = x  # of block()
    assert torch.equal(result, called_directly(weights, arch, source, x, logits, 1.0) + shared)
    assert caplog.messages == [f"layer 3: experts run by deep_moe ({weights}, 1 rank)"]
    # Neither more tokens than SGLang's own kernel takes, nor its gate or its shared experts.
    assert not module.should_fuse_mega_moe_shared_experts(block(experts))


def test_tokens_in_bf16_beside_mxfp4(caplog, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_TOKEN_FORMAT", "bf16")
    module = started(monkeypatch.setenv, "sm_90a")
    source, (x, logits) = checkpoint("mxfp4"), tokens(5)
    experts = layer("mxfp4", source, swiglu_limit=1.0)
    with caplog.at_level(logging.INFO, "sglang.deep_moe"):
        module.build_mega_moe_experts_weights(experts)
    result = forward(module, block(experts), x, logits)
    assert torch.equal(
        result, called_directly("mxfp4 x bf16", "sm_90a", source, x, logits, 1.0) + x
    )
    assert caplog.messages == ["layer 3: experts run by deep_moe (mxfp4, 1 rank)"]


def test_float_scales_of_tokens_beside_fp8(monkeypatch):
    monkeypatch.setenv("DEEP_MOE_TOKEN_FORMAT", "fp8_128")
    module = started(monkeypatch.setenv, "sm_90a")
    source, (x, logits) = checkpoint("fp8"), tokens(5)
    experts = layer("fp8", source, swiglu_limit=1.0)
    module.build_mega_moe_experts_weights(experts)
    result = forward(module, block(experts), x, logits)
    own, default = (
        called_directly("fp8", "sm_90a", source, x, logits, 1.0, scales) + x
        for scales in ("fp8_128", "mxfp8")
    )
    assert torch.equal(result, own)
    assert not torch.equal(result, default)


def test_tokens_that_there_is_no_kernel_for_are_sglangs(caplog, monkeypatch):
    monkeypatch.setenv("DEEP_MOE_TOKEN_FORMAT", "fp8_128")
    module = started(monkeypatch.setenv, "sm_100a")
    with pytest.raises(ModuleNotFoundError, match="deep_gemm"):  # SGLang's own way
        module.build_mega_moe_experts_weights(layer("fp8", checkpoint("fp8")))
    (line,) = caplog.messages
    assert line.endswith("for which only sm_90a has a kernel, not sm_100a")


def test_routed_sums_are_scaled_once(monkeypatch):
    module = started(monkeypatch.setenv, "sm_90a")
    source, (x, logits) = checkpoint("mxfp4"), tokens(5)
    experts = layer("mxfp4", source)
    module.build_mega_moe_experts_weights(experts)
    results = []
    for scale in (1.0, 2.0):
        moe = block(experts, scale)
        moe._forward_shared_experts = lambda hidden_states: None
        results.append(forward(module, moe, x, logits))
    once, twice = results
    assert torch.equal(twice, 2 * once)
    assert once.abs().max() > 0.5


def test_a_load_balancer_permutes_experts_in_place(monkeypatch):
    module = started(monkeypatch.setenv, "sm_90a")
    source, (x, logits) = checkpoint("mxfp4"), tokens(5)
    experts = layer("mxfp4", source)
    module.build_mega_moe_experts_weights(experts)
    expected = forward(module, block(experts), x, logits)
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(1))
    for parameter in experts.parameters():
        parameter.copy_(parameter[order].clone())
    assert torch.equal(forward(module, block(experts), x, logits[:, order]), expected)


FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"with_bias": True}, "experts have biases"),
    "fused": ({"num_fused_shared_experts": 1}, "shared experts are fused"),
    "nvfp4": ({"_mega_moe_nvfp4": True}, "weights are NVFP4"),
    "w4a4": ({"_mega_moe_w4a4": True}, "activations in FP4 were asked for"),
    "alpha": ({"gemm1_alpha": 1.7}, "the kernel has no activation silu, gemm1_alpha=1.7"),
    "gelu": ({"activation": "gelu"}, "the kernel has no activation gelu"),
    "limit": ({"swiglu_limit": -1.0}, "clamp must be a positive number"),
    "slices": ({"moe_tp_size": 2}, "ranks hold slices of experts"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_the_kernel_does_not_run_goes_sglangs_way_with_one_line(name, caplog, monkeypatch):
    changes, reason = FALLBACKS[name]
    module = started(monkeypatch.setenv, "sm_90a")
    experts = layer("mxfp4", checkpoint("mxfp4"), **changes)
    with pytest.raises(ModuleNotFoundError, match="deep_gemm"):  # SGLang's own way
        module.build_mega_moe_experts_weights(experts)
    (line,) = caplog.messages
    assert line.startswith(f"layer 3: experts run by SGLang: {reason}")
    assert not module.is_mega_moe_experts_ready(experts)


def test_elastic_expert_parallelism_is_sglangs(caplog, monkeypatch):
    module = started(monkeypatch.setenv, "sm_90a")
    sglang_stage.module("runtime_context").get_exec().moe.elastic_ep_backend = "mooncake"
    with pytest.raises(ModuleNotFoundError, match="deep_gemm"):
        module.build_mega_moe_experts_weights(layer("mxfp4", checkpoint("mxfp4")))
    assert caplog.messages == ["layer 3: experts run by SGLang: expert parallelism is elastic"]


def test_a_call_that_asks_for_something_else_is_refused(monkeypatch):
    module = started(monkeypatch.setenv, "sm_90a")
    experts = layer("mxfp4", checkpoint("mxfp4"))
    module.build_mega_moe_experts_weights(experts)
    x, logits = tokens(3)
    weights, ids = route(x, logits, TOPK, True)
    options = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "top_k": TOPK,
        "num_tokens": 3,
    }
    with pytest.raises(ValueError, match=r"activation must be 'swiglu'.* got 'situ'"):
        module.run_mega_routed_experts(experts, x, ids, weights, activation="situ", **options)
    with pytest.raises(ValueError, match=r"activation_clamp must be that of .* got 7\.0"):
        module.run_mega_routed_experts(experts, x, ids, weights, activation_clamp=7.0, **options)


def test_without_a_gpu_sglang_runs_experts_itself(caplog, monkeypatch):
    module = started(monkeypatch.setenv, "1")
    with pytest.raises(ModuleNotFoundError, match="deep_gemm"):
        module.build_mega_moe_experts_weights(layer("mxfp4", checkpoint("mxfp4")))
    assert caplog.messages == ["layer 3: experts run by SGLang: there is no NVIDIA GPU"]


def test_switched_off_it_registers_nothing(monkeypatch):
    module = started(monkeypatch.setenv, "0")
    assert not hasattr(module.run_mega_routed_experts, "__wrapped__")


def test_two_ranks_of_which_one_is_idle(monkeypatch):
    run_on_ranks(run_two_ranks, 2, "cpu", start_method="spawn")


def run_two_ranks(device: torch.device) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.group.WORLD
    group = SimpleNamespace(world_size=2, device_group=world, cpu_group=world)
    module = started(os.environ.__setitem__, "sm_90a", group)
    source = checkpoint("mxfp4")
    experts = layer("mxfp4", source, rank, 2)
    module.build_mega_moe_experts_weights(experts)
    x, logits = tokens(5) if rank == 0 else tokens(0)
    result = forward(module, block(experts), x, logits)
    served_experts.buffers.close()
    assert result.shape == x.shape
    if rank == 0:
        assert torch.equal(result, called_directly("mxfp4", "sm_90a", source, x, logits) + x)


def test_sglang_applies_every_hook(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    registry = sglang_stage.module("plugins.hook_registry").HookRegistry
    assert registry._patched == set(hooks.HOOKS)


def test_hooks_have_the_parameters_of_what_they_stand_around():
    for target, hook in hooks.HOOKS.items():
        parameters = list(_parameters(target))
        own = list(inspect.signature(hook).parameters)
        assert own[0] == "original"
        if own[-2:] == ["arguments", "options"]:  # passed on as they are
            assert parameters[0] == "self"
        elif own[-1] == "options":  # by keyword, those that it checks or knows to be without effect
            assert parameters[: len(own) - 2] == own[1:-1]
            known = {"shared_l1_weights", "shared_l2_weights", "num_tokens"}
            known |= {"hidden_size", "intermediate_size", "top_k", "activation_clamp"}
            known |= {"routed_scaling_factor", "activation", "num_shared_experts"}
            assert set(parameters[len(own) - 2 :]) == known | {"routing_in_buffer"}
        elif parameters[0] == "self":
            assert parameters[1:] == own[2:]
        else:
            assert parameters == own[1:]


def _parameters(target: str) -> Iterator[str]:
    """Of a function, or of a class's method, in SGLang's source."""
    path, _, name = target.rpartition(".")
    owner = ""
    if path.rpartition(".")[2][0].isupper():
        path, _, owner = path.rpartition(".")
    body = ast.parse(sglang_stage.source_of(path).read_text()).body
    if owner:
        (body,) = (
            node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner
        )
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield from (each.arg for each in (*node.args.args, *node.args.kwonlyargs))
            return
    raise AssertionError(f"SGLang has no {target}")


def test_the_layer_of_these_tests_has_the_names_of_sglangs(monkeypatch):
    started(monkeypatch.setenv, "sm_90a")
    moe = "sglang.srt.layers.moe"
    source = sglang_stage.source_of(f"{moe}.fused_moe_triton.layer").read_text()
    method = sglang_stage.source_of("sglang.srt.layers.quantization.fp8").read_text()
    experts = layer("mxfp4", checkpoint("mxfp4"))
    own = set(vars(experts)) - set(vars(torch.nn.Module())) - {"use_padded_loading"}
    for name in own:
        assert name.startswith("_deep_moe") or f"self.{name} = " in source, name
    for name in ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"):
        assert f'layer.register_parameter("{name}", ' in method, name
    config = sglang_stage.source_of(f"{moe}.moe_runner.base").read_text()
    for name in vars(experts.moe_runner_config):
        assert f"    {name}: " in config, name


def test_the_benchmark_asks_for_what_sglang_knows():
    """By the names in SGLang's source."""
    from benchmarks import sglang_model
    from benchmarks.served_model import EngineSettings

    def source(name: str) -> str:
        return sglang_stage.source_of(f"sglang.srt.{name}").read_text()

    options = source("arg_groups.field_order")
    settings = EngineSettings(
        gpus=2, max_requests=256, step_tokens=None, memory=0.8, commit=None, weights="mxfp4"
    )
    for is_ours in (False, True):
        given = sglang_model.engine_options(Path("model"), settings, is_ours=is_ours)
        assert [name for name in given if f'"{name}"' not in options] == []
    assert f"{sglang_model.MAX_TOKENS_VARIABLE} = " in source("environ")
    for module, words in (
        ("managers.scheduler", "def handle_rpc_request(self, recv_req: RpcReqInput)"),
        ("managers.scheduler", "func = getattr(self, recv_req.method)"),
        ("managers.scheduler", "self.tp_worker.model_runner."),
        ("managers.tokenizer_manager", "await self._handle_batch_output(recv_obj)"),
        ("managers.tokenizer_manager", "delta_output_ids = list(recv_obj.output_ids[i])"),
        ("model_loader.loader", "            initialize_dummy_weights(model)"),
        ("entrypoints.engine", "self.loop = self._ensure_event_loop()"),
        ("entrypoints.engine", "def collective_rpc(self, method: str, **kwargs):"),
    ):
        assert words in source(module), words


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--weights", "mxfp4"],
        ["--tensor-parallel-size", "2", "--data-parallel-attention"],
        ["--tensor-parallel-size", "2", "--redundant-experts", "4"],
    ],
)
def test_the_example_asks_for_what_sglang_knows(monkeypatch, words):
    """By the names in SGLang's source: its server cannot be imported without a GPU."""
    from tests.examples.test_served_model import example

    serve_sglang = example("serve_sglang", monkeypatch)
    source = sglang_stage.source_of("sglang.srt.arg_groups.field_order").read_text()
    arguments = serve_sglang.parsed(words)
    arguments.serve = Path("mxfp4")
    for is_kernel in (False, True):
        given = serve_sglang.engine_arguments(arguments, is_kernel=is_kernel)
        assert [name for name in given if f'"{name}"' not in source] == []
    environ = sglang_stage.source_of("sglang.srt.environ").read_text()
    assert f"{serve_sglang.MAX_TOKENS_VARIABLE} = " in environ
    generate = sglang_stage.source_of("sglang.srt.entrypoints.engine").read_text()
    for name in ("input_ids", "sampling_params", "return_logprob", "logprob_start_len"):
        assert f"        {name}: Optional[" in generate
