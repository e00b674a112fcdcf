"""An option is written once: signatures, help, the operator and the checks follow."""

from __future__ import annotations

import inspect

import pytest
import torch

import deep_moe
from deep_moe.activations import Situ, Swiglu, SwigluOai
from deep_moe.fused.emulated_ranks import EmulatedRanks
from deep_moe.fused.options import (
    OPTION_TENSORS,
    CallOptions,
    call_key,
    from_operator,
    given_options,
    to_operator,
)

OPTIONS = {
    "arch": "sm_90a",
    "num_sms": 4,
    "expected_tokens_per_rank": 3,
    "overrides": {"block_m": 16, "num_stages": 3},
    "timeout_s": 2.5,
    "schedule_seed": 7,
    "accumulate": True,
    "checked": False,
}


def test_these_are_all_of_them() -> None:
    assert OPTIONS.keys() | OPTION_TENSORS.keys() == CallOptions.__annotations__.keys()


@pytest.mark.parametrize("function", [deep_moe.fp8_fp4_mega_moe, EmulatedRanks.call])
def test_signatures_and_help_have_every_option(function) -> None:
    parameters = inspect.signature(function).parameters
    for name in CallOptions.__annotations__:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None
        assert f"\n    {name}: " in inspect.getdoc(function)
    assert "options" not in parameters
    assert "{options}" not in inspect.getdoc(function)


def test_the_operator_takes_every_option_and_gives_it_back() -> None:
    given = given_options("f", OPTIONS)
    assert given == OPTIONS
    taken = to_operator(given)
    schema = torch.ops.deep_moe.mega_moe.default._schema
    assert taken.keys() <= {argument.name for argument in schema.arguments}
    assert from_operator(taken) == OPTIONS


@pytest.mark.parametrize("activation", ["situ", Swiglu(), SwigluOai(limit=3.0), Situ(beta=2.0)])
def test_the_operator_takes_every_activation_and_gives_it_back(activation) -> None:
    given = {"activation": activation, "activation_clamp": 2.0}
    taken = to_operator(given)
    schema = torch.ops.deep_moe.mega_moe.default._schema
    assert taken.keys() <= {argument.name for argument in schema.arguments}
    assert isinstance(taken["activation"], str)
    assert from_operator(taken) == given


def test_none_is_as_good_as_nothing() -> None:
    assert given_options("f", dict.fromkeys(OPTIONS)) == {}
    assert given_options("f", {"overrides": {}}) == {}


def test_equal_arguments_have_equal_keys() -> None:
    backwards = dict(reversed(OPTIONS.items()))
    backwards["overrides"] = dict(reversed(OPTIONS["overrides"].items()))
    assert call_key(OPTIONS) == call_key(backwards)
    assert hash(call_key(OPTIONS)) == hash(call_key(backwards))
    for name in OPTIONS:
        assert call_key({k: v for k, v in OPTIONS.items() if k != name}) != call_key(OPTIONS)
