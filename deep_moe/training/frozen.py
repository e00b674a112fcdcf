"""`frozen_weights`: passes share quantized weights while the caller says that weights stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deep_moe.tensor_memory import check_dense, check_memory

from .gathered_weights import plain_weight
from .kept_weights import KeptWeight, keep
from .layer import MoELayer


@contextmanager
def frozen_weights(*owners: torch.nn.Module | torch.Tensor) -> Iterator[None]:
    """A context in which weights do not change, so that calls quantize each of them once.

    For several forward passes between two steps of an optimizer: accumulated gradients, gradient
    checkpointing, `recompute=True`, or experts that are not trained. Calls of `moe` and `MoELayer`
    with precision "fp8", "fp8_dgrad", "fp8_wgrad" or "mxfp8" keep what they round weights to, and
    free it when the context ends: 1 byte for each value with "fp8", 2 with the others. Outputs and
    gradients have the same bits as without.

    A pass quantizes a weight again where its storage or its version is another than before. Other
    changes, as of fused optimizers or through `.data`, cannot be seen then. The end of the context
    therefore compares what is kept of each weight with what would be made of it now, bit for bit,
    and the host waits for it. So optimizers step behind the context, or raise an error there. Only
    a weight that was changed unseen and changed back is not found.

    While a CUDA graph is captured nothing is kept, and the context must not end.

    Args:
        owners: modules, of which each `MoELayer` inside is meant, or weights themselves, those that
            calls of `moe` are given, not views of them.

    Raises:
        TypeError: an owner is neither a module nor a tensor, or a weight is of a subclass of
            tensors, as a DTensor is.
        ValueError: a module has no MoELayer, a weight is frozen already, or its storage is gone.
        RuntimeError: at the end, a weight has changed; the text names it. Gradients of the passes
            are those of earlier weights then.

    >>> import torch, deep_moe
    >>> layer = deep_moe.MoELayer(128, 128, num_experts=2, precision="fp8")
    >>> x = torch.ones(4, 128, dtype=torch.bfloat16)
    >>> with deep_moe.frozen_weights(layer):
    ...     for _ in range(3):
    ...         y = layer(x, torch.zeros(4, 1).long(), torch.ones(4, 1))
    ...         y.float().sum().backward()
    """
    entered = _entries(owners)
    with keep(entered):
        yield
        found = [entry.num_differences() for entry in entered]  # before the host waits
        changed = [entry.name for entry, some in zip(entered, found, strict=True) if any(some)]
    if changed:
        raise RuntimeError(
            f"{', '.join(changed)} changed within frozen_weights, whose passes multiplied earlier "
            "values: let optimizers step behind it"
        )


def _entries(owners: tuple[torch.nn.Module | torch.Tensor, ...]) -> list[KeptWeight]:
    if not owners:
        raise ValueError("owners must be at least one module or tensor; got none")
    found: dict[int, KeptWeight] = {}
    for index, owner in enumerate(owners):
        name = f"owners[{index}]"
        weights: dict[str, torch.Tensor]
        if isinstance(owner, torch.nn.Module):
            weights = {
                ".".join(part for part in (name, path, key) if part): weight
                for path, module in owner.named_modules()
                if isinstance(module, MoELayer)
                for key, weight in (("w1", module.w1), ("w3", module.w3), ("w2", module.w2))
                if weight is not None
            }
            if not weights:
                raise ValueError(f"{name} must have a MoELayer inside; got {type(owner).__name__}")
        elif isinstance(owner, torch.Tensor):
            weights = {name: owner}
        else:
            raise TypeError(f"{name} must be a module or a tensor; got {type(owner).__name__}")
        for key, given in weights.items():
            weight = plain_weight(given)
            if type(weight) not in (torch.Tensor, torch.nn.Parameter):
                raise TypeError(
                    f"{key} must be a plain tensor, as calls get it; got {type(weight).__name__}"
                )
            check_dense(key, weight)
            check_memory(key, weight)
            found.setdefault(id(weight), KeptWeight(key, weight))
    return list(found.values())
