"""torchtitan's own router, override mechanism and weights around our experts, on a CPU."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("torchtitan", reason="make test-trainers installs it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import (
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        DeepEPTokenDispatcher,
        LocalTokenDispatcher,
    )
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    from deep_moe.integrations.torchtitan.experts import DeepMoERoutedExperts
from deep_moe.trial.rank_processes import results_of_ranks

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 128, 128, 4, 2
OVERRIDE = "deep_moe.integrations.torchtitan.experts.routed_experts"
NORMAL = partial(torch.nn.init.normal_, std=0.1)
INIT = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD", "weight"), NORMAL)


def config(dispatcher: type = LocalTokenDispatcher, **options: Any) -> Any:
    """A layer's, with our experts if there are options, or {}."""
    return MoE.Config(
        num_experts=EXPERTS,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=EXPERTS, param_init=INIT
            ),
            token_dispatcher=dispatcher.Config(num_experts=EXPERTS, top_k=TOPK, **options),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS,
            top_k=TOPK,
            gate=Linear.Config(
                in_features=HIDDEN, out_features=EXPERTS, bias=False, param_init=INIT
            ),
        ),
        load_balance_coeff=None,
    )


def overridden(found: Any, **options: Any) -> Any:
    lines = apply_overrides(OverrideConfig(imports=[(OVERRIDE, options)]), found)
    assert len(lines) == 1
    return found


def built(found: Any) -> Any:
    torch.manual_seed(0)
    layer = found.build().bfloat16()
    layer.init_states()
    return layer


def step(layer: Any, x: torch.Tensor, d_out: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(d_out)
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, expected in b.items():
        error = (a[name].float() - expected.float()).norm()
        assert error <= 2.0**-6 * expected.float().norm(), f"{name}: {error}"


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x, d_out = torch.randn(2, 2, 9, HIDDEN, dtype=torch.bfloat16)
    return x, d_out


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_output_and_gradients_are_torchtitans(options: dict[str, Any]) -> None:
    theirs, ours = built(config()), built(overridden(config(), **options))
    assert isinstance(ours.routed_experts, DeepMoERoutedExperts)
    assert type(theirs.routed_experts) is RoutedExperts
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, ours.state_dict()[name]), name
    assert_close(step(ours, *tokens()), step(theirs, *tokens()))


def test_options_reach_the_layer() -> None:
    exact = step(built(overridden(config())), *tokens())
    quantized = step(built(overridden(config(), precision="fp8")), *tokens())
    difference = (quantized["out"] - exact["out"]).norm() / exact["out"].norm()
    assert 1e-3 < difference < 0.2


def test_values_in_float32_are_rounded_as_torchtitan_rounds_them() -> None:
    layers = [built(found).float() for found in (config(), overridden(config()))]
    x, d_out = (tensor.float() for tensor in tokens())
    theirs, ours = (step(layer, x, d_out) for layer in layers)
    assert ours["out"].dtype == torch.float32
    assert_close(ours, theirs)


def on_a_rank(_device: torch.device) -> dict[str, torch.Tensor]:
    """Of one rank, all tokens and experts; of two, a batch each and half of the experts."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    layer = built(overridden(config(AllToAllTokenDispatcher)))
    experts = layer.routed_experts
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("ep",))
    experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    own = slice(rank * EXPERTS // num_ranks, (rank + 1) * EXPERTS // num_ranks)
    for name, weight in experts.inner_experts.named_parameters():
        setattr(experts.inner_experts, name, torch.nn.Parameter(weight[own].detach().clone()))
    batches = slice(rank, rank + 1) if num_ranks == 2 else slice(None)
    return step(layer, *(tensor[batches] for tensor in tokens()))


def test_over_ranks_it_is_one_rank() -> None:
    (whole,) = results_of_ranks(on_a_rank, 1, "cpu", start_method="spawn")
    parts = results_of_ranks(on_a_rank, 2, "cpu", start_method="spawn")
    for name, expected in whole.items():
        found = [part[name].float() for part in parts]
        both = sum(found) if name.startswith("router") else torch.cat(found)
        error = (both - expected.float()).norm()
        assert error <= 2.0**-6 * expected.float().norm(), name


def test_what_computes_something_else_is_refused() -> None:
    words = "token_dispatcher must be LocalTokenDispatcher or AllToAll.*; got DeepEPTokenDispatcher"
    with pytest.raises(ValueError, match=words):
        built(overridden(config(DeepEPTokenDispatcher, num_max_tokens_per_rank=64)))

    found = overridden(config())
    found.routed_experts.inner_experts = GptOssGroupedExperts.Config(
        dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=EXPERTS, param_init={}
    )
    words = "inner_experts must be GroupedExperts with .*; got GptOssGroupedExperts"
    with pytest.raises(ValueError, match=words):
        built(found)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="precison"):
        overridden(config(), precison="fp8")
