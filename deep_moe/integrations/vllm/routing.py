"""Experts that are chosen in the launch which prepares their tokens, for those of vLLM's routers
whose weights the kernel computes bit for bit. For all others vLLM launches its own kernel.

vLLM's router goes on: its callbacks see the experts that were chosen. Only its rule is computed
elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import (
    FusedTopKRouter,
    _get_padding_mask,
)
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

from deep_moe.heuristics.router import Router

from ..shares import rows_of_share

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
_ALIGNMENT = 16  # bytes of logits


def rule_of(router: Any) -> Router | None:
    """The rule whose experts and weights are this router's, bit for bit; None if there is none.

    router: of one of vLLM's classes, itself: a class that is derived from one may do otherwise.
    """
    bias = getattr(router, "e_score_correction_bias", None)
    if router.eplb_state is not None or (bias is not None and bias.dtype != torch.float32):
        return None
    if type(router) is GroupedTopKRouter:
        return _rule_of_groups(router)
    if router.global_num_experts not in _NUMBERS_OF_EXPERTS:
        return None
    if type(router) is FusedTopKBiasRouter:
        return _rule_with_bias(router)
    if type(router) is not FusedTopKRouter or router.scoring_func not in ("softmax", "sigmoid"):
        return None
    return Router(router.scoring_func, renormalize=router.renormalize)


def _rule_with_bias(router: FusedTopKBiasRouter) -> Router | None:
    scale, renormalize = router.routed_scaling_factor, router.renormalize
    if (
        router.e_score_correction_bias is None
        or router._hash_indices_table is not None
        or router.bias_vl is not None
        or router.num_fused_shared_experts > 0
    ):
        return None
    # With a scale, vLLM scales these weights in another launch, and rounds once more.
    if router.scoring_func == "softmax" and scale == 1.0:
        return Router("softmax", renormalize=renormalize)
    if router.scoring_func == "sigmoid":
        return Router("sigmoid", renormalize=renormalize, scale=scale)
    if (
        router.scoring_func == "sqrtsoftplus"
        and router.global_num_experts in _SQRT_SOFTPLUS_EXPERTS
        and router.top_k == _SQRT_SOFTPLUS_TOPK
        and renormalize
    ):
        return Router("sqrt_softplus", scale=scale)
    return None


def _rule_of_groups(router: GroupedTopKRouter) -> Router | None:
    """Of several groups of the sizes for which vLLM has its faster kernel, as DeepSeek-V3's. Of one
    group, as Kimi-K2's, vLLM has two others: a warp for each token, which has a score as the choice
    less the bias, or a block, which keeps scores. Their last bits differ."""
    num_experts, num_groups = router.global_num_experts, router.num_expert_group
    num_chosen, topk = router.topk_group, router.top_k
    if (
        router.scoring_func != "sigmoid"
        or router.e_score_correction_bias is None
        or router.num_fused_shared_experts > 0
        or not envs.VLLM_USE_FUSED_MOE_GROUPED_TOPK
        or not 1 < num_groups < num_experts <= 256
        or num_experts % num_groups != 0
    ):
        return None
    size = num_experts // num_groups
    if topk > 8 or size > 32 or num_chosen > 4 or num_chosen * size > 128:
        return None
    return Router(
        "tanh_sigmoid", router.renormalize, num_groups, num_chosen, router.routed_scaling_factor
    )


def route_in_preparation(router: BaseRouter, served: ServedExperts, num_sharers: int) -> bool:
    """From now on, let the router's rule be computed where tokens are prepared, if it is one of
    those; whether it is. served: whose `run` gets what the router gives, tokens as they are.
    num_sharers: as `on_own_share` has it."""
    rule = rule_of(router)
    sizes = served.sizes
    if rule is None or (router.global_num_experts, router.top_k) != (
        sizes.num_experts,
        sizes.num_topk,
    ):
        return False
    router._compute_routing = PreparationRouting(  # type: ignore[method-assign]
        router, rule, served, num_sharers
    )
    return True


class PreparationRouting:
    """In place of a router's `_compute_routing`, with its arguments and results. Of ranks that
    share tokens, each routes its own share, and gives the results for that alone."""

    def __init__(
        self, router: BaseRouter, rule: Router, served: ServedExperts, num_sharers: int
    ) -> None:
        self.router = router
        self.rule = rule
        self.served = served
        self.num_sharers = num_sharers
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
        # A router of groups leaves padding alone, unless it was told otherwise.
        skips_padding = getattr(self.router, "skip_padding", True)
        padding_mask = _get_padding_mask(num_tokens) if skips_padding else None
        x, logits = hidden_states, router_logits
        if self.num_sharers > 1:
            rows = rows_of_share(get_tp_group(), self.num_sharers, num_tokens)
            x, logits = x[rows], logits[rows]
        if (
            indices_type not in (None, torch.int64)
            or logits.dtype not in self.dtypes
            or router_logits.shape != (num_tokens, self.served.sizes.num_experts)
            or not logits.is_contiguous()
            or logits.data_ptr() % _ALIGNMENT != 0
            or (padding_mask is not None and padding_mask.shape != (num_tokens,))
            or (self.num_sharers > 1 and self._is_recorded())
        ):
            return self.vllms(hidden_states, router_logits, indices_type, input_ids=input_ids)
        if padding_mask is not None and self.num_sharers > 1:
            padding_mask = padding_mask[rows]
        bias = getattr(self.router, "e_score_correction_bias", None)
        return self.served.route(
            x,
            logits,
            self.rule,
            correction_bias=None if bias is None else bias.data,
            padding_mask=padding_mask,
        )

    def _is_recorded(self) -> bool:
        """Whether vLLM wants to know the experts of all tokens."""
        return self.router.capture_fn is not None or self.router._routing_replay_out is not None
