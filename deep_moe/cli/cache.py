"""`deep-moe cache`: list, verify and clear the compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from .options import FolderOption, JsonOption
from .output import format_bytes, new_table, print_json, stdout

if TYPE_CHECKING:
    from deep_moe.jit.cache import EntryReport

app = typer.Typer(no_args_is_help=True, help="List, verify or clear the compiled kernels.")


@app.command("list")
def list_entries(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Show every compiled kernel."""
    from deep_moe.jit.cache import KernelCache

    cache = KernelCache(folder)
    cache.check_is_cache()
    entries = list(cache.entries())
    if as_json:
        print_json({"folder": str(cache.folder), "entries": [_as_dict(entry) for entry in entries]})
        return
    table = new_table(f"{cache.folder}", "kernel", "arch", "size", "state", right=("size",))
    for entry in entries:
        state = "of another version" if entry.is_of_other_version else entry.problem or "intact"
        arch = str(entry.manifest.get("arch", "?"))
        table.add_row(entry.key, arch, format_bytes(entry.num_bytes), state)
    stdout().print(table)
    total = sum(entry.num_bytes for entry in entries)
    stdout().print(f"{len(entries)} kernels, {format_bytes(total)}")


@app.command("verify")
def verify(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Compare every file with the checksum recorded for it; exit 1 if one differs. Kernels of other
    versions of deep_moe are never used, and not compared."""
    from deep_moe.jit.cache import KernelCache

    cache = KernelCache(folder)
    cache.check_is_cache()
    entries = list(cache.entries())
    damaged = [entry for entry in entries if entry.problem]
    num_of_other_versions = sum(entry.is_of_other_version for entry in entries)
    if as_json:
        print_json(
            {
                "folder": str(cache.folder),
                "num_entries": len(entries),
                "num_of_other_versions": num_of_other_versions,
                "damaged": [_as_dict(entry) for entry in damaged],
            }
        )
    else:
        for entry in damaged:
            stdout().print(f"damaged: {entry.folder}: {entry.problem}")
        num_intact = len(entries) - len(damaged) - num_of_other_versions
        others = f", {num_of_other_versions} of other versions" if num_of_other_versions else ""
        stdout().print(f"{num_intact} of {len(entries)} kernels intact{others}")
    if damaged:
        raise typer.Exit(1)


@app.command("clear")
def clear(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Delete every compiled kernel; the next call compiles what it needs. Everything else in the
    folder stays, and a folder that is not a kernel cache is refused."""
    from deep_moe.jit.cache import KernelCache

    cache = KernelCache(folder)
    num_removed = cache.clear()
    if as_json:
        print_json({"folder": str(cache.folder), "num_removed": num_removed})
    else:
        stdout().print(f"removed {num_removed} kernels from {cache.folder}", soft_wrap=True)


def _as_dict(entry: EntryReport) -> dict[str, Any]:
    return {
        "key": entry.key,
        "folder": str(entry.folder),
        "num_bytes": entry.num_bytes,
        "arch": entry.manifest.get("arch"),
        "problem": entry.problem,
        "is_of_other_version": entry.is_of_other_version,
    }
