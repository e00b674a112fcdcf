"""The options of a call. Each is written once, as a field of `CallOptions`; its type is checked, it
stands in signatures and their documentation, and it travels through the operator, by that. One that
is a tensor is annotated `Annotated[OptionTensor, CallTensor(...)]`, and reaches the kernel by its
name, too."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, TypeVar, cast

import torch

from deep_moe.activations import ACTIVATIONS, Activation
from deep_moe.heuristics.shape import require_int

from .call_tensors import STATISTICS_TENSOR, CallTensor, CallTensors, OptionTensor, check_types
from .checks import STATISTICS, require_type

if TYPE_CHECKING:
    from deep_moe.activations import ActivationName


class CallOptions(TypedDict, total=False):
    """Options of a call, by keyword. None means that an option is not given.

    arch: "sm_100a" and so on; by default that of the buffer's GPU, sm_100a on a CPU.
    num_sms: number of CTAs, equal on all ranks; on SM100 an even number. By default all SMs of the
        GPU, which are also the limit; 4 on a CPU.
    expected_tokens_per_rank: mean number of tokens over all ranks in this call, if the caller knows
        it. The number decides the time of the call, not its result. By default the rank's own
        number of tokens, or more if its experts received more in the last call that the host knows
        of (docs/tuning.md).
    overrides: config fields by name, whose values replace the chosen ones. Without, a GPU's tuning
        tables come before the heuristics' formula (docs/tuning.md).
    timeout_s: limit of the kernel's waits for other ranks, in seconds. Waits that depend on other
        waits have up to four times that limit. By default 60 on GPUs and 600 in the
        emulator.
    schedule_seed: on a CPU, picks the order in which the emulator interleaves warps; 0 by default.
    accumulate: add the result to y, in float32, before the one rounding to bfloat16. A token that
        names no expert keeps its row. By default y is overwritten.
    checked: check the expert ids, for which a call on a GPU waits; on a CPU also look for races
        in the kernel and writes beside the buffer. By default only on CPUs. Unchecked, an expert id
        out of range is taken as -1.
    masked_ranks: int32 [ranks], not 0 for ranks that are left out, the same on all others: their
        tokens count as none, and slots that name their experts as -1. No rank waits for them or
        touches their memory. The kernel reads the tensor, so a CUDA graph follows what it holds.
        Calls with it have kernels of their own (docs/serving.md).
    """

    arch: str | None
    num_sms: int | None
    expected_tokens_per_rank: int | None
    overrides: Mapping[str, int] | None
    timeout_s: float | None
    schedule_seed: int | None
    accumulate: bool | None
    checked: bool | None
    masked_ranks: Annotated[
        OptionTensor, CallTensor(torch.int32, lambda shape, _: (shape.num_ranks,))
    ]


class CallArguments(CallOptions, total=False):
    """All arguments of a call that are no tensors and not None, of the right types. Those of equal
    calls are equal, so that what is not given stays away. Not written to once a call is made."""

    activation: ActivationName | Activation
    activation_clamp: float
    fast_math: bool


class _Type(NamedTuple):
    """What one option may be, and how an operator takes it."""

    classes: tuple[type, ...]
    words: str
    schema: str


_TYPES = {
    str: _Type((str,), "a str", "str"),
    int: _Type((int,), "an int", "int"),
    float: _Type((int, float), "a number", "float"),
    bool: _Type((bool,), "a bool", "bool"),
}
MAX_INT = 2**63 - 1  # of an operator's arguments
MAX_TIMEOUT_S = 1e9  # its fourfold, in nanoseconds, fits 64 bits
OVERRIDES = "overrides"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _of_annotations() -> tuple[dict[str, _Type], dict[str, CallTensor]]:
    """Of every option but `overrides`: those that are no tensors, and those that are."""
    others, tensors = {}, {}
    for name, hint in typing.get_type_hints(CallOptions, include_extras=True).items():
        if name == OVERRIDES:
            continue
        if typing.get_origin(hint) is typing.Annotated:
            (tensors[name],) = hint.__metadata__
        else:
            (python_type,) = set(typing.get_args(hint)) - {types.NoneType}
            others[name] = _TYPES[python_type]
    return others, tensors


_OPTION_TYPES, OPTION_TENSORS = _of_annotations()
# All that a call may be given, by the member of the kernel's arguments.
CALL_TENSORS = {STATISTICS: STATISTICS_TENSOR, **OPTION_TENSORS}
MASKED_RANKS = "masked_ranks"


def given_tensors(options: CallOptions) -> dict[str, Any]:
    """The options that are tensors, and not None."""
    return {
        name: value
        for name, value in options.items()
        if name in OPTION_TENSORS and value is not None
    }


def without_tensors(options: CallOptions) -> CallOptions:
    left = {name: value for name, value in options.items() if name not in OPTION_TENSORS}
    return cast("CallOptions", left)


def given_options(function: str, options: CallOptions) -> CallArguments:
    """The options that are not None, of the right types. function: whose they are, for errors; one
    that takes tensors has taken them."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name == OVERRIDES:
            if value is not None:
                check_overrides(cast("Mapping[str, int]", value))
            if value:
                given[name] = value
            continue
        if name not in _OPTION_TYPES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is None:
            continue
        check_option(name, value, _OPTION_TYPES[name])
        given[name] = value
    return cast("CallArguments", given)


