"""Options that several commands share, and the words they are parsed from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from deep_moe.activations import ACTIVATIONS, DEFAULT_ACTIVATION, Activation, activation_of
from deep_moe.heuristics.presets import PRESETS, preset_activation, preset_has_biases
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.tokens import TOKEN_FORMATS
from deep_moe.tokens import token_format as token_format_of
from deep_moe.weights import DEFAULT_WEIGHTS, WEIGHTS, default_token_format

if TYPE_CHECKING:
    from deep_moe.fused.gpu import Gpu
    from deep_moe.heuristics import MoEShape, Tuning
    from deep_moe.weights import WeightsName

MODELS = ", ".join(PRESETS)
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
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help=f"Take experts, top-k and sizes of a published model: {MODELS}."),
]
RanksOption = Annotated[int, typer.Option("--ranks", min=1, help="Ranks that share the experts.")]
SeedOption = Annotated[
    int,
    typer.Option("--seed", min=0, max=MAX_SEED, help="Seed of weights, tokens and routing."),
]
HiddenOption = Annotated[int | None, typer.Option("--hidden", help="Values of a token.")]
IntermediateOption = Annotated[
    int | None, typer.Option("--intermediate", help="Values between Linear1 and Linear2.")
]
ExpertsOption = Annotated[
    int | None, typer.Option("--experts", help="Experts of all ranks together.")
]
TokensOption = Annotated[
    str, typer.Option("--tokens", help='Tokens per rank: one number, or one per rank: "5,0,17".')
]
TopkOption = Annotated[int | None, typer.Option("--topk", help="Expert slots per token.")]
ActivationOption = Annotated[
    str | None,
    typer.Option(
        "--activation",
        metavar="NAME[:PARAMETER=NUMBER,...]",
        help=f"Activation between Linear1 and Linear2: {', '.join(ACTIVATIONS)}; "
        "default: the model's, or swiglu.",
    ),
]
WeightsOption = Annotated[
    str,
    typer.Option(
        "--weights",
        help=f"Format of the experts' weights: {', '.join(WEIGHTS)}.",
    ),
]
TokenFormatOption = Annotated[
    str | None,
    typer.Option(
        "--token-format",
        help="Format of the tokens: "
        f"{', '.join(name for name in TOKEN_FORMATS if token_format_of(name).is_of_products)}; "
        "default: the usual one of the weights.",
    ),
]
BiasesOption = Annotated[
    bool, typer.Option("--biases", help="Add biases to both linear layers; some models have them.")
]
ClampOption = Annotated[
    float | None,
    typer.Option("--clamp", help="Bound of gate and up, if --activation gives no parameters."),
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
PoolTokensOption = Annotated[
    int | None,
    typer.Option(
        "--pool-tokens",
        help="Rows of the pool, a multiple of 384; a call with more rows reuses them. "
        "0: as many rows as a call may bring. "
        f"Default: {DEFAULT_POOL_TOKENS} for the fused kernel, otherwise 0.",
    ),
]
SharedExpertsOption = Annotated[
    int,
    typer.Option(
        "--shared-experts", help="Experts that every token goes to besides its top-k, 0 to 4."
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help="Cache folder; default: DEEP_MOE_CACHE_DIR, or the user's."),
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
    pool_tokens: int | None = None,
    shared_experts: int = 0,
    weights: str = DEFAULT_WEIGHTS,
    biases: bool = False,
    token_format: str | None = None,
    arch: str | None = None,
) -> MoEShape:
    """The shape that the options name: a model's, or else a small layer's, with whatever sizes
    are given on top. arch: where its kernel runs, which decides the tokens if nothing is said."""
    from deep_moe.heuristics import MoEShape
    from deep_moe.targets import target_of

    if model is None:
        sizes = {"num_experts": 4 * ranks, **SMALL_LAYER}
    elif model in PRESETS:
        names = ("num_experts", "num_topk", "hidden", "intermediate_hidden")
        sizes = dict(zip(names, PRESETS[model], strict=True))
    else:
        raise typer.BadParameter(f"--model must be one of {MODELS}; got {model!r}")
    given: dict[str, Any] = {
        "num_experts": experts,
        "num_topk": topk,
        "hidden": hidden,
        "intermediate_hidden": intermediate,
    }
    given = {**sizes, **{name: value for name, value in given.items() if value is not None}}
    check_weights(weights)
    if token_format is None and arch is not None:
        token_format = target_of(arch).usual_token_format(weights)
    return MoEShape(
        num_ranks=ranks,
        num_max_tokens_per_rank=max_tokens,
        num_pool_tokens=pool_tokens,
        num_shared_experts=shared_experts,
        weights=cast("WeightsName", weights),
        biases=biases or (model in PRESETS and preset_has_biases(model)),
        token_format=default_token_format(weights, token_format),
        **given,
    )


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


def pool_rows(pool_tokens: int | None, *, is_fused: bool = True) -> int | None:
    """What --pool-tokens says, as `MoEShape` has it. is_fused: whether the fused kernel runs.

    >>> pool_rows(None), pool_rows(None, is_fused=False), pool_rows(768), pool_rows(0)
    (24576, None, 768, None)
    """
    if pool_tokens is None:
        return DEFAULT_POOL_TOKENS if is_fused else None
    return pool_tokens or None


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


def parse_activation(
    text: str | None, clamp: float | None = None, *, model: str | None = None
) -> Activation:
    """The activation that --activation, --clamp and --model name together.

    >>> parse_activation("situ:beta=3,linear_beta=20"), parse_activation(None, 10)
    (Situ(beta=3.0, linear_beta=20.0), Swiglu(clamp=10.0))
    """
    if text is None:
        text = preset_activation(model) if model in PRESETS else DEFAULT_ACTIVATION
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if name not in ACTIVATIONS:
        raise typer.BadParameter(
            f"--activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}"
        )
    kind = ACTIVATIONS[name]
    allowed = ", ".join(kind().parameters)
    parameters: dict[str, float] = {}
    for part in rest.split(",") if colon else ():
        parameter, _, digits = (word.strip() for word in part.partition("="))
        try:
            value = float(digits)
        except ValueError:
            parameter = ""
        if parameter not in kind().parameters or parameter in parameters:
            raise typer.BadParameter(
                f"--activation {name} must have PARAMETER=NUMBER behind the colon, separated by "
                f"commas, each of {allowed} at most once; got {part!r}"
            )
        parameters[parameter] = value
    return activation_of(kind(**parameters) if parameters else name, clamp)


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
