"""deep_moe as the experts of models that SGLang serves with `--moe-a2a-backend megamoe`.

SGLang finds `register` by the entry point group "sglang.srt.plugins", so that installing deep_moe
is enough. docs/sglang.md says what is supported.
"""

from __future__ import annotations

from ..engine_version import require_version
from ..switch import read_switch

__all__ = ["register"]

SWITCH_VARIABLE = "DEEP_MOE_SGLANG"  # 0 turns the adapter off

# The versions whose interfaces this was written for: of 0.5.23 and its post releases.
OLDEST, TOO_NEW = (0, 5, 23), (0, 5, 24)


def register() -> None:
    """Put the hooks of this adapter around SGLang's functions for fused experts. SGLang calls it in
    every process.

    Raises DeepMoEError for a version of it that this was not written for, and ValueError for a
    value of DEEP_MOE_SGLANG that is not allowed: SGLang logs either and serves without deep_moe.
    """
    switch = read_switch(SWITCH_VARIABLE)
    if not switch.is_on:
        return
    require_version("sglang", OLDEST, TOO_NEW)
    from .hooks import install

    install(switch.emulated_arch)
