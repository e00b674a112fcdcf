"""The scales that a user may choose for tokens beside FP8 experts: powers of two per 32 values, or
on Hopper floats per 128, as engines quantize tokens for kernels of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep_moe.formats.weight_formats import DEFAULT_TOKEN_SCALES, TOKEN_SCALES
from deep_moe.targets import TARGETS

from .unsupported import check_target

if TYPE_CHECKING:
    import torch

_WEIGHTS = "fp8"


def check_fp8_token_scales(name: str, value: str) -> None:
    """Raise ValueError unless it is a name of such scales. name: of the argument."""
    if value not in TOKEN_SCALES:
        raise ValueError(f"{name} must be {' or '.join(TOKEN_SCALES)}; got {value!r}")


def served_token_scales(
    weights: str, token_scales: str, arch: str | None, device: torch.device
) -> str:
    """The `token_scales` of the buffer for experts in the format `weights`.

    token_scales: what the user chose beside FP8, which `check_fp8_token_scales` has seen. It says
    nothing of experts in other formats. arch: a target's name, None for that of `device`.

    Raises UnsupportedError if the target has no kernel for such scales.
    """
    if weights != _WEIGHTS:
        return DEFAULT_TOKEN_SCALES
    having = [
        name
        for name, own in TARGETS.items()
        if token_scales in own.weights_of(_WEIGHTS).allowed_token_scales
    ]
    check_target(f"FP8 experts with token scales {token_scales}", having, arch, device)
    return token_scales
