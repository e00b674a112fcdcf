"""Megatron-core's own layer, router and checkpoints around our experts, on a CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("megatron.core", reason="make test-trainers installs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine is not there
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

import deep_moe
from deep_moe.integrations import megatron
from deep_moe.trial.rank_processes import results_of_ranks

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 128, 64, 4, 2


def config(**changes: Any) -> TransformerConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            **{
                "num_layers": 1,
                "hidden_size": HIDDEN,
                "num_attention_heads": 4,
                "num_moe_experts": EXPERTS,
                "moe_ffn_hidden_size": INTERMEDIATE,
                "moe_router_topk": TOPK,
                "moe_router_load_balancing_type": "none",
                "gated_linear_unit": True,
                "activation_func": F.silu,
                "add_bias_linear": False,
                "params_dtype": torch.bfloat16,
                "bf16": True,
                "use_cpu_initialization": True,
                "bias_activation_fusion": False,
                **changes,
            }
        )


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's router moves itself to the current GPU, and asks for Transformer Engine by a name
    that is not there without it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    without_cuda(monkeypatch)
    store = dist.FileStore(os.fspath(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def megatrons_spec() -> Any:
    return get_moe_module_spec(use_te=False, num_experts=EXPERTS)


def built(spec: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    return build_module(spec, config=config(**changes))


def take_weights(ours: Any, theirs: Any) -> None:
    """Router and experts of Megatron's own layer."""
    experts = theirs.experts.local_experts
    with torch.no_grad():
        ours.router.weight.copy_(theirs.router.weight)
        for i, expert in enumerate(experts):
            ours.experts.linear_fc1[i].copy_(expert.linear_fc1.weight)
            ours.experts.linear_fc2[i].copy_(expert.linear_fc2.weight)


