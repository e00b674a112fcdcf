"""The activations between the two linear layers, by name. A call takes a name, or one of these
objects with its own parameters: `activation=deep_moe.activations.Situ(beta=3.0)`.

Each activation is a folder here with an `Activation`, which has everything that Python knows of it.
The kernels' side is the folder of the same name in include/deep_moe/activations. For a new
activation, write both, import its class below, and name it in `ActivationName`.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Literal

from deep_moe.axes import further_values

from .activation import Activation as Activation
from .activation import GatedActivation as GatedActivation
from .activation import positive_float
from .gelu_tanh import GeluTanh as GeluTanh
from .relu2 import Relu2 as Relu2
from .situ import Situ as Situ
from .swiglu import Swiglu as Swiglu
from .swiglu_oai import SwigluOai as SwigluOai
from .swiglu_step import SwigluStep as SwigluStep

for _name in further_values(__name__, __path__):
    _kind = importlib.import_module(f"{__name__}.{_name}").ACTIVATION
    globals()[_kind.__name__] = _kind

ActivationName = Literal["gelu_tanh", "relu2", "situ", "swiglu", "swiglu_oai", "swiglu_step"]
ACTIVATIONS: dict[str, type[Activation]] = {
    kind.name: kind
    for kind in tuple(globals().values())
    if isinstance(kind, type) and issubclass(kind, Activation) and hasattr(kind, "name")
}
DEFAULT_ACTIVATION: ActivationName = "swiglu"

_CLASSES = tuple(ACTIVATIONS.values())
_NAMES = ", ".join(map(repr, ACTIVATIONS))
__all__ = ["Activation", "GatedActivation", *(kind.__name__ for kind in _CLASSES)]


def activation_of(
    activation: str | Activation = DEFAULT_ACTIVATION, clamp: float | None = None
) -> Activation:
    """The activation that a call's arguments `activation` and `activation_clamp` name together, or
    an error that says what is allowed.

    clamp: of a name only, the bound of gate and up: swiglu's `clamp`, swiglu_oai's `limit`.

    >>> activation_of("swiglu_oai", 5)
    SwigluOai(alpha=1.7020000219345093, limit=5.0)
    """
    if isinstance(activation, _CLASSES):
        if clamp is not None:
            raise ValueError(
                f"activation_clamp must be None beside {activation!r}, which has all of its "
                f"parameters; got {clamp!r}"
            )
        return activation
    if not isinstance(activation, str):
        classes = ", ".join(kind.__name__ for kind in _CLASSES)
        raise TypeError(
            f"activation must be {_NAMES}, or an object of deep_moe.activations: {classes}; "
            f"got {type(activation).__name__}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {_NAMES}; got {activation!r}")
    if clamp is not None:
        parameter = ACTIVATIONS[activation].clamp_parameter
        if parameter is None:
            raise ValueError(
                f"activation_clamp must be None with activation {activation!r}, which has no "
                f"clamp; got {clamp!r}"
            )
        clamp = positive_float("activation_clamp", clamp, or_none=True, or_infinite=True)
    return _of_name(activation, clamp)


def has_gate(activation: str | Activation) -> bool:
    """Whether Linear1 has rows of gate for it. True of what `activation_of` refuses."""
    kind = ACTIVATIONS.get(activation) if isinstance(activation, str) else activation
    return getattr(kind, "has_gate", True)


@lru_cache(maxsize=256)
def _of_name(name: str, clamp: float | None) -> Activation:
    """Calls name the same few again and again."""
    kind = ACTIVATIONS[name]
    if clamp is None or kind.clamp_parameter is None:
        return kind()
    return kind(**{kind.clamp_parameter: clamp})
