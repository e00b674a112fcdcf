"""vLLM's routers whose rule is computed in the launch that prepares tokens, and those that are
left alone. On a CPU vLLM has a router of its own, so the tests put those of GPUs in its place."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import Router
from deep_moe.activations import Swiglu
from deep_moe.integrations import served_experts
from deep_moe.integrations.switch import LOW_LATENCY, PATH_VARIABLE
from deep_moe.trial.rank_processes import run_on_ranks

pytest.importorskip("vllm", reason="make test-serving installs it")

from .test_vllm import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    MAX_TOKENS,
    NAME,
    TOPK,
    checkpoint,
    forward,
    install,
    installed,
    lines,
    load,
    make_runner,
    tokens,
    world,
)

__all__ = ["installed"]

BIAS = torch.tensor([0.5, -0.25, 0.0, 0.125] * (EXPERTS // 4))
RULES: dict[str, tuple[Router, torch.Tensor | None]] = {
    "softmax": (Router(), None),
    "sigmoid": (Router("sigmoid", renormalize=False), None),
    "softmax, bias": (Router(renormalize=False), BIAS),
    "sigmoid, bias, scale": (Router("sigmoid", scale=2.5), BIAS),
    "groups": (Router("tanh_sigmoid", True, 4, 2, 2.5), BIAS),
    "groups, weights as they are": (Router("tanh_sigmoid", False, 4, 2), BIAS),
}


def router_of(rule: Router, bias: torch.Tensor | None, **others: Any) -> Any:
    """vLLM's."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import (
        FusedTopKBiasRouter,
    )
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    given = {"top_k": TOPK, "global_num_experts": EXPERTS, "renormalize": rule.renormalize}
    if rule.scoring == "tanh_sigmoid":
        given |= {"scoring_func": "sigmoid", "num_expert_group": rule.num_groups}
        given |= {"topk_group": rule.num_chosen_groups, "routed_scaling_factor": rule.scale}
        return GroupedTopKRouter(**{"e_score_correction_bias": bias} | given | others)
    given |= {"scoring_func": rule.scoring} | others
    if bias is None and "hash_indices_table" not in given:
        return FusedTopKRouter(**given)
    given.setdefault("routed_scaling_factor", rule.scale)
    return FusedTopKBiasRouter(e_score_correction_bias=bias, **given)


def runner_with(router: Any, **arguments: Any) -> Any:
    runner = make_runner("mxfp4", swiglu_limit=1.0, **arguments)
    runner.router = router
    return runner


