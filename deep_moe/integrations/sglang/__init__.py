"""deep_moe as the experts of models that SGLang serves with `--moe-a2a-backend megamoe`.

SGLang finds `register` by the entry point group "sglang.srt.plugins", so that installing deep_moe
is enough. docs/sglang.md says what is supported.
"""

from __future__ import annotations

import logging

from deep_moe.errors import DeepMoEError

from ..engine_version import log_standing_aside, require_version
from ..switch import read_switch

__all__ = ["register"]

SWITCH_VARIABLE = "DEEP_MOE_SGLANG"  # 0 turns the adapter off

# The versions whose interfaces this was written for: of 0.5.23 and its post releases.
OLDEST, TOO_NEW = (0, 5, 23), (0, 5, 24)

# SGLang shows the lines of every logger.
logger = logging.getLogger("sglang.deep_moe")


def register() -> None:
    """Put the hooks of this adapter around SGLang's functions for fused experts. SGLang calls it in
    every process.

    An SGLang that this was not written for runs all experts itself: one warning says so.

    Raises ValueError for a value of DEEP_MOE_SGLANG that is not allowed; SGLang logs it and serves
    without deep_moe.
    """
    switch = read_switch(SWITCH_VARIABLE)
    if not switch.is_on:
        return
    try:
        require_version("sglang", OLDEST, TOO_NEW)
        from .hooks import install

        install(switch.emulated_arch)
    # A build of that version may lack names.
    except (DeepMoEError, ImportError, AttributeError) as error:
        log_standing_aside(logger, "SGLang", error)
