"""`deep-moe run`: run a layer through the fused kernel and compare it with the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    ClampOption,
    ExpertsOption,
    HiddenOption,
    IntermediateOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    OverrideOption,
    RanksOption,
    TopkOption,
    make_shape,
    parse_overrides,
    parse_tokens,
)
from .output import new_table, print_json, stderr, stdout

if TYPE_CHECKING:
    import torch

    from deep_moe.heuristics import MoEShape
    from deep_moe.synthetic import Layer, Tokens


class Device(str, Enum):
    """Where the call runs."""

    cpu = "cpu"
    cuda = "cuda"


def run(
    model: ModelOption = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Take the experts from this checkpoint.")
    ] = None,
    layer: Annotated[int, typer.Option("--layer", help="Which layer of the checkpoint.")] = 0,
    ranks: RanksOption = 2,
    tokens: Annotated[
        str, typer.Option("--tokens", help='Tokens of every rank, or of each: "5,0,17".')
    ] = "16",
    max_tokens: MaxTokensOption = None,
    experts: ExpertsOption = None,
    topk: TopkOption = None,
    hidden: HiddenOption = None,
    intermediate: IntermediateOption = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="A case whose result must agree bit for bit.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of weights, tokens and routing.")] = 0,
    clamp: ClampOption = None,
    arch: Annotated[
        str | None, typer.Option("--arch", help="Default: that of the GPU, sm_100a on a CPU.")
    ] = None,
    device: Annotated[
        Device, typer.Option("--device", help="cpu: in the emulator; cuda: rank r on GPU r.")
    ] = Device.cpu,
    processes: Annotated[
        bool, typer.Option("--processes", help="A process per rank, on a CPU too.")
    ] = False,
    num_sms: Annotated[
        int | None, typer.Option("--num-sms", help="CTAs; default: 4 on a CPU, else all SMs.")
    ] = None,
    override: OverrideOption = None,
    schedule_seed: Annotated[
        int, typer.Option("--schedule-seed", help="Which interleaving the emulator takes.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run one call on all ranks and compare each rank's output with the reference."""
    import torch

    from deep_moe import trial
    from deep_moe.comparison import FP32_SUM_BITS, compare, judge
    from deep_moe.reference import NUMERICS, reference_mega_moe
    from deep_moe.synthetic import exact_tokens, random_tokens
    from deep_moe.weights import weight_arch

    if arch is None:
        has_gpu = device == Device.cuda and torch.cuda.is_available()
        arch = weight_arch(torch.device("cuda" if has_gpu else "cpu"))
    if arch not in NUMERICS:
        raise typer.BadParameter(f"--arch must be one of {', '.join(NUMERICS)}; got {arch!r}")
    numerics = NUMERICS[arch]
    counts = parse_tokens(tokens, ranks)
    sizes = {"experts": experts, "topk": topk, "hidden": hidden, "intermediate": intermediate}
    capacity = max(1, max(counts) if max_tokens is None else max_tokens)
    if checkpoint is None:
        shape = make_shape(model=model, ranks=ranks, max_tokens=capacity, **sizes)
        whole_layer = _made_layer(shape, exact=exact, seed=seed, sum_bits=numerics.sum_bits)
    else:
        if exact or model or any(sizes[name] for name in ("experts", "hidden", "intermediate")):
            raise typer.BadParameter("--checkpoint decides the weights and all sizes but --topk")
        shape, whole_layer = _loaded_layer(checkpoint, layer, ranks, topk, capacity)
    make_tokens = exact_tokens if exact else random_tokens
    inputs = [make_tokens(shape, count, seed=seed + 1 + rank) for rank, count in enumerate(counts)]

    call: dict[str, Any] = {
        "activation_clamp": clamp,
        "arch": arch,
        "num_sms": num_sms,
        "overrides": parse_overrides(override),
        "schedule_seed": schedule_seed,
    }
    started = time.perf_counter()
    with stderr().status("running the fused kernel") as status:
        if processes or device == Device.cuda:
            outputs = trial.run_processes(shape, whole_layer, inputs, device=device.value, **call)
        else:

            def show(steps: int) -> None:
                status.update(f"emulating: {steps / 1e6:.1f} million warp instructions")

            outputs = trial.run_emulated_ranks(shape, whole_layer, inputs, progress=show, **call)
    seconds = time.perf_counter() - started
    with stderr().status("computing the reference"):
        expected = [
            reference_mega_moe(
                own.x,
                own.x_sf,
                own.topk_idx,
                own.topk_weights,
                whole_layer.l1,
                whole_layer.l2,
                activation_clamp=clamp,
                numerics=numerics,
            )
            for own in inputs
        ]
    # The emulator adds products exactly.
    sum_bits = numerics.sum_bits if device == Device.cuda else FP32_SUM_BITS
    comparisons = [
        compare(output.y, reference) for output, reference in zip(outputs, expected, strict=True)
    ]
    verdicts = judge(comparisons, exact=exact, sum_bits=sum_bits)
    stats_agree = [
        torch.equal(output.stats, counted)
        for output, counted in zip(outputs, _received(shape, inputs), strict=True)
    ]
    rows = [
        {
            "rank": rank,
            "num_tokens": counts[rank],
            "num_received": int(outputs[rank].stats.sum()),
            "stats_agree": stats_agree[rank],
            **asdict(comparison),
            "passed": stats_agree[rank] and verdicts[rank],
        }
        for rank, comparison in enumerate(comparisons)
    ]
    passed = all(row["passed"] for row in rows)
    if as_json:
        print_json(
            {
                "shape": asdict(shape),
                "arch": arch,
                "exact": exact,
                "seconds": round(seconds, 3),
                "ranks": rows,
                "passed": passed,
            }
        )
    else:
        _print_rows(shape, rows, demand=_demand(exact, sum_bits), seconds=seconds)
    if not passed:
        raise typer.Exit(1)


