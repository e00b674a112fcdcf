"""`deep-moe warmup`: compile every kernel that a deployment needs, before it serves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from .layer_options import LayerOptions, with_layer_options
from .options import (
    AccumulateOption,
    FolderOption,
    GpuOption,
    JsonOption,
    NumSmsOption,
    OverrideOption,
    RanksOption,
    find_measurements,
    gpu_of_this_machine,
    parse_overrides,
)
from .output import new_table, print_json, stderr, stdout

if TYPE_CHECKING:
    from deep_moe.fused.deployment import DeploymentKernel
    from deep_moe.targets import MegaMoEConfig


@with_layer_options
def warmup(
    options: LayerOptions,
    ranks: RanksOption = 8,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Most tokens of one call per rank.")
    ] = 256,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            help="Architecture of the kernels; default: that of --gpu, of the GPU of "
            "this machine, or sm_100a.",
        ),
    ] = None,
    num_sms: NumSmsOption = None,
    gpu: GpuOption = None,
    accumulate: AccumulateOption = False,
    override: OverrideOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes; default: one per CPU.")
    ] = None,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels of all calls up to --max-tokens, in parallel and without a GPU. Kernels
    for uneven routing come last. The target is the GPU of this machine, unless --arch or --gpu
    names another. With --gpu, the kernels are those of that GPU's tuning tables."""
    from rich.progress import Progress

    from deep_moe.fused.deployment import ChosenConfigs, build_deployment
    from deep_moe.fused.tuning_tables import find_tuning
    from deep_moe.targets import choose_config

    arch, tuning = find_measurements(gpu, arch)
    here = gpu_of_this_machine() if arch is None else None
    if here is not None:  # what calls here choose from
        arch, tuning = here.target.name, find_tuning(here.name)
        num_sms = here.num_sms if num_sms is None else num_sms
    shape = options.shape(ranks, max_tokens, arch=arch)
    overrides = parse_overrides(override)
    applied = options.applied()

    def choose(num_tokens: int, is_uneven: bool) -> MegaMoEConfig:
        return choose_config(
            shape,
            num_tokens,
            is_uneven=is_uneven,
            arch=arch,
            num_sms=num_sms,
            activation=applied,
            accumulate=accumulate,
            overrides=overrides,
            tuning=tuning,
        )

    with stderr().status("choosing kernels"):
        configs = ChosenConfigs(choose, max_tokens).uses
    with Progress(console=stderr()) as progress:
        task = progress.add_task("compiling", total=len({config for _, _, config in configs}))
        kernels = build_deployment(
            configs,
            cache_folder=folder,
            num_workers=workers,
            on_built=lambda kernel: progress.advance(task),
        )
    if as_json:
        print_json([_as_dict(kernel) for kernel in kernels])
        return
    first = configs[0][2]
    table = new_table(
        f"{first.arch}, {first.weights} weights, {first.num_sms} SMs",
        "tokens",
        "block_m",
        "kernel",
        "built",
        right=("block_m",),
    )
    for kernel in kernels:
        built = "cached" if kernel.was_cached else f"{kernel.compile_seconds:.1f} s"
        tokens = f"{kernel.first_num_tokens} to {kernel.last_num_tokens}"
        table.add_row(tokens, str(kernel.config.block_m), kernel.key, built)
    stdout().print(table)
    num_cached = sum(kernel.was_cached for kernel in kernels)
    stdout().print(f"{len(kernels)} kernels, {num_cached} of them were cached")


def _as_dict(kernel: DeploymentKernel) -> dict[str, object]:
    fields = kernel.config.to_dict()
    return {
        "first_num_tokens": kernel.first_num_tokens,
        "last_num_tokens": kernel.last_num_tokens,
        "key": kernel.key,
        "was_cached": kernel.was_cached,
        "compile_seconds": kernel.compile_seconds,
        "config": {name: None if value == math.inf else value for name, value in fields.items()},
    }
