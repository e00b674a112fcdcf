"""The command `warpcheck`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import EmulatorError
from ..machine import SCHEDULES
from .causes import Cause, Suppression, read_suppressions, split_suppressed
from .launch_files import run_launch_file
from .options import CHIP_NAMES, MAX_DEVICES, MAX_SMS, GpuOptions
from .programs import ProgramRun, merge_runs, run_program, run_side_by_side
from .sarif import sarif_log

FAIL_LEVELS = ("error", "warning", "never")
NOT_STARTED = 2

# Typer brings this class along or takes it from click, and exports only what derives from it.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# Options come before the program; all that follows is the program's own.
CONTEXT_SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def check(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM [ARGS]...",
            help="The program and its arguments, or KERNEL.ptx LAUNCH.toml.",
            show_default=False,
        ),
    ],
    chip: Annotated[
        str, typer.Option("--chip", help=f"The emulated GPU: {', '.join(CHIP_NAMES)}.")
    ] = "h100",
    devices: Annotated[
        int, typer.Option("--devices", min=1, max=MAX_DEVICES, help="How many GPUs there are.")
    ] = 1,
    sms: Annotated[
        int | None,
        typer.Option(
            "--sms",
            min=1,
            max=MAX_SMS,
            help="Multiprocessors of each; fewer than the chip has make programs that fill it "
            "faster.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Picks the interleaving of warps.")
    ] = 0,
    runs: Annotated[
        int,
        typer.Option("--runs", min=1, help="How often to run it, each time with the next seed."),
    ] = 1,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            min=1,
            help="Runs of a program at a time. What each prints comes when it has ended.",
        ),
    ] = 1,
    schedule: Annotated[
        str, typer.Option("--schedule", help=f"How warps take turns: {', '.join(SCHEDULES)}.")
    ] = "random",
    checks: Annotated[
        bool, typer.Option("--checks/--no-checks", help="Look for data races and the like.")
    ] = True,
    stop: Annotated[
        bool, typer.Option("--stop", help="A finding ends its kernel with an error.")
    ] = False,
    strict_tcgen05: Annotated[
        bool, typer.Option("--strict-tcgen05", help="Ask for tcgen05 fences everywhere.")
    ] = False,
    suppressions: Annotated[
        Path | None,
        typer.Option(
            "--suppressions",
            help="File of known findings: a kind and a place in each line, both may be patterns.",
        ),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option("--fail-on", help=f"The least severity that fails: {', '.join(FAIL_LEVELS)}."),
    ] = "error",
    exit_code: Annotated[
        int, typer.Option("--exit-code", min=0, max=255, help="Exit status of such findings.")
    ] = 1,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0.001, help="Seconds after which a run is ended."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON document; the program prints to stderr."),
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json-file", help="Write the JSON document to a file.")
    ] = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", help="Write the findings as SARIF 2.1.0.")
    ] = None,
) -> int:
    """Run a CUDA program without a GPU and check its kernels.

    The program is not changed: a stand-in takes the place of CUDA's driver and runtime, and the
    emulator executes the PTX of its kernels. Data races, missing fences and barriers, accesses out
    of bounds, uninitialized memory and the like are listed by cause, with the source lines if the
    program was compiled with -lineinfo.

    The exit status is the program's own if it is not 0, else that of --exit-code if something was
    found or could not be emulated, else 0.
    """
    if fail_on not in FAIL_LEVELS:
        raise ValueError(f"--fail-on must be one of {', '.join(FAIL_LEVELS)}; got {fail_on!r}")
    known = read_suppressions(suppressions) if suppressions else []
    options = GpuOptions(
        chip=chip,
        devices=devices,
        sms=sms,
        seed=seed,
        schedule=schedule,  # type: ignore[arg-type]
        checks=checks,
        stop_at_findings=stop,
        strict_tcgen05=strict_tcgen05,
    )
    every = [replace(options, seed=seed + number) for number in range(runs)]
    if len(command) == 2 and command[0].endswith(".ptx"):
        results = [run_launch_file(Path(command[0]), Path(command[1]), each) for each in every]
    elif jobs == 1:
        # The document has stdout to itself.
        streams: dict[str, Any] = {"stdout": sys.stderr} if as_json else {}
        results = [run_program(command, each, timeout=timeout, **streams) for each in every]
    else:
        out = sys.stderr if as_json else sys.stdout
        results = run_side_by_side(
            command, every, jobs, timeout=timeout, stdout=out.buffer, stderr=sys.stderr.buffer
        )
    run = merge_runs(results)
    reported, suppressed, unused = split_suppressed(run.causes, known)
    document = _document(command, run, reported, suppressed)
    if json_file:
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if sarif:
        log = sarif_log(reported, __version__)
        sarif.write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _print_report(run, reported, suppressed, unused, suppressions)
    if run.status:
        return run.status
    if fail_on == "never":
        return 0
    spared = "warning" if fail_on == "error" else None
    fails = any(cause.severity != spared for cause in reported)
    return exit_code if fails or any(call.is_unserved for call in run.calls) else 0


def _document(
    command: list[str], run: ProgramRun, reported: list[Cause], suppressed: list[Cause]
) -> dict[str, Any]:
    return {
        "command": command,
        "status": run.status,
        "launches": run.launches,
        "warp_instructions": run.warp_instructions,
        "seconds": round(run.seconds, 3),
        "causes": [cause.as_dict() for cause in reported],
        "suppressed": [cause.as_dict() for cause in suppressed],
        "refused_calls": [
            {"call": call.call, "result": call.result, "text": call.text} for call in run.calls
        ],
    }


def _print_report(
    run: ProgramRun,
    reported: list[Cause],
    suppressed: list[Cause],
    unused: list[Suppression],
    path: Path | None,
) -> None:
    def say(text: str) -> None:
        print(f"warpcheck: {text}", file=sys.stderr)

    sys.stdout.flush()
    for call in run.calls:
        say(f"refused: {call.text}")
    for cause in reported:
        say(f"{cause}\n  during {cause.launch}")
    for one in unused:
        say(f"{path}:{one.line}: nothing was suppressed by '{one.kind} {one.place}'")
    counts = [
        f"{sum(cause.severity == severity for cause in reported)} {plural}"
        for severity, plural in (
            ("error", "errors"),
            ("refusal", "refusals"),
            ("warning", "warnings"),
        )
    ]
    if suppressed:
        counts.append(f"{len(suppressed)} suppressed")
    if run.calls:
        counts.append(f"{len(run.calls)} refused calls")
    say(
        f"{', '.join(counts)}; {run.launches} launches, {run.warp_instructions} warp instructions, "
        f"{run.seconds:.1f} s in kernels"
    )


def main(words: list[str] | None = None, name: str = "warpcheck") -> None:
    """Entry point of `warpcheck`.

    Args:
        words: of the command line, by default the process's.
        name: of the command, as its help has it.
    """
    # Markdown's paragraphs are as wide as the terminal, not as in the source.
    app = typer.Typer(
        add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode="markdown"
    )
    app.command(context_settings=CONTEXT_SETTINGS)(check)
    try:
        status = app(words, prog_name=name, standalone_mode=False)
    except (EmulatorError, ValueError, OSError) as error:
        print(f"warpcheck: {error}", file=sys.stderr)
        status = NOT_STARTED
    except _UsageError as error:
        error.show()  # type: ignore[attr-defined]
        status = NOT_STARTED
    sys.exit(status)
