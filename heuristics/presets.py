"""Sizes and activations of published models, by name."""

from __future__ import annotations

from deep_moe.activations import DEFAULT_ACTIVATION, has_gate

from .shape import MoEShape

# name: (num_experts, num_topk, hidden, intermediate_hidden). Many, as DeepSeek-V3, both DeepSeek-V4
# and GLM-5, have one shared expert beside these (n_shared_experts). It is left out here, because
# DeepSeek-V4's is in another format than the routed ones. Nemotron-3's experts work on tokens of a
# smaller, latent size, which is what the kernel sees.
PRESETS: dict[str, tuple[int, int, int, int]] = {
    "deepseek-v4-flash": (256, 6, 4096, 2048),
    "deepseek-v4-pro": (384, 6, 7168, 3072),
    "deepseek-v3": (256, 8, 7168, 2048),
    "deepseek-v4.1-flash": (384, 6, 5120, 2304),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "glm-5": (256, 8, 6144, 2048),
    "glm-5.3": (256, 8, 6144, 2048),
    "glm-5.3-flash": (288, 8, 4096, 2048),
    "gemma-4-26b": (128, 8, 2816, 704),
    "kimi-k2": (384, 8, 7168, 2048),
    "kimi-k3": (896, 16, 3584, 3072),
    "minimax-m3": (128, 4, 6144, 3072),
    "nemotron-3-super": (512, 22, 1024, 2688),
    "nemotron-3-ultra": (512, 22, 2048, 5120),
    "qwen3-235b": (128, 8, 4096, 1536),
    "step-3.7": (288, 8, 4096, 1280),
}
# Of those that do not have SwiGLU. Step-3.7 has it in all layers but two, which have swiglu_step.
_ACTIVATIONS = {
    "gemma-4-26b": "gelu_tanh",
    "gpt-oss-120b": "swiglu_oai",
    "kimi-k3": "situ",
    "minimax-m3": "swiglu_oai",
    "nemotron-3-super": "relu2",
    "nemotron-3-ultra": "relu2",
}
_WITH_BIASES = frozenset({"gpt-oss-120b"})  # of both linear layers


def preset_activation(name: str) -> str:
    """The name of a published model's activation.

    >>> preset_activation("kimi-k3"), preset_activation("qwen3-235b")
    ('situ', 'swiglu')
    """
    _check_name(name)
    return _ACTIVATIONS.get(name, DEFAULT_ACTIVATION)


def preset_has_biases(name: str) -> bool:
    """Whether a published model's experts have biases.

    >>> preset_has_biases("gpt-oss-120b"), preset_has_biases("qwen3-235b")
    (True, False)
    """
    _check_name(name)
    return name in _WITH_BIASES


def preset_shape(name: str, *, num_ranks: int, num_max_tokens_per_rank: int) -> MoEShape:
    """The shape of a published model on `num_ranks` ranks.

    >>> shape = preset_shape("deepseek-v3", num_ranks=8, num_max_tokens_per_rank=256)
    >>> shape.num_experts, shape.num_topk, shape.hidden, shape.intermediate_hidden
    (256, 8, 7168, 2048)
    """
    _check_name(name)
    num_experts, num_topk, hidden, intermediate_hidden = PRESETS[name]
    return MoEShape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        biases=preset_has_biases(name),
        has_gate=has_gate(preset_activation(name)),
    )


def _check_name(name: str) -> None:
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
