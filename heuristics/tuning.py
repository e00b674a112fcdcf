"""Tuning tables: kernels measured to be faster than what the heuristics choose by formula.

A table says of a layer on a device: at this many tokens per rank the formula chose kernel F, and
kernel W was faster. That is used where it is known to hold:

- on the same device and number of SMs, for layers of which a rank has the same part: as many local
  experts of the same widths. Of how many ranks it is one, and top-k, change the tokens that the
  experts receive, and nothing else of what the tunable fields are about;
- for calls whose expected tokens per expert are at most a factor of sqrt(2) away from the measured
  ones, the nearest measured number of tokens counting, also if nothing beat the formula there.
  What was measured with the call's own ranks, experts and top-k comes before all else;
- where the formula would still choose F. Elsewhere nothing is known of W's merit, and after a
  change of the formula the measurement is out of date.

All else is the formula's. Tables are JSON; `deep-moe tune` measures and writes them.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from deep_moe.tokens import token_format
from deep_moe.weights import DEFAULT_WEIGHTS, check_weights_name, default_token_format

from .shape import MoEShape, expected_tokens_per_expert

SCHEMA_VERSION = 1
SHIPPED_FOLDER = Path(__file__).parent / "tables"
SHIPPED = "shipped table"
# A table of a thousand layers has one MB.
MAX_TABLE_BYTES = 16 * 2**20
_MAX_INT = 2**31 - 1
_MAX_STRING = 200
LAYER_FIELDS = ("num_ranks", "num_experts", "num_topk", "hidden", "intermediate_hidden")

Fields = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TunedLayerKey:
    """What a measurement was made with, beside the number of tokens."""

    device: str  # as CUDA names it, "NVIDIA H200"
    arch: str
    num_sms: int
    num_ranks: int
    num_experts: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    weights: str = DEFAULT_WEIGHTS
    token_format: str = default_token_format(DEFAULT_WEIGHTS)
    num_pool_tokens: int | None = None  # of a bounded pool
    biases: bool = False
    num_shared_experts: int = 0
    has_gate: bool = True

    @classmethod
    def of(cls, shape: MoEShape, *, device: str, arch: str, num_sms: int) -> TunedLayerKey:
        """The key of a layer on a device."""
        sizes = {name: getattr(shape, name) for name in LAYER_FIELDS}
        return cls(
            device,
            arch,
            num_sms,
            **sizes,
            weights=shape.weights,
            token_format=shape.token_format,
            num_pool_tokens=shape.num_pool_tokens,
            biases=shape.biases,
            num_shared_experts=shape.num_shared_experts,
            has_gate=shape.has_gate,
        )

    @property
    def num_experts_per_rank(self) -> int:
        """Experts that live on one rank."""
        return self.num_experts // self.num_ranks

    def has_same_part(self, other: TunedLayerKey) -> bool:
        """Whether a rank of both has the same experts to compute, on the same device. How many rows
        their pools have may differ: that costs a kernel little, whatever its tile."""
        return (
            self.hidden == other.hidden
            and self.intermediate_hidden == other.intermediate_hidden
            and self.num_experts_per_rank == other.num_experts_per_rank
            and self.num_sms == other.num_sms
            and self.device == other.device
            and self.arch == other.arch
            and self.weights == other.weights
            and self.token_format == other.token_format
            and self.biases == other.biases
            and self.num_shared_experts == other.num_shared_experts
            and self.has_gate == other.has_gate
        )

    def tokens_per_expert(self, num_tokens: int) -> float:
        """Expected of each expert at `num_tokens` tokens per rank."""
        return float(
            expected_tokens_per_expert(
                num_tokens,
                num_topk=self.num_topk,
                num_experts_per_rank=self.num_experts_per_rank,
            )
        )

    def words(self) -> str:
        """The layer, for people.

        >>> TunedLayerKey("NVIDIA H200", "sm_90a", 132, 2, 192, 6, 7168, 3072).words()
        '2 ranks x 192 experts, top-6'
        """
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        pool = "" if self.num_pool_tokens is None else f", {self.num_pool_tokens} pool rows"
        shared = f" and {self.num_shared_experts} shared" if self.num_shared_experts else ""
        return f"{ranks} x {self.num_experts} experts{shared}, top-{self.num_topk}{pool}"


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
class Measurement:
    """One measured size of a layer. source: the table it stands in."""

    source: str
    layer: TunedLayer
    num_tokens: int  # per rank

    @property
    def entry(self) -> TunedEntry | None:
        """What was faster than the formula's kernel, if anything."""
        return self.layer.entry(self.num_tokens)

    def words(self) -> str:
        """What it was made with, for people."""
        key = self.layer.key
        return f"on {key.device} with {key.words()}, {self.num_tokens} tokens/rank"


