"""`deep-moe cache`: list, verify, prune and clear the compiled kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from .options import FolderOption, JsonOption
from .output import format_bytes, new_table, print_json, stdout

if TYPE_CHECKING:
    from deep_moe.jit.cache import EntryReport

app = typer.Typer(no_args_is_help=True, help="List, verify, prune or clear the compiled kernels.")


@app.command("list")
def list_entries(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """List every compiled kernel: its layer, its weights, and whether calls still use it."""
    from deep_moe.jit import KernelCache, outdated

    cache = KernelCache(folder)
    cache.check_is_cache()
    entries = list(cache.entries())
    old = outdated(entries) if entries else set()
    if as_json:
        listed = [{**_as_dict(entry), "is_outdated": entry.key in old} for entry in entries]
        print_json({"folder": str(cache.folder), "entries": listed})
        return
    table = new_table(
        f"{cache.folder}",
        "kernel",
        "layer",
        "weights",
        "made",
        "size",
        "state",
        right=("size",),
        whole=("kernel", "made"),
    )
    for entry in entries:
        state = "outdated" if entry.key in old else "intact"
        state = "of another version" if entry.is_of_other_version else entry.problem or state
        config = entry.manifest.get("config") or {}
        table.add_row(
            entry.key[: entry.key.index("-") + 9],
            _layer_words(entry.manifest.get("kernel"), config),
            str(config.get("weights", "")),
            str(entry.manifest.get("created", ""))[:10],
            format_bytes(entry.num_bytes),
            state,
        )
    stdout().print(table)
    total = sum(entry.num_bytes for entry in entries)
    stdout().print(f"{len(entries)} kernels, {format_bytes(total)}")
    if old:
        stdout().print(f"deep-moe cache prune removes {len(old)} that no call takes any more")


@app.command("verify")
def verify(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Compare every file with its recorded checksum; exit 1 if one differs. Kernels of other
    versions of deep_moe are never used, so they are not compared."""
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
    """Delete every compiled kernel; the next call compiles what it needs. Other files in the folder
    stay. A folder that is not a kernel cache is an error."""
    from deep_moe.jit.cache import KernelCache

    cache = KernelCache(folder)
    num_removed = cache.clear()
    if as_json:
        print_json({"folder": str(cache.folder), "num_removed": num_removed})
    else:
        stdout().print(f"removed {num_removed} kernels from {cache.folder}", soft_wrap=True)


@app.command("prune")
def prune(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """Delete the kernels that this installation no longer uses: made with other headers, options or
    another compiler, damaged, or of other versions of deep_moe."""
    from deep_moe import jit

    cache = jit.KernelCache(folder)
    removed = jit.prune(cache)
    if as_json:
        print_json({"folder": str(cache.folder), "removed": [entry.key for entry in removed]})
    else:
        total = format_bytes(sum(entry.num_bytes for entry in removed))
        stdout().print(
            f"removed {len(removed)} kernels, {total}, from {cache.folder}", soft_wrap=True
        )


def _layer_words(kernel: str | None, config: Mapping[str, Any]) -> str:
    """Which layer a kernel is for; of one that is of no size, what it does.

    >>> sizes = {"num_ranks": 2, "num_experts": 8, "num_topk": 3, "hidden": 256}
    >>> _layer_words("mega_moe_kernel", {**sizes, "intermediate_hidden": 128})
    '2 ranks, 8 experts, top-3, 256 x 128'
    >>> _layer_words("prepare_inputs_kernel", {"hidden": 256})
    'prepare_inputs_kernel'
    """
    try:
        return (
            f"{config['num_ranks']} ranks, {config['num_experts']} experts, "
            f"top-{config['num_topk']}, {config['hidden']} x {config['intermediate_hidden']}"
        )
    except KeyError:
        return kernel or "?"


def _as_dict(entry: EntryReport) -> dict[str, Any]:
    return {
        "key": entry.key,
        "folder": str(entry.folder),
        "num_bytes": entry.num_bytes,
        "arch": entry.manifest.get("arch"),
        "kernel": entry.manifest.get("kernel"),
        "created": entry.manifest.get("created"),
        "config": entry.manifest.get("config"),
        "problem": entry.problem,
        "is_of_other_version": entry.is_of_other_version,
    }
