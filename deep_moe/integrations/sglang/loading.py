"""Around SGLang's functions that load weights, at start and when others replace them.

At start a layer's parameters have the checkpoint's layout, and SGLang loads into them: here it is
noted what came. Of a layer that the kernel runs they are the kernel's own tensors: what comes then
takes the way of `Replacement`. SGLang has placed experts before either, whatever its load balancer
did.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from deep_moe.formats.sizes import K_BLOCK

from ..completeness import LoadedParts, shards_of
from ..kernel_parameters import KernelParameters
from ..served_experts import ServedExperts
from ..unsupported import UnsupportedError
from . import engine
from .forms import TENSORS, form_of, group_size_of
from .replacement import Replacement

logger = logging.getLogger("sglang.deep_moe")

# Of a layer that the kernel runs: its KernelParameters.
PARAMETERS = "_deep_moe_parameters"
_PARTS, _REPLACEMENT = "_deep_moe_loaded_parts", "_deep_moe_replacement"
_REORDERED = "_deep_moe_reordered"  # name of a tensor that gives columns another order
_HOW_TO_LOAD = "SGLang's update_weights_from_disk, _tensor, _distributed and _ipc load new ones"
_MOST_LAYERS = 4  # named in one answer


def tensors_of(experts: Any) -> tuple[str, ...]:
    """Names of the parameters that a checkpoint is loaded into."""
    form = form_of(experts)
    return TENSORS if form is None else form.tensors


def name_of(experts: Any) -> str:
    return f"layer {experts.layer_id}"


def has_begun(experts: Any, tensor: str) -> bool:
    """Whether any part of it was loaded."""
    return bool(_parts_of(experts).begun([tensor]))


def require_all(experts: Any, also: Sequence[str] = ()) -> bool:
    """Raise CheckpointError unless all of a layer was loaded, if SGLang's loaders did it: not for
    weights that were made up, or came in another way. Whether they loaded any. also: tensors that
    are to be complete, too."""
    parts: LoadedParts = experts.__dict__.pop(_PARTS, None) or LoadedParts()
    tensors = tensors_of(experts)
    loaded = [name for name in tensors if hasattr(getattr(experts, name), "weight_loader")]
    is_loaded = bool(parts.begun(loaded))
    if is_loaded:
        parts.require_all(name_of(experts), [*loaded, *also], engine.expert_ids(experts))
    return is_loaded


def check_order(experts: Any) -> None:
    """Raise UnsupportedError if the checkpoint gives columns another order than they lie in."""
    name = experts.__dict__.get(_REORDERED)
    if name is not None:
        raise UnsupportedError(f"{name} says that columns are in another order")


def await_replacement(experts: Any, served: ServedExperts) -> None:
    """From now on the layer's parameters, which still have the form in which they were loaded, are
    the kernel's own tensors, and what is loaded replaces weights of `served`."""
    parameters = {name: getattr(experts, name) for name in tensors_of(experts)}
    name = name_of(experts)
    experts.__dict__[_REPLACEMENT] = Replacement(name, served, parameters)
    names = TENSORS if served.form is None else served.form.kernel_tensors
    tensors = dict(zip(names, served.tensors(), strict=True))
    experts.__dict__[PARAMETERS] = KernelParameters(name, experts, tensors, _HOW_TO_LOAD)


def require_own_memory(experts: Any) -> None:
    """Raise DeepMoEError if a parameter of a layer that the kernel runs was given other memory."""
    parameters: KernelParameters = experts.__dict__[PARAMETERS]
    parameters.require(experts)


def load_part(
    original: Callable[..., None],
    experts: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
) -> None:
    """A part of one expert's tensor. expert_id: the expert's place on this rank."""

    def write(into: torch.nn.Parameter, place: int) -> None:
        original(
            experts,
            param=into,
            loaded_weight=loaded_weight,
            weight_name=weight_name,
            shard_id=shard_id,
            expert_id=place,
        )

    tensor, replacement = _tensor_of(experts, param), _replacement_of(experts)
    if replacement is not None and tensor is None:
        experts.__dict__[PARAMETERS].refuse_parts(param)
    if replacement is not None and tensor is not None:
        expert = engine.expert_ids(experts)[expert_id]
        part = tensor, shard_id
        replacement.load(part, expert_id, expert, param, lambda into: write(into, 0))
        return
    write(param, expert_id)
    if tensor is None and weight_name.endswith("_g_idx"):
        groups = torch.arange(loaded_weight.shape[-1]) // (group_size_of(experts) or K_BLOCK)
        if not torch.equal(loaded_weight.cpu().long(), groups):
            experts.__dict__[_REORDERED] = weight_name
    if _is_noted(experts):
        noted = tensor or _token_scales_of(experts, param)
        if noted is not None:
            _parts_of(experts).add(noted, shard_id, [expert_id])


