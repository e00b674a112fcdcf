"""Experts out of checkpoints, and into them."""

from .experts import load_biases, load_experts, load_token_scale, save_experts
from .namings import ExpertNaming, StackedNaming

__all__ = [
    "ExpertNaming",
    "StackedNaming",
    "load_biases",
    "load_experts",
    "load_token_scale",
    "save_experts",
]
