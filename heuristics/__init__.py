"""From the shape of an MoE layer to the configuration of its kernel. Pure Python.

Shapes, layouts and the choosers of fields (sm90.py, sm100.py and what they import) are below the
targets (deep_moe/targets), which use them; config.py and what builds on it stand above and ask the
targets. So names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.lazy import names_on_use

if TYPE_CHECKING:
    from .config import Decision, MegaMoEConfig, choose_config
    from .expected_tokens import expected_tokens_per_rank
    from .explain import Explanation
    from .prepare_inputs import PrepareInputsConfig
    from .presets import PRESETS, preset_activation, preset_has_biases, preset_shape
    from .segments import Layout, Segment
    from .shape import MoEShape
    from .tuning import Tuning, TuningTable

__all__ = [
    "PRESETS",
    "Decision",
    "Explanation",
    "Layout",
    "MegaMoEConfig",
    "MoEShape",
    "PrepareInputsConfig",
    "Segment",
    "Tuning",
    "TuningTable",
    "choose_config",
    "expected_tokens_per_rank",
    "preset_activation",
    "preset_has_biases",
    "preset_shape",
]

if not TYPE_CHECKING:  # so that type checkers find names that do not exist
    __getattr__, __dir__ = names_on_use(
        __name__,
        {
            "PRESETS": "presets",
            "Decision": "config",
            "Explanation": "explain",
            "Layout": "segments",
            "MegaMoEConfig": "config",
            "MoEShape": "shape",
            "PrepareInputsConfig": "prepare_inputs",
            "Segment": "segments",
            "Tuning": "tuning",
            "TuningTable": "tuning",
            "choose_config": "config",
            "expected_tokens_per_rank": "expected_tokens",
            "preset_activation": "presets",
            "preset_has_biases": "presets",
            "preset_shape": "presets",
        },
    )
