"""Whatever stands in an argument's place, a call takes it, or its error names the argument.

No kernel is compiled or launched here: a call that comes so far has taken its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deep_moe import jit
from deep_moe.emulator.machine import Machine
from deep_moe.errors import CheckpointError
from deep_moe.fused import loaded_kernels
from docs.site_hooks import documented_errors

from .public_calls import CALLS
from .wrong_values import Change, changes

Case = tuple[str, Any, Change]  # an argument, what it takes, and what to make of that
# Another shape or type than those of the other arguments may be what these have to change.
OF_TWO_ARGUMENTS = (
    "a row more",
    "a column less",
    "no columns",
    "a dimension",
    "turned",
    "a tensor",
)
OF_TWO_ARGUMENTS += ("a scalar tensor", "torch.", "on the meta device")


# Without these the other arguments mean something else.
LEFT_OUT = ("arch", "token_format", "num_groups", "w3")


TAKEN = "taken"
# After a call that has taken its arguments, but did not run, these refuse whatever comes.
BEGIN_SOMETHING = tuple(
    f"{kind}LowLatencyAllToAll.{step}"
    for kind in ("", "TwoLevel")
    for step in ("dispatch", "combine")
)


class Taken(BaseException):
    """The call has taken its arguments."""


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def take(*_: Any, **__: Any) -> None:
        raise Taken

    def switch() -> None:
        # A launch that fails would leave a buffer that refuses further calls.
        loaded_kernels.built_kernel.cache_clear()
        monkeypatch.setattr(jit, "compile_cached", take)
        monkeypatch.setattr(Machine, "launch", take)

    return switch


def cases(arguments: dict[str, Any]) -> list[Case]:
    return [(name, value, change) for name, value in arguments.items() for change in changes(value)]


def check(function: Any, arguments: dict[str, Any], case: Case, raised: set[str]) -> str | None:
    """What is wrong with the answer to a case. raised: gets the name of an error that is right."""
    name, value, (words, change) = case
    what: Exception
    try:
        changed = change(value)
    except Exception:  # there is no such change of this value
        return None
    may_name = [name]
    if words.startswith(OF_TWO_ARGUMENTS) or (words == "None" and name in LEFT_OUT):
        may_name = [*arguments]
    try:
        function(**{**arguments, name: changed})
    except Taken:
        return TAKEN
    except (TypeError, ValueError) as error:
        is_right = any(re.search(rf"(?<!\w){other}(?![A-Za-z])", str(error)) for other in may_name)
        what = error
    except CheckpointError as error:  # names a file or a tensor: tests/checkpoint
        is_right, what = True, error
    except MemoryError as error:
        is_right = words == "a large number" and "what the given sizes take" in str(error)
        what = error
    except Exception as error:
        is_right, what = False, error
    else:
        return None
    if not is_right:
        return f"{name}, {words}: {type(what).__name__}: {what}"
    raised.add("ValueError" if isinstance(what, ValueError) else type(what).__name__)
    return None


@pytest.mark.parametrize("call", CALLS)
def test_errors_name_the_argument(
    call: str, nothing_runs: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the docstring lists each kind of error that comes."""
    monkeypatch.chdir(tmp_path)  # where paths such as "text" lead
    function, arguments = CALLS[call]()
    nothing_runs()
    found, raised = [], set[str]()
    for case in cases(arguments):
        answer = check(function, arguments, case, raised)
        if answer == TAKEN and call in BEGIN_SOMETHING:
            break
        if answer not in (None, TAKEN):
            found.append(answer)
    assert found == [], "\n".join(found)
    assert raised - documented_errors(function) == set()
