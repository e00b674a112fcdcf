"""vLLM's prepare and finalize steps over deep_moe's low-latency all-to-all, around experts that
take a batch of rows for each expert: ours (batched_experts.py), or others of vLLM's.

    layer = deep_moe.LowLatencyAllToAll(
        get_ep_group().device_group, max_tokens, hidden, num_experts, topk, token_format="bf16"
    )
    kernel = FusedMoEKernel(LowLatencyPrepareAndFinalize(layer), experts)

DEEP_MOE_VLLM_PATH=low_latency chooses it around ours; around others, whoever makes a layer's kernel
does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.v1.worker.ubatching import dbo_enabled

from .batched_experts import DeepMoEBatchedExperts

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig

    from deep_moe.split.handle import DispatchHandle
    from deep_moe.split.low_latency import LowLatencyAllToAll
    from deep_moe.split.throughput import AllToAll
    from deep_moe.tokens import TokenFormatName

    from ..served_experts import ServedExperts
    from ..shared_steps import Steps

_BLOCK = 128  # values that share a scale in the formats of FP8 that vLLM's kernels take


def make_step_kernel(
    moe: FusedMoEConfig, served: ServedExperts, steps: Steps, num_sharers: int
) -> mk.FusedMoEKernel:
    """vLLM's kernel of a layer whose dispatch, experts and combine are ours. num_sharers: as of
    `DeepMoEBatchedExperts`."""
    shape = steps.all_to_all.shape
    experts = DeepMoEBatchedExperts(
        moe, served, steps.experts, shape.num_max_tokens_per_rank, shape.num_ranks, num_sharers
    )
    return mk.FusedMoEKernel(LowLatencyPrepareAndFinalize(steps.all_to_all), experts)


def format_of_experts(quant_config: FusedMoEQuantConfig, *, is_deferred: bool) -> TokenFormatName:
    """Of the tokens that vLLM's experts take. is_deferred: they quantize for themselves."""
    asked = None if is_deferred else quant_config.quant_dtype
    if asked is None:
        return "bf16"
    if asked == torch.float8_e4m3fn and quant_config.block_shape == [_BLOCK, _BLOCK]:
        return "fp8_128"
    raise ValueError(
        "experts must take tokens in BF16, or in FP8 with a scale per 128 values; got "
        f"quant_dtype {asked} with block_shape {quant_config.block_shape}"
    )


def check_token_format(own: TokenFormatName, expected: str) -> None:
    """That of the all-to-all is the one that the experts take."""
    if own != expected:
        raise ValueError(
            f"the all-to-all must be made with token_format={expected!r} for these experts; "
            f"got one with {own!r}"
        )


def check_num_experts(num_experts: int, expected: int) -> None:
    if num_experts != expected:
        raise ValueError(
            f"num_experts must be {expected}, those of the all-to-all; got {num_experts}"
        )


def weighted_input(a1: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Tokens that have their routing weights before they are sent: of one expert each."""
    if topk_weights.shape[1] != 1:
        raise ValueError(
            "apply_router_weight_on_input must be False for tokens of several experts: one "
            f"row goes to all of them; got True with {topk_weights.shape[1]}"
        )
    return a1 * topk_weights.to(a1.dtype)


class _Receive:
    """Receives what was sent. kept: tensors that its kernel may read, whose memory nobody else must
    get before."""

    def __init__(
        self, layer: LowLatencyAllToAll, handle: DispatchHandle, kept: tuple[torch.Tensor, ...]
    ) -> None:
        self.layer = layer
        self.handle = handle
        self.kept = kept

    def __call__(self) -> None:
        self.layer.receive(self.handle)


class StepsOverAllToAll(mk.FusedMoEPrepareAndFinalizeModular):
    """What vLLM asks of the steps over either of our all-to-alls."""

    layer: LowLatencyAllToAll | AllToAll

    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    def num_dispatchers(self) -> int:
        return self.layer.shape.num_ranks

    def output_is_reduced(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True


class LowLatencyPrepareAndFinalize(StepsOverAllToAll):
    """Tokens go to their experts, [local experts, ranks * most tokens, hidden] with a count each;
    rows behind a count are not written, and experts must not read them. Rows come back and are
    added with the routing weights, once, in float32.

    layer: made with the format that our experts take; for others with token_format="bf16", if they
        take BF16 or quantize for themselves, and with "fp8_128", if they take FP8 with a float32
        scale per 128 values. Layers of a model may share one: its calls are made in turn.

    Ids are those of all ranks' experts, int32 or int64; -1: the slot is not used. Every rank must
    call, those without tokens too. Nothing waits for the GPU on the host.
    """

    layer: LowLatencyAllToAll

    def __init__(self, layer: LowLatencyAllToAll) -> None:
        super().__init__()
        self.layer = layer
        self._handle: DispatchHandle | None = None
        self._own_format: str | None = None  # that our experts take, if the experts are ours

    def post_init_setup(self, fused_experts: mk.FusedMoEExperts) -> None:
        """vLLM's kernel tells which experts it has."""
        if isinstance(fused_experts, DeepMoEBatchedExperts):
            self._own_format = fused_experts.experts.token_format

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        return self.layer.shape.num_max_tokens_per_rank

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> Any:
        hook, receiver = self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
        hook()
        return receiver()

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """Sends; the first function that it returns receives, the second gives the result. The
        experts' map plays no part: tokens go to ranks by the ids of all experts."""
        if dbo_enabled():
            raise NotImplementedError("two batches overlap, and would take one handle")
        check_num_experts(num_experts, self.layer.shape.num_experts)
        if apply_router_weight_on_input:
            a1 = weighted_input(a1, topk_weights)
        self._check_format(quant_config, is_deferred=defer_input_quant)
        x, ids = a1.contiguous(), topk_ids.contiguous()
        result = self.layer.dispatch(x, ids, receive=False)
        self._handle = result.handle
        tokens = mk.ExpertTokensMetadata(
            expert_num_tokens=result.recv_count, expert_num_tokens_cpu=None
        )
        prepared = (result.recv_x, result.scales, tokens, None, None)
        return _Receive(self.layer, result.handle, (x, ids)), (lambda: prepared)

    def _check_format(self, quant_config: FusedMoEQuantConfig, *, is_deferred: bool) -> None:
        """That of the all-to-all is the one that the experts take."""
        expected = self._own_format or format_of_experts(quant_config, is_deferred=is_deferred)
        check_token_format(self.layer.shape.token_format, expected)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        self._combine(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        hook = self._combine(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
            receive=False,
        )
        return hook, (lambda: None)

    def _combine(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_weighted: bool,
        weight_and_reduce: mk.TopKWeightAndReduce,
        *,
        receive: bool = True,
    ) -> _Receive:
        """is_weighted: tokens had their weights before they were sent. Gives what receives, which
        is to be called after receive=False."""
        if not isinstance(weight_and_reduce, TopKWeightAndReduceDelegate):
            raise TypeError(
                "weight_and_reduce_impl must be TopKWeightAndReduceDelegate: combine weights and "
                f"adds rows; got {type(weight_and_reduce).__name__}"
            )
        handle, self._handle = self._handle, None
        if handle is None:
            raise RuntimeError("finalize must follow a prepare; there was none since the last one")
        weights = torch.ones_like(topk_weights) if is_weighted else topk_weights
        ids, weights = topk_ids.contiguous(), weights.float().contiguous()
        self.layer.combine(rows, ids, weights, handle, out=output, receive=receive)
        return _Receive(self.layer, handle, (rows, ids, weights))
