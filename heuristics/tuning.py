"""Tuning tables: kernels measured to be faster than what the heuristics choose by formula.

A table says of a layer on a device: at this many tokens per rank the formula chose kernel F, and
kernel W was faster. That is used where it is known to hold:

- on the same device and number of SMs, for the same layer (ranks, experts, top-k, widths);
- for calls whose expected tokens per expert are at most a factor of sqrt(2) away from the measured
  ones, the nearest measured number of tokens counting, also if nothing beat the formula there;
- where the formula would still choose F. Elsewhere nothing is known of W's merit, and after a
  change of the formula the measurement is out of date.

All else is the formula's. Tables are JSON; `deep-moe tune` measures and writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .shape import MoEShape

SCHEMA_VERSION = 1
SHIPPED_FOLDER = Path(__file__).parent / "tables"
SHIPPED = "shipped table"
LAYER_FIELDS = ("num_ranks", "num_experts", "num_topk", "hidden", "intermediate_hidden")

Fields = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TunedLayerKey:
    """What a measurement depends on beside the number of tokens."""

    device: str  # as CUDA names it, "NVIDIA H200"
    arch: str
    num_sms: int
    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int

    @classmethod
    def of(cls, shape: MoEShape, *, device: str, arch: str, num_sms: int) -> TunedLayerKey:
        """The key of a layer on a device."""
        return cls(device, arch, num_sms, **{name: getattr(shape, name) for name in LAYER_FIELDS})


@dataclass(frozen=True)
class TunedEntry:
    """One number of tokens per rank at which another kernel beat the formula's.

    overrides: the fields that make the faster kernel. formula: every tunable field as the formula
    chose it. us, formula_us: microseconds of a call with each, measured in turn in one run.
    """

    num_tokens: int
    overrides: Fields
    formula: Fields
    us: float
    formula_us: float
    date: str
    commit: str

    @property
    def gain(self) -> float:
        """How much longer the formula's kernel takes, as a fraction."""
        return self.formula_us / self.us - 1

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a file."""
        pairs = {"overrides": dict(self.overrides), "formula": dict(self.formula)}
        return {**asdict(self), **pairs}


@dataclass(frozen=True)
class TunedLayer:
    """All that was measured for one layer on one device. At the numbers of tokens that have no
    entry the formula's kernel was not beaten."""

    key: TunedLayerKey
    measured_tokens: tuple[int, ...]
    entries: tuple[TunedEntry, ...]

    def nearest_measured(self, num_tokens: int) -> int | None:
        """The measured number of tokens that counts for a call, if one is near enough.

        >>> key = TunedLayerKey("NVIDIA H200", "sm_90a", 132, 4, 256, 6, 4096, 2048)
        >>> [TunedLayer(key, (8, 16, 64), ()).nearest_measured(n) for n in (5, 6, 11, 12, 23, 64)]
        [None, 8, 8, 16, None, 64]
        """

        def distance(measured: int) -> float:
            return max(measured, num_tokens) / min(measured, num_tokens)

        # Squares, so that the bound is exact.
        near = [n for n in self.measured_tokens if num_tokens > 0 and distance(n) ** 2 <= 2]
        return min(near, key=distance, default=None)

    def entry(self, num_tokens: int) -> TunedEntry | None:
        """What was faster at a measured number of tokens."""
        return next((entry for entry in self.entries if entry.num_tokens == num_tokens), None)

    def updated(self, newer: TunedLayer) -> TunedLayer:
        """Both together; where both measured, `newer` counts."""
        measured = sorted({*self.measured_tokens, *newer.measured_tokens})
        kept = [entry for entry in self.entries if entry.num_tokens not in newer.measured_tokens]
        entries = sorted([*kept, *newer.entries], key=lambda entry: entry.num_tokens)
        return TunedLayer(self.key, tuple(measured), tuple(entries))


@dataclass(frozen=True)
class TuningTable:
    """The layers of one file. source: which file, in words."""

    source: str
    layers: tuple[TunedLayer, ...]

    def layer(self, key: TunedLayerKey) -> TunedLayer | None:
        """What was measured for a layer on a device."""
        return next((layer for layer in self.layers if layer.key == key), None)

    def updated(self, newer: TunedLayer) -> TuningTable:
        """The table with another measurement in it."""
        known = self.layer(newer.key)
        others = tuple(layer for layer in self.layers if layer.key != newer.key)
        return TuningTable(self.source, (*others, newer if known is None else known.updated(newer)))


@dataclass(frozen=True)
class TuningResult:
    """What the tables say of one call. overrides: fields to set instead of the formula's choice,
    `reasons` of each; outcome: the same as a sentence, for people."""

    outcome: str
    overrides: Fields = ()
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tuning:
    """The tables for one device, in the order in which they count."""

    device: str
    tables: tuple[TuningTable, ...]

    def layers(self, key: TunedLayerKey) -> list[tuple[str, TunedLayer]]:
        """All that was measured for a layer, with where it stands."""
        found = ((table.source, table.layer(key)) for table in self.tables)
        return [(source, layer) for source, layer in found if layer is not None]

    def look_up(
        self,
        key: TunedLayerKey,
        num_tokens: int,
        formula: Mapping[str, int],
        overrides: Mapping[str, int],
    ) -> TuningResult:
        """formula: the tunable fields that the formula chooses for the call, with the caller's
        `overrides` in force."""
        layers = self.layers(key)
        if not layers:
            return TuningResult(
                f"formula: this layer has not been measured on {self.device} with {key.num_sms} SMs"
            )
        for source, layer in layers:
            measured = layer.nearest_measured(num_tokens)
            if measured is not None:
                return _result(source, layer, measured, formula, overrides)
        sizes = sorted({size for _, layer in layers for size in layer.measured_tokens})
        return TuningResult(
            f"formula: measured on {self.device} with {', '.join(map(str, sizes))} tokens per "
            "rank, none of which is near"
        )


