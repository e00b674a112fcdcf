"""The shape of an MoE layer, what lies where in memory, and how targets choose the fields of their
kernels. Pure Python; below the targets (deep_moe/targets), whose `choose_config` gives the kernel.
"""

from .expected_tokens import expected_tokens_per_rank
from .prepare_inputs import PrepareInputsConfig
from .presets import PRESETS, preset_activation, preset_has_biases, preset_shape
from .segments import Layout, Segment
from .shape import MoEShape
from .tuning import Tuning, TuningTable

__all__ = [
    "PRESETS",
    "Layout",
    "MoEShape",
    "PrepareInputsConfig",
    "Segment",
    "Tuning",
    "TuningTable",
    "expected_tokens_per_rank",
    "preset_activation",
    "preset_has_biases",
    "preset_shape",
]
