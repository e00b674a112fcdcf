"""The command line `deep-moe`: each command parses its options, calls the library and prints.

Nothing heavy is imported until a command runs, so `deep-moe --help` answers at once, and nothing is
probed but by `deep-moe doctor`. Every failure ends with a non-zero exit status, and with --json it
is one JSON document on standard output, {"error": ...}.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
from typing import Annotated

import typer

from deep_moe import __version__
from deep_moe.errors import DeepMoEError

from . import cache, check, config, doctor, fuzz, run, time, timeline, trace, tune, warmup
from .layer_options import MODELS
from .output import print_error, print_json
from .packages import remedy

app = typer.Typer(
    name="deep-moe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("run")(run.run)
app.command("config")(config.config)
app.command("fuzz")(fuzz.fuzz)
app.command("time")(time.time)
app.command("timeline")(timeline.timeline)
app.command("trace")(trace.trace)
app.command("tune")(tune.tune)
app.command("warmup")(warmup.warmup)
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)
app.command("check", context_settings=check.CONTEXT_SETTINGS)(check.check)


def _flowing(docstring: str | None) -> str:
    """A docstring as help: Typer keeps the line breaks of a paragraph, wherever lines end.

    >>> _flowing("Run\\n    calls.\\n\\n    Then more.\\n    ")
    'Run calls.\\n\\nThen more.'
    """
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


for _command in (*app.registered_commands, *cache.app.registered_commands):
    assert _command.callback is not None
    _command.help = _flowing(_command.callback.__doc__)

# Typer brings this class along or takes it from click, and exports only what derives from it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"deep-moe {__version__}")
        raise typer.Exit


@app.callback(epilog=f"Models, for --model: {MODELS}.")
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Run, inspect and prepare fused mixture-of-experts layers."""


def main() -> None:
    """Entry point. What is refused is said in words; anything else is a traceback."""
    words = sys.argv[1:]
    as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads our output has gone. What is still in Python's buffer has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except _UsageError as error:
        error.show()  # type: ignore[attr-defined]
        if as_json:
            print_json({"error": error.format_message()})  # type: ignore[attr-defined]
        status = 2
    except Exception as error:
        text = _refusal(error)
        if text is None:
            raise
        print_error(text)
        if as_json:
            print_json({"error": text})
        status = 1
    sys.exit(status)


def _refusal(error: Exception) -> str | None:
    """What to say of an error, None if it is a fault of this program."""
    if isinstance(error, ImportError):
        return remedy(error)
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        # PyTorch's errors: of its own type on a GPU, told by their text on a CPU.
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    ):
        return f"not enough memory: {str(error).splitlines()[0] if str(error) else 'no details'}"
    from deep_moe.emulator import EmulatorError

    if isinstance(error, (DeepMoEError, EmulatorError, ValueError, OSError)):
        return str(error)
    return None
