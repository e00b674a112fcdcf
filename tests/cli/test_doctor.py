"""`deep-moe doctor`: a working installation passes, a broken one fails with the way to mend it."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from deep_moe.cli import app
from deep_moe.cli.doctor import Finding, _guarded, _packages
from deep_moe.cli.packages import REQUIREMENTS
from deep_moe.errors import DeepMoEError
from deep_moe.fused import peers
from deep_moe.jit import driver
from deep_moe.jit.cache import make_key
from deep_moe.jit.driver import driver_cuda_version

doctor = importlib.import_module("deep_moe.cli.doctor")  # the package's name is the command


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
    (tmp_path / make_key("sm_100a", {})).mkdir()
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    finding = findings(exit_code=0)["kernel cache"]
    assert "1 damaged" in finding["detail"]
    assert "compiled again when it is needed" in finding["remedy"]


def test_a_cache_that_cannot_be_written_is_reported(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    finding = findings(exit_code=0)["kernel cache"]
    assert finding["state"] == "absent"
    assert "cannot be written" in finding["detail"]
    assert f"{tmp_path} cannot be written" in finding["remedy"]
    assert "DEEP_MOE_CACHE_DIR" in finding["remedy"]


def test_folders_that_are_no_kernels_are_not_called_damaged(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("Documents", ".ssh", "sm_100a-notes"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("DEEP_MOE_CACHE_DIR", str(tmp_path))
    finding = findings(exit_code=0)["kernel cache"]
    assert "0 kernels, 0 damaged" in finding["detail"]
    assert (finding["state"], finding["remedy"]) == ("ok", "")


@pytest.mark.parametrize("package", ["jinja2", "filelock", "safetensors", "platformdirs"])
def test_a_missing_package_fails_and_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, package, None)
    finding = _guarded(_packages)
    assert finding.state == "missing"
    assert package in finding.detail
    assert finding.remedy == f"pip install '{package}'"


def test_every_python_package_that_is_depended_on_is_checked():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*?)\]", text, re.M | re.S)
    assert dependencies is not None
    # Packages of headers and libraries are looked for by the checks that use them.
    python = {line for line in re.findall(r'"(.+?)"', dependencies[1]) if "nvidia-" not in line}
    assert python == set(REQUIREMENTS.values())


@pytest.mark.parametrize(
    ("supported", "state"),
    [((12, 8), "missing"), ((13, 0), "ok"), ((13, 2), "ok"), ((14, 0), "ok"), (None, "absent")],
)
def test_the_driver_must_be_of_the_compiler_s_cuda(
    supported: tuple[int, int] | None, state: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(driver, "driver_cuda_version", lambda: supported)
    monkeypatch.setattr("deep_moe.emulator.nvrtc.nvrtc_version", lambda: (13, 1))
    finding = _guarded(doctor._driver)
    assert finding.state == state
    if supported is not None:
        assert "kernels of NVRTC 13.1 need one for CUDA 13, 580 or newer" in finding.detail
    assert bool(finding.remedy) == (state == "missing")


def test_the_driver_s_version_is_read(monkeypatch: pytest.MonkeyPatch):
    class Library:
        @staticmethod
        def cuDriverGetVersion(pointer):  # noqa: N802
            pointer._obj.value = 13020
            return 0

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library)
    assert driver_cuda_version() == (13, 2)


def test_a_check_that_fails_in_any_way_is_a_finding():
    def _some_check() -> Finding:
        raise AttributeError("a broken package")

    assert _guarded(_some_check) == Finding("some check", "missing", "a broken package")


def test_the_table_names_every_check():
    printed = CliRunner().invoke(app, ["doctor"]).stdout
    for name in ("python", "torch", "headers", "compiler", "kernel cache", "emulator", "GPU"):
        assert name in printed


def test_a_driver_for_an_older_cuda_is_refused_at_the_first_kernel(monkeypatch: pytest.MonkeyPatch):
    for supported, is_refused in (((12, 9), True), ((13, 0), False), (None, False)):
        driver.require_driver.cache_clear()
        monkeypatch.setattr(driver, "driver_cuda_version", lambda found=supported: found)
        if is_refused:
            with pytest.raises(DeepMoEError, match=r"580 or newer; got one for CUDA 12\.9"):
                driver.require_driver()
        else:
            driver.require_driver()
    driver.require_driver.cache_clear()


def test_what_ranks_could_share_is_said(monkeypatch: pytest.MonkeyPatch):
    linked = {"a": "b", "b": "a"}
    properties = [SimpleNamespace(uuid=name) for name in "abc"]
    for name, stand_in in (
        ("is_available", lambda: True),
        ("device_count", lambda: 3),
        ("current_device", lambda: 0),
        ("get_device_properties", lambda index: properties[index]),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(peers, "own_problem", lambda device: None)
    monkeypatch.setattr(peers, "link_of_gpus", lambda own, peer: linked.get(own) == peer)
    monkeypatch.setattr(peers, "fabric_of", lambda uuid: peers.Fabric("rack.1", None))
    finding = _guarded(doctor._shared_memory)
    assert finding.detail == (
        "no link between GPUs 0 and 2, 1 and 2; with other machines: NVLink domain rack.1"
    )
    assert finding.state == "absent"
    monkeypatch.setattr(peers, "link_of_gpus", lambda own, peer: True)
    monkeypatch.setattr(peers, "fabric_of", lambda uuid: peers.Fabric(problem="no fabric"))
    finding = _guarded(doctor._shared_memory)
    assert finding.detail == "3 GPUs, all linked; with other machines: no fabric"
    assert finding.state == "ok"
    monkeypatch.setattr(peers, "own_problem", lambda device: "a fault")
    assert _guarded(doctor._shared_memory) == Finding("shared memory", "missing", "a fault")
