"""Options that several commands share, and the words they are parsed from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deep_moe.heuristics import MoEShape

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
ArchOption = Annotated[str, typer.Option("--arch", help="Architecture the kernel is made for.")]
NumSmsOption = Annotated[
    int | None,
    typer.Option("--num-sms", help="CTAs of the launch; default: 148 on sm_100a, 132 on sm_90a."),
]
GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu", help='Use the tuning tables of this GPU: "NVIDIA H200". Default: no table.'
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Take experts, top-k and sizes of a published model."),
]
RanksOption = Annotated[int, typer.Option("--ranks", help="Ranks that share the experts.")]
HiddenOption = Annotated[int | None, typer.Option("--hidden", help="Width of a token.")]
IntermediateOption = Annotated[
    int | None, typer.Option("--intermediate", help="Width between the two linear layers.")
]
ExpertsOption = Annotated[
    int | None, typer.Option("--experts", help="Experts of all ranks together.")
]
TopkOption = Annotated[int | None, typer.Option("--topk", help="Expert slots per token.")]
ClampOption = Annotated[
    float | None, typer.Option("--clamp", help="Bound of gate and up before SwiGLU.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option("--override", help="FIELD=VALUE, taken instead of the heuristic's choice."),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", help="Capacity of the buffer per rank; default: the tokens."),
]
FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help="Cache folder; by default DEEP_MOE_CACHE_DIR or the user's."),
]

# What is run if no model is named; 4 experts per rank.
SMALL_LAYER = {"num_topk": 2, "hidden": 256, "intermediate_hidden": 256}


def make_shape(
    *,
    model: str | None,
    ranks: int,
    experts: int | None,
    topk: int | None,
    hidden: int | None,
    intermediate: int | None,
    max_tokens: int,
) -> MoEShape:
    """The shape that the options name: a model's, or else a small layer's, with whatever sizes
    are given on top."""
    from deep_moe.heuristics import PRESETS, MoEShape

    if model is None:
        sizes = {"num_experts": 4 * ranks, **SMALL_LAYER}
    elif model in PRESETS:
        names = ("num_experts", "num_topk", "hidden", "intermediate_hidden")
        sizes = dict(zip(names, PRESETS[model], strict=True))
    else:
        raise typer.BadParameter(f"--model must be one of {', '.join(PRESETS)}; got {model!r}")
    given = {
        "num_experts": experts,
        "num_topk": topk,
        "hidden": hidden,
        "intermediate_hidden": intermediate,
    }
    sizes |= {name: value for name, value in given.items() if value is not None}
    return MoEShape(num_ranks=ranks, num_max_tokens_per_rank=max_tokens, **sizes)


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


def parse_overrides(texts: list[str] | None) -> dict[str, int]:
    """Config fields by name.

    >>> parse_overrides(["block_m=64", "num_stages=3"])
    {'block_m': 64, 'num_stages': 3}
    """
    overrides = {}
    for text in texts or []:
        name, separator, value = text.partition("=")
        try:
            overrides[name.strip()] = int(value)
        except ValueError:
            separator = ""
        if not separator or not name.strip():
            raise typer.BadParameter(f"--override must be FIELD=NUMBER; got {text!r}")
    return overrides
