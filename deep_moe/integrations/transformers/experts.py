"""The forward pass of a module of experts, as transformers calls it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from deep_moe.errors import DeepMoEError
from deep_moe.fused.input_preparation import prepare_inputs
from deep_moe.fused.mega_moe import mega_moe

from ..shared_buffers import SharedBuffers
from ..shares import rows_of_calls
from ..unsupported import UnsupportedError
from .layer import (
    ExpertsLayer,
    Options,
    activation_of,
    lay_out,
    own_tensors,
    reason_not_to_take_from,
)
from .taken import Loan, end_loans, has_shared_memory, loan_of, take

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from deep_moe.weights import WeightsName

NAME = "deep_moe"
MAX_CHUNK = 8192  # tokens of one call

logger = logging.getLogger(__name__)
buffers = SharedBuffers()

_DECISION = "_deep_moe_decision"
_GROUP = "_deep_moe_group"


_LAID_OUT_ANEW = (
    ", and laid out anew in each call: other tensors have the memory of {}, such as a state dict's "
    "or FSDP's, and could change it unseen"
)


@dataclass(frozen=True)
class Path:
    """Who runs a module's experts in a call. layer: None for the engine itself, because of
    `reason`."""

    layer: ExpertsLayer | None
    reason: str = ""

    def __str__(self) -> str:
        return NAME if self.layer is not None else f"transformers: {self.reason}"


@dataclass(frozen=True)
class _Decision:
    """What was decided for a module, for as long as it has the same tensors. The weights are in the
    tensors themselves. weights: the format that they were laid out in, None for the engine, because
    of `reason`."""

    options: Options
    tensors: tuple[int, ...]
    obstacle: str | None
    num_topk: int
    weights: WeightsName | None
    reason: str


class _GroupOf:
    """A group as a module holds it."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            "experts that are spread over ranks cannot be copied with their module: transformers "
            "gives the copy a forward that runs the weights of the original"
        )


options = Options()


def set_options(value: Options) -> None:
    global options
    options = value


def set_group(module: torch.nn.Module, group: ProcessGroup) -> None:
    """The module's experts are those of one rank of `group`."""
    module.__dict__[_GROUP] = _GroupOf(group)


def group_of(module: torch.nn.Module) -> ProcessGroup | None:
    """Of the ranks that a module's experts are spread over, if it was said."""
    found = module.__dict__.get(_GROUP)
    return None if found is None else found.group


def decide_first(module: torch.nn.Module) -> None:
    """From now on decide who runs the module's experts before its forward pass. In its forward pass
    transformers has put local tensors in the place of parameters that are spread over ranks; what
    can be taken are the parameters."""
    if _decide_before_forward not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_decide_before_forward, with_kwargs=True)


def _decide_before_forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    config: Any = module.config
    if config._experts_implementation == NAME and not isinstance(module, FSDPModule):
        top_k_index = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        path_of(module, group_of(module), top_k_index.shape[-1])


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
    if torch.is_grad_enabled() and any(p.requires_grad for p in own_tensors(self).values()):
        raise _no_backward()
    return run(path.layer, hidden_states, top_k_index, top_k_weights)


@torch.compiler.disable
def path_of(
    module: torch.nn.Module, group: ProcessGroup | None, num_topk: int = 1, name: str | None = None
) -> Path:
    """Who runs the module's experts in this call. What is laid out is used for as long as nothing
    has touched the module's tensors; otherwise they are laid out anew, or left to the engine.

    Every rank of `group` must come here with the same module first, and again after `register`
    changed options. num_topk: slots of a token. name: for the log.
    """
    tensors = own_tensors(module)
    decision: _Decision | None = module.__dict__.get(_DECISION)
    if decision is not None and decision.options != options:
        decision = None
    loan = loan_of(tensors)
    if loan is not None and _is_for(loan, module, group):
        layer: ExpertsLayer = loan.content
        reason = _reason_against(layer, num_topk)
        if reason is None:
            return Path(layer)
        loan.end(reason)
        return _engine(module, tensors, None, num_topk, reason, name)
    end_loans(tensors, "they go with other options, or another module")
    # Experts that are spread over ranks go on to get their tokens by the kernel.
    is_gathered = group is not None and isinstance(module, FSDPModule)
    obstacle, shared = None, None
    if is_gathered:
        shared = next(iter(tensors), None)
    else:
        if any(
            type(each) is torch.Tensor and hasattr(each, "_is_param") for each in tensors.values()
        ):
            decide_first(module)
        obstacle = reason_not_to_take_from(module, tensors)
        if obstacle is None:
            shared = next((key for key, each in tensors.items() if has_shared_memory(each)), None)
    if group is not None and decision is not None:
        return _again(module, group, tensors, decision, shared is None, num_topk)
    ids = tuple(map(id, tensors.values()))
    if (
        decision is not None
        and decision.weights is None
        and (decision.tensors, decision.obstacle, decision.num_topk) == (ids, obstacle, num_topk)
    ):
        return Path(None, decision.reason)
    layer_or_none, reason = None, obstacle
    if reason is None:
        try:
            layer_or_none = lay_out(module, group, options, num_topk=num_topk)
        except UnsupportedError as error:
            reason = str(error)
    reason = _first_reason(reason, group)
    if layer_or_none is None or reason is not None:
        assert reason is not None
        return _engine(module, tensors, obstacle, num_topk, reason, name)
    if shared is None:
        _take(module, tensors, layer_or_none)
    path = Path(layer_or_none, "" if shared is None else _LAID_OUT_ANEW.format(shared))
    if decision is None or decision.weights is None or decision.reason != path.reason:
        level = logging.INFO if shared is None else logging.WARNING
        logger.log(
            level, "%s: experts run by %s%s", name or type(module).__name__, path, path.reason
        )
    weights = layer_or_none.sizes.weights
    module.__dict__[_DECISION] = _Decision(options, ids, None, num_topk, weights, path.reason)
    return path


