"""Options that several commands share, and the words they are parsed from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deep_moe.weights import WEIGHTS

if TYPE_CHECKING:
    from deep_moe.fused.gpu import Gpu
    from deep_moe.heuristics import Tuning

MAX_SEED = 2**63 - 1  # as large as ranks can still be added to in 64 bits

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text.")
]
HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", dir_okay=False, help="Also write the timeline as a page that any browser shows."
    ),
]
ArchOption = Annotated[
    str | None,
    typer.Option("--arch", help="Architecture of the kernel; default: that of --gpu, or sm_100a."),
]
NumSmsOption = Annotated[
    int | None,
    typer.Option("--num-sms", help="CTAs of the launch; default: all SMs of a GPU of --arch."),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu", help='Use the tuning tables of this GPU, e.g. "NVIDIA H200"; default: none.'
    ),
]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Ranks that share the experts.")]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of weights, tokens and routing."),
]
TokensOption = Annotated[
    str, typer.Option("--tokens", help='Tokens per rank: one number, or one per rank: "5,0,17".')
]
AccumulateOption = Annotated[bool, typer.Option("--accumulate", help="Calls add to y.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("--override", help="FIELD=VALUE of the config, in place of the chosen value."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=1, help="Most tokens per rank of the buffer; default: --tokens."
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help="Cache folder; default: DEEP_MOE_CACHE_DIR, or the user's."),
]


def check_weights(weights: str) -> None:
    """BadParameter unless it is a format of weights."""
    if weights not in WEIGHTS:
        raise typer.BadParameter(f"--weights must be one of {', '.join(WEIGHTS)}; got {weights!r}")


def parse_tokens(text: str, num_ranks: int) -> list[int]:
    """Tokens of each rank: one number for all, or one per rank.

    >>> parse_tokens("16", 3), parse_tokens("5,0,17", 3)
    ([16, 16, 16], [5, 0, 17])
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if len(counts) == 1:
        counts *= num_ranks
    if len(counts) != num_ranks or min(counts) < 0:
        raise typer.BadParameter(
            f"--tokens must be one number, or {num_ranks} separated by commas; got {text!r}"
        )
    return counts


def find_measurements(gpu: str | None, arch: str | None) -> tuple[str | None, Tuning | None]:
    """The architecture that --arch or --gpu names, None if neither does, and what was measured on
    that GPU."""
    from deep_moe.fused.tuning_tables import read_tuning
    from deep_moe.heuristics.tuning import shipped_devices

    if gpu is None:
        return arch, None
    tuning = read_tuning(gpu)
    keys = [layer.key for table in tuning.tables for layer in table.layers]
    archs = sorted({key.arch for key in keys if key.device == gpu})
    if not archs:
        devices = sorted({key.device for key in keys}.union(shipped_devices()))
        raise typer.BadParameter(
            f"--gpu must name a GPU that there are measurements of, {', '.join(devices)}; got "
            f"{gpu!r}: leave it out for what is chosen by formula, or measure with deep-moe tune"
        )
    if arch is not None and arch not in archs:
        raise typer.BadParameter(
            f"--arch must be {' or '.join(archs)} with --gpu {gpu}; got {arch}"
        )
    return arch or archs[0], tuning


def gpu_of_this_machine() -> Gpu | None:
    """The first GPU that there is a kernel for. Imports PyTorch only where there is a driver."""
    from deep_moe.jit.driver import driver_cuda_version

    if driver_cuda_version() is None:
        return None
    import torch

    from deep_moe.fused.gpu import gpu_of
    from deep_moe.targets import target_of_capability

    for index in range(torch.cuda.device_count()):
        if target_of_capability(torch.cuda.get_device_capability(index)) is not None:
            return gpu_of(torch.device("cuda", index))
    return None


def parse_overrides(texts: list[str] | None) -> dict[str, int]:
    """Config fields by name.

    >>> parse_overrides(["block_m=64", "num_stages=3"])
    {'block_m': 64, 'num_stages': 3}
    """
    overrides: dict[str, int] = {}
    for text in texts or []:
        name, _, digits = (part.strip() for part in text.partition("="))
        try:
            value = int(digits)
        except ValueError:
            name = ""
        if not name:
            raise typer.BadParameter(f"--override must be FIELD=NUMBER; got {text!r}")
        if abs(value) > MAX_SEED:
            raise typer.BadParameter(f"--override must be a number of 64 bits; got {text!r}")
        if name in overrides:
            raise typer.BadParameter(f"--override must name a field once; got {name} again")
        overrides[name] = value
    return overrides
