"""What pictures and tables are made of, and that the committed ones show the committed reports."""

import json

import pytest

from benchmarks.plot import (
    PAGE_MACHINE,
    PAGE_MODEL,
    PAGE_TABLE,
    PAGES_WITH_TABLES,
    RESULTS,
    ROOT,
    documents,
    page_table,
    picture_path,
    table,
    timed,
    with_newest_peer,
)

MACHINE = ("NVIDIA H200", 4)


def report(date: str, *results: dict) -> dict:
    machine = {"gpu": "NVIDIA H200", "date": date, "commit": "abc", "cuda": "13", "torch": "2"}
    return {"machine": machine, "results": list(results)}


def result(tokens: int, us: float, model: str = "deepseek-v4-pro", **others) -> dict:
    paths = {name: {"us": other} for name, other in others.items() if name in ("peer", "unfused")}
    changes = {name: value for name, value in others.items() if name not in paths}
    return {
        "model": model,
        "num_ranks": 4,
        "tokens_per_rank": tokens,
        "us": us,
        "us_p10": us - 1,
        "us_p90": us + 2,
        "floor_us": us / 2,
        "floor_share": 0.5,
        "tflops": 7.0,
        "weight_tb_per_s": 3.0,
        **paths,
        **changes,
    }


def test_a_curve_is_one_reports_that_with_most_sizes_and_then_the_newest():
    old = report("2026-11-20", result(1, 10.0), result(8, 11.0, peer=20.0))
    new = report("2026-11-21", result(1, 9.0), result(8, 9.5))
    single = report("2026-11-22", result(8, 8.0))
    reports = [new, single, old]
    fused = timed(reports, MACHINE, "deepseek-v4-pro", "fused")
    assert fused is not None
    assert fused.us("fused") == {1: 9.0, 8: 9.5}
    peer = timed(reports, MACHINE, "deepseek-v4-pro", "peer")
    assert peer is not None
    assert peer.us("peer") == {8: 20.0}
    assert timed(reports, MACHINE, "deepseek-v4-pro", "unfused") is None
    assert timed(reports, ("NVIDIA H200", 8), "deepseek-v4-pro", "fused") is None


@pytest.mark.parametrize(
    "changes", [{"routing": "zipf"}, {"tokens_of_ranks": [8, 0, 8, 8]}], ids=["routing", "shares"]
)
def test_skewed_problems_are_not_shown(changes):
    assert (
        timed([report("d", result(8, 1.0, **changes))], MACHINE, "deepseek-v4-pro", "fused") is None
    )


@pytest.mark.parametrize("has_others", [False, True])
def test_other_sizes_are_in_the_tables_and_in_a_picture_that_has_no_others(has_others: bool):
    other = result(8, 50.0, "deepseek-v4-pro, experts 96", peer=75.0, num_ranks=1)
    other["peer"]["times_slower"] = 1.5
    others = [result(8, 90.0, num_ranks=1)] if has_others else []
    made = documents([report("2026-11-20", other, *others)])
    assert ("experts 96" in made[picture_path(("NVIDIA H200", 1))]) != has_others
    text = made[ROOT / "benchmarks" / "RESULTS.md"]
    assert "## deepseek-v4-pro, experts 96, 1 × NVIDIA H200" in text
    assert "| 75 |  | 1.50× |  |  |  |" in text


def test_a_table_has_the_comparison_and_what_is_asked():
    asked = {"model": PAGE_MODEL, "num_ranks": 2}
    machine = ("NVIDIA H200", 2)
    timed_here = result(512, 1000.0, peer=1665.0, unfused=4000.0, **asked)
    text = table(machine, [report("2026-11-20", timed_here)])
    assert text.splitlines()[-1] == (
        "| 512 | 1000.0 | 999.0 to 1002.0 | 7 | 3.00 | 50% | 4000 | 1665 | "
        "1665 (sgl-deep-gemm, this run) | 1.67× | 1.85× | 900 | +11% |"
    )
    text = table(machine, [report("2026-11-20", result(512, 900.0, peer=1665.0, **asked))])
    assert text.splitlines()[-1].endswith("1.85× | 1.85× | 900 | reached |")


def test_only_the_newest_version_of_the_peer_is_shown_and_named():
    old = report("2026-11-21", result(8, 300.0, peer=700.0)) | {"peer": "sgl-deep-gemm 0.1.4"}
    new = report("2026-11-22", result(8, 301.0, peer=600.0)) | {"peer": "sgl-deep-gemm 0.2.5"}
    text = documents([old, new])[picture_path(MACHINE)]
    assert "sgl-deep-gemm 0.2.5, FP8 weights" in text
    assert "0.1.4" not in text
    counts = with_newest_peer([old, new])
    assert [("peer" in report["results"][0]) for report in counts] == [False, True]
    assert old["results"][0]["peer"] == {"us": 700.0}


def test_a_peer_of_another_report_is_named_by_its_date():
    reports = [
        report("2026-11-21T10:11:12Z", result(8, 300.0), result(512, 900.0)),
        report("2026-11-20T09:08:07Z", result(512, 950.0, peer=1200.0)),
    ]
    last = table(MACHINE, reports).splitlines()[-1]
    assert "| 1200 | 1200 (sgl-deep-gemm, run of 2026-11-20T09:08) | 1.33× |" in last


def test_the_pages_table_leaves_out_what_was_not_timed():
    sizes = {"model": PAGE_MODEL, "num_ranks": PAGE_MACHINE[1]}
    timed_here = report("d", result(8, 370.4, **sizes), result(512, 1086.6, **sizes))
    lines = page_table([timed_here]).splitlines()
    assert lines[2] == "| deep_moe, FP4 weights, µs | 370 |  | 1087 |  |  |"
    assert len(lines) == 3


def test_committed_pictures_and_tables_are_those_of_the_committed_reports():
    """`python -m benchmarks.plot` mends it."""
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    made = documents(reports)
    assert picture_path(MACHINE) in made
    for path, text in made.items():
        assert path.read_text() == text, path.relative_to(ROOT)
    for page in PAGES_WITH_TABLES:
        found = PAGE_TABLE.findall(made[page])
        assert len(found) == made[page].count("<!-- table: ") > 0, page.name
