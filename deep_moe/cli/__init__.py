"""The command line `deep-moe`: each command parses its options, calls the library and prints.

Nothing heavy is imported until a command runs, so `deep-moe --help` answers at once, and nothing is
probed but by `deep-moe doctor`. Every failure ends with a non-zero exit status.
"""

from __future__ import annotations

import sys

import typer

from ..errors import DeepMoEError
from . import cache, config, doctor, fuzz, run, trace, tune, warmup
from .output import print_error

app = typer.Typer(
    name="deep-moe",
    help="Run, inspect and prepare fused mixture-of-experts layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("run")(run.run)
app.command("config")(config.config)
app.command("fuzz")(fuzz.fuzz)
app.command("trace")(trace.trace)
app.command("tune")(tune.tune)
app.command("warmup")(warmup.warmup)
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Entry point. What the library refuses is shown as one line; anything else is a traceback."""
    try:
        app()
    except (DeepMoEError, ValueError, OSError) as error:
        print_error(str(error))
        sys.exit(1)
