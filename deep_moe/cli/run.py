"""`deep-moe run`: run a layer, by the fused kernel or the split path, and compare it with the
reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deep_moe.activations import Situ
from deep_moe.formats.weight_formats import (
    DEFAULT_TOKEN_SCALES,
    DEFAULT_WEIGHTS,
    WEIGHT_FORMATS,
    weight_format,
)

from .checks import check_call
from .options import (
    MAX_SEED,
    AccumulateOption,
    ActivationOption,
    BiasesOption,
    ClampOption,
    ExpertsOption,
    HiddenOption,
    IntermediateOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    OverrideOption,
    PoolTokensOption,
    SeedOption,
    SharedExpertsOption,
    TokenScalesOption,
    TopkOption,
    WeightsOption,
    check_weights,
    make_shape,
    parse_activation,
    parse_overrides,
    parse_tokens,
    pool_rows,
)
from .output import coloured, new_table, print_json, stderr, stdout

if TYPE_CHECKING:
    from deep_moe.heuristics import MoEShape
    from deep_moe.targets import TargetWeights
    from deep_moe.trial.synthetic import Layer, Tokens


class Device(str, Enum):
    """Where the call runs."""

    cpu = "cpu"
    cuda = "cuda"


class LayerPath(str, Enum):
    """Which kernels compute the layer."""

    fused_path = "fused"
    split_path = "split"
    throughput_path = "throughput"


_PATHS = {
    LayerPath.fused_path: "fused kernel",
    LayerPath.split_path: "split path",
    LayerPath.throughput_path: "throughput path",
}


def run(
    model: ModelOption = None,
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
            help="NVLink domains of the ranks: more than 1 is the two-level path.",
        ),
    ] = 1,
    chunks: Annotated[
        int, typer.Option("--chunks", min=1, help="Parts that tokens between domains go in.")
    ] = 1,
    exact_sizes: Annotated[
        bool,
        typer.Option("--exact-sizes", help="Only what is needed travels between domains."),
    ] = False,
    tokens: Annotated[
        str, typer.Option("--tokens", help='Tokens of every rank, or of each: "5,0,17".')
    ] = "16",
    max_tokens: MaxTokensOption = None,
    pool_tokens: PoolTokensOption = None,
    shared_experts: SharedExpertsOption = 0,
    experts: ExpertsOption = None,
    topk: TopkOption = None,
    hidden: HiddenOption = None,
    intermediate: IntermediateOption = None,
    weights: WeightsOption = DEFAULT_WEIGHTS,
    biases: BiasesOption = False,
    token_scales: TokenScalesOption = DEFAULT_TOKEN_SCALES,
    exact: Annotated[
        bool, typer.Option("--exact", help="A case whose result must agree bit for bit.")
    ] = False,
    seed: SeedOption = 0,
    activation: ActivationOption = None,
    clamp: ClampOption = None,
    accumulate: AccumulateOption = False,
    calls: Annotated[
        int,
        typer.Option("--calls", min=1, help="Calls in the same buffers, each with other tokens."),
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
        str | None, typer.Option("--arch", help="Default: that of the GPU, sm_100a on a CPU.")
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
            help="With --path throughput: most rows of a rank's experts; default: all of them.",
        ),
    ] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="A process per rank, on a CPU too.")
    ] = False,
    num_sms: Annotated[
        int | None, typer.Option("--num-sms", help="CTAs; default: 4 on a CPU, else all SMs.")
    ] = None,
    override: OverrideOption = None,
    schedule_seed: Annotated[
        int | None,
        typer.Option(
            "--schedule-seed", min=0, max=MAX_SEED, help="Which interleaving the emulator takes."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run calls on all ranks and compare each rank's outputs with the reference."""
    import torch

    from deep_moe.targets import TARGETS
    from deep_moe.trial import calls as trial
    from deep_moe.trial import split_calls, throughput_calls
    from deep_moe.trial.bounds import reference_bounds
    from deep_moe.trial.comparison import compare
    from deep_moe.trial.reference import FP32_SUM_BITS
    from deep_moe.trial.synthetic import received
    from deep_moe.trial.two_level import run_two_level, two_level_bounds

    is_split = path != LayerPath.fused_path
    if is_split:
        check_split_path(path, shared_experts)
    if is_split and domains > 1:
        raise typer.BadParameter(
            f"--domains must be 1 with --path {path.value}, whose ranks reach each other's memory; "
            f"got {domains}"
        )
    if recv_rows is not None and path != LayerPath.throughput_path:
        raise typer.BadParameter(
            f"--recv-rows needs --path throughput: the others have a row for all that may come; "
            f"got --path {path.value}"
        )
    if domains == 1 and (chunks > 1 or exact_sizes):
        raise typer.BadParameter("--chunks and --exact-sizes need --domains of 2 or more; got 1")
    if is_split and accumulate:
        raise typer.BadParameter("--accumulate needs --path fused: no other combine adds to y")
    if domains > 1 and accumulate:
        raise typer.BadParameter("--accumulate needs --domains of 1")
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
    check_weights(weights)
    on_target = TARGETS[arch].weights_of(weights)
    numerics = on_target.numerics_of(token_scales)
    counts = parse_tokens(tokens, ranks)
    sizes = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    capacity = max(1, *counts) if max_tokens is None else max_tokens
    num_pool_tokens = pool_rows(pool_tokens, is_fused=path is LayerPath.fused_path)
    overrides = parse_overrides(override)
    applied = parse_activation(activation, clamp, model=model)
    if exact and isinstance(applied, Situ):
        raise typer.BadParameter(
            f"--exact must be without --activation {applied.name}: tanh leaves no result exact"
        )
    call: dict[str, Any] = {
        "activation": applied,
        "arch": arch,
        "num_sms": num_sms,
        "overrides": overrides,
        "accumulate": accumulate,
    }
    if checkpoint is None:
        shape = make_shape(
            model=model,
            ranks=ranks,
            max_tokens=capacity,
            pool_tokens=num_pool_tokens,
            shared_experts=shared_experts,
            weights=weights,
            biases=biases,
            token_scales=token_scales,
            **sizes,
        )
        check_call(shape, counts, **call)
        whole_layer = _made_layer(shape, on_target, exact=exact, seed=seed)
    else:
        if exact or model or hidden or intermediate or biases:
            raise typer.BadParameter(
                "--checkpoint decides the weights and all sizes but --topk; --experts says how "
                "many there are if it does not"
            )
        shape, whole_layer = _loaded_layer(
            checkpoint,
            layer,
            ranks,
            topk,
            capacity,
            num_pool_tokens,
            experts,
            weights,
            shared_experts,
            token_scales,
        )
        check_call(shape, counts, **call)
    if unused_slots > shape.num_topk:
        raise typer.BadParameter(
            f"--unused-slots must be at most the {shape.num_topk} slots; got {unused_slots}"
        )
    if duplicates and shape.num_topk < 2:
        raise typer.BadParameter("--duplicates needs at least 2 slots per token")
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

    if domains > 1 or is_split:  # whose layers take BF16
        inputs = [[trial.model_inputs(own)[1] for own in of_call] for of_call in inputs]

    call["schedule_seed"] = schedule_seed or 0
    if is_split:
        del call["accumulate"]  # refused above
    if path == LayerPath.throughput_path:
        call["max_recv_rows"] = recv_rows
    started = time.perf_counter()
    with stderr().status(f"running the {_PATHS[path]}") as status:
        if domains > 1:
            outputs = run_two_level(
                shape,
                domains,
                whole_layer,
                inputs,
                device=device.value,
                two_level={"num_chunks": chunks, "exact_sizes": exact_sizes},
                **call,
            )
        elif is_split and (processes or device == Device.cuda):
            run_processes = {
                LayerPath.split_path: split_calls.run_split_processes,
                LayerPath.throughput_path: throughput_calls.run_throughput_processes,
            }[path]
            outputs = run_processes(shape, whole_layer, inputs, device=device.value, **call)
        elif is_split:
            run_emulated = {
                LayerPath.split_path: split_calls.run_emulated_split,
                LayerPath.throughput_path: throughput_calls.run_emulated_throughput,
            }[path]
            outputs = run_emulated(shape, whole_layer, inputs, **call)
        elif processes or device == Device.cuda:
            outputs = trial.run_processes(shape, whole_layer, inputs, device=device.value, **call)
        else:

            def show(steps: int) -> None:
                status.update(f"emulating: {steps / 1e6:.1f} million warp instructions")

            outputs = trial.run_emulated_ranks(shape, whole_layer, inputs, progress=show, **call)
    seconds = time.perf_counter() - started
    # The emulator adds products exactly.
    sum_bits = numerics.sum_bits if device == Device.cuda else FP32_SUM_BITS
    rows = []
    with stderr().status("computing the reference"):
        for call_idx, (tokens_of_call, of_call) in enumerate(zip(inputs, outputs, strict=True)):
            # A low-latency dispatch brings a token to an expert once.
            is_once = path == LayerPath.split_path
            count_rows = split_calls.received_rows if is_once else received
            sent = count_rows(shape, tokens_of_call).split(shape.num_experts_per_rank)
            for rank, (own, output) in enumerate(zip(tokens_of_call, of_call, strict=True)):
                how: dict[str, Any] = {
                    "activation": applied,
                    "numerics": numerics,
                    "sum_bits": sum_bits,
                }
                if domains > 1:
                    domain = rank * domains // ranks
                    bounds = two_level_bounds(shape, domains, domain, whole_layer, own, **how)
                else:
                    bounds = reference_bounds(
                        own.x,
                        own.x_sf,
                        own.topk_idx,
                        own.topk_weights,
                        whole_layer.l1,
                        whole_layer.l2,
                        num_shared_experts=shape.num_shared_experts,
                        y=trial.initial_y(own.num_tokens, shape.hidden) if accumulate else None,
                        weights_in_combine=is_split,
                        **whole_layer.biases,
                        **how,
                    )
                comparison = compare(output.y, bounds.y if exact else bounds)
                stats_agree = torch.equal(output.stats, sent[rank])
                rows.append(
                    {
                        "call": call_idx,
                        "rank": rank,
                        "num_received": int(output.stats.sum()),
                        "stats_agree": stats_agree,
                        **asdict(comparison),
                        "passed": stats_agree and comparison.is_right,
                    }
                )
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
        _print_rows(rows, path=path, demand=demand)
    if not passed:
        raise typer.Exit(1)


