"""Arguments that take one of a few words are typed so that a type checker finds a misspelt one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, get_args

import pytest

from deep_moe.activations import ACTIVATIONS, DEFAULT_ACTIVATION, ActivationName
from deep_moe.axes import further_folders
from deep_moe.checkpoint.namings import NAMINGS, NamingName
from deep_moe.compat.deep_gemm import mega
from deep_moe.heuristics.low_latency import PLACEMENTS, Placement
from deep_moe.tokens import TOKEN_FORMATS, TokenFormatName
from deep_moe.weights import DEFAULT_WEIGHTS, WEIGHTS, WeightsName

from .public_calls import CALLS

WORDS = [
    (WeightsName, WEIGHTS),
    (TokenFormatName, TOKEN_FORMATS),
    (ActivationName, ACTIVATIONS),
    (NamingName, NAMINGS),
    (Placement, PLACEMENTS),
    (mega.MmaType, mega.WEIGHTS),
    (mega.DeepGemmActivation, mega.ACTIVATIONS),
]
ARGUMENTS = ("weights", "token_format", "activation", "placement", "naming", "mma_type")
ARGUMENTS += ("precision", "forward")


@pytest.mark.parametrize(("literal", "known"), WORDS)
def test_types_have_the_words_that_are_taken(literal: Any, known: Iterable[str]) -> None:
    assert not further_folders()  # whose values no type can know
    assert sorted(get_args(literal)) == sorted(known)
    assert {DEFAULT_WEIGHTS, DEFAULT_ACTIVATION} <= {*WEIGHTS, *ACTIVATIONS}


@pytest.mark.parametrize("call", CALLS)
def test_no_such_argument_is_any_text(call: str) -> None:
    function, _ = CALLS[call]()
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ARGUMENTS:
            assert not re.search(r"\bstr\b", str(parameter.annotation)), f"{name}: {parameter}"


def test_there_are_such_arguments() -> None:
    """The test above looks at something."""
    names = {name for make in CALLS.values() for name in inspect.signature(make()[0]).parameters}
    assert names >= set(ARGUMENTS)