def _made_layer(shape: MoEShape, *, exact: bool, seed: int, sum_bits: int) -> Layer:
    from deep_moe.synthetic import exact_layer, random_layer

    if exact:
        return exact_layer(shape, seed=seed, sum_bits=sum_bits)
    return random_layer(shape, seed=seed)


def _loaded_layer(
    checkpoint: Path, layer: int, num_ranks: int, num_topk: int | None, max_tokens: int
) -> tuple[MoEShape, Layer]:
    """All experts of a checkpoint's layer and their shape."""
    from deep_moe.checkpoint import load_experts
    from deep_moe.heuristics import MoEShape
    from deep_moe.synthetic import Layer

    l1, l2 = load_experts(checkpoint, layer)
    num_experts, num_l1_rows, num_packed = l1.weight.shape
    shape = MoEShape(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=min(2, num_experts) if num_topk is None else num_topk,
        hidden=2 * num_packed,
        intermediate_hidden=num_l1_rows // 2,
        num_max_tokens_per_rank=max_tokens,
    )
    return shape, Layer(l1, l2)


def _received(shape: MoEShape, inputs: Sequence[Tokens]) -> list[torch.Tensor]:
    """Tokens that each local expert of each rank must have received."""
    import torch

    named = torch.cat([own.topk_idx.flatten() for own in inputs])
    counts = torch.bincount(named[named >= 0], minlength=shape.num_experts).int()
    return list(counts.split(shape.num_experts_per_rank))


def _demand(exact: bool, sum_bits: int) -> str:
    from deep_moe import comparison

    if exact:
        return "bit for bit"
    if sum_bits >= comparison.FP32_SUM_BITS:
        return (
            f"{comparison.MIN_NEAR_SHARE:.1%} at most 1 BF16 unit away, "
            f"cosine distance < {comparison.MAX_COSINE_DISTANCE:.0e}"
        )
    return (
        f"errors of tokens below {comparison.MAX_TOKEN_ERROR:.1%}, "
        f"half of them below {comparison.MAX_MEDIAN_TOKEN_ERROR:.0%}"
    )


def _print_rows(
    shape: MoEShape, rows: Sequence[dict[str, Any]], *, demand: str, seconds: float
) -> None:
    stdout().print(
        f"{shape.num_experts} experts on {shape.num_ranks} ranks, top-{shape.num_topk}, "
        f"hidden {shape.hidden}, intermediate {shape.intermediate_hidden}: {seconds:.1f} s"
    )
    numbers = (
        "tokens",
        "received",
        "values",
        "equal",
        "within\n1 unit",
        "max\nunits",
        "cosine\ndistance",
    )
    table = new_table(
        f"fused kernel against the reference: {demand}",
        "rank",
        *numbers,
        "verdict",
        right=("rank", *numbers),
        whole=("verdict",),
    )
    for row in rows:
        table.add_row(
            str(row["rank"]),
            str(row["num_tokens"]),
            str(row["num_received"]),
            str(row["num_values"]),
            str(row["num_equal"]),
            str(row["num_near"]),
            f"{row['max_units']:g}",
            f"{row['cosine_distance']:.1e}",
            "[green]ok[/]" if row["passed"] else "[red]DIFFERENT[/]",
        )
    stdout().print(table)
