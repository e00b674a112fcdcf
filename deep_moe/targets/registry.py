"""The targets by name, by a GPU's compute capability, and of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import sm90, sm100
from .target import Target

if TYPE_CHECKING:
    import torch

TARGETS: dict[str, Target] = {target.name: target for target in (*sm90.TARGETS, *sm100.TARGETS)}
# What a CPU stands for, and configs are for, unless another target is named.
EMULATED = sm100.SM100A


def target_of(name: str) -> Target:
    """The target with this name, or an error that says which there are.

    >>> target_of("sm_90a").gpus
    'H100, H200'
    """
    allowed = f"one of {', '.join(TARGETS)}"
    if not isinstance(name, str):
        raise TypeError(f"arch must be {allowed}; got {name!r}")
    if name not in TARGETS:
        raise ValueError(f"arch must be {allowed}; got {name!r}")
    return TARGETS[name]


def products_target() -> Target:
    """The first target that `grouped_product` has a kernel for, which the emulator runs."""
    return next(target for target in TARGETS.values() if target.has_grouped_product)


def target_of_capability(capability: tuple[int, int]) -> Target | None:
    """The target of GPUs with this compute capability, None if there is no kernel for them.

    >>> target_of_capability((10, 3)).name
    'sm_103a'
    """
    return next((t for t in TARGETS.values() if capability in t.capabilities), None)


def target_for(arch: str | None, device: torch.device) -> Target:
    """The target named `arch`, by default that of `device`."""
    return target_of_device(device) if arch is None else target_of(arch)


def target_of_device(device: torch.device) -> Target:
    """What weights on `device` are laid out for and calls there run on, when the caller names
    nothing. Raises ValueError for a GPU without a kernel."""
    if device.type != "cuda":
        return EMULATED
    import torch

    capability = torch.cuda.get_device_capability(device)
    target = target_of_capability(capability)
    if target is None:
        major, minor = capability
        known = "; ".join(f"{t.name} ({t.gpus})" for t in TARGETS.values())
        raise ValueError(
            f"device must be a GPU that there is a kernel for, {known}; {device} has compute "
            f"capability {major}.{minor}"
        )
    return target