def nearest(
    measurements: Iterable[Measurement], key: TunedLayerKey, num_tokens: int
) -> Measurement | None:
    """The measurement that counts for a call with `num_tokens` tokens per rank of the layer `key`,
    if one is near enough: the one with the nearest expected tokens per expert. Of equally near
    ones the one with most ranks counts, then with the largest top-k, then with fewest tokens.

    measurements: of layers of which a rank has the same part as of `key`.

    >>> key = TunedLayerKey("NVIDIA H200", "sm_90a", 132, 4, 256, 6, 4096, 2048)
    >>> sizes = [Measurement("", TunedLayer(key, (8, 16, 64), ()), n) for n in (8, 16, 64)]
    >>> found = [nearest(sizes, key, n) for n in (5, 6, 11, 12, 23, 64)]
    >>> [measurement and measurement.num_tokens for measurement in found]
    [None, 8, 8, 16, None, 64]
    """
    # Of equally many local experts, so these are in the ratio of the tokens per expert.
    num_received = num_tokens * key.num_topk
    near = []
    for found in measurements:
        other = found.layer.key
        measured = found.num_tokens * other.num_topk
        more, less = max(measured, num_received), min(measured, num_received)
        if more * more <= 2 * less * less:  # squares, so that the bound is exact
            order = (more / less, -other.num_ranks, -other.num_topk, found.num_tokens)
            near.append((order, found))
    return min(near, key=itemgetter(0), default=(None, None))[1]


@dataclass(frozen=True)
class TuningResult:
    """What the tables say of one call. overrides: fields to set instead of the formula's choice,
    `reasons` of each; outcome: the same as a sentence, for people. is_of_own_layer: measured with
    the call's own ranks, experts and top-k, so that no limit can forbid the overrides."""

    outcome: str
    overrides: Fields = ()
    reasons: tuple[tuple[str, str], ...] = ()
    is_of_own_layer: bool = True


