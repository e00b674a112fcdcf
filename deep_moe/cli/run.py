"""`deep-moe run`: run a layer on one of the paths, and compare it with the reference. Without
options: some small ones, on each of the paths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from deep_moe.weights import DEFAULT_WEIGHTS, weight_format

from .checks import check_call
from .layer_options import LayerOptions, with_layer_options
from .layer_path import LayerPath, choose_path
from .options import (
    MAX_SEED,
    AccumulateOption,
    JsonOption,
    MaxTokensOption,
    OverrideOption,
    SeedOption,
    TokensOption,
    parse_overrides,
    parse_tokens,
)
from .output import coloured, new_table, print_json, stdout
from .progress import bar, say_how_long
from .small_layers import run_small_layers

if TYPE_CHECKING:
    from deep_moe.heuristics import MoEShape
    from deep_moe.targets import TargetWeights
    from deep_moe.trial.synthetic import Layer, Tokens
    from deep_moe.weights import WeightsName
    from deep_moe.weights.stored_form import StoredForm


_WITHOUT_GATE = "relu2"  # the activation of models whose experts have no gate


class Device(str, Enum):
    """Where the call runs."""

    cpu = "cpu"
    cuda = "cuda"


@with_layer_options
def run(
    context: typer.Context,
    options: LayerOptions,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Take the experts from this checkpoint.")
    ] = None,
    layer: Annotated[
        int, typer.Option("--layer", min=0, help="Which layer of the checkpoint.")
    ] = 0,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            help="Ranks that share the experts; default: 2, or 1 on a lone GPU, or 2 per domain.",
        ),
    ] = None,
    domains: Annotated[
        int,
        typer.Option(
            "--domains",
            min=1,
            help="NVLink domains of the ranks; more than 1 runs the two-level path.",
        ),
    ] = 1,
    chunks: Annotated[
        int, typer.Option("--chunks", min=1, help="Parts in which tokens travel between domains.")
    ] = 1,
    exact_sizes: Annotated[
        bool,
        typer.Option("--exact-sizes", help="Send only rows with tokens between domains."),
    ] = False,
    tokens: TokensOption = "16",
    max_tokens: MaxTokensOption = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Run an exact case: results must agree bit for bit.")
    ] = False,
    seed: SeedOption = 0,
    accumulate: AccumulateOption = False,
    calls: Annotated[
        int,
        typer.Option("--calls", min=1, help="Calls in the same buffers, with new tokens each."),
    ] = 1,
    unused_slots: Annotated[
        int, typer.Option("--unused-slots", min=0, help="Slots of each token that are -1.")
    ] = 0,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="Every other token names an expert twice.")
    ] = False,
    nan_tokens: Annotated[
        int, typer.Option("--nan-tokens", min=0, help="Tokens of each rank that hold a NaN.")
    ] = 0,
    arch: Annotated[
        str | None, typer.Option("--arch", help="Target; default: the GPU's, sm_100a on a CPU.")
    ] = None,
    device: Annotated[
        Device | None,
        typer.Option(
            "--device",
            help="cpu: in the emulator; cuda: rank r on GPU r. Default: GPUs, if there are enough.",
        ),
    ] = None,
    path: Annotated[
        LayerPath,
        typer.Option(
            "--path",
            help="fused: one kernel; split: low-latency dispatch, experts, combine; "
            "throughput: those for many tokens.",
        ),
    ] = LayerPath.fused_path,
    recv_rows: Annotated[
        int | None,
        typer.Option(
            "--recv-rows",
            min=1,
            help="With --path throughput: most rows that a rank receives; default: no limit.",
        ),
    ] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="One process per rank, also on a CPU.")
    ] = False,
    num_sms: Annotated[
        int | None, typer.Option("--num-sms", help="CTAs; default: 4 on a CPU, else all SMs.")
    ] = None,
    override: OverrideOption = None,
    schedule_seed: Annotated[
        int | None,
        typer.Option(
            "--schedule-seed", min=0, max=MAX_SEED, help="Seed of the emulator's schedule."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run calls on all ranks and compare each rank's outputs with the reference.

    Without options: small layers on each of the paths, of several formats, in the emulator.
    """
    import torch

    from deep_moe.formats.numerics import FP32_SUM_BITS
    from deep_moe.targets import TARGETS
    from deep_moe.trial.calls import model_inputs
    from deep_moe.trial.paths import Where, verdicts

    if _only_defaults(context) and _default_device(None, None) == Device.cpu:
        run_small_layers(as_json)
        return
    layer_path = choose_path(
        path,
        domains=domains,
        chunks=chunks,
        exact_sizes=exact_sizes,
        recv_rows=recv_rows,
        accumulate=accumulate,
        shared_experts=options.shared_experts,
    )
    if domains > 1 and ranks is None:
        ranks = 2 * domains
    if ranks is not None and ranks % domains:
        raise typer.BadParameter(f"--ranks must be a multiple of --domains {domains}; got {ranks}")
    if device is None:
        device = Device.cpu if schedule_seed is not None else _default_device(ranks, arch)
    if ranks is None:
        ranks = 1 if device == Device.cuda and torch.cuda.device_count() == 1 else 2
    if arch is None:
        arch = arch_of(device)
    if arch not in TARGETS:
        raise typer.BadParameter(f"--arch must be one of {', '.join(TARGETS)}; got {arch!r}")
    loaded = None
    if checkpoint is not None:
        if exact or options.model or options.hidden or options.intermediate or options.biases:
            raise typer.BadParameter(
                "--checkpoint decides the weights and all sizes but --topk; --experts says how "
                "many there are if it does not"
            )
        loaded, form = _loaded_layer(checkpoint, layer, options)
        if options.weights not in (None, form.weights):
            raise typer.BadParameter(
                f"--weights must be {form.weights}, the format of the checkpoint's experts; got "
                f"{options.weights}"
            )
        given = options.token_format or form.token_format
        options = replace(options, weights=form.weights, token_format=given)
    weights = cast("WeightsName", options.weights or DEFAULT_WEIGHTS)
    token_format = options.token_format or TARGETS[arch].default_tokens(weights)
    on_target = TARGETS[arch].weights_of(weights, token_format)
    numerics = on_target.numerics
    counts = parse_tokens(tokens, ranks)
    sizes = None if loaded is None else weight_format(weights).check(loaded.l1, loaded.l2)
    if sizes is not None and options.activation is None and not sizes.has_gate:
        options = replace(options, activation=_WITHOUT_GATE)
    applied = options.applied()
    if sizes is not None and applied.has_gate is not sizes.has_gate:
        kind = "without" if applied.has_gate else "with"
        raise typer.BadParameter(
            f"--activation must be one {kind} a gate, as the checkpoint's experts are; got "
            f"{applied.name}"
        )
    if exact and not applied.exact_cases():
        raise typer.BadParameter(
            f"--exact must be without --activation {applied.name}, which leaves no result exact"
        )
    call: dict[str, Any] = {
        "activation": applied,
        "arch": arch,
        "num_sms": num_sms,
        "overrides": parse_overrides(override),
    }
    if loaded is not None and sizes is not None:
        num_experts = sizes.num_experts - options.shared_experts
        options = replace(
            options,
            experts=num_experts,
            topk=min(2, num_experts) if options.topk is None else options.topk,
            hidden=sizes.hidden,
            intermediate=sizes.intermediate_hidden,
            biases=loaded.l1_bias is not None,
        )
    shape = options.shape(
        ranks,
        max(1, *counts) if max_tokens is None else max_tokens,
        arch=arch,
        is_fused=path is LayerPath.fused_path,
    )
    check_call(shape, counts, accumulate=accumulate, **call)
    if unused_slots > shape.num_topk:
        raise typer.BadParameter(
            f"--unused-slots must be at most the {shape.num_topk} slots; got {unused_slots}"
        )
    if duplicates and shape.num_topk < 2:
        raise typer.BadParameter("--duplicates needs at least 2 slots per token")
    if device == Device.cpu:
        say_how_long(shape, sum(counts) * calls)

    call["schedule_seed"] = schedule_seed or 0
    if accumulate:
        call["accumulate"] = True
    with bar("making the layer") as say:
        whole_layer = loaded or _made_layer(shape, on_target, exact=exact, seed=seed)
        inputs = [
            [
                _made_tokens(
                    shape,
                    count,
                    exact=exact,
                    seed=seed + 1 + call_idx * ranks + rank,
                    unused_slots=unused_slots,
                    duplicates=duplicates,
                    nan_tokens=nan_tokens,
                )
                for rank, count in enumerate(counts)
            ]
            for call_idx in range(calls)
        ]
        if layer_path.takes_bf16:
            inputs = [[model_inputs(own)[1] for own in of_call] for of_call in inputs]
        say(f"running the {layer_path.words}")
        started = time.perf_counter()
        where = Where(
            device.value,
            processes,
            lambda steps: say(f"emulating: {steps / 1e6:.1f} million warp instructions"),
        )
        outputs = layer_path.outputs(shape, whole_layer, inputs, where, **call)
        seconds = time.perf_counter() - started
        say("computing the reference")
        found = verdicts(
            *(layer_path, shape, whole_layer, inputs, outputs),
            is_exact=exact,
            accumulates=accumulate,
            activation=applied,
            numerics=numerics,
            # The emulator adds products exactly.
            sum_bits=numerics.sum_bits if device == Device.cuda else FP32_SUM_BITS,
        )
        rows = [verdict.as_dict() for verdict in found]
    passed = all(row["passed"] for row in rows)
    if as_json:
        print_json(
            {
                "shape": asdict(shape),
                "arch": arch,
                "device": device.value,
                "domains": domains,
                "path": path.value,
                "exact": exact,
                "seconds": round(seconds, 3),
                "ranks": rows,
                "passed": passed,
            }
        )
    else:
        stdout().print(
            f"{shape.num_experts} experts on {shape.num_ranks} ranks"
            f"{f' of {domains} domains' if domains > 1 else ''}, top-{shape.num_topk}, "
            f"hidden {shape.hidden}, intermediate {shape.intermediate_hidden}, "
            f"{shape.weights} weights{' with biases' if shape.biases else ''}, "
            f"{'on GPUs' if device == Device.cuda else 'emulated'}: {seconds:.1f} s"
        )
        demand = "bit for bit" if exact else "within what rounding explains"
        _print_rows(rows, title=f"{layer_path.words} against the reference: {demand}")
    if not passed:
        raise typer.Exit(1)


