"""`deep-moe check`: what the command `warpcheck` does. The emulator is imported when it runs."""

from __future__ import annotations

import typer

# All words, --help too, are the other command's.
CONTEXT_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def check(context: typer.Context) -> None:
    """Run a CUDA program, or a kernel's PTX, without a GPU, and report what is wrong with it: the
    command `warpcheck`. `deep-moe check --help` lists its options."""
    from deep_moe.emulator.cuda.command import main

    main(context.args, name="deep-moe check")
