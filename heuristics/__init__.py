"""From the shape of an MoE layer to the configuration of its kernel. Pure Python."""

from .config import ARCHITECTURES, Decision, MegaMoEConfig, choose_config
from .expected_tokens import expected_tokens_per_rank
from .explain import Explanation, explain
from .prepare_inputs import PrepareInputsConfig
from .presets import PRESETS, preset_shape
from .segments import Layout, Segment
from .shape import MoEShape
from .symm_buffer_layout import symm_buffer_layout
from .tuning import Tuning, TuningTable

__all__ = [
    "ARCHITECTURES",
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
    "explain",
    "preset_shape",
    "symm_buffer_layout",
]
