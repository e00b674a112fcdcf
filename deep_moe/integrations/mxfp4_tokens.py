"""The tokens that a user may choose beside MXFP4 experts: E4M3, or on Hopper BF16, where the model
was made for weights in FP4 and nothing else quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.formats.weight_formats import DEFAULT_WEIGHTS, WEIGHT_FORMATS, weight_format
from deep_moe.targets import TARGETS

from .unsupported import check_target

if TYPE_CHECKING:
    import torch


def formats_by_tokens() -> dict[str, str]:
    """The formats in which kernels take MXFP4 experts, by their tokens; the default first.

    >>> formats_by_tokens()
    {'e4m3': 'mxfp4', 'bf16': 'mxfp4_bf16'}
    """
    return {
        tokens.words: name
        for name, tokens in WEIGHT_FORMATS.items()
        if weight_format(name).in_checkpoints == DEFAULT_WEIGHTS
    }


def check_mxfp4_tokens(name: str, value: object) -> None:
    """Raise unless it is a name of tokens, or None for the default. name: of the argument."""
    allowed = " or ".join(formats_by_tokens())
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be {allowed} or None; got {value!r}")
    if value is not None and value not in formats_by_tokens():
        raise ValueError(f"{name} must be {allowed}; got {value!r}")


def served_format(weights: str, tokens: str | None, arch: str | None, device: torch.device) -> str:
    """The format in which the kernel takes experts whose weights are `weights` in the checkpoint.

    tokens: what the user chose beside MXFP4, which `check_mxfp4_tokens` has seen. It says nothing
    of experts in other formats. arch: a target's name, None for that of `device`.

    Raises UnsupportedError if the target has no kernel for such tokens.
    """
    if tokens is None or weights != DEFAULT_WEIGHTS:
        return weights
    chosen = formats_by_tokens()[tokens]
    having = [
        name for name, own in TARGETS.items() if chosen in {each.format for each in own.weights}
    ]
    check_target(f"MXFP4 experts with tokens in {tokens}", having, arch, device)
    return chosen
