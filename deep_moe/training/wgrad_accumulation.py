"""Gradients of weights that a backward pass adds up itself, in a weight's `main_grad` or `.grad`.

PyTorch gets no gradient for such a weight. So whoever would have read one there is refused by name:
hooks of the weight, `torch.autograd.grad` of it, and a gradient of gradients. Hooks behind the
accumulation, as DDP has them, run as always, and find the sum in `.grad`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.autograd.graph import get_gradient_edge

from .experts import WeightSums


@dataclass(frozen=True)
class Owner:
    """The parameter whose gradients are added up, and whether the call got its transpose."""

    name: str
    parameter: torch.Tensor
    is_transposed: bool

    def check_hooks(self) -> None:
        """Raise for hooks that would not see what is added."""
        kinds = {"_backward_hooks": "register_hook"}
        kinds["_post_accumulate_grad_hooks"] = "register_post_accumulate_grad_hook"
        for attribute, method in kinds.items():
            if getattr(self.parameter, attribute, None):
                raise ValueError(
                    f"{self.name} must have no hooks of {method} with fuse_wgrad_accumulation, "
                    "which gives them no gradient; it has"
                )

    def is_wanted(self) -> bool:
        """Whether the backward pass that runs now is for its gradient, among others."""
        node = get_gradient_edge(self.parameter).node
        try:
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError as error:  # of a leaf whose gradient is to be returned
            raise RuntimeError(
                f"torch.autograd.grad gets no gradient of {self.name}, which "
                "fuse_wgrad_accumulation adds to main_grad or .grad: call backward()"
            ) from error

    def sums(self) -> torch.Tensor | None:
        """What gradients are added to, in the shape that the call got. None: there is nothing yet,
        and PyTorch makes `.grad` of the gradient."""
        parameter = self.parameter
        kind, sums = "main_grad", getattr(parameter, "main_grad", None)
        if sums is None:
            kind, sums = "grad", parameter.grad
        if sums is None:
            return None
        name = f"{kind} of {self.name}"
        if not isinstance(sums, torch.Tensor) or sums.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor; got {type(sums).__name__}")
        is_double = parameter.dtype == torch.float64
        dtypes = (parameter.dtype,) if is_double else (parameter.dtype, torch.float32)
        if sums.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}; got {sums.dtype}")
        if sums.shape != parameter.shape:
            raise ValueError(
                f"{name} must have shape {tuple(parameter.shape)}; got {tuple(sums.shape)}"
            )
        if sums.device != parameter.device:
            raise ValueError(f"{name} must be on {parameter.device}; got {sums.device}")
        sums = sums.detach()
        return sums.transpose(1, 2) if self.is_transposed else sums


Owners = tuple[Owner | None, Owner | None, Owner | None]  # of w1, w3, w2; None for no gradient


def owners_of(weights: Mapping[str, torch.Tensor | None]) -> Owners:
    """Of a call's w1, w3, w2."""
    first, second, third = (
        None if weight is None or not weight.requires_grad else _owner_of(name, weight)
        for name, weight in weights.items()
    )
    return first, second, third


def _owner_of(name: str, weight: torch.Tensor) -> Owner:
    parameter = weight if weight.is_leaf else weight._base
    is_transposed = parameter is not weight
    if (
        parameter is None
        or not parameter.is_leaf
        or (is_transposed and not _is_transpose(weight, parameter))
    ):
        raise ValueError(
            f"{name} must be a leaf, or leaf.transpose(1, 2), with fuse_wgrad_accumulation, which "
            f"adds to the leaf's gradient; got what {weight.grad_fn} made"
        )
    owner = Owner(name, parameter, is_transposed)
    owner.check_hooks()
    return owner


def _is_transpose(weight: torch.Tensor, parameter: torch.Tensor) -> bool:
    if parameter.ndim != 3 or parameter.data_ptr() != weight.data_ptr():
        return False
    whole = parameter.transpose(1, 2)
    return whole.shape == weight.shape and whole.stride() == weight.stride()


def refuse_second_derivatives() -> None:
    """In a backward pass: raise where it makes a graph."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph must be False with fuse_wgrad_accumulation: what is added to main_grad "
            "or .grad has no gradient"
        )


@dataclass(frozen=True)
class Sums:
    """is_wanted: the backward pass is for the gradient of some weight. of_weights: what these are
    added to; a gradient that has nothing to be added to is returned."""

    is_wanted: bool
    of_weights: WeightSums


def sums_of(owners: Owners) -> Sums:
    """Those of the backward pass that runs now."""
    wanted = [owner if owner is not None and owner.is_wanted() else None for owner in owners]
    found: list[torch.Tensor | None] = []
    for owner in wanted:
        if owner is not None:
            owner.check_hooks()
        found.append(None if owner is None else owner.sums())
    return Sums(any(owner is not None for owner in wanted), WeightSums(*found))