def _result(
    source: str,
    layer: TunedLayer,
    measured: int,
    formula: Mapping[str, int],
    overrides: Mapping[str, int],
) -> TuningResult:
    where = f"{layer.key.device} with {measured} tokens per rank"
    entry = layer.entry(measured)
    if entry is None:
        return TuningResult(
            f"formula: on {where} nothing that was tried is faster beyond noise ({source})"
        )
    set_by_caller = [name for name, _ in entry.formula if name in overrides]
    if set_by_caller:
        return TuningResult(f"formula: the caller sets {', '.join(set_by_caller)}")
    was = dict(entry.formula)
    if was != dict(formula):
        names = sorted({*was, *formula}, key=[*formula, *was].index)
        changed = [
            f"{name} {formula.get(name, 'not tunable')}, there {was.get(name, 'not tunable')}"
            for name in names
            if formula.get(name) != was.get(name)
        ]
        return TuningResult(
            f"formula: what was measured on {where} beat another choice of the formula, which is "
            f"here {'; '.join(changed)} ({source})"
        )
    text = (
        f"measured on {where}: {entry.us:.1f} µs, the formula's choice {entry.formula_us:.1f} "
        f"(+{entry.gain:.1%}); {entry.date}, {source}"
    )
    reasons = tuple((name, f"formula: {was[name]}; {text}") for name, _ in entry.overrides)
    return TuningResult(text, entry.overrides, reasons)


def device_file_name(device: str) -> str:
    """The name of the file that a device's table is shipped in.

    >>> device_file_name("NVIDIA H200")
    'nvidia-h200.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def shipped_table(device: str, folder: Path = SHIPPED_FOLDER) -> TuningTable | None:
    """The table that comes with the package, or None if this device was not measured."""
    return read_table(folder / device_file_name(device), SHIPPED)


def shipped_devices(folder: Path = SHIPPED_FOLDER) -> list[str]:
    """The devices whose tables come with the package."""
    tables = [read_table(path, SHIPPED) for path in sorted(folder.glob("*.json"))]
    return sorted({layer.key.device for table in tables if table for layer in table.layers})


def read_table(path: Path, source: str | None = None) -> TuningTable | None:
    """The table in a file, or None if there is no such file. source: what to call it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return parse_table(text, source or str(path))


def parse_table(text: str, source: str) -> TuningTable:
    """A table from JSON; a ValueError says what is wrong with it."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"tuning table, {source}: not JSON: {error}") from None
    try:
        version = _take(document, "schema", int)
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"schema must be {SCHEMA_VERSION}; got {version}: remove the file, or measure "
                "again with `deep-moe tune`"
            )
        layers = tuple(_layer(record) for record in _take(document, "layers", list))
    except ValueError as error:
        raise ValueError(f"tuning table, {source}: {error}") from None
    return TuningTable(source, layers)


def format_table(table: TuningTable) -> str:
    """What `parse_table` reads."""

    layers = [
        {
            **asdict(layer.key),
            "measured_tokens": list(layer.measured_tokens),
            "entries": [entry.to_dict() for entry in layer.entries],
        }
        for layer in table.layers
    ]
    return json.dumps({"schema": SCHEMA_VERSION, "layers": layers}, indent=1) + "\n"


def _layer(record: Any) -> TunedLayer:
    key: dict[str, Any] = {
        field.name: _take(record, field.name, str if field.type == "str" else int)
        for field in fields(TunedLayerKey)
    }
    measured = _take(record, "measured_tokens", list)
    if not all(isinstance(n, int) and n > 0 for n in measured):
        raise ValueError(f"measured_tokens must be positive ints; got {measured}")
    entries = tuple(_entry(entry) for entry in _take(record, "entries", list))
    stray = [entry.num_tokens for entry in entries if entry.num_tokens not in measured]
    if stray:
        raise ValueError(f"entries must be of measured_tokens {measured}; got {stray}")
    return TunedLayer(TunedLayerKey(**key), tuple(measured), entries)


def _entry(record: Any) -> TunedEntry:
    overrides, formula = (
        tuple(_int_fields(_take(record, name, dict))) for name in ("overrides", "formula")
    )
    unknown = [name for name, _ in overrides if name not in dict(formula)]
    if not overrides or unknown:
        raise ValueError(
            f"overrides must set fields of `formula`; got {dict(overrides)} for {dict(formula)}"
        )
    times = {name: _take(record, name, float) for name in ("us", "formula_us")}
    if not 0 < times["us"] < times["formula_us"]:
        raise ValueError(f"us must be positive and below formula_us; got {times}")
    return TunedEntry(
        num_tokens=_take(record, "num_tokens", int),
        overrides=overrides,
        formula=formula,
        **times,
        date=_take(record, "date", str),
        commit=_take(record, "commit", str),
    )


def _int_fields(record: Mapping[str, Any]) -> Sequence[tuple[str, int]]:
    return [(name, _take(record, name, int)) for name in record]


_T = TypeVar("_T")
_KINDS = {int: "an int", float: "a number", str: "a string", list: "a list", dict: "an object"}


def _take(record: Any, name: str, kind: type[_T]) -> _T:
    if not isinstance(record, dict) or name not in record:
        raise ValueError(f"{name} is missing in {str(record)[:80]}")
    value = record[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name} must be {_KINDS[kind]}; got {value!r}")
    return value