def step(layer: Any, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients; of the experts in Megatron's form."""
    x = x.clone().requires_grad_()
    out, bias = layer(x)
    assert bias is None
    out.backward(d_out)
    found = {"out": out.detach(), "x": x.grad, "router": layer.router.weight.grad}
    if hasattr(layer.experts, "local_experts"):
        experts = layer.experts.local_experts
        found["fc1"] = torch.stack([expert.linear_fc1.weight.grad for expert in experts])
        found["fc2"] = torch.stack([expert.linear_fc2.weight.grad for expert in experts])
    else:
        found["fc1"] = layer.experts.linear_fc1.grad
        found["fc2"] = layer.experts.linear_fc2.grad
    return found


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, expected in b.items():
        error = (a[name].float() - expected.float()).norm()
        assert error <= 2.0**-6 * expected.float().norm(), f"{name}: {error}"


CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "a clamp": {"activation_func_clamp_value": 0.25},
    "sigmoid, groups and a scale": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "tokens that are dropped": {"moe_expert_capacity_factor": 0.75},
    "a shared expert": {"moe_shared_expert_intermediate_size": 32},
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_megatrons(case: str) -> None:
    theirs, ours = (
        built(spec, **CASES[case])
        for spec in (megatrons_spec(), megatron.moe_spec(megatrons_spec()))
    )
    take_weights(ours, theirs)
    if "shared" in case:
        ours.shared_experts.load_state_dict(theirs.shared_experts.state_dict())
    torch.manual_seed(1)
    x, d_out = torch.randn(2, 9, 2, HIDDEN, dtype=torch.bfloat16)
    assert_close(step(ours, x, d_out), step(theirs, x, d_out))


@pytest.mark.usefixtures("one_rank")
def test_it_stands_in_a_whole_transformer_layer() -> None:
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    spec.submodules.mlp = megatron.moe_spec(spec.submodules.mlp)
    layer = built(spec)
    assert type(layer.mlp).__name__ == "DeepMoELayer"
    assert layer.is_moe_layer
    found = step(layer.mlp, *torch.randn(2, 5, 2, HIDDEN, dtype=torch.bfloat16))
    assert found["fc1"].any()


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_are_megatrons(tmp_path: Path) -> None:
    """Of ours and of Megatron's own experts, each loads the other's."""
    theirs, ours = built(megatrons_spec()), built(megatron.moe_spec(megatrons_spec()))
    move(theirs, ours, tmp_path / "theirs")
    with torch.no_grad():
        ours.experts.linear_fc1[2].add_(1)
        ours.experts.linear_fc2[1].sub_(1)
    move(ours, built(megatrons_spec()), tmp_path / "ours")


def move(source: Any, target: Any, folder: Path) -> None:
    """By a sharded checkpoint; both have the same weights then."""
    folder.mkdir()
    dist_checkpointing.save(weights_alone(source.sharded_state_dict()), folder)
    with torch.no_grad():
        for weight in target.parameters():
            weight.zero_()
    target.load_state_dict(
        dist_checkpointing.load(weights_alone(target.sharded_state_dict()), folder), strict=False
    )
    layers = [source, target]
    if hasattr(source.experts, "local_experts"):
        layers.reverse()
    ours, theirs = layers
    again = built(megatron.moe_spec(megatrons_spec()))
    take_weights(again, theirs)
    for name, weight in again.state_dict().items():
        if weight is not None:
            assert weight.any()
            assert torch.equal(weight, ours.state_dict()[name]), name


def weights_alone(state: dict[str, Any]) -> dict[str, Any]:
    """Without what Transformer Engine's layers would keep beside their weights."""
    return {name: value for name, value in state.items() if "_extra_state" not in name}


NUM_TOKENS = (5, 3)


def on_a_rank(_device: torch.device) -> dict[str, torch.Tensor]:
    """Of one rank, all tokens; of two, this rank's."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_cuda(monkeypatch)
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
        spec = megatron.moe_spec(megatrons_spec())
        layer = built(spec, expert_model_parallel_size=num_ranks)
        assert layer.experts.linear_fc1.allreduce is (num_ranks == 1)
        torch.manual_seed(1)
        x, d_out = torch.randn(2, sum(NUM_TOKENS), 1, HIDDEN, dtype=torch.bfloat16)
        own = slice(sum(NUM_TOKENS[:rank]), sum(NUM_TOKENS[: rank + 1]))
        tokens = own if num_ranks == 2 else slice(None)
        return step(layer, x[tokens], d_out[tokens])


def test_over_ranks_it_is_one_rank() -> None:
    """Experts on two ranks, by Megatron's expert-parallel group, with uneven tokens."""
    (whole,) = results_of_ranks(on_a_rank, 1, "cpu", start_method="spawn")
    parts = results_of_ranks(on_a_rank, 2, "cpu", start_method="spawn")
    for name, expected in whole.items():
        found = [part[name].float() for part in parts]
        both = sum(found) if name == "router" else torch.cat(found)
        error = (both - expected.float()).norm()
        assert error <= 2.0**-6 * expected.float().norm(), name


@pytest.mark.usefixtures("one_rank")
def test_the_forward_pass_may_be_servings() -> None:
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, EXPERTS, 8, TOPK, HIDDEN, INTERMEDIATE, weights="fp8", device="cpu"
    )
    spec = megatron.moe_spec(megatrons_spec(), forward="serving", sym_buffer=buffer)
    layer, trained = built(spec), built(megatron.moe_spec(megatrons_spec()))
    trained.load_state_dict(layer.state_dict())
    x, d_out = torch.randn(2, 6, 1, HIDDEN, dtype=torch.bfloat16)
    found, expected = step(layer, x, d_out), step(trained, x, d_out)
    difference = (found["out"] - expected["out"]).norm() / expected["out"].norm()
    assert 1e-3 < difference < 0.2  # FP8
    for name in ("x", "fc1", "fc2"):
        assert torch.equal(found[name], expected[name]), name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"add_bias_linear": True}, "add_bias_linear must be False.*; got True"),
    "no gate": ({"gated_linear_unit": False}, "gated_linear_unit must be True.*; got False"),
    "gelu": ({"activation_func": F.gelu}, "activation_func must be silu.*; got gelu"),
    "float32": (
        {"params_dtype": torch.float32, "bf16": False},
        "params_dtype must be torch.bfloat16",
    ),
    "padded": (
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        "moe_pad_expert_input_to_capacity must be False.*; got True",
    ),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", REFUSED)
def test_what_our_experts_do_not_have_is_refused(case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        built(megatron.moe_spec(megatrons_spec()), **changes)


def test_other_specs_are_refused() -> None:
    with pytest.raises(TypeError, match="spec must be a ModuleSpec; got int"):
        megatron.moe_spec(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="spec must be of Megatron's MoELayer"):
        megatron.moe_spec(get_gpt_layer_local_spec())
