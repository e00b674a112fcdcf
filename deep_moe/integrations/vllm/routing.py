"""Experts that are chosen in the launch which prepares their tokens, for those of vLLM's routers
whose weights the kernel computes bit for bit. For all others vLLM launches its own kernel.

vLLM's router goes on: its callbacks see the experts that were chosen. Only its rule is computed
elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
    FusedTopKRouter,
    _get_padding_mask,
)

from deep_moe.heuristics.router import Router

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    from ..served_experts import ServedExperts

# With others, vLLM's kernel adds up the exponentials of softmax in another order.
_NUMBERS_OF_EXPERTS = frozenset(
    (*(2**i for i in range(10)), *(64 * i for i in (3, 5, 6, 7, 9))),
)
# Of DeepSeek-V4, for which vLLM has a kernel. Its kernel for other routers of this scoring takes a
# score to be the choice less the bias.
_SQRT_SOFTPLUS_EXPERTS, _SQRT_SOFTPLUS_TOPK = (256, 384), 6
_SCORINGS = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
_ALIGNMENT = 16  # bytes of logits


def rule_of(router: Any) -> Router | None:
    """The rule whose experts and weights are this router's, bit for bit; None if there is none.

    router: of one of vLLM's classes, itself: a class that is derived from one may do otherwise.
    """
    if router.eplb_state is not None or router.global_num_experts not in _NUMBERS_OF_EXPERTS:
        return None
    scale = 1.0
    if type(router) is FusedTopKBiasRouter:
        bias, scale = router.e_score_correction_bias, router.routed_scaling_factor
        if (
            bias is None
            or bias.dtype != torch.float32
            or router._hash_indices_table is not None
            or router.bias_vl is not None
            or router.num_fused_shared_experts > 0
            # vLLM scales these weights in another launch, and rounds once more.
            or (router.scoring_func == "softmax" and scale != 1.0)
        ):
            return None
    elif type(router) is not FusedTopKRouter:
        return None
    if router.scoring_func == "sqrtsoftplus" and not (
        type(router) is FusedTopKBiasRouter
        and router.global_num_experts in _SQRT_SOFTPLUS_EXPERTS
        and router.top_k == _SQRT_SOFTPLUS_TOPK
        and router.renormalize
    ):
        return None
    if router.scoring_func not in _SCORINGS:
        return None
    scoring: Any = _SCORINGS[router.scoring_func]
    return Router(scoring, renormalize=router.renormalize, scale=scale)


def route_in_preparation(router: BaseRouter, served: ServedExperts) -> bool:
    """From now on, let the router's rule be computed where tokens are prepared, if it is one of
    those; whether it is. served: whose `run` gets what the router gives, tokens as they are."""
    rule = rule_of(router)
    sizes = served.sizes
    if rule is None or (router.global_num_experts, router.top_k) != (
        sizes.num_experts,
        sizes.num_topk,
    ):
        return False
    router._compute_routing = PreparationRouting(router, rule, served)  # type: ignore[method-assign]
    return True


class PreparationRouting:
    """In place of a router's `_compute_routing`, with its arguments and results."""

    def __init__(self, router: BaseRouter, rule: Router, served: ServedExperts) -> None:
        self.router = router
        self.rule = rule
        self.served = served
        self.vllms = router._compute_routing
        has_own_kernel = rule.scoring == "sqrt_softplus"
        self.dtypes = (torch.float32,) if has_own_kernel else (torch.float32, torch.bfloat16)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = hidden_states.shape[0]
        padding_mask = _get_padding_mask(num_tokens)
        if (
            indices_type not in (None, torch.int64)
            or router_logits.dtype not in self.dtypes
            or router_logits.shape != (num_tokens, self.served.sizes.num_experts)
            or not router_logits.is_contiguous()
            or router_logits.data_ptr() % _ALIGNMENT != 0
            or (padding_mask is not None and padding_mask.shape != (num_tokens,))
            or num_tokens > self.served.max_tokens_per_rank
        ):
            return self.vllms(hidden_states, router_logits, indices_type, input_ids=input_ids)
        bias = getattr(self.router, "e_score_correction_bias", None)
        return self.served.route(
            hidden_states,
            router_logits,
            self.rule,
            correction_bias=None if bias is None else bias.data,
            padding_mask=padding_mask,
        )
