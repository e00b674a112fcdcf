"""The environment variables of the adapters that engines load by themselves: they turn an adapter
off, set the memory of its buffers, and choose how it runs experts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.targets import TARGETS

from .token_format import check_token_format

OFF, ON = "0", "1"
TOKENS_VARIABLE = "DEEP_MOE_TOKEN_FORMAT"
POOL_VARIABLE = "DEEP_MOE_NUM_POOL_TOKENS"
PATH_VARIABLE = "DEEP_MOE_VLLM_PATH"
SCALES_VARIABLE = "DEEP_MOE_TOKEN_SCALES"
AHEAD_VARIABLE = "DEEP_MOE_COMPILE_AHEAD"
SM100_VARIABLE = "DEEP_MOE_SM100"
REQUANTIZE_VARIABLE = "DEEP_MOE_REQUANTIZE"
OWN_SCALES, CHECKPOINT_SCALES = "own", "checkpoint"
FUSED, LOW_LATENCY = "fused", "low_latency"


@dataclass(frozen=True)
class Switch:
    """is_on: whether the adapter does anything. emulated_arch: the target that is emulated where
    there is no GPU, for tests; None: there the engine runs its experts itself."""

    is_on: bool
    emulated_arch: str | None


def read_switch(variable: str) -> Switch:
    """What `variable` says: 0 for off, 1 for on, which is the default, or the name of a target, to
    emulate it on a CPU. Raises ValueError for anything else."""
    value = os.environ.get(variable) or ON
    if value in (OFF, ON):
        return Switch(value == ON, None)
    if value not in TARGETS:
        raise ValueError(
            f"{variable} must be {ON} (the default), {OFF} to turn deep_moe off, or, to emulate a "
            f"GPU on a CPU, one of {', '.join(TARGETS)}; got {value!r}"
        )
    return Switch(True, value)


def read_token_format() -> str | None:
    """What DEEP_MOE_TOKEN_FORMAT says of the tokens beside experts, None for what goes with the
    weights. Raises ValueError for what is no name of such tokens."""
    value = os.environ.get(TOKENS_VARIABLE) or None
    check_token_format(TOKENS_VARIABLE, value)
    return value


def read_static_scales() -> bool:
    """Whether DEEP_MOE_TOKEN_SCALES says that tokens get the scale that a checkpoint has for them,
    where it has one: "checkpoint"; "own", the default, gives each token its own. Raises ValueError
    for anything else."""
    value = os.environ.get(SCALES_VARIABLE) or OWN_SCALES
    if value not in (OWN_SCALES, CHECKPOINT_SCALES):
        raise ValueError(
            f"{SCALES_VARIABLE} must be {OWN_SCALES} (the default), a scale for each token, or "
            f"{CHECKPOINT_SCALES}, the one that a checkpoint has for all; got {value!r}"
        )
    return value == CHECKPOINT_SCALES


def read_num_pool_tokens(default: int | None = DEFAULT_POOL_TOKENS) -> int | None:
    """What DEEP_MOE_NUM_POOL_TOKENS says of the buffers' pool, None for the worst case, which 0
    asks for. Raises ValueError for what is no number; which numbers are allowed, the buffer
    says."""
    value = os.environ.get(POOL_VARIABLE)
    if not value:
        return default
    if not value.isdecimal():
        raise ValueError(
            f"{POOL_VARIABLE} must be a number of rows, a multiple of 384, 0 for as many as a call "
            f"may bring, or unset; got {value!r}"
        )
    return int(value) or None


def read_compile_ahead() -> bool:
    """Whether DEEP_MOE_COMPILE_AHEAD says that all kernels are compiled while an engine loads: 1,
    the default. Raises ValueError for what is neither 0 nor 1."""
    return _read_flag(AHEAD_VARIABLE, ON, f"{OFF} to compile a kernel when the first step needs it")


def read_sm100() -> bool:
    """Whether DEEP_MOE_SM100 lets engines give layers to a kernel that nobody has run on such a GPU
    yet: 0, the default, or 1. Raises ValueError for anything else."""
    return _read_flag(
        SM100_VARIABLE,
        OFF,
        f"{ON} to let engines run experts by kernels that nobody has run on such a GPU yet",
    )


def read_requantize() -> bool:
    """Whether DEEP_MOE_REQUANTIZE lets FP8 experts be rounded anew, whose scales the kernel cannot
    apply: 0, the default, or 1. Raises ValueError for anything else."""
    return _read_flag(
        REQUANTIZE_VARIABLE,
        OFF,
        f"{ON} to round FP8 experts anew where the kernel cannot apply their scales",
    )


def read_path() -> str:
    """What DEEP_MOE_VLLM_PATH says of how layers run: in one kernel, or in three steps. Raises
    ValueError for anything else."""
    value = os.environ.get(PATH_VARIABLE) or FUSED
    if value not in (FUSED, LOW_LATENCY):
        raise ValueError(
            f"{PATH_VARIABLE} must be {FUSED} (the default), one kernel, or {LOW_LATENCY}, "
            f"dispatch, experts and combine as three; got {value!r}"
        )
    return value


def _read_flag(variable: str, default: str, other: str) -> bool:
    """Whether `variable` is on. other: the value that is not the default, and what it means."""
    value = os.environ.get(variable) or default
    if value not in (OFF, ON):
        raise ValueError(f"{variable} must be {default} (the default), or {other}; got {value!r}")
    return value == ON
