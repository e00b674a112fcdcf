"""What tests/sanitize_on_gpu.sh is made of, as far as it goes without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layer import racecheck, sanitized_call

REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at issue()+0x1230 in bulk_copy.cuh:12
=========     and Read access at add(unsigned int)+0x2f0 in ld_st.cuh:48 [508 hazards]
=========     and Read access at add(unsigned int)+0x310 in ld_st.cuh:48 [4 hazards]
=========
========= Error: Race reported between Read access at load()+0x10 in ld_st.cuh:20
=========     and Write access at store()+0x20 in ld_st.cuh:30 [16 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_reports_of_bulk_copies_are_told_from_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_a_copy, finding = racecheck.read_races(REPORT)
    assert len(of_a_copy.accesses) == 3
    assert of_a_copy.is_of_a_bulk_copy
    assert len(finding.accesses) == 2
    assert not finding.is_of_a_bulk_copy
    log = tmp_path / "log"
    log.write_text(REPORT)
    assert racecheck.main([str(log)]) == 1
    assert "FINDING: Read access at load()" in capsys.readouterr().out


def test_a_clean_log_has_no_findings(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "========= COMPUTE-SANITIZER\n"
        "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    )
    assert racecheck.main([str(log)]) == 0


def test_what_cannot_be_read_is_no_clean_log() -> None:
    with pytest.raises(ValueError, match="did not come to its end"):
        racecheck.read_races("========= COMPUTE-SANITIZER\n")
    with pytest.raises(ValueError, match=r"lists 0 reports, .*3 hazards"):
        racecheck.read_races("========= RACECHECK SUMMARY: 3 hazards displayed (3 errors)\n")


def test_full_tiles_are_full() -> None:
    tokens = sanitized_call.make_tokens(full_tiles=True)
    counts = tokens.topk_idx.flatten().bincount(minlength=sanitized_call.SHAPE.num_experts)
    assert counts.tolist() == [sanitized_call.BLOCK_M] * sanitized_call.SHAPE.num_experts


@pytest.mark.parametrize("words", [[], ["--full-tiles"]])
def test_the_call_is_right(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sanitized_call.main(words)
    assert capsys.readouterr().out.startswith("right: ")
