"""vLLM's modular kernel with deep_moe as its experts.

The kernel dispatches and combines itself, so that with expert parallelism vLLM's pass-through
prepare and finalize stand around it. Without, ranks of tensor parallelism hold slices of all
experts, and vLLM adds up what they compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.prepare_finalize import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.passthrough import (
    PassThroughPrepareAndFinalize,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ..shares import mean_tokens, on_own_share, weighted_once

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from ..served_experts import ServedExperts


def make_kernel(moe: FusedMoEConfig, served: ServedExperts, num_sharers: int) -> mk.FusedMoEKernel:
    """vLLM's kernel of a layer."""
    is_spread = moe.moe_parallel_config.use_ep
    around = PassThroughPrepareAndFinalize() if is_spread else MoEPrepareAndFinalizeNoDPEPModular()
    return mk.FusedMoEKernel(around, DeepMoEExperts(moe, served, num_sharers))


def mean_tokens_of_step(moe: FusedMoEConfig, num_tokens: int, num_sharers: int = 1) -> int:
    """`mean_tokens` of what vLLM knows of this step. num_sharers: ranks that share the tokens of a
    data parallel rank among them."""
    step = get_forward_context().dp_metadata if is_forward_context_available() else None
    counts = None if step is None else step.num_tokens_across_dp_cpu.tolist()
    return mean_tokens(counts, num_tokens, moe.moe_parallel_config.sp_size, num_sharers)


class DeepMoEKernel(mk.FusedMoEExpertsModular):
    """What our kernels have in common as vLLM sees them."""

    def __init__(
        self,
        moe: FusedMoEConfig,
        served: ServedExperts,
        max_num_tokens: int | None = None,
        num_dispatchers: int | None = None,
    ) -> None:
        super().__init__(moe, FUSED_MOE_UNQUANTIZED_CONFIG, max_num_tokens, num_dispatchers)
        self.served = served

    # vLLM asks these when it chooses among its own kernels. This one is never in that list:
    # support.py decides.
    @staticmethod
    def _supports_current_device() -> bool:
        return False

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return False

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return False

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def moe_problem_size(
        self,
        a1: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> tuple[int, int, int, int, int]:
        """The weights' shapes are the kernel's own and say nothing of the layer's. a1: tokens, or
        rows of each local expert."""
        sizes = self.served.sizes
        num_rows = 2 * sizes.intermediate_hidden
        return w1.shape[0], a1.shape[-2], num_rows, sizes.hidden, topk_ids.shape[1]


class DeepMoEExperts(DeepMoEKernel):
    """num_sharers: ranks of the tensor parallel group, if they hold the same tokens and the experts
    are spread over them; otherwise 1."""

    def __init__(self, moe: FusedMoEConfig, served: ServedExperts, num_sharers: int) -> None:
        super().__init__(moe, served)
        self.num_sharers = num_sharers

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,  # noqa: N803
        N: int,  # noqa: N803
        K: int,  # noqa: N803
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """topk_ids name places of all ranks' experts, also where `expert_map` would give this
        rank's own: tokens go to other ranks by them."""
        if apply_router_weight_on_input:
            # Of the two stages that vLLM may have before this one, the pass-through stage of expert
            # parallelism has not applied them.
            is_weighted = not self.moe_config.moe_parallel_config.use_ep
            hidden_states, topk_weights = weighted_once(
                hidden_states, topk_weights, is_weighted=is_weighted
            )
        self.run(output, hidden_states, topk_ids, topk_weights)

    def run(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        """As `ServedExperts.run`, for tokens that `num_sharers` ranks may all hold."""
        share = -(-x.shape[0] // self.num_sharers)
        expected = mean_tokens_of_step(self.moe_config, share, self.num_sharers)

        def run(
            output: torch.Tensor,
            x: torch.Tensor,
            topk_ids: torch.Tensor,
            topk_weights: torch.Tensor,
        ) -> None:
            self.served.run(output, x, topk_ids, topk_weights, expected_tokens_per_rank=expected)

        group = get_tp_group() if self.num_sharers > 1 else None
        on_own_share(group, self.num_sharers, output, x, topk_ids, topk_weights, run)
