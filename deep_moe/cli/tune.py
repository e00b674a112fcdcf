"""`deep-moe tune`: find kernels that are faster here than the formula's, for a table."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deep_moe.activations import Swiglu

from .layer_options import LayerOptions, with_layer_options
from .options import JsonOption
from .output import new_table, print_error, print_json, stderr, stdout
from .run import Device

if TYPE_CHECKING:
    from deep_moe.emulator import Chip
    from deep_moe.heuristics import MoEShape

DEFAULT_TOKENS = "1,8,16,32,64,128,256,512,1024,2048,4096,8192"


@with_layer_options
def tune(
    options: LayerOptions,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, help="GPUs that share the experts; default: all, with --chip one."
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option("--tokens", help="Tokens per rank, separated by commas.")
    ] = DEFAULT_TOKENS,
    budget: Annotated[
        float, typer.Option("--budget", min=1, help="Seconds for the whole run, roughly.")
    ] = 300.0,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="File to add to; default: DEEP_MOE_TUNING_TABLE or yours."),
    ] = None,
    commit: Annotated[
        str | None, typer.Option("--commit", help="Commit of the sources, where git cannot tell.")
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option("--device", help="cuda: the GPUs here (default); cpu: --chip's clock."),
    ] = None,
    chip: Annotated[
        str | None,
        typer.Option(
            "--chip",
            help="Time the kernels on a clock, without GPUs: h100, h200, b200, b300 or gb200.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            help="With --chip: CUDA's name of the GPU that the entries are for; default: NVIDIA "
            "and the chip's name.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure candidates beside the formula's kernel on the GPUs of this machine.

    A candidate that is faster beyond noise enters the table. Later calls take the kernel from the
    table, also on more ranks with as many experts each. See docs/tuning.md.

    Without --activation and --clamp, swiglu's gate and up are bounded by 10.

    With --chip the emulator's clock predicts the times, and no GPU is needed. A candidate takes
    seconds to minutes.
    """
    started = time.time()
    _check_place(device, chip, gpu, table, options.biases)
    from deep_moe.emulator import chips

    on = None if chip is None else chips.load(chip)
    sizes = parse_sizes(tokens)
    applied = options.applied()
    if options.activation is None and applied == Swiglu():
        applied = Swiglu(10.0)

    def shape_on(num_ranks: int, arch: str | None = None) -> MoEShape:
        return options.shape(num_ranks, max(sizes), arch=arch)

    from deep_moe.fused.tuning_tables import user_table_path
    from deep_moe.heuristics.tuning import read_table
    from deep_moe.targets import target_of

    # What can be refused is, before PyTorch is imported: that takes seconds.
    if ranks is not None:
        shape_on(ranks)
    path = table or user_table_path()
    read_table(path)  # a damaged one, or a pipe
    if on is not None:
        target = target_of(on.arch)
        plan_of_chip = {
            "shape": shape_on(ranks or 1, on.arch),
            "tokens": sizes,
            "ends": started + budget,
            "table": path,
            "arch": on.arch,
            "num_sms": target.whole_clusters(int(on.value("num_sms"))),
            "activation": applied,
            "commit": commit,
        }
        results = _tune_on_chip(plan_of_chip, on, gpu)
        _show(results, sizes, path, budget, as_json)
        return

    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ValueError(
            "deep-moe tune measures kernels on GPUs, and PyTorch finds none on this machine; "
            "--chip times them on the clock of a chip that is not here"
        )
    if ranks is not None and ranks > num_gpus:
        raise typer.BadParameter(f"--ranks must be 1 to the number of GPUs ({num_gpus})")

    from rich.progress import Progress

    from deep_moe.fused.gpu import gpu_of
    from deep_moe.trial.tuning import TuningPlan, compile_candidates
    from deep_moe.trial.tuning import tune as measure

    gpu_here = gpu_of(torch.device("cuda", 0))
    assert gpu_here is not None
    with tempfile.TemporaryDirectory(prefix="deep_moe_tune_") as folder:
        plan = TuningPlan(
            shape=shape_on(ranks or num_gpus, gpu_here.target.name),
            tokens=sizes,
            ends=started + budget,
            table=path,
            results=Path(folder, "results.json"),
            arch=gpu_here.target.name,
            num_sms=gpu_here.num_sms,
            activation=applied,
            commit=commit,
        )
        with Progress(console=stderr()) as progress:
            task = progress.add_task("compiling", total=None)
            num_kernels = compile_candidates(plan, lambda: progress.advance(task))
            progress.update(task, total=num_kernels)
        results = measure(plan)
    _show(results, sizes, path, budget, as_json)


