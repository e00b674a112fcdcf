"""What a config means: every field with its reason, the memory maps, and the schedule."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from deep_moe.heuristics.links import LinkLoad, WorkPerByte, link_loads, work_per_byte
from deep_moe.heuristics.segments import Layout, ceil_div
from deep_moe.heuristics.tuning import TunedEntry, TunedLayerKey

if TYPE_CHECKING:
    from .config import Decision, MegaMoEConfig


@dataclass(frozen=True)
class FieldReason:
    """One field of the config and why it has its value."""

    name: str
    value: int | float | bool | str
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
    """One rank's work if routing is uniform: m-blocks of routed experts and of shared ones, the
    blocks of each layer in a turn, how many rounds the grid makes over all blocks, and which part
    of it the last round occupies."""

    num_tokens: int
    expected_tokens_per_expert: float
    num_m_blocks_per_expert: int
    num_routed_m_blocks: int
    num_l1_blocks_per_turn: int
    num_l2_blocks_per_turn: int
    num_shared_m_blocks: int
    num_blocks: int
    num_rounds: int
    last_round_occupancy: float


@dataclass(frozen=True)
class TuningRow:
    """One number of tokens per rank at which this layer, or another of which a rank has the same
    part, was measured on the device. No entry: the formula was not beaten."""

    source: str
    num_ranks: int
    num_experts: int
    num_topk: int
    num_tokens: int
    tokens_per_expert: float
    entry: TunedEntry | None


@dataclass(frozen=True)
class TuningReport:
    """What the tuning tables say: of the call, in words, and of the layer, all that may hold in the
    order in which it counts."""

    device: str | None
    outcome: str
    rows: tuple[TuningRow, ...]


@dataclass(frozen=True)
class Explanation:
    """The explained config. The command line prints it as tables, or `to_dict` as JSON."""

    arch: str
    weights: str
    biases: bool
    token_format: str
    smem_capacity: int
    fields: tuple[FieldReason, ...]
    tuning: TuningReport
    smem_map: tuple[MapRow, ...]
    smem_bytes: int
    tmem_map: tuple[MapRow, ...]
    tmem_columns: int
    registers: tuple[RegisterRow, ...]
    symm_buffer_map: tuple[MapRow, ...]
    symm_buffer_bytes: int
    schedule: Schedule
    links: tuple[LinkLoad, ...]
    work_per_byte: WorkPerByte | None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; an infinite clamp becomes None."""
        plain = asdict(self)
        for field in plain["fields"]:
            if field["value"] == math.inf:
                field["value"] = None
        for row, plain_row in zip(self.tuning.rows, plain["tuning"]["rows"], strict=True):
            plain_row["entry"] = row.entry and row.entry.to_dict()
        return plain


def explain(config: MegaMoEConfig) -> Explanation:
    """Explain a config that `choose_config` made."""
    if config.decision is None:
        raise ValueError("config must come from choose_config, which records its reasons")
    decision = config.decision
    smem, tmem, symm = config.smem_layout, config.tmem_layout, config.symm_buffer_layout
    return Explanation(
        arch=config.arch,
        weights=config.weights,
        biases=config.biases,
        token_format=config.token_format,
        smem_capacity=decision.smem_capacity,
        fields=tuple(
            FieldReason(name, value, decision.reasons[name])
            for name, value in config.to_dict().items()
        ),
        tuning=_tuning_report(config, decision),
        smem_map=_map_rows(smem),
        smem_bytes=smem.num_bytes,
        tmem_map=_map_rows(tmem) if tmem else (),
        tmem_columns=tmem.num_bytes if tmem else 0,
        registers=_register_rows(config),
        symm_buffer_map=_map_rows(symm),
        symm_buffer_bytes=symm.num_bytes,
        schedule=_schedule(config, decision.num_tokens),
        links=link_loads(config.shape, decision.num_tokens, config.target.rates),
        work_per_byte=work_per_byte(config.shape, config.target.rates),
    )


def _tuning_report(config: MegaMoEConfig, decision: Decision) -> TuningReport:
    if decision.tuning is None:
        return TuningReport(None, decision.tuning_result.outcome, ())
    device = decision.tuning.device
    key = TunedLayerKey.of(config.shape, device=device, arch=config.arch, num_sms=config.num_sms)
    rows = [
        TuningRow(
            source=found.source,
            num_ranks=found.layer.key.num_ranks,
            num_experts=found.layer.key.num_experts,
            num_topk=found.layer.key.num_topk,
            num_tokens=found.num_tokens,
            tokens_per_expert=found.layer.key.tokens_per_expert(found.num_tokens),
            entry=found.entry,
        )
        for group in decision.tuning.measurements(key)
        for found in group
    ]
    return TuningReport(device, decision.tuning_result.outcome, tuple(rows))


def _map_rows(layout: Layout) -> tuple[MapRow, ...]:
    return tuple(
        MapRow(row.name, row.offset, row.num_bytes, row.dtype, row.shape, row.purpose)
        for row in layout.rows()
    )


def _register_rows(config: MegaMoEConfig) -> tuple[RegisterRow, ...]:
    return tuple(
        RegisterRow(role, num_warps, count, 32 * num_warps * count)
        for role, num_warps, count in config.role_registers
    )


def _schedule(config: MegaMoEConfig, num_tokens: int) -> Schedule:
    expected = config.shape.expected_tokens_per_expert(num_tokens)
    num_m_blocks = ceil_div(math.ceil(expected), config.block_m)
    num_routed_m_blocks = config.num_experts_per_rank * num_m_blocks
    # Clusters take neighbouring n-blocks together, or one of two m-blocks; with an odd number of
    # n-blocks the last group is not full.
    num_groups_per_m_block = ceil_div(config.num_l1_n_blocks, config.cluster_size) + ceil_div(
        config.num_l2_n_blocks, config.cluster_size
    )
    num_clusters = config.num_sms // config.cluster_size
    # Parts of a shared expert are full m-blocks but for its last one.
    num_shared_m_blocks = config.num_shared_experts * ceil_div(num_tokens, config.block_m)
    num_all_m_blocks = num_routed_m_blocks + num_shared_m_blocks
    num_groups = num_all_m_blocks * num_groups_per_m_block
    num_m_blocks_per_turn = min(config.num_turn_m_blocks, num_all_m_blocks)
    in_last_round = num_groups % num_clusters or min(num_groups, num_clusters)
    return Schedule(
        num_tokens=num_tokens,
        expected_tokens_per_expert=float(expected),
        num_m_blocks_per_expert=num_m_blocks,
        num_routed_m_blocks=num_routed_m_blocks,
        num_l1_blocks_per_turn=num_m_blocks_per_turn * config.num_l1_n_blocks,
        num_l2_blocks_per_turn=num_m_blocks_per_turn * config.num_l2_n_blocks,
        num_shared_m_blocks=num_shared_m_blocks,
        num_blocks=num_all_m_blocks * (config.num_l1_n_blocks + config.num_l2_n_blocks),
        num_rounds=ceil_div(num_groups, num_clusters),
        last_round_occupancy=in_last_round / num_clusters,
    )
