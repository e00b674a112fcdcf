"""Adapters use an engine's internals, so they name the versions that they were written for."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from deep_moe.errors import DeepMoEError, MissingPackageError


def require_version(package: str, oldest: tuple[int, ...], too_new: tuple[int, ...]) -> None:
    """Raise unless a version of `package` from `oldest` on and before `too_new` is installed:
    MissingPackageError without it, DeepMoEError for another version.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise MissingPackageError(
            f"{package} is needed for deep_moe.integrations.{package}; "
            f"install {package}>={_text(oldest)}"
        ) from None
    if not oldest <= _numbers(found) < too_new:
        raise DeepMoEError(
            f"{package} must be at least {_text(oldest)} and older than {_text(too_new)}, whose "
            f"interfaces deep_moe's adapter was written for; got {found}"
        )


def log_standing_aside(logger: logging.Logger, engine: str, reason: Exception) -> None:
    """The one line of an adapter that an engine found by itself and cannot work with: the engine
    serves as if deep_moe were not installed. engine: as people write it."""
    logger.warning("%s runs all experts itself, without deep_moe: %s", engine, reason)


def _numbers(found: str) -> tuple[int, ...]:
    """The leading numbers of a version, without what makes it a development version or the like.

    >>> _numbers("0.5.23.post1+cu130")
    (0, 5, 23)
    """
    numbers = []
    for part in found.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
