"""`deep-moe fuzz`: random small layers under random schedules, all checks on, for a while."""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .checks import check_output_file
from .options import MAX_SEED, JsonOption, check_weights
from .output import new_table, print_json, stderr, stdout

if TYPE_CHECKING:
    from rich.table import Table

    from deep_moe.trial.fuzzing import Case

NUM_WORKERS = 2


def fuzz(
    hours: Annotated[float, typer.Option("--hours", min=0, help="Time limit in hours.")] = 0,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0, help="Minutes, added to --hours.")
    ] = 0,
    first: Annotated[
        int, typer.Option("--first", min=0, max=MAX_SEED, help="Number of the first case.")
    ] = 0,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Stop after this many cases.")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(
            "--path",
            help="Cases of this path only: fused, split, throughput (the layer of many tokens), "
            "grouped (GroupedExperts), two_level (TwoLevelMoE, several domains), adapters (what "
            "adapters of engines do with ranks' tokens in front of the fused call), training (the "
            "differentiable layer, forward and backward) or product (grouped_product). Otherwise "
            "all in turn.",
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", help="Cases of this architecture only.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Cases with weights of this format only.")
    ] = None,
    biases: Annotated[
        bool | None,
        typer.Option("--biases/--no-biases", help="Only cases with biases, or only without."),
    ] = None,
    shared_experts: Annotated[
        int | None,
        typer.Option("--shared-experts", help="Cases with so many shared experts only: 0, 1 or 3."),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid", help="Run every case of the grid once; takes some hours of one core."
        ),
    ] = False,
    corpus: Annotated[
        Path | None,
        typer.Option(
            "--corpus",
            dir_okay=False,
            help="File of case numbers, one per line. They run first; failing cases are added.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes that run cases.")
    ] = NUM_WORKERS,
    as_json: JsonOption = False,
) -> None:
    """Run random small layers with all checks on. Each failure ends with the command that repeats
    it, and the run ends with a summary of the cases."""
    from deep_moe.targets import target_of
    from deep_moe.trial.adapter_fuzzing import AdapterCase
    from deep_moe.trial.fuzz_workers import outcomes
    from deep_moe.trial.fuzzing import (
        ARCHS,
        CASES_PER_KERNEL,
        NUMS_SHARED,
        Coverage,
        FuzzCase,
        grid_size,
    )
    from deep_moe.trial.grouped_fuzzing import GroupedCase
    from deep_moe.trial.product_fuzzing import ProductCase
    from deep_moe.trial.split_fuzzing import SplitCase
    from deep_moe.trial.throughput_fuzzing import ThroughputCase
    from deep_moe.trial.training_fuzzing import TrainingCase
    from deep_moe.trial.two_level_fuzzing import TwoLevelCase

    if not hours and not minutes and count is None and not grid:
        raise typer.BadParameter("say how long: --hours, --minutes, --count or --grid")
    if grid and corpus is not None:
        raise typer.BadParameter("--corpus is for cases outside of the grid")
    kinds: dict[str, type[Case]] = {
        kind.path: kind
        for kind in (
            *(FuzzCase, SplitCase, ThroughputCase, GroupedCase),
            *(TwoLevelCase, AdapterCase, TrainingCase, ProductCase),
        )
    }
    if path not in (None, *kinds):
        raise typer.BadParameter(f"--path must be one of {', '.join(kinds)}; got {path!r}")
    if grid and path not in (None, FuzzCase.path):
        raise typer.BadParameter(f"--grid must be without --path {path}: it is the fused call's")
    has_layers = path is None or issubclass(kinds[path], FuzzCase)
    if not has_layers and any(o is not None for o in (arch, weights, biases, shared_experts)):
        raise typer.BadParameter(
            f"--arch, --weights, --biases and --shared-experts must be without --path {path}: "
            "it has axes of its own"
        )
    if arch is not None and arch not in ARCHS:
        raise typer.BadParameter(f"--arch must be one of {', '.join(ARCHS)}; got {arch!r}")
    if weights is not None:
        check_weights(weights)
        if arch is not None:
            target_of(arch).weights_of(weights)
    if shared_experts not in (None, *NUMS_SHARED):
        allowed = ", ".join(map(str, NUMS_SHARED))
        raise typer.BadParameter(f"--shared-experts must be one of {allowed}; got {shared_experts}")
    known = [] if corpus is None else _numbers(corpus)  # and what fails later
    seconds = 3600 * hours + 60 * minutes
    only = {"arch": arch, "weights": weights, "shared-experts": shared_experts}
    chosen = "".join(f" --{name} {value}" for name, value in only.items() if value is not None)
    if biases is not None:
        chosen += " --biases" if biases else " --no-biases"

    def is_wanted(case: Case) -> bool:
        if not isinstance(case, FuzzCase):
            return not chosen
        shape = case.shape
        of_case = (case.arch, shape.weights, shape.num_shared_experts, shape.biases)
        wanted = (arch, weights, shared_experts, biases)
        return all(own in (None, one) for own, one in zip(wanted, of_case, strict=True))

    cases: Iterable[Case]
    if grid:
        cases = map(FuzzCase.of_grid, range(first, grid_size()))
    else:
        # Those that take least time have most turns.
        turns = (
            *(FuzzCase, SplitCase, TrainingCase),
            *(FuzzCase, ThroughputCase, ProductCase, TrainingCase),
            *(FuzzCase, GroupedCase, AdapterCase, TwoLevelCase, ProductCase, TrainingCase),
        )
        drawn: Sequence[type[Case]] = turns if path is None else (kinds[path],)
        cases = itertools.chain(
            (kind.of(number) for number in tuple(known) for kind in dict.fromkeys(drawn)),
            _in_turn(drawn, first, frozenset(known), CASES_PER_KERNEL),
        )
    cases = itertools.islice(filter(is_wanted, cases), count)
    failures: list[dict[str, Any]] = []
    coverage = Coverage()
    processor_seconds = 0.0
    # A few cases are over before a second process has begun.
    num_workers = workers if count is None or count > CASES_PER_KERNEL else 1
    ends_at = time.time() + seconds if seconds else None
    with stderr().status("starting") as status:
        for outcome in outcomes(cases, num_workers=num_workers, ends_at=ends_at):
            case, number = outcome.case, outcome.case.number
            coverage.add(case, outcome.failure)
            processor_seconds += outcome.seconds
            status.update(f"{coverage.num_cases} cases, {coverage.num_failed} failed")
            if not outcome.failure:
                continue
            words = "fuzz --grid" if grid else f"fuzz --path {case.path}"
            repeat = f"deep-moe {words} --first {number} --count 1{chosen}"
            failures.append({"case": str(case), "failure": outcome.failure, "repeat": repeat})
            if not as_json:
                stdout().print(f"{case}\n{outcome.failure}\nrepeat: {repeat}")
            if corpus is not None and number not in known:
                known.append(number)
                with corpus.open("a") as file:
                    file.write(f"{number}\n")
    covered = {axis: dict(counts) for axis, counts in coverage.values.items()}
    if as_json:
        print_json(
            {
                "num_cases": coverage.num_cases,
                "processor_seconds": round(processor_seconds, 1),
                "failures": failures,
                "covered": covered,
                "num_pairs": coverage.num_pairs,
                "num_all_pairs": coverage.num_all_pairs,
            }
        )
    else:
        stdout().print(_coverage_table(covered))
        stdout().print(
            f"{coverage.num_cases} cases, {coverage.num_failed} failed; "
            f"{coverage.num_pairs} of {coverage.num_all_pairs} pairs of values met; "
            f"{processor_seconds:.0f} s of processors"
        )
    if failures:
        raise typer.Exit(1)


