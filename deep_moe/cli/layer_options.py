"""The options of a layer, which every command takes that makes one or chooses its kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from deep_moe.activations import ACTIVATIONS, DEFAULT_ACTIVATION, Activation, activation_of
from deep_moe.heuristics.presets import PRESETS, preset_activation, preset_has_biases
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.tokens import TOKEN_FORMATS
from deep_moe.tokens import token_format as token_format_of
from deep_moe.weights import DEFAULT_WEIGHTS, WEIGHTS

from .options import check_weights

if TYPE_CHECKING:
    from deep_moe.heuristics import MoEShape
    from deep_moe.tokens import TokenFormatName
    from deep_moe.weights import WeightsName

MODELS = ", ".join(PRESETS)
_PRODUCT_TOKENS = ", ".join(name for name in TOKEN_FORMATS if token_format_of(name).is_of_products)

# What is run if no model is named; 4 experts per rank.
SMALL_LAYER = {"num_topk": 2, "hidden": 256, "intermediate_hidden": 256}


@dataclass(frozen=True)
class LayerOptions:
    """Sizes, formats and activation, as they were asked for."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model", help=f"Take experts, top-k and sizes of a published model: {MODELS}."
        ),
    ] = None
    experts: Annotated[
        int | None, typer.Option("--experts", help="Experts of all ranks together.")
    ] = None
    shared_experts: Annotated[
        int,
        typer.Option(
            "--shared-experts", help="Experts that every token goes to besides its top-k, 0 to 4."
        ),
    ] = 0
    topk: Annotated[int | None, typer.Option("--topk", help="Expert slots per token.")] = None
    hidden: Annotated[int | None, typer.Option("--hidden", help="Values of a token.")] = None
    intermediate: Annotated[
        int | None, typer.Option("--intermediate", help="Values between Linear1 and Linear2.")
    ] = None
    pool_tokens: Annotated[
        int | None,
        typer.Option(
            "--pool-tokens",
            help="Rows of the pool, a multiple of 384; a call with more rows reuses them. "
            "0: as many rows as a call may bring. "
            f"Default: {DEFAULT_POOL_TOKENS} for the fused kernel, otherwise 0.",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help=f"Format of the experts' weights: {', '.join(WEIGHTS)}. Default: that of a "
            f"checkpoint, or {DEFAULT_WEIGHTS}.",
        ),
    ] = None
    biases: Annotated[
        bool,
        typer.Option("--biases", help="Add biases to both linear layers; some models have them."),
    ] = False
    token_format: Annotated[
        str | None,
        typer.Option(
            "--token-format",
            help=f"Format of the tokens: {_PRODUCT_TOKENS}; default: the usual one of the weights.",
        ),
    ] = None
    activation: Annotated[
        str | None,
        typer.Option(
            "--activation",
            metavar="NAME[:PARAMETER=NUMBER,...]",
            help=f"Activation between Linear1 and Linear2: {', '.join(ACTIVATIONS)}; "
            "default: the model's, or swiglu.",
        ),
    ] = None
    clamp: Annotated[
        float | None,
        typer.Option("--clamp", help="Bound of gate and up, if --activation gives no parameters."),
    ] = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(self.weights)

    def applied(self) -> Activation:
        """The activation that --activation, --clamp and --model name together.

        >>> LayerOptions(activation="situ:beta=3,linear_beta=20").applied()
        Situ(beta=3.0, linear_beta=20.0)
        >>> LayerOptions(clamp=10).applied()
        Swiglu(clamp=10.0)
        """
        text = self.activation
        if text is None:
            model = self.model
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
                    f"--activation {name} must have PARAMETER=NUMBER behind the colon, separated "
                    f"by commas, each of {allowed} at most once; got {part!r}"
                )
            parameters[parameter] = value
        return activation_of(kind(**parameters) if parameters else name, self.clamp)

    def pool_rows(self, *, is_fused: bool = True) -> int | None:
        """What --pool-tokens says, as `MoEShape` has it. is_fused: whether the fused kernel runs.

        >>> LayerOptions().pool_rows(), LayerOptions().pool_rows(is_fused=False)
        (24576, None)
        >>> LayerOptions(pool_tokens=768).pool_rows(), LayerOptions(pool_tokens=0).pool_rows()
        (768, None)
        """
        if self.pool_tokens is None:
            return DEFAULT_POOL_TOKENS if is_fused else None
        return self.pool_tokens or None

    def shape(
        self, ranks: int, max_tokens: int, *, arch: str | None = None, is_fused: bool = True
    ) -> MoEShape:
        """A model's, or else a small layer's, with whatever sizes are given on top. arch: where its
        kernel runs, which decides the tokens if nothing is said."""
        from deep_moe.heuristics import MoEShape
        from deep_moe.targets import target_of

        if self.model is None:
            sizes = {"num_experts": 4 * ranks, **SMALL_LAYER}
        elif self.model in PRESETS:
            names = ("num_experts", "num_topk", "hidden", "intermediate_hidden")
            sizes = dict(zip(names, PRESETS[self.model], strict=True))
        else:
            raise typer.BadParameter(f"--model must be one of {MODELS}; got {self.model!r}")
        given: dict[str, Any] = {
            "num_experts": self.experts,
            "num_topk": self.topk,
            "hidden": self.hidden,
            "intermediate_hidden": self.intermediate,
        }
        given = {**sizes, **{name: value for name, value in given.items() if value is not None}}
        weights = self.weights or DEFAULT_WEIGHTS
        token_format = self.token_format
        if token_format is None and arch is not None:
            token_format = target_of(arch).default_tokens(weights)
        return MoEShape(
            num_ranks=ranks,
            num_max_tokens_per_rank=max_tokens,
            num_pool_tokens=self.pool_rows(is_fused=is_fused),
            num_shared_experts=self.shared_experts,
            weights=cast("WeightsName", weights),
            biases=self.biases or (self.model in PRESETS and preset_has_biases(self.model)),
            token_format=cast("TokenFormatName", token_format),
            has_gate=self.applied().has_gate,
            **given,
        )


def with_layer_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose parameter `options` is a `LayerOptions`, as Typer reads it: with the
    options of a layer in its place."""
    signature = inspect.signature(command, eval_str=True)
    hints = get_type_hints(LayerOptions, include_extras=True)
    of_layer = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(LayerOptions)
    ]
    others = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
    ]
    index = list(signature.parameters).index("options")

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        options = LayerOptions(**{each.name: values.pop(each.name) for each in of_layer})
        command(options=options, **values)

    parameters = [*others[:index], *of_layer, *others[index + 1 :]]
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options
