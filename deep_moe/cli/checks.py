"""Checks of a call before anything is made for it, so that an impossible call ends at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .output import format_bytes

if TYPE_CHECKING:
    from deep_moe.activations import Activation
    from deep_moe.heuristics import MoEShape


def check_call(
    shape: MoEShape,
    tokens: Sequence[int],
    *,
    arch: str,
    num_sms: int | None,
    activation: Activation,
    overrides: Mapping[str, int],
    accumulate: bool = False,
) -> None:
    """ValueError unless there is a kernel for the ranks' tokens, and memory for random weights and
    tokens."""
    from deep_moe.targets import choose_config

    choose_config(
        shape,
        max(tokens),
        arch=arch,
        num_sms=num_sms,
        activation=activation,
        overrides=overrides,
        accumulate=accumulate,
    )
    needed = trial_bytes(shape, tokens)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ValueError(
            f"the weights and tokens of this layer take at least {format_bytes(needed)}, and this "
            f"machine has {format_bytes(memory)}: take fewer or smaller experts, or fewer tokens"
        )


def trial_bytes(shape: MoEShape, tokens: Sequence[int]) -> int:
    """What a layer of all ranks and their tokens take at least while they are made: weights as they
    are stored and as they are laid out, one expert's Linear1 and a token in FP32.

    >>> from deep_moe.heuristics import MoEShape
    >>> trial_bytes(MoEShape(2, 4, 2, 256, 128, 16), (16, 8))
    679936
    """
    from deep_moe.weights import weight_format

    bits_per_value = weight_format(shape.weights).bits_per_value
    per_expert = 2 * shape.num_weights_per_expert * bits_per_value // 8
    linear1 = shape.hidden * shape.num_l1_rows
    return shape.num_experts * per_expert + 4 * linear1 + 4 * sum(tokens) * shape.hidden


def check_output_file(option: str, path: Path) -> None:
    """BadParameter if the folder of a file that a command writes at its end is not there."""
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{option} must lie in a folder that exists; got {path}")
