"""deep_moe as the experts of models that vLLM serves.

vLLM finds `register` by the entry point group "vllm.general_plugins", so that installing deep_moe
is enough. docs/vllm.md says what is supported.
"""

from __future__ import annotations

import logging

from deep_moe.errors import DeepMoEError

from ..engine_version import log_standing_aside, require_version
from ..switch import read_switch

__all__ = ["register"]

SWITCH_VARIABLE = "DEEP_MOE_VLLM"  # 0 turns the adapter off

# The versions whose interfaces this was written for.
OLDEST, TOO_NEW = (0, 33), (0, 34)

# vLLM shows the lines of loggers below its own.
logger = logging.getLogger("vllm.deep_moe")


def register() -> None:
    """Let vLLM make its layers of routed experts by this adapter, and its `--moe-backend` name
    deep_moe. vLLM calls it in every process.

    A vLLM that this was not written for, or where another plugin has taken the layers, runs all
    experts itself: one warning says so.

    Raises ValueError for a value of DEEP_MOE_VLLM that is not allowed.
    """
    switch = read_switch(SWITCH_VARIABLE)
    if not switch.is_on:
        return
    try:
        require_version("vllm", OLDEST, TOO_NEW)
        from .routed_experts import install

        install(switch.emulated_arch)
    # A build of that version may lack names.
    except (DeepMoEError, ImportError, AttributeError) as error:
        log_standing_aside(logger, "vLLM", error)
