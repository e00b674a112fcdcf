"""Our experts as the middle of vLLM's modular kernel: rows of each expert in, as a low-latency
dispatch gives them, and the same rows out. all_to_all.py is what stands around it.

Sizes of tensors do not depend on a step's tokens, and nothing goes to the host, so the kernel can
be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate

from .experts import DeepMoEKernel, mean_tokens_of_step

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from deep_moe.split.grouped_experts import GroupedExperts

    from ..served_experts import ServedExperts


class DeepMoEBatchedExperts(DeepMoEKernel):
    """served: whose weights are used. experts: runs them; layers of the same sizes may share one.
    max_num_tokens, num_dispatchers: those of the dispatch. num_sharers: as of `mean_tokens`.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        served: ServedExperts,
        experts: GroupedExperts,
        max_num_tokens: int,
        num_dispatchers: int,
        num_sharers: int = 1,
    ) -> None:
        super().__init__(moe, served, max_num_tokens, num_dispatchers)
        self.experts = experts
        self.num_sharers = num_sharers

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceDelegate()

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
        return (0,), (0,), (local_num_experts, M, K)

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
        """hidden_states, output: [local experts, rows, hidden]. Rows behind an expert's count are
        neither read nor written. Routing weights are not applied here. topk_ids: of this rank's own
        tokens; they say how many tokens the step has."""
        assert expert_tokens_meta is not None
        assert expert_tokens_meta.expert_num_tokens is not None
        served = self.served
        num_tokens, num_topk = topk_ids.shape
        # Said always, so that the tile follows from the step's size alone: a graph is captured with
        # the one that its replays need.
        rows = num_topk * mean_tokens_of_step(self.moe_config, num_tokens, self.num_sharers)
        self.experts(
            hidden_states,
            a1q_scale,
            served.whole_weights(),
            expert_tokens_meta.expert_num_tokens,
            out=output,
            l1_bias=served.biases and served.biases.l1,
            l2_bias=served.biases and served.biases.l2,
            expected_rows=min(max(rows, 1), self.experts.max_rows),
        )
