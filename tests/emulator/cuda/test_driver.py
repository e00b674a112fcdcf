"""The stand-in for CUDA's driver, by a program that finds it as programs do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from warpcheck.cuda import GpuOptions, ProgramRun, run_program

from .building import host_program, kernels_ptx

TIMEOUT = 120


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("image") / "kernels.ptx"
    path.write_text(kernels_ptx())
    return path


def run(scenario: str, image: Path, **options: object) -> tuple[ProgramRun, str]:
    """What came of the program, and what it printed."""
    output = image.parent / f"{scenario}.txt"
    with output.open("w") as stream:
        result = run_program(
            [str(host_program("driver.cpp")), scenario, str(image)],
            GpuOptions(**options),  # type: ignore[arg-type]
            timeout=TIMEOUT,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    return result, output.read_text()


@pytest.mark.parametrize(
    "scenario",
    [
        "adds",
        "packed_arguments",
        "variables",
        "streams",
        "legacy_stream",
        "peers",
        "clusters",
        "cooperative",
        "shared_memory",
        "tensor_map",
        "im2col_map",
        "memory",
        "words_in_memory",
        "graphs",
    ],
)
def test_a_program_runs(scenario: str, image: Path):
    result, printed = run(scenario, image, devices=2)
    assert (result.status, printed) == (0, "ok\n")
    assert result.findings == ()


@pytest.mark.parametrize("scenario", ["out_of_bounds", "use_after_free"])
def test_a_bad_access_ends_the_kernel_as_on_a_gpu(scenario: str, image: Path):
    result, printed = run(scenario, image)
    assert (result.status, printed) == (0, "ok\n")
    (cause,) = result.causes
    assert (cause.kind, cause.severity) == ("out_of_bounds", "error")
    assert cause.launch.startswith("add<<<")


def test_a_race_of_several_launches_is_one_cause(image: Path):
    result, printed = run("race", image)
    assert (result.status, printed) == (0, "ok\n")
    (cause,) = result.causes
    assert (cause.kind, cause.severity, cause.kernels) == ("race", "error", ("race",))
    assert result.launches == 3


def test_refused_calls_say_why(image: Path):
    result, _ = run("memory", image)
    assert [call.call for call in result.calls] == ["cuMemcpyHtoD", "cuMemFree"]
    assert "goes 44 bytes beyond the end of allocation 1" in result.calls[0].text
    result, _ = run("tensor_map", image)
    assert "globalStrides[0] must be a multiple of 16 bytes" in result.calls[0].text
    result, _ = run("im2col_map", image)
    assert "pixelBoxLowerCorner[0] must be -32768 to 32767" in result.calls[0].text


def test_the_status_is_the_programs(image: Path):
    assert run("exits_with_3", image)[0].status == 3


def test_a_program_that_hangs_is_ended(image: Path):
    result = run_program([str(host_program("driver.cpp")), "waits_for_ever", str(image)], timeout=1)
    assert result.status == 124


def test_ptx_of_another_architecture_is_refused(tmp_path: Path):
    image = tmp_path / "kernels.ptx"
    image.write_text(kernels_ptx("sm_100a"))
    result, _ = run("adds", image)
    assert result.status == 10
    assert "the PTX is for sm_100a, and the emulated GPU is sm_90" in result.calls[0].text
    result, printed = run("adds", image, chip="b200")
    assert (result.status, printed) == (0, "ok\n")


def test_machine_code_is_refused_with_what_to_compile(tmp_path: Path):
    image = tmp_path / "kernels.cubin"
    image.write_bytes(b"\x7fELF" + bytes(64))
    result, _ = run("adds", image)
    assert result.status == 10
    assert "-gencode arch=compute_90a,code=compute_90a" in result.calls[0].text
    assert result.calls[0].is_unserved


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("chip", "h99", "one of h100, h200"),
        ("schedule", "never", "one of random, round_robin"),
        ("devices", 0, "1 to 64"),
        ("sms", 5000, "1 to 1024"),
    ],
)
def test_wrong_options_are_named(field: str, value: object, allowed: str):
    with pytest.raises(ValueError, match=f"{field} must be {allowed}.*; got .*{value}"):
        GpuOptions(**{field: value})  # type: ignore[arg-type]
