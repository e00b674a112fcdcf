"""`deep-moe config`: which kernel a problem gets, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .layer_options import LayerOptions, with_layer_options
from .options import (
    ArchOption,
    GpuOption,
    JsonOption,
    MaxTokensOption,
    NumSmsOption,
    OverrideOption,
    RanksOption,
    find_measurements,
    parse_overrides,
)
from .output import format_bytes, new_table, print_json, stdout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from deep_moe.heuristics.links import LinkLoad, WorkPerByte
    from deep_moe.targets import Explanation
    from deep_moe.targets.explain import MapRow, TuningReport


@with_layer_options
def config(
    options: LayerOptions,
    ranks: RanksOption = 8,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of one call per rank.")] = 256,
    max_tokens: MaxTokensOption = None,
    arch: ArchOption = None,
    num_sms: NumSmsOption = None,
    gpu: GpuOption = None,
    override: OverrideOption = None,
    uneven: Annotated[
        bool,
        typer.Option("--uneven", help="Choose as after a call with uneven routing (SM90)."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the chosen config, the reason for each field, the measurements of the layer, the memory
    maps and the schedule."""
    from deep_moe.targets import choose_config

    arch, tuning = find_measurements(gpu, arch)
    shape = options.shape(ranks, tokens if max_tokens is None else max_tokens, arch=arch)
    explanation = choose_config(
        shape,
        tokens,
        is_uneven=uneven,
        arch=arch,
        num_sms=num_sms,
        activation=options.applied(),
        overrides=parse_overrides(override),
        tuning=tuning,
    ).explain()
    if as_json:
        print_json(explanation.to_dict())
        return
    console = stdout()
    for table in _tables(explanation):
        console.print(table)
        console.print()
    if explanation.work_per_byte is not None:
        console.print(_work_words(explanation.work_per_byte))
    console.print(f"tuning: {_tuning_outcome(explanation.tuning)}")


def _links_table(loads: Sequence[LinkLoad]) -> Table:
    table = new_table(
        "links of one rank, each direction, uniform routing",
        "what",
        "bytes",
        "us for them",
        "of what links carry",
        right=("bytes", "us for them", "of what links carry"),
    )
    for load in loads:
        table.add_row(
            load.phase, format_bytes(load.num_bytes), f"{load.us:.1f}", f"{load.share:.0%}"
        )
    return table


def _work_words(work: WorkPerByte) -> str:
    verdict = "products can hide the links" if work.hides_links else "links take longer"
    return (
        f"work per byte over links: {work.flops:,.0f} operations; the chip needs "
        f"{work.flops_to_hide_links:,.0f} to hide them: {verdict}"
    )


def _tables(explanation: Explanation) -> list[Table]:
    schedule = explanation.schedule
    fields = new_table(
        f"{explanation.arch}, {explanation.weights} weights"
        f"{' with biases' if explanation.biases else ''}, {schedule.num_tokens} tokens per rank",
        "field",
        "value",
        "why",
        whole=("field", "value"),
    )
    for field in explanation.fields:
        fields.add_row(field.name, _value(field.value), field.reason)

    registers = new_table(
        f"registers: {sum(row.registers for row in explanation.registers)} per CTA",
        "warps of",
        "warps",
        "per thread",
        "registers",
        right=("warps", "per thread", "registers"),
    )
    for row in explanation.registers:
        registers.add_row(
            row.role, str(row.num_warps), str(row.registers_per_thread), str(row.registers)
        )

    work = new_table("schedule of one rank, uniform routing", "quantity", "value")
    for name, value in asdict(schedule).items():
        work.add_row(name.replace("_", " "), _value(value))

    smem, capacity = explanation.smem_bytes, explanation.smem_capacity
    tables = [
        fields,
        _map_table(f"shared memory: {smem} of {capacity} bytes", explanation.smem_map, "bytes"),
    ]
    if explanation.tmem_map:
        title = f"tensor memory: {explanation.tmem_columns} columns"
        tables.append(_map_table(title, explanation.tmem_map, "columns"))
    buffer = f"{explanation.symm_buffer_bytes} bytes"
    if explanation.symm_buffer_bytes >= 10 * 1024:
        buffer += f" ({format_bytes(explanation.symm_buffer_bytes)})"
    title = f"symmetric buffer: {buffer} per rank"
    tables += [registers, _map_table(title, explanation.symm_buffer_map, "bytes"), work]
    if explanation.links:
        tables.append(_links_table(explanation.links))
    if explanation.tuning.rows:
        tables.append(_tuning_table(explanation.tuning))
    return tables


def _tuning_outcome(tuning: TuningReport) -> str:
    """What the tables say of the call; without a device, which tables there are."""
    if tuning.device is not None:
        return tuning.outcome
    from deep_moe.heuristics.tuning import shipped_devices

    devices = ", ".join(shipped_devices())
    shipped = f"; a table is shipped for {devices}" if devices else ""
    return f"{tuning.outcome} (--gpu){shipped}"


def _tuning_table(tuning: TuningReport) -> Table:
    numbers = ("tokens/rank", "tokens/expert", "µs", "formula's µs", "gain")
    table = new_table(
        f"measured on {tuning.device} with as many experts per rank",
        "with",
        *numbers,
        "faster kernel",
        "measured",
        "table",
        right=numbers,
    )
    for row in tuning.rows:
        entry = row.entry
        start = (
            f"{row.num_ranks} x {row.num_experts}, top-{row.num_topk}",
            str(row.num_tokens),
            f"{row.tokens_per_expert:.4g}",
        )
        if entry is None:
            table.add_row(*start, "", "", "", "none: the formula's", "", row.source)
            continue
        faster = ", ".join(
            f"{name} {value} (formula: {dict(entry.formula)[name]})"
            for name, value in entry.overrides
        )
        table.add_row(
            *start,
            f"{entry.us:.1f}",
            f"{entry.formula_us:.1f}",
            f"{entry.gain:+.1%}",
            faster,
            f"{entry.date}, {entry.commit}",
            row.source,
        )
    return table


def _map_table(title: str, rows: tuple[MapRow, ...], unit: str) -> Table:
    numbers, names = ("offset", unit), ("segment",)
    table = new_table(title, *numbers, *names, "array", "purpose", right=numbers, whole=names)
    for row in rows:
        array = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
        table.add_row(str(row.offset), str(row.size), row.name, array, row.purpose)
    return table


def _value(value: int | float | str) -> str:
    if isinstance(value, float):
        return "none" if value == float("inf") else f"{value:.4g}"
    return str(value)
