"""`deep-moe timeline`: a trace file as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .checks import check_output_file
from .options import JsonOption
from .output import print_json, stderr, stdout


def timeline(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A trace in Chrome's JSON format.")
    ],
    page: Annotated[
        Path | None,
        typer.Argument(dir_okay=False, help="Where the page goes; default: FILE's name, .html."),
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", help="Title of the page; default: FILE's name.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn a trace file into a page for any browser.

    The trace comes from `deep-moe trace`, from a layer with enable_profiling=True, or from
    benchmarks.mega_moe. The page is one file and needs no network.
    """
    name = file.name.removesuffix(".gz").removesuffix(".json")
    page = file.with_name(f"{name}.html") if page is None else page
    check_output_file("PAGE", page)
    from deep_moe.traces.chrome_reader import read_trace
    from deep_moe.traces.page import write_page

    with stderr().status(f"reading {file}"):
        found = read_trace(file)
    write_page(found, page, title=name if title is None else title)
    said = {"page": str(page), "warps": len(found.lanes), "steps": len(found.spans)}
    if as_json:
        print_json(said)
    else:
        words = f"written: {page} ({said['steps']} steps of {said['warps']} warps)"
        stdout().print(words, soft_wrap=True)
