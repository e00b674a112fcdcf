"""What the vLLM adapter reads of a layer under construction, without vLLM. tests/serving holds the
names against vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

PARALLEL: dict[str, Any] = {
    "dp_size": 1,
    "pcp_size": 1,
    "ep_size": 1,
    "sp_size": 1,
    "use_ep": False,
    "is_sequence_parallel": False,
    "all2all_backend": "allgather_reducescatter",
}
CONFIG: dict[str, Any] = {
    "num_experts": 8,
    "experts_per_token": 2,
    "hidden_dim": 256,
    "intermediate_size_per_partition": 128,
    "max_num_tokens": 33,
    "moe_backend": "auto",
    "in_dtype": torch.bfloat16,
    "has_bias": False,
    "is_lora_enabled": False,
    "skip_final_all_reduce": False,
    "swiglu_limit": None,
    "swiglu_alpha": None,
    "swiglu_beta": None,
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
}
PLACEMENT: dict[str, Any] = {"placement_strategy": "linear", "num_fused_shared_experts": 0}
LAYER: dict[str, Any] = {"apply_router_weight_on_input": False}


def layer(activation: str = "silu", **changes: Any) -> Any:
    """A layer; what differs from the values above, by name."""

    def of(defaults: dict[str, Any]) -> dict[str, Any]:
        return {name: changes.get(name, value) for name, value in defaults.items()}

    return SimpleNamespace(
        moe_config=SimpleNamespace(
            activation=SimpleNamespace(value=activation),
            moe_parallel_config=SimpleNamespace(**of(PARALLEL)),
            **of(CONFIG),
        ),
        expert_map_manager=SimpleNamespace(**of(PLACEMENT)),
        **of(LAYER),
    )
