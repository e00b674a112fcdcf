"""Values of the axes weights, tokens and activations that are not part of deep_moe.

A value is a folder of its name in the folder of its axis, and one of the same name among the
headers. Each folder that `DEEP_MOE_VALUES` names, separated as in PATH, may hold more of them, as
this repository does:

    <folder>/deep_moe/weights/<name>/
    <folder>/include/deep_moe/weights/<name>/

Then the name is known wherever those of deep_moe are: in the library, its kernels, `deep-moe run`
and `fuzz`, and the processes that these start.
"""

from __future__ import annotations

import os
from pathlib import Path

VALUES_VARIABLE = "DEEP_MOE_VALUES"


def further_folders() -> tuple[Path, ...]:
    """The folders that the variable names. Raises FileNotFoundError for one that is not there."""
    named = os.environ.get(VALUES_VARIABLE, "").split(os.pathsep)
    folders = tuple(Path(name).expanduser().resolve() for name in named if name)
    for folder in folders:
        if not (folder / "deep_moe").is_dir():
            raise FileNotFoundError(
                f"{VALUES_VARIABLE} must name folders that hold a folder deep_moe; got {folder}"
            )
    return folders


def further_values(package: str, search_path: list[str]) -> tuple[str, ...]:
    """The names of an axis's values in those folders, whose modules can be imported from then on.

    package: the axis, as `deep_moe.weights`. search_path: its `__path__`.
    """
    found: list[str] = []
    for folder in further_folders():
        axis = folder.joinpath(*package.split("."))
        names = sorted(own.parent.name for own in axis.glob("*/__init__.py"))
        taken = {entry.stem for known in search_path for entry in Path(known).iterdir()}
        for name in names:
            if name in taken or not name.isidentifier():
                raise ValueError(
                    f"{VALUES_VARIABLE} must name folders whose values have new names in "
                    f"{package}; got {axis / name}"
                )
        if names:
            search_path.append(str(axis))
        found += names
    return tuple(found)