def _again(
    module: torch.nn.Module,
    group: ProcessGroup,
    tensors: dict[str, torch.Tensor],
    decision: _Decision,
    may_take: bool,
    num_topk: int,
) -> Path:
    """As all ranks decided: this one may be the only one whose tensors were touched."""
    if decision.weights is None:
        return Path(None, decision.reason)
    try:
        layer = lay_out(module, group, options, num_topk=num_topk, weights=decision.weights)
    except UnsupportedError as error:
        raise DeepMoEError(
            f"{type(module).__name__}: weights that were changed on this rank cannot be laid out "
            f"again: {error}; call release(model) on every rank"
        ) from error
    if may_take:
        _take(module, tensors, layer)
    return Path(layer)  # otherwise for this call only


def _take(module: torch.nn.Module, tensors: dict[str, torch.Tensor], layer: ExpertsLayer) -> None:
    take(tensors, layer, layer.originals)
    layer.modules.add(module)


def _is_for(loan: Loan, module: torch.nn.Module, group: ProcessGroup | None) -> bool:
    """Whether what is laid out is what this module would be laid out as; layers may be tied."""
    layer: ExpertsLayer = loan.content
    if layer.options != options or layer.group is not group:
        return False
    if module not in layer.modules:
        device = layer.weights.l1.weight.device
        try:
            is_same = activation_of(module, device) == layer.activation
        except UnsupportedError:
            return False
        if not is_same or not layer.has_form_of(module):
            return False
        layer.modules.add(module)
    return True


def _reason_against(layer: ExpertsLayer, num_topk: int) -> str | None:
    """Of calls with so many slots for each token."""
    if num_topk not in layer.known_topk:
        try:
            layer.check(num_topk)
        except UnsupportedError as error:
            return str(error)
        layer.known_topk.add(num_topk)
    return None


def _engine(
    module: torch.nn.Module,
    tensors: dict[str, torch.Tensor],
    obstacle: str | None,
    num_topk: int,
    reason: str,
    name: str | None,
) -> Path:
    path = Path(None, reason)
    before: _Decision | None = module.__dict__.get(_DECISION)
    if before is None or before.reason != reason:
        logger.warning("%s: experts run by %s", name or type(module).__name__, path)
    ids = tuple(map(id, tensors.values()))
    module.__dict__[_DECISION] = _Decision(options, ids, obstacle, num_topk, None, reason)
    return path


def forget(module: torch.nn.Module) -> None:
    """Give the module its own tensors' values back, if they were taken; the next call decides
    anew."""
    end_loans(own_tensors(module), "release was called")
    module.__dict__.pop(_DECISION, None)


@torch.compiler.disable
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
        raise _no_backward()
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
    sizes = layer.sizes_for(topk_idx.shape[1])
    buffer = buffers.buffer(layer.group, x.device, sizes, chunk)
    y = torch.empty_like(x)
    for rows in rows_of_calls(most, chunk):
        prepare_inputs(x[rows], topk_idx[rows], topk_weights[rows], buffer, arch=options.arch)
        mega_moe(
            y[rows],
            layer.weights,
            buffer,
            activation=layer.activation,
            l1_bias=layer.biases and layer.biases.l1,
            l2_bias=layer.biases and layer.biases.l2,
            arch=options.arch,
        )
    return y.to(hidden_states.dtype)


def _no_backward() -> NotImplementedError:
    return NotImplementedError(
        "deep_moe has no backward pass: call the model under torch.no_grad() or "
        "torch.inference_mode()"
    )


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