MAX_VALUES_SHOWN = 8


def _coverage_table(covered: Mapping[str, Mapping[str, int]]) -> Table:
    table = new_table("what the cases were", "axis", "value: cases", whole=("axis",))
    for name, counts in covered.items():
        if len(counts) <= MAX_VALUES_SHOWN:
            text = ", ".join(f"{value}: {count}" for value, count in counts.items())
        else:
            values = list(counts)
            text = f"{len(values)} values, {values[0]} to {values[-1]}"
        table.add_row(name, text)
    return table


def _numbers(corpus: Path) -> list[int]:
    """Those in the file, each once. A file that does not exist yet has none."""
    check_output_file("--corpus", corpus)
    words = corpus.read_text(errors="replace").split() if corpus.exists() else []
    if not all(word.isdecimal() and len(word) < 20 and int(word) <= MAX_SEED for word in words):
        raise typer.BadParameter(f"--corpus must hold one case number per line: {corpus}")
    return list(dict.fromkeys(map(int, words)))


def _in_turn(
    kinds: Sequence[type[Case]],
    first: int,
    known: Container[int],
    num_in_a_row: int,
) -> Iterator[Case]:
    """Cases of these kinds from number `first` on that are not known. Kinds take turns, each with
    numbers that share a kernel; one that is named twice has two turns."""
    numbers = {kind: itertools.count(first) for kind in kinds}
    for kind in itertools.cycle(kinds):
        for number in numbers[kind]:
            if number not in known:
                yield kind.of(number)
            if (number + 1) % num_in_a_row == 0:
                break
