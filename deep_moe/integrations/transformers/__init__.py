"""deep_moe as the experts of models in Hugging Face transformers.

    import deep_moe.integrations.transformers as deep_moe_transformers

    deep_moe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="deep_moe")

docs/transformers.md says what is supported.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS

from ..engine_version import require_version

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from deep_moe.tokens import TokenFormatName

__all__ = ["close_buffers", "prepare", "register", "release"]

# The versions whose interfaces this was written for: from vLLM's and SGLang's on.
OLDEST, TOO_NEW = (5, 16, 1), (6, 0)


def register(
    *,
    quantize: bool = False,
    max_tokens_per_rank: int | None = None,
    num_pool_tokens: int | None = DEFAULT_POOL_TOKENS,
    token_format: TokenFormatName | None = None,
    arch: str | None = None,
) -> None:
    """Make the experts and `DistributedConfig(ep_implementation=...)` of the name "deep_moe"
    known to transformers. Call it before `from_pretrained`, on every rank with the same arguments.

    Args:
        quantize: round experts in floats to MXFP4, and those in FP8 to scales that the target
            applies. Without it, experts in BF16 run as BF16, and others that would be rounded are
            left to transformers. What is exact needs no rounding: floats that are MXFP4 in fact, as
            a dequantized checkpoint's are, and FP8 with most scales.
        max_tokens_per_rank: most tokens of one call. Buffers are then made once, and ranks with
            different tokens need not ask each other how many there are. By default buffers grow.
        num_pool_tokens: bounds the memory of buffers, as in `get_symm_buffer_for_mega_moe`; None
            for as many rows as a call may bring.
        token_format: what tokens are when they meet experts, where there is a choice: "bf16" beside
            MXFP4, so that nothing but weights is quantized. By default what goes with the weights,
            "mxfp8" or, beside BF16, "bf16".
        arch: a target's name; by default that of the GPU, sm_100a on a CPU, where experts are
            emulated.

    Raises MissingPackageError without transformers, DeepMoEError for a version of it that this was
    not written for, TypeError and ValueError for arguments that are not allowed.
    """
    from deep_moe.fused.checks import require_type
    from deep_moe.targets import target_of

    from ..token_format import check_token_format

    require_type("quantize", quantize, bool, "a bool")
    for name, number in (
        ("max_tokens_per_rank", max_tokens_per_rank),
        ("num_pool_tokens", num_pool_tokens),
    ):
        if number is not None:
            require_type(name, number, int, "an int or None")
            if number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}")
    if arch is not None:
        require_type("arch", arch, str, "a str or None")
        target_of(arch)
    check_token_format("token_format", token_format)
    require_version("transformers", OLDEST, TOO_NEW)
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from .experts import NAME, experts_forward, set_options
    from .layer import Options

    set_options(Options(quantize, num_pool_tokens, max_tokens_per_rank, token_format, arch))
    for functions in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        functions.register(NAME, experts_forward)
    # Before 5.23 transformers lets nobody else bring the experts of other ranks their tokens.
    if find_spec("transformers.distributed.expert_parallel") is not None:
        from transformers.distributed.expert_parallel import EPImplementationInterface

        from .expert_parallel import DeepMoEExpertParallel

        EPImplementationInterface.register(NAME, DeepMoEExpertParallel)


def prepare(model: PreTrainedModel) -> dict[str, str]:
    """Lay out all experts of a loaded model now, not at the first call of each layer, which logs a
    line for each. Every rank must call this.

    Args:
        model: of transformers, loaded with deep_moe's experts.

    Returns by the name of each module of experts who runs it: "deep_moe", or "transformers: " and
    the reason.
    """
    from .experts import group_of, path_of

    return {
        name: str(path_of(module, group_of(module), name=name))
        for name, module in _experts_of(model)
    }


def release(model: PreTrainedModel) -> None:
    """Give a model the weights back that were laid out for the kernel: the same parameters have
    their values again. Whatever reads or writes a parameter does that for its layer by itself; this
    does it for all, and the next call decides anew who runs them. Of experts that are spread over
    ranks, every rank must call this.

    Args:
        model: of transformers, loaded with deep_moe's experts.
    """
    from .experts import forget

    for _, module in _experts_of(model):
        forget(module)


def close_buffers() -> None:
    """Give back the memory that all models share for their calls. On every rank, before a process
    group is destroyed; a further call makes it anew."""
    from .experts import buffers

    buffers.close()


def _experts_of(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Modules that transformers may run by several implementations, with their names."""
    found = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if (
            name.endswith("experts")
            and hasattr(module, "is_concatenated")
            and getattr(config, "_experts_implementation", None) == "deep_moe"
        ):
            found.append((name, module))
    return found
