"""Puts bugs into copies of the sources, and says who notices them: what the tests of all catalogues
share."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from deep_moe.emulator import EmulatorError, RaceDetected
from deep_moe.errors import MegaMoEError, MegaMoETimeoutError
from deep_moe.fused.loaded_kernels import built_kernel
from deep_moe.jit import headers

from .catalogue import Edit, Mutation, TextEdit
from .marks import find_marks

ROOT = Path(__file__).parents[2]
INCLUDE = ROOT / "include" / "deep_moe"


def with_text_edit(edit: TextEdit, text: str) -> str:
    assert text.count(edit.old) == 1, f"{edit.file}: {edit.old!r} does not stand there once"
    return text.replace(edit.old, edit.new)


def new_statement(edit: Edit, statement: str) -> str:
    """What stands in place of a mark's statement."""
    if edit.old is None:
        return edit.new
    tokens = [re.escape(token) for token in re.findall(r"\w+|\S", edit.old)]
    whole_words = [rf"\b{token}\b" if token[-1].isalnum() else token for token in tokens]
    matches = list(re.finditer(r"\s*".join(whole_words), statement))
    assert len(matches) == 1, f"mark {edit.mark}: {edit.old!r} does not stand there once"
    return statement[: matches[0].start()] + edit.new + statement[matches[0].end() :]


def with_edits(edits: Sequence[Edit], include: Path) -> dict[Path, str]:
    """The new text of each header that the edits change."""
    marks = find_marks(include)
    pieces: dict[Path, list[tuple[int, int, str]]] = {}  # begin, end, what stands there
    for edit in edits:
        (place,) = marks[edit.mark]
        statement = place.path.read_text()[place.begin : place.end]
        pieces.setdefault(place.path, []).append(
            (place.begin, place.end, new_statement(edit, statement))
        )
        if edit.behind is not None:
            (other,) = marks[edit.behind]
            assert other.path == place.path
            assert other.begin >= place.end
            assert statement.endswith(";"), f"mark {edit.mark}: the head of a block cannot move"
            pieces[place.path].append((other.end, other.end, f"\n{statement}"))
    texts = {}
    for path, changes in pieces.items():
        text = path.read_text()
        for begin, end, new in sorted(changes, reverse=True):
            text = text[:begin] + new + text[end:]
        texts[path] = text
    return texts


def header_edits(mutation: Mutation) -> list[Edit]:
    return [edit for edit in mutation.edits if isinstance(edit, Edit)]


def text_edit(mutation: Mutation) -> TextEdit:
    (edit,) = mutation.edits
    assert isinstance(edit, TextEdit)
    return edit


def plant_into_header(mutation: Mutation, folder: Path) -> headers.HeaderFolder:
    """A copy of the headers with the bug in it. folder: of the test, in that of all tests of this
    process, where one copy takes another's place: kernels whose headers have other paths could not
    share what other libraries' headers come to (emulator/precompiled_headers.py)."""
    include = folder.parent / "planted"
    shutil.rmtree(include, ignore_errors=True)
    shutil.copytree(headers.find_library().path, include)
    for path, text in with_edits(header_edits(mutation), include).items():
        path.write_text(text)
    return headers.HeaderFolder(include, f"mutation {headers.tree_digest(include)}")


def plant_into_module(edit: TextEdit) -> ModuleType:
    """The module of the host's side, made anew with the bug in it."""
    name = edit.file.removesuffix(".py").replace("/", ".")
    path = importlib.import_module(name).__file__
    assert path is not None
    module = ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    exec(compile(with_text_edit(edit, Path(path).read_text()), path, "exec"), module.__dict__)
    return module


def noticed_in(run: Callable[[], bool]) -> str:
    """Who noticed something: "race", "misuse", "timeout", "result" or "" (nobody). `run` says
    whether the results are right, or fails as a test does."""
    try:
        return "" if run() else "result"
    except AssertionError:
        return "result"
    except RaceDetected:
        return "race"
    except EmulatorError:
        return "misuse"
    except RuntimeError as error:
        if "waited" not in str(error):
            raise
        return "timeout"


def noticed_in_test(folder: str, mutation: Mutation) -> str:
    """Who noticed something in the mutation's own test. folder: below tests, of that test."""
    module, _, name = mutation.test.partition("::")
    test = getattr(importlib.import_module(f"tests.{folder}.{module}"), name)

    def run() -> bool:
        try:
            test(**mutation.arguments)
        except MegaMoETimeoutError:
            raise
        except (pytest.fail.Exception, MegaMoEError):
            return False
        return True

    return noticed_in(run)


def check_edits(mutation: Mutation) -> None:
    """That its edits of headers are there, and change something."""
    texts = with_edits(header_edits(mutation), INCLUDE)
    assert texts
    for path, text in texts.items():
        assert text != path.read_text()


@contextmanager
def planted_in_headers(
    mutation: Mutation, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Kernels are compiled, for the emulator alone, from headers with the bug."""
    planted = plant_into_header(mutation, folder)
    monkeypatch.setattr(headers, "find_library", lambda: planted)
    built_kernel.cache_clear()
    try:
        yield
    finally:
        built_kernel.cache_clear()
