"""The architectures that kernels are made for, and the choice of a kernel for a call.

A target (target.py) is all that the rest of deep_moe knows of an architecture. For a new one, write
its folder, with the fields that its kernel has beside those of every config (config.py), name it in
`TARGETS` of registry.py, and write in the folder of each weight format that the kernel takes a file
for it.
"""

from .choosing import choose_config
from .config import Decision, MegaMoEConfig
from .explain import Explanation
from .registry import (
    EMULATED,
    TARGETS,
    products_target,
    target_for,
    target_of,
    target_of_capability,
    target_of_device,
)
from .target import Operands, Target, TargetWeights

__all__ = [
    "EMULATED",
    "TARGETS",
    "Decision",
    "Explanation",
    "MegaMoEConfig",
    "Operands",
    "Target",
    "TargetWeights",
    "choose_config",
    "products_target",
    "target_for",
    "target_of",
    "target_of_capability",
    "target_of_device",
]
