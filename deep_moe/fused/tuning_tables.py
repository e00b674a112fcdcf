"""Where tuning tables are: the user's, written by `deep-moe tune`, and the shipped one."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

from deep_moe.heuristics.tuning import (
    TunedLayer,
    Tuning,
    TuningTable,
    format_table,
    parse_table,
    read_table,
    shipped_table,
)

TABLE_VARIABLE = "DEEP_MOE_TUNING_TABLE"


def user_table_path() -> Path:
    """The user's table: DEEP_MOE_TUNING_TABLE, else `tuning.json` beside the compiled kernels.
    `deep-moe cache clear` leaves it."""
    if os.environ.get(TABLE_VARIABLE):
        return Path(os.environ[TABLE_VARIABLE]).expanduser()
    from deep_moe.jit.cache import default_folder

    return default_folder() / "tuning.json"


@cache
def find_tuning(device: str) -> Tuning:
    """The tables that hold for a device, the user's first. Read once in a process."""
    return read_tuning(device)


def read_tuning(device: str) -> Tuning:
    """As `find_tuning`, from the files as they are now. device: as CUDA names it."""
    path = user_table_path()
    tables = (read_table(path, f"user's table {path}"), shipped_table(device))
    return Tuning(device, tuple(table for table in tables if table is not None))


def add_to_table(path: Path, layer: TunedLayer) -> TuningTable:
    """Put a measurement into the file, which is made if there is none. Readers see the old table
    or the new one."""
    table = (read_table(path) or TuningTable(str(path), ())).updated(layer)
    text = format_table(table)
    parse_table(text, str(path))  # so that what is written can be read
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return table
