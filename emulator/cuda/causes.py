"""Findings by cause: which of them are one mistake, how grave it is, and which are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from ..findings import Finding, Involved

# "refusal": the emulator could not go on, so what comes after it was not checked.
Severity = Literal["error", "warning", "refusal"]

_SEVERITIES: dict[str, Severity] = {
    "unsupported": "refusal",
    "memory": "refusal",
    "internal": "refusal",
    "invalid_ptx": "refusal",
    # Kernels may read what they then throw away.
    "uninitialized": "warning",
}


@dataclass(frozen=True)
class Cause:
    """One mistake, and how often it was seen.

    Args:
        kind: of its findings, such as "race".
        severity: "error", "warning" or "refusal".
        places: the lines that it is about, as "file:line", or "kernel: instruction" where the PTX
            has no line information.
        kernels: C++ names of the kernels.
        count: how many findings it had, over all launches, GPUs and runs.
        finding: the first of them.
        launch: during which it came.
    """

    kind: str
    severity: Severity
    places: tuple[str, ...]
    kernels: tuple[str, ...]
    count: int
    finding: Finding
    launch: str

    def as_dict(self) -> dict[str, Any]:
        """All of it, as `json` takes it."""
        return {
            "kind": self.kind,
            "severity": self.severity,
            "places": list(self.places),
            "kernels": list(self.kernels),
            "count": self.count,
            "launch": self.launch,
            "finding": self.finding.as_dict(),
        }

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count} times)"
        return f"{self.severity}: {self.kind}{times}: {self.finding.text}"


@dataclass(frozen=True)
class Suppression:
    """Findings that are known and not reported again.

    Args:
        kind: a pattern for the kind, such as "race" or "*".
        place: a pattern for one of the places, the file's name with its line, or a kernel's name.
        line: of the file that it comes from.
    """

    kind: str
    place: str
    line: int = 0

    def matches(self, cause: Cause) -> bool:
        """Whether it is meant for a cause.

        Args:
            cause: any.
        """
        if not fnmatchcase(cause.kind, self.kind):
            return False
        names = [*cause.places, *(Path(place).name for place in cause.places), *cause.kernels]
        return any(fnmatchcase(name, self.place) for name in names)


def severity_of(finding: Finding) -> Severity:
    """How grave a finding of this kind is.

    Args:
        finding: any.
    """
    if finding.same_value:  # hardware leaves the one value, although PTX does not say so
        return "warning"
    return _SEVERITIES.get(finding.kind, "error")


def place_of(involved: Involved) -> str:
    """Where in the source an instruction stands.

    Args:
        involved: the instruction.
    """
    if involved.file:
        return f"{involved.file}:{involved.line}"
    return f"{involved.kernel}: {involved.instruction.strip()}"


def group_findings(findings: Iterable[tuple[Finding, str]]) -> list[Cause]:
    """Findings of one kind at the same places are one cause: errors first, then in the order in
    which they came.

    Args:
        findings: each with the launch during which it came.
    """
    causes: dict[tuple[str, ...], Cause] = {}
    order: tuple[Severity, ...] = ("error", "refusal", "warning")
    for finding, launch in findings:
        places = tuple(dict.fromkeys(place_of(one) for one in finding.involved))
        key = (finding.kind, *sorted(places or (finding.text,)))
        known = causes.get(key)
        kernels = tuple(dict.fromkeys(one.kernel for one in finding.involved))
        cause = Cause(finding.kind, severity_of(finding), places, kernels, 1, finding, launch)
        if known:
            # What is shown is the first of the gravest ones.
            shown = min(known, cause, key=lambda one: order.index(one.severity))
            all_kernels = tuple(dict.fromkeys((*known.kernels, *kernels)))
            cause = replace(shown, kernels=all_kernels, count=known.count + 1)
        causes[key] = cause
    return sorted(causes.values(), key=lambda cause: order.index(cause.severity))


def read_suppressions(path: Path) -> list[Suppression]:
    """The suppressions in a file: a kind and a place in each line, `#` begins a comment.

    Args:
        path: of the file. Its lines look like `race gemm.cu:120`, `uninitialized *pad_rows*`.
    """
    suppressions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split("#", 1)[0].split(maxsplit=1)
        if not words:
            continue
        if len(words) != 2:
            raise ValueError(f"{path}:{number} must be a kind and a place; got {line!r}")
        suppressions.append(Suppression(words[0], words[1].strip(), number))
    return suppressions


def split_suppressed(
    causes: Sequence[Cause], suppressions: Sequence[Suppression]
) -> tuple[list[Cause], list[Cause], list[Suppression]]:
    """The causes to report, those that are suppressed, and the suppressions that met nothing.

    Args:
        causes: as `group_findings` made them.
        suppressions: as `read_suppressions` read them.
    """
    reported: list[Cause] = []
    suppressed: list[Cause] = []
    used: set[Suppression] = set()
    for cause in causes:
        meant = [one for one in suppressions if one.matches(cause)]
        used.update(meant)
        (suppressed if meant else reported).append(cause)
    return reported, suppressed, [one for one in suppressions if one not in used]
