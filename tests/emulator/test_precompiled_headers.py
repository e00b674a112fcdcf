"""Headers of other libraries are parsed once by a process that compiles several kernels."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from deep_moe.emulator import CompileError, compile_to_ptx, nvrtc
from deep_moe.emulator.precompiled_headers import (
    HEADER_STOP,
    MIN_FREE_BYTES,
    PrecompiledHeaders,
)
from deep_moe.jit import find_headers, render_kernel
from tests.kernels.conftest import small_config

OPTIONS = ("--gpu-architecture=sm_100a", "-Ia")
SOURCE = f"#include <other.h>\n{HEADER_STOP}int own;\n"


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=MIN_FREE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


@dataclass(frozen=True)
class Outcome:
    succeeded: bool


class Compiler:
    """Remembers what it was asked for. writes: whether it makes a precompiled header that it is
    asked for; fails: for which options it fails."""

    def __init__(
        self, *, writes: bool = True, fails: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.asked: list[list[str]] = []
        self.files: list[str] = []
        self._writes, self._fails = writes, fails

    def __call__(self, options: Sequence[str]) -> Outcome:
        more = [option for option in options if option not in OPTIONS]
        self.asked.append([option.partition("=")[0] for option in more])
        for option in more:
            name, _, path = option.partition("=")
            self.files.append(path)
            if name == "--create-pch" and self._writes:
                Path(path).write_bytes(b"parsed")
            if name == "--use-pch":
                assert Path(path).read_bytes() == b"parsed"
        return Outcome(not any(map(self._fails, more or [""])))


PLAIN: list[str] = []
MADE, USED = ["--create-pch"], ["--use-pch"]


def compiled(compiler: Compiler, times: int) -> PrecompiledHeaders:
    headers = PrecompiledHeaders()
    for _ in range(times):
        assert headers.compile(SOURCE, OPTIONS, compiler).succeeded
    return headers


def test_the_second_source_makes_the_file_and_later_ones_use_it() -> None:
    compiler = Compiler()
    headers = compiled(compiler, 4)
    assert compiler.asked == [PLAIN, MADE, USED, USED]
    # The virtual architecture's, for PTX alone, is parsed like the real one's.
    virtual = ["--gpu-architecture=compute_100a", "-Ia"]
    compiler.asked.clear()
    headers.compile(SOURCE, virtual, lambda options: compiler(options[2:]))
    assert compiler.asked == [USED]


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (SOURCE.replace("other", "another"), OPTIONS),
        (SOURCE, ("--gpu-architecture=sm_103a", "-Ia")),
        (SOURCE, ("--gpu-architecture=sm_100a", "-Ib")),
    ],
)
def test_what_begins_otherwise_has_another_file(source: str, options: tuple[str, ...]) -> None:
    compiler = Compiler()
    headers = compiled(compiler, 2)
    headers.compile(source, options, lambda given: compiler(given[2:]))
    assert compiler.asked == [PLAIN, MADE, PLAIN]


def test_a_source_without_the_pragma_has_none() -> None:
    compiler, headers = Compiler(), PrecompiledHeaders()
    for _ in range(3):
        headers.compile("int own;\n", OPTIONS, compiler)
    assert compiler.asked == [PLAIN] * 3


def test_the_file_has_no_name() -> None:
    compiler = Compiler()
    compiled(compiler, 3)
    made, used = compiler.files
    assert not Path(made).parent.exists()
    assert used.startswith("/proc/self/fd/")


def test_where_none_can_be_made_nobody_tries_again() -> None:
    compiler = Compiler(fails=lambda option: option.startswith("--create-pch"))
    compiled(compiler, 4)
    assert compiler.asked == [PLAIN, MADE, PLAIN, PLAIN, PLAIN]


def test_where_the_compiler_makes_none_nobody_tries_again() -> None:
    compiler = Compiler(writes=False)
    compiled(compiler, 4)
    assert compiler.asked == [PLAIN, MADE, PLAIN, PLAIN]


def test_without_temporary_files_all_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/no-such-folder")
    compiler = Compiler()
    compiled(compiler, 3)
    assert compiler.asked == [PLAIN] * 3


def test_without_much_room_all_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC would end the process where the file does not fit."""
    usage = shutil.disk_usage("/")
    for free, asked in ((MIN_FREE_BYTES - 1, PLAIN), (MIN_FREE_BYTES, MADE)):
        found = usage._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, found=found: found)
        compiler = Compiler()
        compiled(compiler, 2)
        assert compiler.asked == [PLAIN, asked]


def test_one_that_cannot_be_used_is_left_alone() -> None:
    compiler = Compiler(fails=lambda option: option.startswith("--use-pch"))
    compiled(compiler, 4)
    assert compiler.asked == [PLAIN, MADE, USED, PLAIN, PLAIN]


def test_a_source_that_does_not_compile_says_nothing_of_the_file() -> None:
    broken, compiler, headers = Compiler(fails=lambda _: True), Compiler(), PrecompiledHeaders()
    headers.compile(SOURCE, OPTIONS, compiler)
    assert not headers.compile(SOURCE, OPTIONS, broken).succeeded
    headers.compile(SOURCE, OPTIONS, compiler)
    assert not headers.compile(SOURCE, OPTIONS, broken).succeeded
    headers.compile(SOURCE, OPTIONS, compiler)
    assert broken.asked == [MADE, PLAIN, USED, PLAIN]
    assert compiler.asked == [PLAIN, MADE, USED]


def test_other_threads_do_not_wait_for_the_file() -> None:
    headers, compiler = PrecompiledHeaders(), Compiler()
    headers.compile(SOURCE, OPTIONS, compiler)

    def meanwhile(options: Sequence[str]) -> Outcome:
        thread = threading.Thread(target=headers.compile, args=(SOURCE, OPTIONS, compiler))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        return compiler(options)

    headers.compile(SOURCE, OPTIONS, meanwhile)
    assert compiler.asked == [PLAIN, PLAIN, MADE]


@pytest.mark.slow
def test_a_kernel_is_the_same_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By NVRTC itself, for an SM100 kernel, in this process and in one that it begot."""
    headers = PrecompiledHeaders()
    monkeypatch.setattr(nvrtc, "_precompiled_headers", headers)
    paths = find_headers().include_paths
    source = render_kernel(small_config())
    assert HEADER_STOP in source

    def ptx(source: str = source) -> str:
        return compile_to_ptx(source, arch="sm_100a", include_paths=paths)

    plain, making, using = ptx(), ptx(), ptx()
    assert plain == making == using
    (file,) = headers._known.values()
    child = os.fork()
    if child == 0:
        os._exit(0 if ptx() == plain else 1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(CompileError, match="no_such_name"):
        ptx(source + "int i = no_such_name;\n")
    # It is what NVRTC reads: without its content there is none.
    os.truncate(f"/proc/self/fd/{file.fileno()}", 100)
    assert ptx() == plain
    assert list(headers._known.values()) != [file]
