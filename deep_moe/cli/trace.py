"""`deep-moe trace`: where the time of a call goes, and what every warp did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .checks import check_call, check_output_file
from .layer_options import LayerOptions, with_layer_options
from .layer_path import LayerPath, check_split_path
from .options import (
    HtmlOption,
    JsonOption,
    MaxTokensOption,
    OverrideOption,
    RanksOption,
    SeedOption,
    TokensOption,
    parse_overrides,
    parse_tokens,
)
from .output import new_table, print_json, stderr, stdout
from .run import Device, arch_of

if TYPE_CHECKING:
    from deep_moe.emulator import Chip
    from deep_moe.heuristics import MoEShape
    from deep_moe.traces.timeline import Series
    from deep_moe.trial.simulated import SimulatedCall
    from deep_moe.trial.synthetic import LayerParts, Tokens
    from deep_moe.trial.trace import RankTrace


@with_layer_options
def trace(
    file: Annotated[
        Path,
        typer.Argument(
            dir_okay=False, help="Where the Chrome trace goes; compressed if it ends in .gz."
        ),
    ],
    options: LayerOptions,
    ranks: RanksOption = 2,
    tokens: TokensOption = "16",
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = 0,
    arch: Annotated[
        str | None, typer.Option("--arch", help="Target; default: the GPU's, sm_100a on a CPU.")
    ] = None,
    device: Annotated[
        Device, typer.Option("--device", help="cpu: in the emulator; cuda: rank r on GPU r.")
    ] = Device.cpu,
    chip: Annotated[
        str | None,
        typer.Option(
            "--chip", help="On a CPU: simulate the time of h100, h200, b200, b300 or gb200."
        ),
    ] = None,
    num_sms: Annotated[
        int | None,
        typer.Option("--num-sms", help="CTAs; default: 4 on a CPU without --chip, else all SMs."),
    ] = None,
    override: OverrideOption = None,
    path: Annotated[
        LayerPath,
        typer.Option(
            "--path",
            help="fused: one kernel; throughput: dispatch, experts and combine for many tokens; "
            "split: not traced.",
        ),
    ] = LayerPath.fused_path,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Calls before the recorded one, on GPUs.")
    ] = 3,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Record one call of a random layer on all ranks: a table of phases, and a trace file.

    On a CPU without --chip, a nanosecond of the trace stands for one instruction of a warp. Then
    the order of events is real, and their durations are not. With --chip the emulator predicts
    durations (docs/clock.md) and leaves out the products. ui.perfetto.dev and chrome://tracing open
    the trace. --html and `deep-moe timeline` write a page for any browser.
    """
    check_output_file("FILE", file)
    if html is not None:
        check_output_file("--html", html)
    if path == LayerPath.split_path:
        raise typer.BadParameter(
            "--path must be fused or throughput; low-latency calls are traced by layers with "
            "enable_profiling=True; got split"
        )
    if path == LayerPath.throughput_path:
        check_split_path(path, options.shared_experts)
    if chip is not None and (
        device != Device.cpu or path != LayerPath.fused_path or options.biases
    ):
        raise typer.BadParameter("--chip goes with --device cpu, --path fused and no --biases")
    counts = parse_tokens(tokens, ranks)
    from deep_moe.targets import EMULATED, target_of

    output = TraceOutput(file, html, title_of(options.model, ranks, tokens), as_json)
    on_chip = None if chip is None else _chip_of(chip, arch)
    if on_chip is not None:
        arch, num_sms = on_chip.arch, num_sms or int(on_chip.value("num_sms"))
    arch = arch or (EMULATED.name if device == Device.cpu else arch_of(device))
    applied = options.applied()
    shape = options.shape(
        ranks,
        max(1, *counts) if max_tokens is None else max_tokens,
        arch=arch,
        is_fused=path is LayerPath.fused_path,
    )
    overrides = parse_overrides(override)
    check_call(
        shape,
        counts,
        arch=arch,
        num_sms=num_sms,
        activation=applied,
        overrides=overrides,
    )
    # These import PyTorch, which takes seconds: nothing that can be refused comes behind them.
    from deep_moe.trial import calls as trial
    from deep_moe.trial import simulated
    from deep_moe.trial.real_size import LayerMadeByRanks
    from deep_moe.trial.synthetic import random_layer, random_tokens

    call: dict[str, Any] = {
        "activation": applied,
        "arch": arch,
        "num_sms": num_sms,
        "overrides": overrides,
    }
    if on_chip is not None:
        with stderr().status(f"simulating the fused kernel on {chip}"):
            simulated_call = simulated.simulate_call(
                shape, counts, on_chip, seed=seed, traced=True, **call
            )
        facts = {"chip": on_chip.name, **facts_of_shape(shape)}
        recorded = list(simulated_call.traces)
        _show(output, shape, counts, recorded, "microseconds", facts, simulated_call)
        return
    scale_block = target_of(arch).weights_of(shape.weights, shape.token_format).scale_block
    layer: LayerParts
    if device == Device.cuda:  # a whole model's experts would take minutes to make here
        layer = LayerMadeByRanks(shape, seed, "cuda", scale_block)
    else:
        layer = random_layer(shape, seed=seed, scale_block=scale_block)
    inputs = [
        random_tokens(shape, count, seed=seed + 1 + rank) for rank, count in enumerate(counts)
    ]
    if path == LayerPath.throughput_path:
        _trace_throughput(output, shape, layer, inputs, device, warmup, call)
        return
    with stderr().status("running the fused kernel"):
        if device == Device.cuda:
            recorded = trial.trace_processes(shape, layer, inputs, num_warmup=warmup, **call)
        else:
            recorded = trial.trace_emulated_ranks(shape, layer, inputs, **call)
    _show(output, shape, counts, recorded, unit_of(device), facts_of_shape(shape))


