"""Whether a compiler, a mode, a transform or a profiler needs to see a call as an operator. If none
does, a call goes straight to its kernel. That has the same effect as PyTorch's operator, and saves
4 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import has_torch_function

if TYPE_CHECKING:
    from deep_moe.weights.layers import MegaMoEWeights

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def _private(path: str) -> Callable[[], Any] | None:
    """A function of torch._C, or None where this PyTorch has none."""
    found: Any = torch._C
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if callable(found) else None


# PyTorch has no public way to ask these.
_num_dispatch_modes = _private("_len_torch_dispatch_stack")  # fake tensors and tracers are modes
_transform_level = _private("_functorch.maybe_current_level")  # None outside of torch.func
_is_profiling = _private("_autograd._profiler_enabled")
_is_tracing = _private("_is_tracing")  # torch.jit.trace
_can_ask = None not in (_num_dispatch_modes, _transform_level, _is_profiling, _is_tracing)


def is_seen_by_nobody(
    tensors: tuple[torch.Tensor, ...], weights: MegaMoEWeights | None = None
) -> bool:
    """False if in doubt: the operator is always right.

    tensors, weights: of the call. Autograd has nothing to see: who wants a gradient is refused
    before, and weights that happen to require one change nothing.
    """
    # In this order because a compiler follows the first, and then nothing else here.
    if torch.compiler.is_compiling() or not _can_ask:
        return False
    if weights is not None and not weights.are_plain:
        return False
    # Most calls have one beside the weights.
    if type(tensors[0]) not in _PLAIN_TYPES or (
        len(tensors) > 1 and not _PLAIN_TYPES.issuperset(map(type, tensors))
    ):
        return False
    return not (
        has_torch_function(tensors)  # true for any tensors within a function mode
        or _num_dispatch_modes()  # type: ignore[misc]
        or _is_profiling()  # type: ignore[misc]
        or _is_tracing()  # type: ignore[misc]
        or _transform_level() is not None  # type: ignore[misc]
    )