def _only_defaults(context: typer.Context) -> bool:
    """Whether nothing was asked for that decides what runs."""
    given = (
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"
    )
    return set(given) <= {"as_json"}


def arch_of(device: Device) -> str:
    """What is run there if no architecture is named."""
    import torch

    from deep_moe.targets import target_of_device

    has_gpu = device == Device.cuda and torch.cuda.is_available()
    return target_of_device(torch.device("cuda" if has_gpu else "cpu")).name


def _default_device(ranks: int | None, arch: str | None) -> Device:
    """cuda if there is a GPU for each rank, and a kernel for it: that of `arch`, if given."""
    import torch

    from deep_moe.targets import target_of_capability

    num_needed = ranks or 1
    if not torch.cuda.is_available() or torch.cuda.device_count() < num_needed:
        return Device.cpu
    for index in range(num_needed):
        target = target_of_capability(torch.cuda.get_device_capability(index))
        if target is None or arch not in (None, target.name):
            return Device.cpu
    return Device.cuda


def _made_layer(shape: MoEShape, on_target: TargetWeights, *, exact: bool, seed: int) -> Layer:
    from deep_moe.trial.synthetic import exact_layer, random_layer

    if exact:
        sum_bits = on_target.numerics.sum_bits
        return exact_layer(shape, seed=seed, sum_bits=sum_bits, scale_block=on_target.scale_block)
    return random_layer(shape, seed=seed, scale_block=on_target.scale_block)