def _chip_of(name: str, arch: str | None) -> Chip:
    """The chip; BadParameter if kernels of `arch` do not run there."""
    from deep_moe.emulator import chips

    chip = chips.load(name)
    if arch not in (None, chip.arch):
        raise typer.BadParameter(f"--arch must be {chip.arch}, that of --chip {name}; got {arch}")
    return chip


@dataclass(frozen=True)
class TraceOutput:
    """Where a trace goes. html: a page, if one is asked for."""

    file: Path
    html: Path | None
    title: str
    as_json: bool

    @property
    def files(self) -> dict[str, str]:
        """What is written, by name."""
        found = {"file": str(self.file)}
        return found if self.html is None else {**found, "html": str(self.html)}

    def show_files(self) -> None:
        """For people."""
        stdout().print(f"\nwritten: {', '.join(self.files.values())}", soft_wrap=True)


def title_of(model: str | None, ranks: int, tokens: str) -> str:
    """Of a page.

    >>> title_of("deepseek-v4-flash", 2, "16"), title_of(None, 1, "16")
    ('deepseek-v4-flash, 2 ranks, 16 tokens each', 'a small layer, 1 rank, 16 tokens')
    """
    of_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
    each = "" if ranks == 1 or "," in tokens else " each"
    return f"{model or 'a small layer'}, {of_ranks}, {tokens} tokens{each}"


def facts_of_shape(shape: MoEShape) -> dict[str, str]:
    """What a page says of the layer."""
    formats = f"{shape.weights} beside {shape.token_format} tokens"
    return {"weights": formats, "experts": f"{shape.num_experts}, top-{shape.num_topk}"}


def _show(
    output: TraceOutput,
    shape: MoEShape,
    counts: list[int],
    recorded: list[RankTrace],
    unit: str,
    facts: dict[str, str],
    simulated: SimulatedCall | None = None,
) -> None:
    from deep_moe.trial.trace import (
        aligned,
        breakdown,
        table,
        timeline_of,
        usage_series,
        write_chrome_trace,
    )

    on_one_clock = aligned(recorded)
    short = short_unit(unit)
    usage: list[Series] = []
    if simulated is not None:
        usage = usage_series(simulated.usage, on_one_clock, simulated.chip)
    write_chrome_trace(on_one_clock, output.file, unit=short, usage=usage)
    if output.html is not None:
        from deep_moe.traces.page import write_page

        timeline = timeline_of(on_one_clock, unit=short, usage=usage, facts=facts)
        write_page(timeline, output.html, title=output.title)
    phases = breakdown(on_one_clock)
    if output.as_json:
        said = {"shape": asdict(shape), "tokens": counts, **output.files}
        print_json({**said, "unit": unit, **phases})
    else:
        stdout().print(table({"": phases}, unit=unit), soft_wrap=True)
        output.show_files()


def short_unit(unit: str) -> str:
    """As traces have it."""
    return "us" if unit == "microseconds" else unit


def unit_of(device: Device) -> str:
    """Of what is recorded there. The emulator's clock counts the instructions of warps."""
    return "microseconds" if device == Device.cuda else "1000 warp instructions"


def _trace_throughput(
    output: TraceOutput,
    shape: MoEShape,
    layer: LayerParts,
    inputs: list[Tokens],
    device: Device,
    warmup: int,
    call: dict[str, Any],
) -> None:
    from deep_moe.trial import throughput_calls
    from deep_moe.trial.split_trace import split_timeline, summary, write_split_trace

    with stderr().status("running the throughput path"):
        if device == Device.cuda:
            recorded = throughput_calls.trace_throughput_processes(
                shape, layer, inputs, device="cuda", num_warmup=warmup, **call
            )
        else:
            recorded = throughput_calls.trace_emulated_throughput(shape, layer, inputs, **call)
    unit = unit_of(device)
    write_split_trace(recorded, output.file, unit=short_unit(unit))
    if output.html is not None:
        from deep_moe.traces.page import write_page

        timeline = split_timeline(recorded, unit=short_unit(unit), facts=facts_of_shape(shape))
        write_page(timeline, output.html, title=f"{output.title}, throughput path")
    found = summary(recorded)
    if output.as_json:
        counts = [own.num_tokens for own in inputs]
        said = {"shape": asdict(shape), "tokens": counts, **output.files}
        print_json({**said, "unit": unit, **found})
        return
    table = new_table("kernels, and phases of a CTA in the mean", "", unit, right=(unit,))
    for part in ("kernels", "phases"):
        for name, duration in found[part].items():
            table.add_row(name, f"{duration:.1f}")
    stdout().print(table)
    output.show_files()
