"""What is kept of the hardware's results, and how results are compared with it.

An output is kept as the first values of its first rows and a checksum of every 256 bytes, so that
any bit counts although little is stored; of a case with a bound, whole.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .case import Bound, Case

FOLDER = Path(__file__).parent / "recorded"
HEAD_ROWS, HEAD = 32, 16  # so many rows, so many values of each
CHUNK = 256  # bytes under one checksum


def head_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, array.shape[-1])[:HEAD_ROWS, :HEAD]


def checksums(array: np.ndarray) -> np.ndarray:
    data = array.tobytes()
    return np.array([zlib.crc32(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)], "<u4")


def keep(case: Case, output: np.ndarray) -> bytes:
    if case.bound is not None or output.nbytes <= CHUNK:
        return output.tobytes()
    return head_of(output).tobytes() + checksums(output).tobytes()


@dataclass(frozen=True)
class Recording:
    """The results of one family. information: device, driver, date."""

    information: dict[str, str]
    digests: dict[str, str]  # of the cases
    kept: dict[str, list[bytes]]  # outputs of the cases

    def save(self, path: Path) -> None:
        cases = {
            name: {"digest": digest, "sizes": [len(part) for part in self.kept[name]]}
            for name, digest in self.digests.items()
        }
        text = json.dumps({**self.information, "cases": cases}).encode()
        values = b"".join(part for parts in self.kept.values() for part in parts)
        np.savez_compressed(
            path, index=np.frombuffer(text, "u1"), values=np.frombuffer(values, "u1")
        )

    @classmethod
    def load(cls, path: Path) -> Recording:
        with np.load(path) as file:
            index: dict[str, Any] = json.loads(file["index"].tobytes())
            values = file["values"].tobytes()
        cases = index.pop("cases")
        kept, at = {}, 0
        for name, entry in cases.items():
            kept[name] = []
            for size in entry["sizes"]:
                kept[name].append(values[at : at + size])
                at += size
        return cls(index, {name: entry["digest"] for name, entry in cases.items()}, kept)


def distance(a: np.ndarray, b: np.ndarray, bound: Bound, floats: type) -> np.ndarray:
    """Where two arrays of codes of `floats` are further apart than `bound`."""
    bits = a.dtype.itemsize * 8
    ordered = []
    for codes in (a, b):
        signed = codes.view(f"<i{bits // 8}").astype(object if bits == 64 else np.int64)
        ordered.append(np.where(signed < 0, -(signed + (1 << (bits - 1))), signed))
    ulps = abs(ordered[0] - ordered[1])
    if bound.absolute:
        with np.errstate(invalid="ignore"):
            near = abs(a.view(floats) - b.view(floats)) <= bound.absolute
    else:
        near = np.zeros(a.shape, bool)
    return ~((ulps <= bound.ulps) | near)


def describe_difference(
    case: Case, output: np.ndarray, kept: bytes, inputs: list[np.ndarray]
) -> str:
    """The first places where `output` is not what was kept; "" if there are none."""
    if keep(case, output) == kept:
        return ""
    if case.bound is not None and case.bound.packed > 1:
        output = output.view(f"<u{output.dtype.itemsize // case.bound.packed}")
    dtype = output.dtype
    if case.bound is not None or output.nbytes <= CHUNK:
        recorded = np.frombuffer(kept, dtype).reshape(output.shape)
        if case.bound is None:
            wrong = recorded != output
        else:
            floats = {2: np.float16, 4: np.float32, 8: np.float64}[dtype.itemsize]
            wrong = distance(output, recorded, case.bound, floats)
        places = np.argwhere(wrong)
        lines = [_line(case, output, recorded, tuple(place), inputs) for place in places[:8]]
        return f"{len(places)} of {output.size} values\n" + "\n".join(lines) if len(places) else ""
    head = head_of(output)
    recorded = np.frombuffer(kept[: head.nbytes], dtype).reshape(head.shape)
    places = np.argwhere(recorded != head)
    lines = [_line(case, head, recorded, tuple(place), inputs) for place in places[:8]]
    bad = np.flatnonzero(np.frombuffer(kept[head.nbytes :], "<u4") != checksums(output))
    first = bad * CHUNK // dtype.itemsize
    per_row = output.shape[-1]
    chunks = ", ".join(f"row {i // per_row} from {i % per_row}" for i in first[:8])
    return (
        f"{len(bad)} of {-(-output.nbytes // CHUNK)} pieces of {CHUNK} bytes: {chunks}\n"
        + "\n".join(lines)
    )


def _line(case: Case, output, recorded, place, inputs: list[np.ndarray]) -> str:
    row = place[0] if len(place) > 1 else 0
    label = case.rows[row] if row < len(case.rows) else f"row {row}"
    digits = 2 * output.dtype.itemsize
    given = ", ".join(
        f"{int(array[place[-1]]):#x}"
        for array in inputs
        if case.rows and array.shape == output.shape[-1:]
    )
    return (
        f"  {label}: element {place[-1]} ({given}) is {int(output[place]):#0{digits + 2}x}, "
        f"the hardware's {int(recorded[place]):#0{digits + 2}x}"
    )