def _loaded_layer(
    checkpoint: Path, layer: int, options: LayerOptions
) -> tuple[Layer, type[StoredForm]]:
    """All experts of a checkpoint's layer, and how it stores them."""

    from deep_moe.checkpoint import load_biases, load_experts
    from deep_moe.checkpoint.forms import form_of
    from deep_moe.trial.synthetic import Layer

    l1, l2 = load_experts(
        checkpoint,
        layer,
        num_experts=options.experts,
        num_shared_experts=options.shared_experts,
        biases_apart=True,
    )
    biases = load_biases(checkpoint, layer, num_experts=options.experts)
    if biases is not None and options.shared_experts:
        raise typer.BadParameter(
            "--shared-experts must be 0 for a checkpoint whose experts have biases: shared experts "
            f"have none there; got {options.shared_experts}"
        )
    form = form_of(l1)
    assert form is not None
    return Layer(l1, l2, options.shared_experts, *(bias.float() for bias in biases or ())), form


def _made_tokens(
    shape: MoEShape,
    num_tokens: int,
    *,
    exact: bool,
    seed: int,
    unused_slots: int,
    duplicates: bool,
    nan_tokens: int,
) -> Tokens:
    """Of one rank and call."""
    from deep_moe.trial.synthetic import exact_tokens, name_twice, put_nan, random_tokens

    make = exact_tokens if exact else random_tokens
    tokens = make(shape, num_tokens, seed=seed, num_unused_slots=unused_slots)
    if duplicates:
        tokens = name_twice(tokens)
    return put_nan(tokens, nan_tokens, seed=seed) if nan_tokens else tokens


def _print_rows(rows: Sequence[dict[str, Any]], *, title: str) -> None:
    numbers = (
        "tokens",
        "received",
        "values",
        "equal",
        "within\n1 unit",
        "max\nunits",
        "wrong",
    )
    table = new_table(
        title,
        "call",
        "rank",
        *numbers,
        "verdict",
        right=("call", "rank", *numbers),
        whole=("verdict",),
    )
    for row in rows:
        table.add_row(
            str(row["call"]),
            str(row["rank"]),
            str(row["num_tokens"]),
            str(row["num_received"]),
            str(row["num_values"]),
            str(row["num_equal"]),
            str(row["num_near"]),
            f"{row['max_units']:g}",
            str(row["num_wrong"]),
            coloured("ok", "green") if row["passed"] else coloured("DIFFERENT", "red"),
        )
    stdout().print(table)
