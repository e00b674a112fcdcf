"""`deep-moe doctor`: a working installation passes, a broken one fails with the way to mend it."""

import json

import pytest
from typer.testing import CliRunner

from deep_moe.cli import app


def findings(exit_code: int) -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == exit_code, result.output
    return {finding["name"]: finding for finding in json.loads(result.stdout)}


def test_everything_that_a_call_needs_works_here():
    found = findings(exit_code=0)
    for name in ("torch", "headers", "compiler", "emulator"):
        assert found[name]["state"] == "ok", found[name]


def test_absent_cutlass_headers_fail_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEP_MOE_CUTLASS_INCLUDE", "/nowhere")
    finding = findings(exit_code=1)["headers"]
    assert finding["state"] == "missing"
    assert "pip install nvidia-cutlass" in finding["detail"]


def test_a_damaged_kernel_is_reported_but_is_no_failure(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sm_100a-broken").mkdir()
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    finding = findings(exit_code=0)["kernel cache"]
    assert "1 damaged" in finding["detail"]
    assert finding["remedy"] == "deep-moe cache clear"


def test_the_table_names_every_check():
    printed = CliRunner().invoke(app, ["doctor"]).stdout
    for name in ("python", "torch", "headers", "compiler", "kernel cache", "emulator", "GPU"):
        assert name in printed
