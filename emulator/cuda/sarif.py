"""Causes as SARIF 2.1.0, which code hosts show beside the lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import BY_KIND, KIND_NAMES
from ..findings import Involved
from .causes import Cause

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "refusal": "note"}


def sarif_log(causes: Sequence[Cause], version: str) -> dict[str, Any]:
    """A SARIF log of one run of the checks.

    Args:
        causes: what to report.
        version: of this package.
    """
    meanings = {
        KIND_NAMES[number]: (error.__doc__ or "").splitlines()[0]
        for number, error in BY_KIND.items()
    }
    rules = [
        {"id": kind, "shortDescription": {"text": meanings[kind]}}
        for kind in dict.fromkeys(cause.kind for cause in causes)
    ]
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "warpcheck", "version": version, "rules": rules}},
                "results": [_result(cause) for cause in causes],
            }
        ],
    }


def _result(cause: Cause) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": cause.kind,
        "level": _LEVELS[cause.severity],
        "message": {"text": cause.finding.text},
        "occurrenceCount": cause.count,
    }
    # What caught it is the last one; of a race the other access is related.
    locations = [_location(one) for one in reversed(cause.finding.involved)]
    if locations:
        result["locations"] = locations[:1]
        result["relatedLocations"] = locations[1:]
    return result


def _location(involved: Involved) -> dict[str, Any]:
    place: dict[str, Any] = {
        "logicalLocations": [{"fullyQualifiedName": involved.kernel, "kind": "function"}],
        "message": {"text": involved.access or involved.instruction.strip()},
    }
    if involved.file:
        place["physicalLocation"] = {
            "artifactLocation": {"uri": involved.file},
            "region": {"startLine": involved.line},
        }
    return place
