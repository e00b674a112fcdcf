"""Sorts what compute-sanitizer's racecheck reports into findings and what it cannot know.

    python -m tests.layer.racecheck LOG

racecheck is known to count what a bulk copy (`cp.async.bulk`) reads and writes as accesses of the
thread that issued it, but not the mbarrier or the bulk group by which it completes as an order
between that thread and those who use the bytes. So it reports such copies in a pipeline as races
with their users; copies by a tensor map, which it counts for no thread, it does not. Those reports
are listed and not counted. The emulator, whose race detector follows mbarriers, bulk groups and
proxies, checks the same pairs (`checked=True`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BULK_COPIES = "bulk_copy.cuh"
_REPORT = re.compile(
    r"Race reported between (?P<first>.+?)\n=+\s+(?P<others>(?:and .+?(?:\n=+\s+|$))+)",
)
_SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")


@dataclass(frozen=True)
class Race:
    """Accesses that were reported together, as the tool words them."""

    accesses: tuple[str, ...]

    @property
    def is_of_a_bulk_copy(self) -> bool:
        return any(BULK_COPIES in access for access in self.accesses)

    def __str__(self) -> str:
        return "\n    ".join(self.accesses)


def read_races(log: str) -> list[Race]:
    """All reports of a log. Raises ValueError if it is not a whole one."""
    summary = _SUMMARY.search(log)
    if summary is None:
        raise ValueError("the log has no RACECHECK SUMMARY: the tool did not come to its end")
    races = []
    for report in _REPORT.finditer(log):
        others = re.findall(r"and (.+?)\s*(?:\n|$)", report["others"])
        races.append(Race((report["first"].strip(), *others)))
    if len(races) != int(summary[1]):
        raise ValueError(f"the log lists {len(races)} reports, its summary says {summary[0]!r}")
    return races


def main(words: Sequence[str]) -> int:
    """1 if there are findings, 0 if not."""
    races = read_races(Path(words[0]).read_text())
    findings = [race for race in races if not race.is_of_a_bulk_copy]
    print(f"{len(races) - len(findings)} reports of bulk copies, which racecheck cannot order")
    for race in findings:
        print(f"FINDING: {race}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