def check_split_path(path: LayerPath, shared_experts: int) -> None:
    """Raise for what no path but the fused one does."""
    if shared_experts:
        raise typer.BadParameter(
            f"--shared-experts must be 0 with --path {path.value}: no dispatch brings a rank its "
            f"own tokens; got {shared_experts}"
        )


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
    checkpoint: Path,
    layer: int,
    num_ranks: int,
    num_topk: int | None,
    max_tokens: int,
    num_pool_tokens: int | None,
    num_experts: int | None,
    weights: str,
    num_shared_experts: int,
    token_scales: str,
) -> tuple[MoEShape, Layer]:
    """All experts of a checkpoint's layer and their shape."""
    import torch

    from deep_moe.checkpoint.experts import load_biases, load_experts
    from deep_moe.heuristics import MoEShape
    from deep_moe.trial.synthetic import Layer

    l1, l2 = load_experts(
        checkpoint,
        layer,
        num_experts=num_experts,
        num_shared_experts=num_shared_experts,
        biases_apart=True,
    )
    biases = load_biases(checkpoint, layer, num_experts=num_experts)
    if biases is not None and num_shared_experts:
        raise typer.BadParameter(
            "--shared-experts must be 0 for a checkpoint whose experts have biases: none are known "
            f"of shared ones; got {num_shared_experts}"
        )
    formats = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16"}
    loaded = formats.get(l1.weight.dtype, "mxfp4")
    allowed = [name for name in WEIGHT_FORMATS if weight_format(name).in_checkpoints == loaded]
    if weights not in allowed:
        raise typer.BadParameter(
            f"--weights must be {' or '.join(allowed)}, for the checkpoint's experts are {loaded}; "
            f"got {weights}"
        )
    num_experts, num_l1_rows, _ = l1.weight.shape
    num_experts -= num_shared_experts
    shape = MoEShape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=min(2, num_experts) if num_topk is None else num_topk,
        hidden=l2.weight.shape[1],
        intermediate_hidden=num_l1_rows // 2,
        num_max_tokens_per_rank=max_tokens,
        num_pool_tokens=num_pool_tokens,
        weights=weights,
        biases=biases is not None,
        num_shared_experts=num_shared_experts,
        token_scales=token_scales,
    )
    return shape, Layer(l1, l2, num_shared_experts, *(bias.float() for bias in biases or ()))


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


def _print_rows(rows: Sequence[dict[str, Any]], *, path: LayerPath, demand: str) -> None:
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
        f"{_PATHS[path]} against the reference: {demand}",
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
