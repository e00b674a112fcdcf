"""What a config means: every field with its reason, the memory maps, and the schedule."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from .config import MegaMoEConfig
from .segments import Layout, ceil_div
from .sm100 import expected_tokens_per_expert


@dataclass(frozen=True)
class FieldReason:
    """One field of the config and why it has its value."""

    name: str
    value: int | float | bool
    reason: str


@dataclass(frozen=True)
class MapRow:
    """One row of a memory map, gaps included. Unit: bytes, or columns for tensor memory."""

    name: str
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    purpose: str


@dataclass(frozen=True)
class RegisterRow:
    """Registers of one group of warps."""

    role: str
    num_warps: int
    registers_per_thread: int
    registers: int


@dataclass(frozen=True)
class Schedule:
    """One rank's work when routing is uniform: blocks per wave of experts, and how the last round
    of CTAs is filled in the last wave."""

    num_tokens: int
    expected_tokens_per_expert: float
    num_m_blocks_per_expert: int
    num_waves: int
    num_l1_blocks_per_wave: int
    num_l2_blocks_per_wave: int
    num_blocks: int
    num_rounds_per_wave: int
    last_round_occupancy: float


@dataclass(frozen=True)
class Explanation:
    """The explained config. `to_dict` is JSON-able; `str` is for people."""

    arch: str
    smem_capacity: int
    fields: tuple[FieldReason, ...]
    smem_map: tuple[MapRow, ...]
    smem_bytes: int
    tmem_map: tuple[MapRow, ...]
    tmem_columns: int
    registers: tuple[RegisterRow, ...]
    symm_buffer_map: tuple[MapRow, ...]
    symm_buffer_bytes: int
    schedule: Schedule

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; an infinite clamp becomes None."""
        plain = asdict(self)
        for field in plain["fields"]:
            if field["value"] == math.inf:
                field["value"] = None
        return plain

    def __str__(self) -> str:
        schedule = self.schedule
        sections = [
            f"{self.arch}, {schedule.num_tokens} tokens per rank",
            _table("fields", [(f.name, _number(f.value), f.reason) for f in self.fields]),
            _map_table(
                f"shared memory: {self.smem_bytes} of {self.smem_capacity} bytes", self.smem_map
            ),
        ]
        if self.tmem_map:
            sections.append(
                _map_table(f"tensor memory: {self.tmem_columns} columns", self.tmem_map)
            )
        sections.append(
            _table(
                f"registers: {sum(row.registers for row in self.registers)} per CTA",
                [
                    (row.role, f"{row.num_warps} warps", f"{row.registers_per_thread} per thread")
                    for row in self.registers
                ],
            )
        )
        sections.append(
            _map_table(
                f"symmetric buffer: {self.symm_buffer_bytes} bytes per rank", self.symm_buffer_map
            )
        )
        sections.append(
            _table(
                "schedule, uniform routing",
                [
                    (name.replace("_", " "), _number(value))
                    for name, value in asdict(schedule).items()
                ],
            )
        )
        return "\n\n".join(sections)


def explain(config: MegaMoEConfig) -> Explanation:
    """Explain a config that `choose_config` made."""
    if config.decision is None:
        raise ValueError("config must come from choose_config, which records its reasons")
    decision = config.decision
    smem, tmem, symm = config.smem_layout, config.tmem_layout, config.symm_buffer_layout
    return Explanation(
        arch=config.arch,
        smem_capacity=decision.smem_capacity,
        fields=tuple(
            FieldReason(name, value, decision.reasons[name])
            for name, value in config.kernel_fields().items()
        ),
        smem_map=_map_rows(smem),
        smem_bytes=smem.num_bytes,
        tmem_map=_map_rows(tmem) if tmem else (),
        tmem_columns=tmem.num_bytes if tmem else 0,
        registers=_register_rows(config),
        symm_buffer_map=_map_rows(symm),
        symm_buffer_bytes=symm.num_bytes,
        schedule=_schedule(config, decision.num_tokens),
    )


def _map_rows(layout: Layout) -> tuple[MapRow, ...]:
    return tuple(
        MapRow(row.name, row.offset, row.num_bytes, row.dtype, row.shape, row.purpose)
        for row in layout.rows()
    )


def _register_rows(config: MegaMoEConfig) -> tuple[RegisterRow, ...]:
    num_warps = config.num_threads // 32
    num_tensor_warps = num_warps - config.num_dispatch_warps - config.num_epilogue_warps
    groups = (
        ("dispatch", config.num_dispatch_warps, config.num_dispatch_registers),
        ("loaders and MMA", num_tensor_warps, config.num_loader_registers),
        ("epilogue", config.num_epilogue_warps, config.num_epilogue_registers),
    )
    return tuple(
        RegisterRow(role, warps, registers, 32 * warps * registers)
        for role, warps, registers in groups
    )


def _schedule(config: MegaMoEConfig, num_tokens: int) -> Schedule:
    expected = expected_tokens_per_expert(config.shape, num_tokens)
    num_m_blocks = ceil_div(math.ceil(expected), config.block_m)
    num_m_blocks_per_wave = config.num_experts_per_wave * num_m_blocks
    num_waves = config.num_experts_per_rank // config.num_experts_per_wave
    num_l1_blocks = num_m_blocks_per_wave * config.num_l1_n_blocks
    num_l2_blocks = num_m_blocks_per_wave * config.num_l2_n_blocks
    num_blocks = num_waves * (num_l1_blocks + num_l2_blocks)
    in_last_round = num_blocks % config.num_sms or min(num_blocks, config.num_sms)
    return Schedule(
        num_tokens=num_tokens,
        expected_tokens_per_expert=float(expected),
        num_m_blocks_per_expert=num_m_blocks,
        num_waves=num_waves,
        num_l1_blocks_per_wave=num_l1_blocks,
        num_l2_blocks_per_wave=num_l2_blocks,
        num_blocks=num_blocks,
        num_rounds_per_wave=ceil_div(num_l1_blocks + num_l2_blocks, config.num_sms),
        last_round_occupancy=in_last_round / config.num_sms,
    )


def _number(value: int | float | bool) -> str:
    if isinstance(value, float):
        return "none" if value == math.inf else f"{value:.4g}"
    return str(value)


def _map_table(title: str, rows: tuple[MapRow, ...]) -> str:
    return _table(
        title,
        [
            (row.name, str(row.offset), str(row.size), f"{row.dtype}{list(row.shape)}", row.purpose)
            for row in rows
        ],
    )


def _table(title: str, rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *lines])
