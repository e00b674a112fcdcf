"""Experts out of checkpoints."""

from .experts import load_biases, load_experts, load_transformed_experts, save_experts

__all__ = ["load_biases", "load_experts", "load_transformed_experts", "save_experts"]