def load_whole(
    original: Callable[..., None],
    experts: Any,
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
) -> None:
    """A tensor of all experts at once, for which SGLang has no expert parallelism."""
    tensor, replacement = _tensor_of(experts, param), _replacement_of(experts)
    if replacement is not None and tensor is not None:
        replacement.refuse(f"{tensor} of all experts in one tensor cannot replace others")
        return
    original(experts, param, loaded_weight, weight_name, shard_id)
    if tensor is not None and _is_noted(experts):
        for shard in shards_of(tensor):
            _parts_of(experts).add(tensor, shard, range(len(param)))


def update(
    original: Callable[..., tuple[bool, str]], updater: Any, *arguments: Any, **options: Any
) -> tuple[bool, str]:
    """One that ends when it returns."""
    success, message = original(updater, *arguments, **options)
    refusal = _end_of_update([updater.get_model()])
    if refusal is None:
        return success, message
    return False, refusal if success else f"{message} {refusal}"


def update_from_tensors(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Not straight into parameters that hold the kernel's layout."""
    if load_format == "direct":
        own = {
            f"{prefix}.{name}"
            for prefix, module in updater.get_model().named_modules()
            if _replacement_of(module) is not None
            for name in tensors_of(module)
        }
        for name, _ in named_tensors:
            if name in own:
                return False, (
                    f"{name} holds the layout of deep_moe's kernel, so load_format must not be "
                    "'direct', but let the model load what checkpoints have"
                )
    return original(updater, named_tensors, load_format)


def end_weight_update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Of one that SGLang was told the begin of; it may have loaded in many calls."""
    session = manager._session
    runners = [] if session is None else manager._select_runners(session.selector)
    answer = original(manager, recv_req)
    refusal = _end_of_update([runner.weight_updater.get_model() for _, runner in runners])
    return answer if refusal is None else type(answer)(success=False, message=refusal)


_FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
HOOKS: dict[str, Callable[..., Any]] = {
    f"{_FUSED_MOE}._weight_loader_impl": load_part,
    f"{_FUSED_MOE}.weight_loader_fused": load_whole,
    f"{_UPDATER}.update_weights_from_disk": update,
    f"{_UPDATER}.update_weights_from_ipc": update,
    f"{_UPDATER}.update_weights_from_tensor": update_from_tensors,
    f"{_MANAGER}.end_weight_update": end_weight_update,
}


def _end_of_update(models: Iterable[Any]) -> str | None:
    """What was not replaced, on any rank, or None. Every rank comes here, with as many layers."""
    modules = (module for model in models for module in model.modules())
    replacements = [
        (found, module) for module in modules if (found := _replacement_of(module)) is not None
    ]
    if not replacements:
        return None
    for replacement, module in replacements:
        replacement.take_token_scale(module)
    ends = (replacement.end(engine.expert_ids(module)) for replacement, module in replacements)
    lacking = [words for words in ends if words is not None]
    for replacement, _ in replacements:
        replacement.renew()
    refusal = None
    if lacking:
        more = len(lacking) - _MOST_LAYERS
        refusal = (
            f"deep_moe has not replaced all experts: {'. '.join(lacking[:_MOST_LAYERS])}"
            + (f". And so in {more} more layers" if more > 0 else "")
            + ". These experts are as they were, others that came are replaced: send all again."
        )
        logger.error("%s", refusal)
    return engine.first_of_ranks(refusal)


def _tensor_of(experts: Any, param: torch.nn.Parameter) -> str | None:
    return next(
        (name for name in tensors_of(experts) if experts._parameters.get(name) is param), None
    )


def _token_scales_of(experts: Any, param: torch.nn.Parameter) -> str | None:
    """The name, if it is the parameter of a checkpoint's scales of tokens."""
    form = form_of(experts)
    name = None if form is None else form.token_scales
    return name if name is not None and experts._parameters.get(name) is param else None


def _replacement_of(module: Any) -> Replacement | None:
    return module.__dict__.get(_REPLACEMENT)


def _is_noted(experts: Any) -> bool:
    """Whether weights of a layer will be laid out for one kernel, and have not been yet."""
    return engine.is_megamoe() and not experts._mega_moe_weights_built


def _parts_of(experts: Any) -> LoadedParts:
    parts: LoadedParts = experts.__dict__.setdefault(_PARTS, LoadedParts())
    return parts