def called_directly(
    rule: Router, bias: torch.Tensor | None, x: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and experts, by the public API."""
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, weights="mxfp4", device="cpu"
    )
    transformed = deep_moe.transform_weights_for_mega_moe(*checkpoint("mxfp4"), "sm_90a")
    deep_moe.route_and_prepare_inputs(x, logits, buffer, rule, correction_bias=bias, arch="sm_90a")
    y = torch.empty_like(x)
    deep_moe.mega_moe(y, transformed, buffer, activation=Swiglu(1.0), arch="sm_90a")
    return y, buffer.topk_idx[: x.shape[0]].clone()


@pytest.mark.parametrize("name", RULES)
def test_experts_are_chosen_where_tokens_are_prepared(installed, caplog, monkeypatch, name):
    installed("sm_90a")
    x, logits = tokens(5)
    rule, bias = RULES[name]
    expected, experts = called_directly(rule, bias, x, logits)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        runner = runner_with(router_of(rule, bias))
        load(runner, "mxfp4", checkpoint("mxfp4"))
        seen: list[torch.Tensor] = []
        runner.router.set_capture_fn(lambda ids: seen.append(ids.clone()))
        monkeypatch.setattr(served_experts, "prepare_inputs", None)
        assert torch.equal(forward(runner, config, x, logits), expected)
        assert torch.equal(seen[0], experts)
        assert forward(runner, config, x[:0], logits[:0]).shape == (0, HIDDEN)
    assert lines(caplog) == [
        f"{NAME}: experts run by deep_moe (mxfp4, chosen where tokens are prepared)"
    ]


def test_rows_that_vllm_pads_have_no_experts(installed):
    installed("sm_90a")
    x, logits = tokens(5)
    expected, _ = called_directly(Router(), None, x[:3], logits[:3])
    padding = torch.arange(8) >= 3
    with world() as config:
        runner = runner_with(router_of(Router(), None))
        load(runner, "mxfp4", checkpoint("mxfp4"))
        y = forward(runner, config, x, logits, is_padding=padding)
    assert torch.equal(y[:3], expected)
    assert not y[3:].any()


def test_logits_that_the_kernel_does_not_take_are_vllms(installed, monkeypatch):
    installed("sm_90a")
    x, logits = tokens(5)
    weights, ids = logits.softmax(-1).topk(TOPK)
    with world() as config:
        runner = runner_with(router_of(Router(), None))
        calls = []

        def vllms(hidden_states, router_logits, indices_type, *, input_ids=None):
            calls.append(router_logits)
            return weights, ids.int()

        runner.router._compute_routing = vllms
        load(runner, "mxfp4", checkpoint("mxfp4"))
        assert runner.router._compute_routing is not vllms
        for one in (logits.half(), logits.T.contiguous().T, logits.repeat(1, 2)[:, :EXPERTS]):
            forward(runner, config, x, one)
        assert len(calls) == 3
        forward(runner, config, x, logits.bfloat16())
        assert len(calls) == 3


def others() -> dict[str, Any]:
    from vllm.distributed.eplb.eplb_state import EplbLayerState
    from vllm.model_executor.layers.fused_moe.router.custom_routing_router import (
        CustomRoutingRouter,
    )
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    class Derived(FusedTopKRouter):
        pass

    def grouped(**others: Any) -> Any:
        rule = Router("tanh_sigmoid", num_groups=2, num_chosen_groups=2)
        return router_of(rule, BIAS, **others)

    sizes = {"top_k": TOPK, "global_num_experts": EXPERTS}
    image = router_of(Router("sigmoid"), BIAS)
    image.bias_vl = BIAS
    return {
        "eplb": router_of(Router(), None, eplb_state=EplbLayerState()),
        "derived": Derived(**sizes),
        "custom": CustomRoutingRouter(**sizes, custom_routing_function=lambda **_: None),
        "groups": GroupedTopKRouter(**sizes, num_expert_group=2, topk_group=1),
        "groups of softmax": grouped(scoring_func="softmax"),
        "groups without a bias": grouped(e_score_correction_bias=None),
        "one group": grouped(num_expert_group=1, topk_group=1),
        "large groups": grouped(global_num_experts=128),
        "more experts than the kernel has": grouped(global_num_experts=1024, num_expert_group=32),
        "many experts of a token": grouped(top_k=16, global_num_experts=64),
        "square root of softplus": router_of(Router(), BIAS, scoring_func="sqrtsoftplus"),
        "table": router_of(Router(), None, hash_indices_table=torch.zeros(4, TOPK)),
        "image tokens": image,
        "fused shared experts": router_of(Router("sigmoid"), BIAS, num_fused_shared_experts=1),
        "scaled in another launch": router_of(Router(), BIAS, routed_scaling_factor=2.0),
        "bias in BF16": router_of(Router("sigmoid"), BIAS.bfloat16()),
        "another order of sums": router_of(Router(), None, global_num_experts=96),
    }


NAMES = (
    "eplb",
    "derived",
    "custom",
    "groups",
    "groups of softmax",
    "groups without a bias",
    "one group",
    "large groups",
    "more experts than the kernel has",
    "many experts of a token",
    "square root of softplus",
    "table",
    "image tokens",
    "fused shared experts",
    "scaled in another launch",
    "bias in BF16",
    "another order of sums",
)


@pytest.mark.parametrize("name", NAMES)
def test_other_routers_are_vllms(name):
    from deep_moe.integrations.vllm.routing import rule_of

    made = others()
    assert (*made,) == NAMES
    assert rule_of(made[name]) is None


def test_deepseek_v3s_rule_is_one():
    from deep_moe.integrations.vllm.routing import rule_of

    rule = Router("tanh_sigmoid", num_groups=8, num_chosen_groups=4, scale=2.5)
    sizes = {"top_k": 8, "global_num_experts": 256}
    assert rule_of(router_of(rule, torch.zeros(256), **sizes)) == rule


def test_a_router_of_groups_leaves_padding_alone(installed):
    installed("sm_90a")
    x, logits = tokens(5)
    rule = Router("tanh_sigmoid", num_groups=4, num_chosen_groups=2)
    expected, _ = called_directly(rule, BIAS, x, logits)
    padding = torch.arange(8) >= 3
    with world() as config:
        for skips in (False, True):
            runner = runner_with(router_of(rule, BIAS, skip_padding=skips), prefix=f"layer.{skips}")
            load(runner, "mxfp4", checkpoint("mxfp4"))
            y = forward(runner, config, x, logits, is_padding=padding)
            assert torch.equal(y[:3], expected[:3])
            assert torch.equal(y[3:], expected[3:]) != skips


def test_deepseek_v4s_rule_is_one():
    from deep_moe.integrations.vllm.routing import rule_of

    sizes = {"top_k": 6, "global_num_experts": 256, "scoring_func": "sqrtsoftplus"}
    rule, bias = Router("sqrt_softplus", scale=1.5), torch.zeros(256)
    assert rule_of(router_of(rule, bias, **sizes)) == rule
    for other in ({"top_k": 8}, {"global_num_experts": 128}, {"renormalize": False}):
        assert rule_of(router_of(rule, bias, **sizes | other)) is None


@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    from deep_moe.integrations.vllm.routing import rule_of

    rule, bias = RULES[name]
    assert rule_of(router_of(rule, bias)) == rule


@pytest.mark.parametrize("reason", ["weights on the input", "another layer's", "low latency"])
def test_layers_whose_router_stays_vllms(installed, caplog, monkeypatch, reason):
    installed("sm_90a")
    if reason == "low latency":
        monkeypatch.setenv(PATH_VARIABLE, LOW_LATENCY)
    arguments = {}
    router = router_of(Router(), None)
    with caplog.at_level(logging.INFO, "vllm.deep_moe"), world() as config:
        if reason == "weights on the input":
            arguments = {"apply_router_weight_on_input": True, "top_k": 1}
            router.top_k = 1
        runner = runner_with(router, **arguments)
        if reason == "another layer's":
            config.compilation_config.static_forward_context[NAME] = runner_with(
                router_of(Router(), None), prefix="another"
            )
        load(runner, "mxfp4", checkpoint("mxfp4"))
    assert "chosen where" not in lines(caplog)[0]
    assert "_compute_routing" not in vars(router)


def test_ranks_that_share_tokens_route_their_own_shares():
    run_on_ranks(run_sharers, 2, "cpu", start_method="spawn")


def run_sharers(device: torch.device) -> None:
    """Every rank compares all rows with all experts on one rank: an odd number of tokens, one, of
    which the second rank has none, and with a router whose choices are recorded."""
    rank = torch.distributed.get_rank()
    install(os.environ.__setitem__, "sm_90a")
    rule, bias = RULES["sigmoid, bias, scale"]
    with world(rank=rank, tp=2) as config:
        runner = runner_with(router_of(rule, bias))
        load(runner, "mxfp4", checkpoint("mxfp4"))
        method = runner.routed_experts.quant_method
        assert method.plan.num_sharers == 2
        routing = runner.router._compute_routing
        for num_tokens in (5, 1):
            x, logits = tokens(num_tokens)
            expected, experts = called_directly(rule, bias, x, logits)
            own = routing(x, logits, None)[1].clone()
            assert torch.equal(own, (experts[: -(-num_tokens // 2)], experts[3:])[rank])
            assert torch.equal(forward(runner, config, x, logits), expected)
        seen: list[torch.Tensor] = []
        runner.router.set_capture_fn(seen.append)
        _, weights = routed_by_hand(rule, bias, x, logits)
        routing.vllms = lambda *_, **__: (weights, experts.int())
        assert torch.equal(forward(runner, config, x, logits), expected)
        assert torch.equal(seen[0], experts.int())


def routed_by_hand(
    rule: Router, bias: torch.Tensor | None, x: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights, as the kernel has them."""
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, weights="mxfp4", device="cpu"
    )
    deep_moe.route_and_prepare_inputs(x, logits, buffer, rule, correction_bias=bias, arch="sm_90a")
    n = x.shape[0]
    return buffer.topk_idx[:n].clone(), buffer.topk_weights[:n].clone()
