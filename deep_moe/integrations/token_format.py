"""The tokens that a user may choose beside a model's experts, where there is a choice: on Hopper
BF16 beside MXFP4, where the model was made for weights in FP4 and nothing else quantized, and FP8
with float32 scales per 128 beside FP8, as engines quantize tokens for kernels of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from deep_moe.targets import TARGETS, target_for
from deep_moe.tokens import TOKEN_FORMATS, token_format

from .unsupported import check_target

if TYPE_CHECKING:
    import torch

    from deep_moe.tokens import TokenFormatName


def check_token_format(name: str, value: object) -> None:
    """Raise unless it is a format of tokens that kernels multiply, or None for what goes with the
    weights. name: of the argument."""
    allowed = [known for known in TOKEN_FORMATS if token_format(known).is_of_products]
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be {' or '.join(allowed)} or None; got {value!r}")
    if value is not None and value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(allowed)}; got {value!r}")


def served_token_format(
    weights: str, chosen: str | None, arch: str | None, device: torch.device
) -> TokenFormatName:
    """The format in which tokens meet experts whose weights are `weights`.

    chosen: what the user said, which `check_token_format` has seen. It says nothing of experts in
    formats that no target takes beside such tokens. arch: a target's name, None for that of
    `device`.

    Raises UnsupportedError if the target has no kernel for the pair, but another has.
    """
    usual = target_for(arch, device).default_tokens(weights)
    if chosen is None or chosen == usual:
        return usual
    having = [name for name, own in TARGETS.items() if chosen in own.token_formats(weights)]
    if not having:
        return usual
    check_target(f"{weights} experts beside {chosen} tokens", having, arch, device)
    return cast("TokenFormatName", chosen)
