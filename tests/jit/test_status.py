"""A kernel's WaitStatus as an error text."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from deep_moe.emulator import library
from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.jit.kernel_args import NO_PEER_RANK, WaitStatus
from deep_moe.jit.status import StatusCode, error_of, missing_ranks, wait_sites

INCLUDE = Path(__file__).parents[2] / "include" / "deep_moe"


def site(text: str) -> int:
    (number,) = (number for number, words in wait_sites().items() if words == text)
    return number


def test_no_failure_is_no_error() -> None:
    assert error_of(WaitStatus(), rank=0) is None


def test_a_timeout_says_who_waited_where_for_whom() -> None:
    status = WaitStatus(
        code=StatusCode.TIMEOUT,
        site=site("rank barrier before combine"),
        cta=3,
        warp=2,
        peer_rank=0,
        expected=2,
        seen=1,
        waited_ns=30_000_000_000,
        missing_ranks=(0b1, 0b10),
    )
    error = error_of(status, rank=1)
    assert isinstance(error, MegaMoETimeoutError)
    assert str(error) == (
        "rank 1, CTA 3, warp 2 waited 30.0 s for rank barrier before combine "
        "(missing: ranks 0, 65): expected 2, saw 1"
    )


def test_a_wait_without_peers_names_none() -> None:
    status = WaitStatus(code=StatusCode.TIMEOUT, site=1, peer_rank=NO_PEER_RANK)
    assert missing_ranks(status) == []
    assert "missing" not in str(error_of(status, rank=0))


def test_a_peer_without_a_set_is_named() -> None:
    status = WaitStatus(code=StatusCode.TIMEOUT, site=5, peer_rank=7)
    assert "missing: rank 7" in str(error_of(status, rank=0))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (StatusCode.POOL_OVERFLOW, "pool"),
        (StatusCode.REFUSED_BY_PEER, "another rank refused"),
        (99, "unknown code 99"),
    ],
)
def test_other_codes_are_errors_too(code: int, text: str) -> None:
    error = error_of(WaitStatus(code=code), rank=0)
    assert isinstance(error, MegaMoEError)
    assert not isinstance(error, MegaMoETimeoutError)
    assert text in str(error)


def test_a_report_is_read_when_it_is_complete() -> None:
    """A host call may look between a failure and what the kernel has to say of it."""
    status = WaitStatus(code=StatusCode.REPORTING, cta=3)

    def complete() -> None:
        status.seen, status.expected = 48, 24
        status.code = StatusCode.RECV_OVERFLOW

    kernel = threading.Timer(0.05, complete)
    kernel.start()
    assert "would get 48 rows, padding included; max_recv_rows is 24" in str(error_of(status, 0))
    kernel.join()


@pytest.mark.parametrize("first", [StatusCode.TIMEOUT, StatusCode.REPORTING])
def test_fields_are_read_behind_a_fence(monkeypatch: pytest.MonkeyPatch, first: StatusCode) -> None:
    """As on a processor that reads ahead: until the fence, fields are as they were."""
    status = WaitStatus(code=first)

    def fence() -> None:
        assert status.code == StatusCode.TIMEOUT
        status.cta, status.warp, status.seen = 3, 2, 7

    def sleep(seconds: float) -> None:
        status.code = StatusCode.TIMEOUT

    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(dm_fence=fence))
    monkeypatch.setattr("time.sleep", sleep)
    text = str(error_of(status, rank=0))
    assert "CTA 3, warp 2 waited" in text
    assert text.endswith("saw 7")


def test_an_error_is_told_where_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a source checkout and a GPU nobody has built the emulator."""

    def load() -> None:
        pytest.fail("the emulator's library was asked for")

    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(library, "load", load)
    assert "pool" in str(error_of(WaitStatus(code=StatusCode.POOL_OVERFLOW), rank=0))


def test_a_kernel_that_is_ended_in_its_report_is_an_error() -> None:
    assert "did not get to say why" in str(error_of(WaitStatus(code=StatusCode.REPORTING), rank=0))


def test_every_wait_site_has_a_text() -> None:
    header = (INCLUDE / "sync" / "wait.cuh").read_text()
    body = header.split("enum class WaitSite")[1].split("};")[0]
    assert len(wait_sites()) == body.count("=") > 10
    assert len(set(wait_sites().values())) == len(wait_sites())


def test_codes_are_those_of_the_kernel() -> None:
    header = (INCLUDE / "layout" / "kernel_args.cuh").read_text()
    body = header.split("enum class WaitCode")[1].split("};")[0]
    kernel_codes = {name.upper(): int(n) for name, n in re.findall(r"(\w+) = (\d+),", body)}
    assert {
        code.name: code.value for code in StatusCode if code.name in kernel_codes
    } == kernel_codes
    assert StatusCode.REFUSED_BY_PEER not in kernel_codes.values()
