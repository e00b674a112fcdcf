"""Values that an argument does not take, most of them, made from one that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import deep_moe

Change = tuple[str, Callable[[Any], Any]]

# In place of anything.
_ANYTHING: list[Change] = [
    ("None", lambda value: None),
    ("an object", lambda value: object()),
    ("text", lambda value: "text"),
    ("bytes", lambda value: b"bytes"),
    ("a fraction", lambda value: 1.5),
    ("a negative number", lambda value: -1),
    ("a large number", lambda value: 2**70),
    ("not a number", lambda value: float("nan")),
    ("a truth value", lambda value: True),
    ("an empty list", lambda value: []),
    ("an empty tuple", lambda value: ()),
    ("a dict", lambda value: {"a": 1}),
    ("a type", lambda value: torch.Tensor),
    ("a scalar tensor", lambda value: torch.tensor(1)),
    ("a list of it", lambda value: [value]),
    ("a tensor", lambda value: torch.zeros(3, 5)),
]


def _as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=dtype)


_TENSORS: list[Change] = [
    *(
        (f"{dtype}", lambda tensor, dtype=dtype: _as_dtype(tensor, dtype))
        for dtype in (
            torch.float64,
            torch.float16,
            torch.int16,
            torch.bool,
            torch.complex64,
            torch.uint8,
            torch.float8_e5m2,
        )
    ),
    ("a dimension more", lambda tensor: tensor.clone().unsqueeze(0)),
    ("a dimension less", lambda tensor: tensor.clone()[0]),
    ("a row more", lambda tensor: torch.cat([tensor, tensor[:1]])),
    ("a column less", lambda tensor: tensor[..., :-1].contiguous()),
    ("no columns", lambda tensor: tensor[..., :0].contiguous()),
    ("turned", lambda tensor: tensor.clone().mT),
    ("of every second value", lambda tensor: torch.stack([tensor, tensor], -1)[..., 0]),
    ("on the meta device", lambda tensor: tensor.to("meta")),
    ("sparse", lambda tensor: torch.zeros(tensor.shape).to_sparse()),
    ("a parameter", lambda tensor: torch.nn.Parameter(tensor.float())),
    ("numpy", lambda tensor: tensor.float().numpy()),
    ("a list of numbers", lambda tensor: tensor.float().flatten().tolist()[:5]),
]
_PAIRS: list[Change] = [
    ("one item less", lambda pair: tuple(pair)[:-1]),
    ("one item more", lambda pair: (*pair, None)),
    ("its first item", lambda pair: pair[0]),
    ("turned round", lambda pair: tuple(reversed(tuple(pair)))),
]
_NUMBERS: list[Change] = [
    ("zero", lambda value: 0),
    ("as text", str),
    ("infinite", lambda value: float("inf")),
    ("as a tensor", torch.tensor),
]


def changes(value: Any) -> Iterator[Change]:
    """What to put in place of a value that is taken, with words for it."""
    yield from _ANYTHING
    if isinstance(value, torch.Tensor):
        yield from _TENSORS
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield from _NUMBERS
    elif isinstance(value, (tuple, list)) and value:
        yield from _PAIRS
        for place, item in enumerate(value):
            for words, change in changes(item):
                if place == 0 and isinstance(item, torch.Tensor):
                    yield f"{words} in place {place}", _within(place, change)
    elif isinstance(value, deep_moe.MegaMoEWeights):
        yield "its layers", lambda weights: (weights.l1, weights.l2)


def _within(place: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(pair: Any) -> Any:
        items = list(pair)
        items[place] = change(items[place])
        return type(pair)(*items) if hasattr(pair, "_fields") else type(pair)(items)

    return changed
