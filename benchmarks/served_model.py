"""The model that benchmarks serve: its config, which is all that engines read of it, and the random
weights that it gets where they lie."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32000, 16, 4, 128
MAX_MODEL_LEN = 4096
# Of experts: products of random codes of E2M1 or E4M3 and tokens of 4096 values then have values
# around 1. UE8M0 of 2^-8, and 2^-6.
MXFP4_SCALE_BYTE, FP8_SCALE = 119, 2.0**-6
WEIGHTS = ("mxfp4", "fp8")  # of experts
# For processes of an engine: nothing is fetched or sent.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with, whichever it is.

    gpus: of one engine. step_tokens: most tokens of a step, None for the engine's default. memory:
    share of a GPU's. commit: of this checkout, for the report. weights: of experts.
    """

    gpus: int
    max_requests: int
    step_tokens: int | None
    memory: float
    commit: str | None
    weights: str


def write_config(
    folder: Path,
    *,
    layers: int,
    experts: int,
    topk: int,
    hidden: int,
    intermediate: int,
    quantization: dict[str, Any],
) -> None:
    """The only file that an engine reads of the model: Qwen3-MoE's shape, because engines run its
    attention on any GPU. quantization: what the config says of its experts."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": topk,
        "norm_topk_prob": True,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "quantization_config": quantization,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def quantization_of(weights: str, layers: int, *, in_sglang: bool) -> dict[str, Any]:
    """A config's words for experts in MXFP4, or in FP8 with a scale for 128 x 128 values, and
    nothing else. SGLang knows this model's MXFP4 under FP8's name, as DeepSeek-V4 has it."""
    if weights == "mxfp4" and not in_sglang:
        return {"quant_method": "mxfp4"}
    prefixes = [f"model.layers.{layer}" for layer in range(layers)]
    names = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.gate"]
    ignored = ["lm_head", *(f"{prefix}.{name}" for prefix in prefixes for name in names)]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "ignored_layers": ignored,
        "modules_to_not_convert": ignored,
    } | ({"routed_experts_quant_method": "mxfp4"} if weights == "mxfp4" else {})


def fill_randomly(model: torch.nn.Module) -> None:
    """Matrices of a variance of 1 over their width, norms of ones; experts of random codes with one
    scale."""
    parameters = dict(model.named_parameters())
    for seed, (name, parameter) in enumerate(parameters.items()):
        values = parameter.data
        generator = torch.Generator(values.device).manual_seed(seed)
        if "scale" in name and values.element_size() == 1:
            values.view(torch.uint8).fill_(MXFP4_SCALE_BYTE)
        elif "scale" in name:
            scaled = parameters.get(name.removesuffix("_inv").removesuffix("_scale"))
            is_fp8 = scaled is not None and scaled.dtype == torch.float8_e4m3fn
            values.fill_(FP8_SCALE if is_fp8 else 2.0 ** (MXFP4_SCALE_BYTE - 127))
        elif values.element_size() == 1:
            codes = values.view(torch.uint8).random_(0, 256, generator=generator)
            if values.dtype == torch.float8_e4m3fn:
                codes.bitwise_and_(0xBF)  # below 2, and no NaN
        elif values.is_floating_point() and values.ndim < 2:
            values.fill_(1.0)
        elif values.is_floating_point():
            std = 1.0 if "embed" in name else values.shape[-1] ** -0.5
            values.normal_(0.0, std, generator=generator)
