"""vLLM's prepare and finalize steps over deep_moe's all-to-all for many tokens, around experts of
vLLM's that take rows in its standard format.

    layer = deep_moe.AllToAll(
        get_ep_group().device_group, max_tokens, hidden, num_experts, topk, max_recv_rows
    )
    kernel = FusedMoEKernel(ThroughputPrepareAndFinalize(layer), experts)

Two batches at once (`--enable-dbo`) travel on vLLM's stream for that, while experts compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker import ubatching

from .all_to_all import (
    StepsOverAllToAll,
    check_num_experts,
    check_token_format,
    format_of_experts,
    weighted_input,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from deep_moe.split.throughput import AllToAll, AllToAllHandle, Received

_MAX_BATCHES = 2  # that overlap


class _Sent:
    """A batch that is with the experts. topk_weights: float32 [tokens, topk] to add its rows by;
    None if its tokens had them before they were sent."""

    def __init__(self, handle: AllToAllHandle, topk_weights: torch.Tensor | None) -> None:
        self.handle = handle
        self.topk_weights = topk_weights


class ThroughputPrepareAndFinalize(StepsOverAllToAll):
    """Tokens go to their experts, a row for each slot: [max_recv_rows, hidden], with an id [rows,
    1] of its expert among those of all ranks, -1 for rows of none. Rows come back and are added
    with the routing weights in float32, once: experts are given weights of 1.

    layer: made with token_format="bf16" for experts that take BF16 or quantize for themselves. For
        others it is the switch of where tokens are quantized: with "bf16" vLLM quantizes the rows
        that have come, in any of its ways but by one scale that it finds in them; with "fp8_128"
        tokens travel as FP8 with a float32 scale per 128 values, for experts that take those.
        Layers of a model may share one. Its max_recv_rows are as many rows as experts go through,
        so that the host need not wait for their number. If two batches are to overlap, num_sms
        leaves some SMs to the experts' kernels.

    Ids are those of all ranks' experts, int32 or int64; -1: the slot is not used. Every rank must
    call, those without tokens too. Nothing waits for the GPU on the host.
    """

    layer: AllToAll

    def __init__(self, layer: AllToAll) -> None:
        super().__init__()
        self.layer = layer
        shape = layer.shape
        self._sent: list[_Sent | None] = [None] * _MAX_BATCHES
        with torch.inference_mode(False):
            self._row = torch.arange(shape.max_recv_rows, dtype=torch.int32, device=layer.device)
            self._ones = torch.ones(shape.max_recv_rows, 1, device=layer.device)
        self._first_expert = layer.rank * shape.num_experts_per_rank

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        return None  # experts of the standard format need no bound

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
        receiver = self.prepare_async(
            a1,
            topk_weights,
            topk_ids,
            num_experts,
            expert_map,
            apply_router_weight_on_input,
            quant_config,
            defer_input_quant,
        )
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
    ) -> Callable[[], Any]:
        """Sends and receives; the function that it returns gives the result. The experts' map plays
        no part: tokens go to ranks by the ids of all experts."""
        check_num_experts(num_experts, self.layer.shape.num_experts)
        quantizes = self._quantizes_rows(quant_config, is_deferred=defer_input_quant)
        weights = None
        if apply_router_weight_on_input:
            a1 = weighted_input(a1, topk_weights)
        else:
            weights = topk_weights.float().contiguous()
        x, ids = a1.contiguous(), topk_ids.contiguous()
        # The other batch's kernels are launched before this one's, which waits for other ranks.
        ubatching.dbo_yield_and_switch_from_compute_to_comm()
        _use_on_this_stream(x, ids, weights)
        received, handle = self.layer.dispatch(x, ids)
        row_ids = self._ids_of_rows(received)
        self._sent[ubatching.dbo_current_ubatch_id()] = _Sent(handle, weights)
        ubatching.dbo_switch_to_compute_sync()

        def prepared() -> Any:
            _use_on_this_stream(received.x, received.x_sf, received.expert_count, row_ids)
            x, scales = received.x, received.x_sf
            if quantizes:
                is_nvfp4 = quant_config.quant_dtype == "nvfp4"
                x, scales = moe_kernel_quantize_input(
                    x,
                    quant_config.a1_gscale if is_nvfp4 else quant_config.a1_scale,
                    quant_config.quant_dtype,
                    quant_config.per_act_token_quant,
                    quant_config.block_shape,
                    is_scale_swizzled=quant_config.is_scale_swizzled,
                )
            tokens = mk.ExpertTokensMetadata(
                expert_num_tokens=received.expert_count, expert_num_tokens_cpu=None
            )
            return x, scales, tokens, row_ids, self._ones

        return prepared

    def _quantizes_rows(self, quant_config: FusedMoEQuantConfig, *, is_deferred: bool) -> bool:
        """Whether vLLM quantizes the rows that have come."""
        if is_deferred or quant_config.quant_dtype is None or self.layer.token_format != "bf16":
            expected = format_of_experts(quant_config, is_deferred=is_deferred)
            check_token_format(self.layer.token_format, expected)
            return False
        is_of_blocks = (
            quant_config.per_act_token_quant
            or quant_config.block_shape is not None
            or isinstance(quant_config.quant_dtype, str)  # a format with blocks of its own
        )
        if not is_of_blocks and quant_config.a1_scale is None:
            raise ValueError(
                "quant_config must have a scale for each row or block, or a1_scale: rows of no "
                "token hold anything, so that no scale of all rows can be found; got quant_dtype "
                f"{quant_config.quant_dtype} without"
            )
        return True

    def _ids_of_rows(self, received: Received) -> torch.Tensor:
        """int32 [rows, 1]."""
        expert = torch.bucketize(self._row, received.expert_end, out_int32=True, right=True)
        local = expert.clamp_(max=received.expert_end.shape[0] - 1).long()
        place = self._row - received.expert_begin.take(local)
        is_used = place < received.expert_count.take(local)
        return (local + self._first_expert).where(is_used, -1).int().unsqueeze(1)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> None:
        receiver = self.finalize_async(
            output,
            fused_expert_output,
            topk_weights,
            topk_ids,
            apply_router_weight_on_input,
            weight_and_reduce_impl,
        )
        receiver()

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Callable[[], None]:
        """Sends rows back and adds them; the function that it returns hands over to the other
        batch, if there is one."""
        # Of one expert each, and with weights of 1: a row is what either makes of it.
        known = (TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP)
        if not isinstance(weight_and_reduce_impl, known):
            raise TypeError(
                "weight_and_reduce_impl must be TopKWeightAndReduceDelegate or "
                "TopKWeightAndReduceNoOP: combine weights and adds rows; got "
                f"{type(weight_and_reduce_impl).__name__}"
            )
        batch = ubatching.dbo_current_ubatch_id()
        sent, self._sent[batch] = self._sent[batch], None
        if sent is None:
            raise RuntimeError("finalize must follow a prepare; there was none since the last one")
        shape = self.layer.shape
        rows = fused_expert_output.view(shape.max_recv_rows, shape.hidden)
        ubatching.dbo_yield_and_switch_from_compute_to_comm()
        _use_on_this_stream(rows, output, sent.topk_weights)
        if rows.data_ptr() == output.data_ptr():  # vLLM's, where both have one shape
            rows = rows.clone()
        self.layer.combine(rows, sent.handle, topk_weights=sent.topk_weights, out=output)
        ubatching.dbo_switch_to_compute()

        def hand_over() -> None:
            ubatching.dbo_switch_to_comm()
            ubatching.dbo_yield_and_switch_from_comm_to_compute()

        return hand_over


def _use_on_this_stream(*tensors: torch.Tensor | None) -> None:
    """With two batches tensors of one stream are used on another: their memory is not given away
    before that."""
    if not ubatching.dbo_enabled():
        return
    for tensor in tensors:
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
