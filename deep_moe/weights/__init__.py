"""The formats that weights come in, by name. A value of this axis is a folder here:

    format.py       `FORMAT`, weights as checkpoints have them (format.py of this folder)
    checkpoint.py   `FORMS`, the tensors that files have of them (stored_form.py of this folder)
    <kernel>.py     `KERNELS`, what the targets of a kernel do with them, for which tokens
                    (deep_moe/targets/target.py)
    __init__.py     `DEFAULT_TOKENS`, the first of `KERNELS`' tokens, if it is the same for all
                    kernels; else None

and beside these the layouts that kernels read. The kernels' side of it is the folder of the same
name in include/deep_moe/weights. For a new one, write both, and name it in `WeightsName`.

Nothing here imports PyTorch: shapes, configs and the command line ask for names only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

from deep_moe.axes import further_values

if TYPE_CHECKING:
    from types import ModuleType

    from deep_moe.tokens import TokenFormatName

    from .format import WeightFormat

WeightsName = Literal["mxfp4", "fp8", "bf16", "nvfp4", "int4", "mxfp8"]
WEIGHTS: tuple[str, ...] = (*get_args(WeightsName), *further_values(__name__, __path__))
DEFAULT_WEIGHTS: WeightsName = "mxfp4"


def check_weights_name(name: object, known: Iterable[str] = WEIGHTS, where: str = "") -> None:
    """Raise unless it is one of `known`. where: behind their list in the error."""
    allowed = f"one of {', '.join(known)}{where}"
    if not isinstance(name, str):
        raise TypeError(f"weights must be {allowed}; got {name!r}")
    if name not in known:
        raise ValueError(f"weights must be {allowed}; got {name!r}")


def weight_format(name: str) -> WeightFormat:
    """The format of this name, or an error that says which there are.

    >>> weight_format("mxfp4").words
    'a pair (packed E2M1 int8, UE8M0 scales int32), as deep_moe.quantize_mxfp4 gives it'
    """
    check_weights_name(name)
    found: WeightFormat = folder_module(name, "format").FORMAT
    return found


def default_token_format(weights: str) -> TokenFormatName:
    """The tokens that go with weights of a format where nothing is said, for a caller that knows no
    target: ValueError where it depends on the target, whose `default_tokens` says it.

    >>> default_token_format("mxfp4"), default_token_format("bf16")
    ('mxfp8', 'bf16')
    """
    check_weights_name(weights)
    name: TokenFormatName | None = folder_module(weights).DEFAULT_TOKENS
    if name is None:
        raise ValueError(
            f"token_format must be given with {weights} weights, whose default depends on the "
            "target; got None"
        )
    return name


@cache
def folder_module(weights: str, name: str | None = None) -> ModuleType:
    """A module of the format's folder, or the folder itself."""
    package = f"{__name__}.{weights}"
    return importlib.import_module(package if name is None else f"{package}.{name}")


def optional_module(weights: str, name: str) -> ModuleType | None:
    """A module of the format's folder, None if it has none of this name."""
    try:
        return folder_module(weights, name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.endswith(f".{name}"):
            raise
        return None
