"""A tiny model with experts, as transformers has it."""

from __future__ import annotations

from typing import Any

import torch

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 4, 256, 128
VOCABULARY = 64


def tiny_model() -> Any:
    """Qwen3's classes, one layer, random weights in BF16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
    )
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


def experts_of(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate above up [E, 2*I, H], and down [E, H, I], float64."""
    experts = model.model.layers[0].mlp.experts
    return experts.gate_up_proj.detach().double(), experts.down_proj.detach().double()
