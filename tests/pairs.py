"""Pairs of a weight format and a token format by one word, for parametrized tests."""

from __future__ import annotations

from typing import TypedDict, cast

from deep_moe.targets import TARGETS
from deep_moe.tokens import TokenFormatName
from deep_moe.weights import WeightsName

BESIDE = " x "


class Formats(TypedDict):
    weights: WeightsName
    token_format: TokenFormatName


def formats(pair: str) -> Formats:
    """The arguments that a pair stands for; one word stands for SM90's default on all targets.

    >>> formats("mxfp4 x bf16"), formats("fp8")
    ({'weights': 'mxfp4', 'token_format': 'bf16'}, {'weights': 'fp8', 'token_format': 'mxfp8'})
    """
    weights, _, tokens = pair.partition(BESIDE)
    usual = TARGETS["sm_90a"].default_tokens(weights)
    token_format = cast("TokenFormatName", tokens) if tokens else usual
    return {"weights": cast("WeightsName", weights), "token_format": token_format}


def usual_pairs(arch: str) -> list[str]:
    """Those of a target but the one with float scales per 128: of a weight format its name where
    tokens are what usually goes with it."""
    names = []
    for own in TARGETS[arch].weights:
        is_usual = own.token_format == formats(own.weights)["token_format"]
        is_first = own.token_format == TARGETS[arch].token_formats(own.weights)[0]
        if is_usual or is_first or own.token_format in ("bf16", "fp8_token"):
            names.append(own.weights if is_usual else own.weights + BESIDE + own.token_format)
    return names


def has_pair(arch: str, pair: str) -> bool:
    """Whether a target has a kernel for it.

    >>> has_pair("sm_90a", "fp8 x fp8_128"), has_pair("sm_100a", "fp8 x fp8_128")
    (True, False)
    """
    own = formats(pair)
    return any(
        (kernel.weights, kernel.token_format) == (own["weights"], own["token_format"])
        for kernel in TARGETS[arch].weights
    )
