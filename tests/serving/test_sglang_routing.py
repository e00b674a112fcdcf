"""SGLang's routers whose rule is computed in the launch that prepares tokens, and those that are
left alone. `TopK` itself cannot be imported without a GPU: its source has the names used here.
"""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deep_moe
from deep_moe import Router
from deep_moe.activations import Swiglu
from deep_moe.errors import DeepMoEError
from deep_moe.integrations import served_experts
from deep_moe.integrations.sglang import engine, hooks, routing

if importlib.util.find_spec("sglang") is None:
    pytest.skip("make test-serving installs sglang", allow_module_level=True)

from . import sglang_stage
from .test_sglang import _closed, block, forward, layer, started
from .test_vllm import EXPERTS, HIDDEN, INTERMEDIATE, MAX_TOKENS, TOPK, checkpoint, tokens

__all__ = ["_closed"]

BIAS = torch.tensor([0.5, -0.25, 0.0, 0.125] * (EXPERTS // 4))
CONFIG = {
    "top_k": TOPK,
    "use_grouped_topk": False,
    "renormalize": True,
    "custom_routing_function": None,
    "correction_bias": None,
    "routed_scaling_factor": None,
    "apply_routed_scaling_factor_on_output": False,
    "scoring_func": "softmax",
}
SIGMOID = {"scoring_func": "sigmoid", "correction_bias": BIAS}
SCALED = {"routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": True}
RULES: dict[str, tuple[dict[str, Any], Router]] = {
    "softmax": ({}, Router("fast_softmax")),
    "softmax, scale": (SCALED, Router("fast_softmax", scale=2.5)),
    "a scale that others apply": ({"routed_scaling_factor": 2.5}, Router("fast_softmax")),
    "sigmoid": (SIGMOID | {"renormalize": False}, Router("fast_sigmoid", renormalize=False)),
    "sigmoid, scale": (SIGMOID | SCALED, Router("fast_sigmoid", scale=2.5)),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so few experts the order of sums is another, which nobody compares here."""
    monkeypatch.setattr(routing, "_layers", {})
    monkeypatch.setattr(routing, "_FEWEST_EXPERTS", EXPERTS)
    monkeypatch.setattr(routing, "_MULTIPLE", 1)
    monkeypatch.setattr(engine, "triton_version", lambda: "3.8.0")


def topk_of(layer_id: int = 3, is_draft: bool = False, waterfill: bool = False, **changes: Any):
    return SimpleNamespace(
        layer_id=layer_id,
        is_draft=is_draft,
        enable_waterfill=waterfill,
        topk_config=SimpleNamespace(**CONFIG | changes),
        routing_inputs=lambda: (None, None),
    )


def stand_in(*, is_noop: bool = True, capturer: Any = None) -> list[torch.Tensor]:
    """SGLang's module of routers; ids that its hooks behind a choice have seen."""
    seen: list[torch.Tensor] = []

    def built(weights: torch.Tensor, ids: torch.Tensor, config: Any, layer_id: int) -> Any:
        assert layer_id == 3
        seen.append(ids.clone())
        return SimpleNamespace(topk_weights=weights, topk_ids=ids)

    sglang_stage.stand_in(
        "sglang.srt.layers.moe.topk",
        precomputed_topk_postprocess_is_noop=lambda config, bound, info: is_noop,
        build_precomputed_topk_output=built,
        get_global_experts_capturer=lambda: capturer,
    )
    return seen


def not_asked(*_: Any, **__: Any) -> Any:
    raise AssertionError("SGLang's own router was asked")


def expected_of(
    rule: Router, bias: torch.Tensor | None, x: torch.Tensor, logits: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y and experts, by the public API. scale: of weights, behind the rule."""
    buffer = deep_moe.get_symm_buffer_for_mega_moe(
        None, EXPERTS, MAX_TOKENS, TOPK, HIDDEN, INTERMEDIATE, weights="mxfp4", device="cpu"
    )
    weights = deep_moe.transform_weights_for_mega_moe(*checkpoint("mxfp4"), "sm_90a")
    deep_moe.route_and_prepare_inputs(x, logits, buffer, rule, correction_bias=bias, arch="sm_90a")
    buffer.topk_weights.mul_(scale)
    y = torch.empty_like(x)
    deep_moe.mega_moe(y, weights, buffer, activation=Swiglu(1.0), arch="sm_90a")
    return y, buffer.topk_idx[: x.shape[0]].clone()


@pytest.mark.parametrize("scale", [1.0, 1.5])
@pytest.mark.parametrize("name", RULES)
def test_experts_are_chosen_where_tokens_are_prepared(monkeypatch, name, scale):
    """scale: SGLang's, of a layer that multiplies behind its router."""
    module = started(monkeypatch.setenv, "sm_90a")
    changes, rule = RULES[name]
    x, logits = tokens(5)
    experts = layer("mxfp4", checkpoint("mxfp4"), swiglu_limit=1.0)
    module.build_mega_moe_experts_weights(experts)
    seen, topk = stand_in(), topk_of(**changes)
    expected, ids = expected_of(rule, changes.get("correction_bias"), x, logits, scale)
    moe = block(experts, scale)
    moe.topk = lambda x, logits: hooks.choose(not_asked, topk, x, logits)
    if scale == 1.0:
        monkeypatch.setattr(served_experts, "prepare_inputs", None)
    assert torch.equal(forward(module, moe, x, logits), expected + x)
    assert torch.equal(seen[0], ids)


def test_experts_of_other_tokens_are_refused(monkeypatch):
    module = started(monkeypatch.setenv, "sm_90a")
    stand_in()
    x, logits = tokens(5)
    experts = layer("mxfp4", checkpoint("mxfp4"), swiglu_limit=1.0)
    module.build_mega_moe_experts_weights(experts)
    chosen = hooks.choose(not_asked, topk_of(), x, logits)
    hooks.choose(not_asked, topk_of(), x[:3].clone(), logits[:3])
    moe = block(experts)
    moe.topk = lambda x, logits: chosen
    with pytest.raises(DeepMoEError, match="other tokens were prepared since"):
        forward(module, moe, x, logits)


@pytest.mark.parametrize(
    "reason",
    ["another layer", "padded", "recorded", "two layers", "halves", "columns", "a tensor more"],
)
def test_calls_that_are_sglangs(monkeypatch, reason):
    module = started(monkeypatch.setenv, "sm_90a")
    x, logits = tokens(5)
    experts = layer("mxfp4", checkpoint("mxfp4"), swiglu_limit=1.0)
    module.build_mega_moe_experts_weights(experts)
    stand_in(is_noop=reason != "padded", capturer=object() if reason == "recorded" else None)
    topk, options = topk_of(), {}
    if reason == "another layer":
        topk.layer_id = 4
    elif reason == "two layers":
        routing.note(layer("mxfp4", checkpoint("mxfp4"), swiglu_limit=1.0))
        other = layer("mxfp4", checkpoint("mxfp4"), swiglu_limit=1.0)
        routing.note(other)
    elif reason == "halves":
        logits = logits.half()
    elif reason == "columns":
        logits = logits.T.contiguous().T
    elif reason == "a tensor more":
        options = {"dynamic_expert_bias": torch.zeros(5, EXPERTS)}
    asked = []

    def sglangs(*arguments: Any, **options: Any) -> str:
        asked.append((arguments, options))
        return "SGLang's"

    assert hooks.choose(sglangs, topk, x, logits, **options) == "SGLang's"
    ((arguments, given),) = asked
    assert arguments[0] is topk
    assert given.keys() == options.keys()


@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    changes, rule = RULES[name]
    found = routing.rule_of(topk_of(**changes), EXPERTS)
    assert found == rule
    assert routing.rule_of(topk_of(**changes), EXPERTS) is found  # not made in each step


OTHERS: dict[str, dict[str, Any]] = {
    "groups": {"use_grouped_topk": True},
    "custom": {"custom_routing_function": lambda **_: None},
    "square root of softplus": {"scoring_func": "sqrtsoftplus", "correction_bias": BIAS},
    "softmax with a bias": {"correction_bias": BIAS},
    "sigmoid without a bias": {"scoring_func": "sigmoid"},
    "bias in BF16": {"scoring_func": "sigmoid", "correction_bias": BIAS.bfloat16()},
    "a draft model's": {"is_draft": True},
    "shared experts by load": {"waterfill": True},
    "more experts of a token than a warp has lanes": {"top_k": 33},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_routers_are_sglangs(name):
    assert routing.rule_of(topk_of(**OTHERS[name]), EXPERTS) is None


@pytest.mark.parametrize(
    ("num_experts", "version"), [(1024, "3.8.0"), (EXPERTS, "3.6.0"), (EXPERTS, None)]
)
def test_sums_of_other_sizes_and_compilers_are_not_known(monkeypatch, num_experts, version):
    monkeypatch.setattr(engine, "triton_version", lambda: version)
    assert routing.rule_of(topk_of(), num_experts) is None


def test_the_router_of_these_tests_has_the_names_of_sglangs():
    source = sglang_stage.source_of("sglang.srt.layers.moe.topk").read_text()
    for name in CONFIG:
        assert re.search(rf"^    {name}: ", source, re.MULTILINE), name
    for words in (
        "        self.layer_id = layer_id",
        "        self.is_draft = (",
        "        self.enable_waterfill = ",
        "    def routing_inputs(self):",
        "    def forward_cuda(\n        self,\n        hidden_states: torch.Tensor,\n"
        "        router_logits: torch.Tensor,\n        *,\n",
        "def precomputed_topk_postprocess_is_noop(\n    topk_config: TopKConfig,\n"
        "    num_token_non_padded",
        "def build_precomputed_topk_output(\n    topk_weights: torch.Tensor,\n"
        "    topk_ids: torch.Tensor,\n    topk_config: TopKConfig,\n    layer_id: int,",
        "(cap := get_global_experts_capturer())",
    ):
        assert words in source, words