def _check_place(
    device: Device | None, chip: str | None, gpu: str | None, table: Path | None, biases: bool
) -> None:
    """BadParameter unless the options that say where kernels are timed go together."""
    if chip is None:
        if device == Device.cpu:
            raise typer.BadParameter(
                "--device cpu needs --chip, the clock that times the kernels; got none"
            )
        if gpu is not None:
            raise typer.BadParameter(f"--gpu must be with --chip; got {gpu!r}")
        return
    if device == Device.cuda:
        raise typer.BadParameter(f"--chip must be with --device cpu; got {chip} and cuda")
    if biases:
        raise typer.BadParameter("--chip must be without --biases: no clock has times of them")
    if table is None:
        raise typer.BadParameter(
            "--table must name a file with --chip: calls take what is in your own table, and a "
            "clock's times are not measured"
        )


def _tune_on_chip(plan: dict[str, Any], chip: Chip, gpu: str | None) -> list[dict[str, Any]]:
    from deep_moe.trial.simulated_tuning import gpu_name, tune_simulated
    from deep_moe.trial.tuning import TuningPlan

    with stderr().status("simulating") as status:

        def tell(num_tokens: int, done: int, total: int) -> None:
            status.update(f"{num_tokens} tokens/rank: kernel {done + 1} of {total} or more")

        made = TuningPlan(**plan, results=Path(os.devnull))
        return tune_simulated(made, chip, gpu or gpu_name(chip), on_kernel=tell)


def _show(
    results: list[dict[str, Any]], sizes: tuple[int, ...], path: Path, budget: float, as_json: bool
) -> None:
    """Exits with 1 if sizes were left out."""
    left = sizes[len(results) :]
    if as_json:
        print_json({"table": str(path), "results": results, "not_measured": left})
    else:
        _print_results(results, path)
    if left:
        print_error(
            f"--budget {budget:g} ended before these tokens were measured: "
            f"{', '.join(map(str, left))}"
        )
        raise typer.Exit(1)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Numbers of tokens, in the order given.

    >>> parse_sizes("8,64")
    (8, 64)
    """
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise typer.BadParameter(
            f"--tokens must be different positive numbers separated by commas; got {text!r}"
        )
    return sizes


def _print_results(results: list[dict[str, Any]], path: Path) -> None:
    numbers = ("tokens/rank", "formula\nµs", "fastest\nµs", "gain", "standard\nerror")
    table = new_table(
        "the formula's kernel and the fastest other", *numbers, "kernel", "entry", right=numbers
    )
    num_entries = 0
    for result in results:
        finalist = result["finalist"]
        start = (str(result["num_tokens"]), f"{result['formula_us']:.1f}")
        if finalist is None:
            table.add_row(*start, "", "", "", f"none of {result['num_candidates']}", "no")
            continue
        num_entries += finalist["is_entry"]
        table.add_row(
            *start,
            f"{finalist['us']:.1f}",
            f"{finalist['gain']['median']:+.1%}",
            f"{finalist['gain']['standard_error']:.1%}",
            ", ".join(f"{name} {value}" for name, value in finalist["overrides"].items()),
            "yes" if finalist["is_entry"] else "no",
        )
    stdout().print(table)
    stdout().print(f"{num_entries} entries, {len(results)} sizes measured: {path}", soft_wrap=True)
