"""`deep-moe config`: which kernel a problem gets, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    ArchOption,
    ClampOption,
    ExpertsOption,
    HiddenOption,
    IntermediateOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    NumSmsOption,
    OverrideOption,
    RanksOption,
    TopkOption,
    make_shape,
    parse_overrides,
)
from .output import format_bytes, new_table, print_json, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from deep_moe.heuristics import Explanation
    from deep_moe.heuristics.explain import MapRow


def config(
    model: ModelOption = None,
    ranks: RanksOption = 8,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of one call per rank.")] = 256,
    max_tokens: MaxTokensOption = None,
    experts: ExpertsOption = None,
    topk: TopkOption = None,
    hidden: HiddenOption = None,
    intermediate: IntermediateOption = None,
    arch: ArchOption = "sm_100a",
    num_sms: NumSmsOption = None,
    clamp: ClampOption = None,
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the chosen config, the reason of each field, the memory maps and the schedule."""
    from deep_moe.heuristics import choose_config

    shape = make_shape(
        model=model,
        ranks=ranks,
        experts=experts,
        topk=topk,
        hidden=hidden,
        intermediate=intermediate,
        max_tokens=tokens if max_tokens is None else max_tokens,
    )
    explanation = choose_config(
        shape,
        tokens,
        arch=arch,
        num_sms=num_sms,
        activation_clamp=clamp,
        overrides=parse_overrides(override),
    ).explain()
    if as_json:
        print_json(explanation.to_dict())
        return
    console = stdout()
    for table in _tables(explanation):
        console.print(table)
        console.print()


def _tables(explanation: Explanation) -> list[Table]:
    schedule = explanation.schedule
    fields = new_table(
        f"{explanation.arch}, {schedule.num_tokens} tokens per rank",
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
    return [*tables, registers, _map_table(title, explanation.symm_buffer_map, "bytes"), work]


def _map_table(title: str, rows: tuple[MapRow, ...], unit: str) -> Table:
    numbers, names = ("offset", unit), ("segment",)
    table = new_table(title, *numbers, *names, "array", "purpose", right=numbers, whole=names)
    for row in rows:
        array = f"{row.dtype}\\[{', '.join(map(str, row.shape))}]"  # the backslash: not markup
        table.add_row(str(row.offset), str(row.size), row.name, array, row.purpose)
    return table


def _value(value: int | float) -> str:
    if isinstance(value, float):
        return "none" if value == float("inf") else f"{value:.4g}"
    return str(value)
