"""Which parameters of a test belong to the everyday subset (`make test-fast`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def parametrize(
    names: str | tuple[str, ...], values: Iterable[Any], everyday: Collection[Any], **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize`, with values of which all but those in `everyday` are slow."""
    values = list(values)
    unknown = [value for value in everyday if value not in values]
    if unknown:
        raise ValueError(f"everyday must be among the values; got {unknown}")

    def param(value: Any) -> Any:
        words = (value,) if isinstance(names, str) else value
        return pytest.param(*words, marks=() if value in everyday else pytest.mark.slow)

    return pytest.mark.parametrize(names, [param(value) for value in values], **options)
