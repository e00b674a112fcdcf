"""deep_moe as the experts of models that vLLM serves.

vLLM finds `register` by the entry point group "vllm.general_plugins", so that installing deep_moe
is enough. docs/vllm.md says what is supported.
"""

from __future__ import annotations

from ..engine_version import require_version
from ..switch import read_switch

__all__ = ["register"]

SWITCH_VARIABLE = "DEEP_MOE_VLLM"  # 0 turns the adapter off

# The versions whose interfaces this was written for.
OLDEST, TOO_NEW = (0, 33), (0, 34)


def register() -> None:
    """Let vLLM make its layers of routed experts by this adapter. vLLM calls it in every process.

    Raises DeepMoEError, so that vLLM does not start, for a version of it that this was not written
    for; ValueError for a value of DEEP_MOE_VLLM that is not allowed.
    """
    switch = read_switch(SWITCH_VARIABLE)
    if not switch.is_on:
        return
    require_version("vllm", OLDEST, TOO_NEW, f"; {SWITCH_VARIABLE}=0 serves without deep_moe")
    from .routed_experts import install

    install(switch.emulated_arch)