def check_option(name: str, value: object, expected: _Type) -> None:
    if not isinstance(value, expected.classes) or (
        isinstance(value, bool) and bool not in expected.classes
    ):
        raise TypeError(f"{name} must be {expected.words} or None; got {value!r}")
    _check_range(name, value)


def _check_range(name: str, value: object) -> None:
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        raise ValueError(f"{name} must be within 64 bits; got {value}")


def check_overrides(overrides: Mapping[str, int]) -> None:
    """Raise if it is not a dict of ints by name; which names and values are allowed, the config
    says."""
    require_type(OVERRIDES, overrides, dict, "a dict of config fields")
    for name, value in overrides.items():
        require_type(OVERRIDES, name, str, "named by str")
        require_type(f"overrides[{name!r}]", value, int, "an int")
        _check_range(f"overrides[{name!r}]", value)


def check_values(arguments: CallArguments) -> None:
    """Raise if one has a value that no call allows, whatever it is called with."""
    timeout_s = arguments.get("timeout_s")
    if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s must be a positive number of at most {MAX_TIMEOUT_S:.0e}; got {timeout_s}"
        )
    check_seed(arguments.get("schedule_seed") or 0)


def check_seed(schedule_seed: int) -> None:
    require_int("schedule_seed", schedule_seed, "at least 0")
    if schedule_seed < 0:
        raise ValueError(f"schedule_seed must be at least 0; got {schedule_seed}")


def check_checked(checked: bool | None) -> None:
    if checked is not None:
        require_type("checked", checked, bool, "a bool or None")


def call_key(arguments: CallArguments) -> Hashable:
    """What is equal for equal arguments, and can be looked up."""
    if OVERRIDES not in arguments:
        return frozenset(arguments.items())
    pairs: dict[str, Any] = {**arguments, OVERRIDES: frozenset(overrides_of(arguments).items())}
    return frozenset(pairs.items())


def overrides_of(arguments: CallArguments) -> Mapping[str, int]:
    return arguments.get("overrides") or {}


def operator_tensors() -> str:
    """Schema of the tensors as an operator takes them. It has written `y`, by the name of a."""
    return ", ".join(
        f"Tensor({chr(ord('b') + i)}!)? {name}=None"
        if tensor.is_written
        else f"Tensor? {name}=None"
        for i, (name, tensor) in enumerate(CALL_TENSORS.items())
    )


# Other arguments of an operator are numbers, words and lists of them.
OPERATOR_OPTIONS = ", ".join(
    [f"{expected.schema}? {name}=None" for name, expected in _OPTION_TYPES.items()]
    + ["str[]? override_names=None", "int[]? override_values=None"]
)


def to_operator(arguments: CallArguments) -> dict[str, Any]:
    """The arguments as an operator with OPERATOR_OPTIONS takes them."""
    taken = cast("dict[str, Any]", dict(arguments))
    activation = taken.get("activation")
    if isinstance(activation, Activation):
        taken["activation"] = activation.name
        taken["activation_parameters"] = list(activation.parameters.values())
    overrides = taken.pop(OVERRIDES, None)
    if overrides:
        taken["override_names"] = list(overrides)
        taken["override_values"] = list(overrides.values())
    return taken


def tensors_from_operator(taken: dict[str, Any]) -> CallTensors:
    """Those that are given, taken out."""
    named = ((name, taken.pop(name, None)) for name in CALL_TENSORS)
    given = {name: tensor for name, tensor in named if tensor is not None}
    check_types(given)
    return given


def from_operator(taken: dict[str, Any]) -> CallArguments:
    """The inverse; for what only differs from `to_operator` by Nones, too."""
    names = taken.pop("override_names", None) or ()
    values = taken.pop("override_values", None) or ()
    parameters = taken.pop("activation_parameters", None)
    given = {name: value for name, value in taken.items() if value is not None}
    if parameters is not None:
        given["activation"] = ACTIVATIONS[given["activation"]](*parameters)
    if names:
        given[OVERRIDES] = dict(zip(names, values, strict=True))
    return cast("CallArguments", given)


def _annotations() -> dict[str, str]:
    """As they are written."""
    return {name: hint.__forward_arg__ for name, hint in CallOptions.__annotations__.items()}


def with_call_options(function: _Function) -> _Function:
    """For `**options: Unpack[CallOptions]`: help() and editors show each option."""
    return _with_options(function, CallOptions.__annotations__)


def with_plain_options(function: _Function) -> _Function:
    """The same, for a function that takes no option that is a tensor."""
    return _with_options(function, CallOptions.__annotations__.keys() - OPTION_TENSORS)


def _with_options(function: _Function, names: Collection[str]) -> _Function:
    signature = inspect.signature(function)
    *others, _ = signature.parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in _annotations().items()
        if name in names
    ]
    function.__signature__ = signature.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
    _, _, documented = inspect.cleandoc(CallOptions.__doc__ or "").partition("\n\n")
    each = re.split(r"(?m)^(?=\w+: )", documented)
    documented = "".join(text for text in each if text.partition(":")[0] in names)
    among_args = textwrap.indent(documented.rstrip(), "    ")
    text = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = text.replace("    {options}", among_args)
    return function
