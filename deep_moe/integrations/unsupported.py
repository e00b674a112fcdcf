"""The error of experts that the kernel cannot run."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from deep_moe.targets import target_for

if TYPE_CHECKING:
    import torch


class UnsupportedError(Exception):
    """Why the kernel cannot run a layer's experts, in words that follow the layer's name."""


def check_target(
    asked: str, having: Collection[str], arch: str | None, device: torch.device
) -> None:
    """Raise UnsupportedError unless the target is one that has a kernel for what was asked.

    asked: in words. having: targets' names. arch: a target's name, None for that of `device`.
    """
    target = target_for(arch, device)
    if target.name not in having:
        raise UnsupportedError(
            f"{asked} were asked for, for which only {', '.join(having)} has a kernel, "
            f"not {target.name}"
        )
