"""docs/clock.md shows every point of the records, good and bad."""

from __future__ import annotations

from pathlib import Path

from benchmarks import clock_points

PAGE = Path(__file__).parents[2] / "docs" / "clock.md"


def test_the_page_has_the_tables_of_the_records():
    page = PAGE.read_text()
    for part in [
        clock_points.summary(),
        clock_points.table(),
        clock_points.tiles(),
        clock_points.phases(),
        clock_points.recording(),
        *clock_points.by_costs(),
    ]:
        assert part in page, "run python -m benchmarks.clock_points"
