"""The forward pass of a module of experts, as transformers calls it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep_moe.fused.input_preparation import prepare_inputs
from deep_moe.fused.mega_moe import CALLS

from ..shared_buffers import SharedBuffers
from ..unsupported import UnsupportedError
from .layer import ExpertsLayer, restore, take_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "deep_moe"
MAX_CHUNK = 8192  # tokens of one call

logger = logging.getLogger(__name__)
buffers = SharedBuffers()

_STATE = "_deep_moe_state"
_GROUP = "_deep_moe_group"


@dataclass(frozen=True)
class Options:
    """Of `register`."""

    quantize: bool = False
    num_pool_tokens: int | None = None
    max_tokens_per_rank: int | None = None
    mxfp4_tokens: str | None = None
    arch: str | None = None


@dataclass(frozen=True)
class Path:
    """Who runs a module's experts. layer: None for the engine itself, because of `reason`."""

    layer: ExpertsLayer | None
    reason: str = ""

    def __str__(self) -> str:
        return NAME if self.layer is not None else f"transformers: {self.reason}"


options = Options()


def set_options(value: Options) -> None:
    global options
    options = value


def set_group(module: torch.nn.Module, group: ProcessGroup) -> None:
    """The module's experts are those of one rank of `group`."""
    module.__dict__[_GROUP] = group


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    process_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """The sum of the experts of each token, bfloat16 rounded, in the dtype of `hidden_states`
    [tokens, hidden]. top_k_index [tokens, topk]: ids in the range of all experts of
    `process_group`; others are left out."""
    path = path_of(self, process_group, top_k_index.shape[-1])
    if path.layer is None:
        return _engine_forward(self)(self, hidden_states, top_k_index, top_k_weights)
    return run(path.layer, hidden_states, top_k_index, top_k_weights)


def path_of(
    module: torch.nn.Module, group: ProcessGroup | None, num_topk: int, name: str | None = None
) -> Path:
    """Who runs the module's experts; decided, and logged, at its first call. Every rank of `group`
    must come here with the same module then. name: for the log."""
    path = module.__dict__.get(_STATE)
    if path is None:
        try:
            layer = take_over(
                module,
                group,
                num_topk,
                quantize=options.quantize,
                num_pool_tokens=options.num_pool_tokens,
                mxfp4_tokens=options.mxfp4_tokens,
                arch=options.arch,
                agree=lambda reason: _first_reason(reason, group),
            )
            path = Path(layer)
        except UnsupportedError as error:
            path = Path(None, str(error))
        module.__dict__[_STATE] = path
        level = logging.INFO if path.layer is not None else logging.WARNING
        logger.log(level, "%s: experts run by %s", name or type(module).__name__, path)
    return path


def group_of(module: torch.nn.Module) -> ProcessGroup | None:
    """Of the ranks that a module's experts are spread over, if it was said."""
    return module.__dict__.get(_GROUP)


def forget(module: torch.nn.Module) -> None:
    """Give the module its own tensors back, if they were taken; the next call decides anew."""
    path = module.__dict__.pop(_STATE, None)
    if path is not None and path.layer is not None:
        restore(module, path.layer, options.arch)


def run(
    layer: ExpertsLayer,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    num_most_tokens: int | None = None,
) -> torch.Tensor:
    """The experts' sums for this rank's tokens. Every rank of the layer's group must call this.

    num_most_tokens: of any rank, if that is known. Otherwise, and if `register` was not told how
    many there are at most, ranks ask each other first, for which the host waits.
    """
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        raise NotImplementedError(
            "deep_moe has no backward pass: call the model under torch.no_grad() or "
            "torch.inference_mode()"
        )
    x = hidden_states.to(torch.bfloat16).contiguous()
    # Ids behind the last expert are transformers' mark of slots that are another rank's.
    is_known = (top_k_index >= 0) & (top_k_index < layer.sizes.num_experts)
    topk_idx = torch.where(is_known, top_k_index, -1).contiguous()
    topk_weights = top_k_weights.float().contiguous()
    num_tokens = x.shape[0]
    limit = options.max_tokens_per_rank
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"hidden_states must have at most max_tokens_per_rank ({limit}) tokens, which register "
            f"was told; got {num_tokens}"
        )
    # All ranks make the same calls.
    most = limit or num_most_tokens or _most_tokens(num_tokens, layer.group, x.device)
    chunk = limit or min(max(most, 1), MAX_CHUNK)
    buffer = buffers.buffer(layer.group, x.device, layer.sizes, chunk)
    y = torch.empty_like(x)
    for first in range(0, max(most, 1), chunk):
        rows = slice(first, first + chunk)
        prepare_inputs(x[rows], topk_idx[rows], topk_weights[rows], buffer, arch=options.arch)
        CALLS[layer.sizes.weights](
            y[rows],
            *layer.weights,
            buffer,
            activation=layer.activation,
            l1_bias=layer.biases and layer.biases.l1,
            l2_bias=layer.biases and layer.biases.l2,
            arch=options.arch,
        )
    return y.to(hidden_states.dtype)


def _most_tokens(num_tokens: int, group: ProcessGroup | None, device: torch.device) -> int:
    """Of any rank of the group."""
    if group is None:
        return num_tokens
    most = torch.tensor(num_tokens, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    return int(most)


def _first_reason(reason: str | None, group: ProcessGroup | None) -> str | None:
    if group is None:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    return next((one for one in reasons if one is not None), None)


def _engine_forward(module: torch.nn.Module) -> Any:
    """The path that transformers itself takes by default."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    is_fp8 = isinstance(module, FP8Experts)
    return (ALL_FP8_EXPERTS_FUNCTIONS if is_fp8 else ALL_EXPERTS_FUNCTIONS)["grouped_mm"]