@dataclass(frozen=True)
class Tuning:
    """The tables for one device, in the order in which they count."""

    device: str
    tables: tuple[TuningTable, ...]

    # A layer's are looked for once, not again for every number of tokens.
    _of_layers: dict[TunedLayerKey, list[list[Measurement]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def measurements(self, key: TunedLayerKey) -> list[list[Measurement]]:
        """All that may hold for a layer, the groups in the order in which they count: those of the
        layer itself, a group per table, then those of others of which a rank has the same part."""
        if key not in self._of_layers:
            self._of_layers[key] = self._measurements(key)
        return self._of_layers[key]

    def _measurements(self, key: TunedLayerKey) -> list[list[Measurement]]:
        def group(table: TuningTable, is_own: bool) -> list[Measurement]:
            return [
                Measurement(table.source, layer, num_tokens)
                for layer in table.layers
                if layer.key.has_same_part(key) and (layer.key == key) is is_own
                for num_tokens in layer.measured_tokens
            ]

        groups = [group(table, is_own) for is_own in (True, False) for table in self.tables]
        return [group for group in groups if group]

    def measurement(self, key: TunedLayerKey, num_tokens: int) -> Measurement | None:
        """The one that counts for a call."""
        near = (nearest(group, key, num_tokens) for group in self.measurements(key))
        return next((found for found in near if found is not None), None)

    def look_up(
        self,
        key: TunedLayerKey,
        num_tokens: int,
        formula: Mapping[str, int],
        overrides: Mapping[str, int],
    ) -> TuningResult:
        """formula: the tunable fields that the formula chooses for the call, with the caller's
        `overrides` in force."""
        groups = self.measurements(key)
        if not groups:
            return TuningResult(
                f"formula: no layer with {key.num_experts_per_rank} experts per rank"
                f"{f' and {key.num_shared_experts} shared' if key.num_shared_experts else ''} of "
                f"{key.hidden} x {key.intermediate_hidden} in {key.weights} x {key.token_format}"
                f"{' with biases' if key.biases else ''}{'' if key.has_gate else ' without a gate'}"
                f" has been measured on {self.device} with {key.num_sms} SMs"
            )
        measurement = self.measurement(key, num_tokens)
        if measurement is not None:
            return _result(measurement, key, formula, overrides)
        sizes = {
            found.layer.key.tokens_per_expert(found.num_tokens)
            for group in groups
            for found in group
        }
        return TuningResult(
            f"formula: measured on {self.device} with "
            f"{', '.join(f'{size:.4g}' for size in sorted(sizes))} tokens per expert, none of "
            f"which is near {key.tokens_per_expert(num_tokens):.4g}"
        )


def _result(
    measurement: Measurement,
    key: TunedLayerKey,
    formula: Mapping[str, int],
    overrides: Mapping[str, int],
) -> TuningResult:
    source, where, entry = measurement.source, measurement.words(), measurement.entry
    if entry is None:
        return TuningResult(
            f"formula: {where} nothing that was tried is faster beyond noise ({source})"
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
            f"formula: what was measured {where} beat another choice of the formula, which is "
            f"here {'; '.join(changed)} ({source})"
        )
    text = (
        f"measured {where}: {entry.us:.1f} µs, the formula's choice {entry.formula_us:.1f} "
        f"(+{entry.gain:.1%}); {entry.date}, {source}"
    )
    reasons = tuple((name, f"formula: {was[name]}; {text}") for name, _ in entry.overrides)
    return TuningResult(text, entry.overrides, reasons, measurement.layer.key == key)


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
    """The table in a file, or None if there is no such file; a ValueError says what is wrong with
    it. source: what to call it."""
    source = source or str(path)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # else a pipe is waited for

    try:
        with open(path, "rb", opener=opener) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"tuning table, {source}: not a file")
            text = file.read(MAX_TABLE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"tuning table, {source}: cannot be read: {error.strerror}") from None
    if len(text) > MAX_TABLE_BYTES:
        raise ValueError(f"tuning table, {source}: more than {MAX_TABLE_BYTES} bytes")
    return parse_table(text, source)


def parse_table(text: str | bytes, source: str) -> TuningTable:
    """A table from JSON; a ValueError says what is wrong with it."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
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
        if field.name
        not in (
            *("weights", "token_format", "num_pool_tokens", "biases", "num_shared_experts"),
            "has_gate",
        )
    }
    if "weights" in record:  # tables of one format only do not say which
        key["weights"] = _take(record, "weights", str)
        check_weights_name(key["weights"])
    if "token_format" in record:
        key["token_format"] = token_format(_take(record, "token_format", str)).name
    else:  # tables from before there were several
        key["token_format"] = default_token_format(key.get("weights", DEFAULT_WEIGHTS))
    if record.get("num_pool_tokens") is not None:
        key["num_pool_tokens"] = _take(record, "num_pool_tokens", int)
    if "biases" in record:  # older tables are of layers without
        key["biases"] = _take(record, "biases", bool)
    if "num_shared_experts" in record:  # older tables have none
        key["num_shared_experts"] = _take(record, "num_shared_experts", int)
    if "has_gate" in record:  # older tables are of layers with one
        key["has_gate"] = _take(record, "has_gate", bool)
    small = {name: key[name] for name in LAYER_FIELDS if key[name] < 1}
    if small:
        raise ValueError(f"{', '.join(LAYER_FIELDS)} must be positive; got {small}")
    if key["num_experts"] % key["num_ranks"]:
        raise ValueError(
            f"num_experts must be a multiple of num_ranks ({key['num_ranks']}); "
            f"got {key['num_experts']}"
        )
    measured = _take(record, "measured_tokens", list)
    if not all(type(n) is int and 0 < n <= _MAX_INT for n in measured):
        raise ValueError(f"measured_tokens must be positive ints; got {_short(measured)}")
    entries = tuple(_entry(entry) for entry in _take(record, "entries", list))
    stray = sorted({entry.num_tokens for entry in entries}.difference(measured))
    if stray:
        raise ValueError(
            f"entries must be of measured_tokens {_short(measured)}; got {_short(stray)}"
        )
    return TunedLayer(TunedLayerKey(**key), tuple(measured), entries)


def _entry(record: Any) -> TunedEntry:
    overrides, formula = (
        tuple(_int_fields(_take(record, name, dict))) for name in ("overrides", "formula")
    )
    unknown = [name for name, _ in overrides if name not in dict(formula)]
    if not overrides or unknown:
        raise ValueError(
            "overrides must set fields of `formula`; got "
            f"{_short(dict(overrides))} for {_short(dict(formula))}"
        )
    times = {name: _take(record, name, float) for name in ("us", "formula_us")}
    if not 0 < times["us"] < times["formula_us"]:
        raise ValueError(f"us must be positive and below formula_us; got {times}")
    date = _take(record, "date", str)
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise ValueError(f"date must be YEAR-MONTH-DAY, as 2026-11-21; got {date!r}")
    return TunedEntry(
        num_tokens=_take(record, "num_tokens", int),
        overrides=overrides,
        formula=formula,
        **times,
        date=date,
        commit=_take(record, "commit", str),
    )


def _int_fields(record: Mapping[str, Any]) -> Sequence[tuple[str, int]]:
    unknown = [name for name in record if not (name.isidentifier() and len(name) <= 40)]
    if unknown:
        raise ValueError(f"overrides and formula must have names of fields; got {_short(unknown)}")
    return [(name, _take(record, name, int)) for name in record]


_T = TypeVar("_T")
_KINDS = {
    int: "an int of 32 bits",
    float: "a finite number",
    str: f"a string of at most {_MAX_STRING} printable characters",
    bool: "a bool",
    list: "a list",
    dict: "an object",
}


def _take(record: Any, name: str, kind: type[_T]) -> _T:
    if not isinstance(record, dict) or name not in record:
        raise ValueError(f"{name} is missing in {_short(record)}")
    value = record[name]
    # A kernel's microseconds and sizes have few digits; more do not fit a float or an int32.
    is_int = type(value) is int and abs(value) <= _MAX_INT
    if kind is float and is_int:
        value = float(value)
    is_allowed = (
        is_int
        if kind is int
        else type(value) is kind
        and (not isinstance(value, float) or math.isfinite(value))
        # What is shown to people is a line of a terminal's.
        and (not isinstance(value, str) or (len(value) <= _MAX_STRING and value.isprintable()))
    )
    if not is_allowed:
        raise ValueError(f"{name} must be {_KINDS[kind]}; got {_short(value)}")
    return value


def _short(value: Any) -> str:
    """A value, however long or deep it is, in a line."""
    words = reprlib.Repr()
    words.maxlevel = 3
    words.maxstring = words.maxother = 60
    return words.repr(value)
