"""Experts that are chosen in the launch which prepares their tokens, for those of SGLang's routers
whose weights the kernel computes bit for bit. For all others SGLang launches its own kernels.

SGLang's `TopK` does not know whose experts it chooses. It has a layer's number, as they have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakSet

import torch

from deep_moe.heuristics.router import Router, Scoring

from ..served_experts import ServedExperts
from . import engine

# Whose code for SGLang's kernel adds up in the order that ours has.
_TRITON = ("3.8.", "3.9.")
# With more experts SGLang's kernel has several warps, with fewer, or odd numbers of them, narrower
# loads; 896 of 16 may have another kernel.
_MOST_EXPERTS, _FEWEST_EXPERTS, _MULTIPLE = 512, 64, 16
_MOST_TOPK = 32
_LOGIT_DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT = 16  # bytes of logits

# Layers that the kernel runs, by number. A draft model may have one of the same number.
_layers: dict[int, WeakSet[Any]] = {}


def note(experts: Any) -> None:
    """The kernel runs this layer."""
    _layers.setdefault(experts.layer_id, WeakSet()).add(experts)


def rule_of(topk: Any, num_experts: int) -> Router | None:
    """The rule whose experts and weights are this router's, bit for bit; None if there is none."""
    config, version = topk.topk_config, engine.triton_version()
    bias = config.correction_bias
    if (
        topk.is_draft
        or topk.enable_waterfill
        or config.use_grouped_topk
        or config.custom_routing_function is not None
        or not _FEWEST_EXPERTS <= num_experts <= _MOST_EXPERTS
        or num_experts % _MULTIPLE
        or config.top_k > _MOST_TOPK
        or version is None
        or not version.startswith(_TRITON)
    ):
        return None
    has_scale = config.apply_routed_scaling_factor_on_output
    scale = (has_scale and config.routed_scaling_factor) or 1.0
    if config.scoring_func == "softmax" and bias is None:
        return _router("fast_softmax", config.renormalize, scale)
    if (
        config.scoring_func == "sigmoid"
        and bias is not None
        and bias.dtype == torch.float32
        and bias.shape == (num_experts,)
        and bias.is_contiguous()
    ):
        return _router("fast_sigmoid", config.renormalize, scale)
    return None


@lru_cache(maxsize=64, typed=True)  # a model's routers ask for theirs in each step
def _router(scoring: Scoring, renormalize: bool, scale: float) -> Router:
    return Router(scoring, renormalize, scale=scale)


def choose(
    original: Callable[..., Any],
    topk: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    served_of: Callable[[Any], ServedExperts | None],
    options: dict[str, Any],
) -> Any:
    """What SGLang's `TopK` gives. served_of: what the kernel runs a layer with. options: of the
    call, beside the tensors."""
    layers = [*_layers.get(topk.layer_id, ())]
    served = served_of(layers[0]) if len(layers) == 1 else None
    if (
        served is None
        or any(value is not None for value in options.values())
        or router_logits.shape != (hidden_states.shape[0], served.sizes.num_experts)
        or topk.topk_config.top_k != served.sizes.num_topk
        or router_logits.dtype not in _LOGIT_DTYPES
        or not router_logits.is_contiguous()
        or router_logits.data_ptr() % _ALIGNMENT != 0
        or (rule := rule_of(topk, served.sizes.num_experts)) is None
        or not engine.keeps_chosen_experts(topk)
    ):
        return original(topk, hidden_states, router_logits, **options)
    bias = topk.topk_config.correction_bias
    weights, ids = served.route(
        hidden_states,
        router_logits,
        rule,
        correction_bias=None if bias is None else bias.data,
    )
    return engine.chosen_experts(topk, weights, ids)
