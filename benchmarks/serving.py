"""Times whole models in vLLM or SGLang, with their experts in deep_moe and as the engine runs them
by itself.

    python -m benchmarks.serving --json serving-1.json
    python -m benchmarks.serving --gpus 2 --json serving-2.json
    python -m benchmarks.serving --server sglang --weights fp8 --json serving-sglang.json
    python -m benchmarks.serving --show serving-1.json serving-2.json --markdown a.md --svg a.svg

The model has Qwen3-MoE's shape, random weights that are made in place, and MXFP4 or FP8 experts of
a published model's sizes. It is served once for each of --engines, in processes of its own, one
after the other, with the server's default options: CUDA graphs, and in vLLM torch.compile. Over
several GPUs, attention is spread by heads and experts by expert parallelism, but for SGLang's own,
which have slices of all experts. The server must be importable, a folder on PYTHONPATH is enough;
nothing is fetched. All engines get the same requests.

Parts, in this order:

- prefill: 16 prompts of 2048 tokens that come at once. Tokens/s until the last first token.
- first: one prompt of 2048 tokens after the other. Milliseconds to the first token.
- decode: so many requests that all make tokens. Milliseconds from a step to the next.
- batch: 64 requests of 1024 tokens that make 128 more each, all at once. Tokens/s, read and made.
- mixed: requests of 256 to 2048 tokens that make 32 to 128 and come at random times, so many a
  second. Milliseconds to the first token, from when a request came, and between two tokens of it.

Each part runs once before it is timed. The report is written after each part. It says which class
ran each layer of experts; if deep_moe did not run all of them where it should, the run ends with an
error. It also says how many kernels deep_moe compiled, read and loaded until the engine was ready,
and until the end: the same numbers mean that no step waited for a kernel.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from deep_moe.cli.output import new_table, stdout
from deep_moe.heuristics import PRESETS
from deep_moe.trial.child_sessions import child_sessions

from .chart import Curve, Panel, Style, chart
from .served_model import (
    ENVIRONMENT,
    VOCABULARY,
    WEIGHTS,
    EngineSettings,
    quantization_of,
    write_config,
)
from .sglang_model import SglangModel
from .vllm_model import ROUTING_VARIABLE, VllmModel

PARTS = ("prefill", "first", "decode", "batch", "mixed")
SIZES = ("experts", "topk", "hidden", "intermediate")


@dataclass(frozen=True)
class Served:
    """Who runs the experts. servers: in which of them. variables: of the environment."""

    label: str
    style: Style
    is_ours: bool = True
    servers: tuple[str, ...] = ("vllm", "sglang")
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        switch = "1" if self.is_ours else "0"
        return {"DEEP_MOE_VLLM": switch, "DEEP_MOE_SGLANG": switch, **self.variables}


ENGINES = {
    "deep_moe": Served("deep_moe", Style("#0969da")),
    "deep_moe_bf16": Served(
        "deep_moe, BF16 tokens",
        Style("#0969da", "5 3", "ring"),
        variables={"DEEP_MOE_TOKEN_FORMAT": "bf16"},
    ),
    "deep_moe_unrouted": Served(
        "deep_moe behind vLLM's router",
        Style("#1a7f37"),
        servers=("vllm",),
        variables={ROUTING_VARIABLE: "0"},
    ),
    "vllm": Served("vLLM's own choice", Style("#bc4c00"), is_ours=False, servers=("vllm",)),
    "sglang": Served("SGLang's own choice", Style("#bc4c00"), is_ours=False, servers=("sglang",)),
}
SERVERS: dict[str, Callable[[Path, EngineSettings], Engine]] = {
    "vllm": VllmModel,
    "sglang": SglangModel,
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.show:
        reports = [json.loads(path.read_text()) for path in arguments.show]
        show(reports, arguments.markdown, arguments.svg)
    elif arguments.serve:
        try:
            serve_one(arguments)
        except Exception:
            # Neither closing an engine that failed nor its threads may keep this process.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    else:
        raise SystemExit(serve_all(arguments))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", choices=SERVERS, default="vllm")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, help="default: deep_moe and the server's own"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="of experts")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--model", choices=sorted(PRESETS), default="deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=6)
    for name in SIZES:
        default = 128 if name == "experts" else None
        parser.add_argument(f"--{name}", type=int, default=default, help="not those of --model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--decode", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--steps", type=int, default=128, help="of the model, for each of --decode")
    parser.add_argument("--repeats", type=int, default=5, help="of prefill, decode and batch")
    parser.add_argument("--first", type=int, default=200, help="prompts of the part `first`")
    parser.add_argument("--requests", type=int, default=400, help="of the part `mixed`")
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second, of `mixed`")
    parser.add_argument("--step-tokens", type=int, help="most of a step; default: vLLM's, 8192")
    parser.add_argument("--memory", type=float, default=0.8, help="share of a GPU's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, help="of each engine, which is stopped then")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--json", type=Path, help="where results are written, after each part")
    parser.add_argument(
        "--show", nargs="+", type=Path, metavar="JSON", help="print reports' tables; time nothing"
    )
    parser.add_argument("--markdown", type=Path, help="with --show: write the tables there, too")
    parser.add_argument("--svg", type=Path, help="with --show: draw times of decoding there")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    counts = ("gpus", "layers", "steps", "repeats", "first", "requests")
    for name in counts:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(arguments, name)}")
    if min(arguments.decode) < 1 or arguments.rate <= 0:
        parser.error("--decode must be at least 1, and --rate more than 0")
    if (arguments.markdown or arguments.svg) and not arguments.show:
        parser.error("--markdown and --svg need --show")
    arguments.engines = arguments.engines or ["deep_moe", arguments.server]
    for name in arguments.engines:
        if arguments.server not in ENGINES[name].servers:
            parser.error(f"--engines {name} is none of --server {arguments.server}")
    for name, size in zip(SIZES, PRESETS[arguments.model], strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, size)
    return arguments


class Engine(Protocol):
    """What serves the model; see `VllmModel`. A name belongs to one request at a time."""

    name: str
    start_seconds: float

    def add(self, name: str, prompt: Sequence[int], new_tokens: int) -> None: ...
    def step(self) -> list[tuple[str, int]]: ...
    def layers(self) -> dict[str, str]: ...
    def kernel_counts(self) -> list[dict[str, int]]: ...
    def machine(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Request:
    """after: seconds from the start of the load until it comes."""

    prompt: Sequence[int]
    new_tokens: int
    after: float = 0.0


@dataclass
class Progress:
    """A request's tokens: `tokens[i]` of them came at `times[i]`. Seconds from the load's start."""

    request: Request
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds from when the request came."""
        return self.times[0] - self.request.after

    @property
    def gaps(self) -> list[float]:
        """Seconds between two tokens; those of one step have none between them."""
        return [end - start for start, end in pairwise(self.times)]


class Clock(Protocol):
    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def run_load(engine: Engine, requests: Sequence[Request], clock: Clock) -> list[Progress]:
    """Serve all requests, each from when it comes. Raises RuntimeError if an engine gives other
    tokens than it was asked for."""
    progress = {str(i): Progress(request) for i, request in enumerate(requests)}
    coming = sorted(progress, key=lambda name: progress[name].request.after)
    coming.reverse()
    running: dict[str, int] = {}  # tokens that are still to come
    start = clock.now()
    while coming or running:
        if not running:
            clock.sleep(max(0.0, progress[coming[-1]].request.after - (clock.now() - start)))
        while coming:
            name, request = coming[-1], progress[coming[-1]].request
            if running and request.after > clock.now() - start:
                break
            coming.pop()
            running[name] = request.new_tokens
            engine.add(name, request.prompt, request.new_tokens)
        made = engine.step()
        now = clock.now() - start
        for name, num_tokens in made:
            if num_tokens == 0:
                continue
            if running.get(name, 0) < num_tokens:
                raise RuntimeError(
                    f"the engine made {num_tokens} tokens for request {name!r}, of which "
                    f"{running.get(name, 0)} were to come"
                )
            running[name] -= num_tokens
            if running[name] == 0:
                del running[name]
            progress[name].times.append(now)
            progress[name].tokens.append(num_tokens)
    return list(progress.values())


class Loads:
    """Makes requests, the same ones for each engine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=length)

    def equal(self, number: int, length: int, new_tokens: int) -> list[Request]:
        return [Request(self.prompt(length), new_tokens) for _ in range(number)]

    def mixed(self, number: int, rate: float) -> list[Request]:
        """Times between two that come are exponentially distributed."""
        made, after = [], 0.0
        for _ in range(number):
            after += self._random.expovariate(rate)
            length, new_tokens = self._random.randint(256, 2048), self._random.randint(32, 128)
            made.append(Request(self.prompt(length), new_tokens, after))
        return made


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 0.5), percentile([3.0, 1.0, 2.0, 4.0], 0.99)
    (2.0, 4.0)
    """
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "median_ms": 1e3 * percentile(seconds, 0.5),
        "p99_ms": 1e3 * percentile(seconds, 0.99),
        "max_ms": 1e3 * max(seconds),
        "count": len(seconds),
    }


def steps_of_all(progress: Sequence[Progress]) -> list[float]:
    """Seconds from a step in which every request got a token to the next such step."""
    shared = set(progress[0].times).intersection(*(one.times for one in progress[1:]))
    return [end - start for start, end in pairwise(sorted(shared))]


Parts = Iterator[tuple[str, dict[str, Any]]]


def timed_parts(engine: Engine, arguments: argparse.Namespace, clock: Clock) -> Parts:
    """Each part's name and result, the most telling first."""
    loads = Loads(arguments.seed)
    parts = set(arguments.parts)

    def elapsed(requests: Sequence[Request]) -> float:
        return max(one.times[-1] for one in run_load(engine, requests, clock))

    if "prefill" in parts:
        number, length = 16, 2048
        seconds = [elapsed(loads.equal(number, length, 1)) for _ in range(1 + arguments.repeats)][
            1:
        ]
        rates = [number * length / one for one in seconds]
        yield (
            f"prefill of {number} x {length} tokens",
            {
                "tokens_per_s": statistics.median(rates),
                "slowest_tokens_per_s": min(rates),
                "count": len(rates),
            },
        )
    if "first" in parts:
        length = 2048
        firsts = [
            run_load(engine, loads.equal(1, length, 1), clock)[0].first_token
            for _ in range(3 + arguments.first)
        ][3:]
        yield f"first token after {length} tokens", spread_ms(firsts)
    if "decode" in parts:
        for batch in arguments.decode:
            # The first of them are ahead by the steps that run while others are added and read.
            num_steps = arguments.steps + 16 + batch // 4
            steps: list[float] = []
            for repeat in range(1 + arguments.repeats):
                own = steps_of_all(run_load(engine, loads.equal(batch, 128, num_steps), clock))
                steps += own[-arguments.steps :] if repeat else []
            # A step that waits for the host lets the next one come early: so the mean, too.
            yield (
                f"decode of {batch} request{'s' if batch > 1 else ''}",
                spread_ms(steps) | {"mean_ms": 1e3 * statistics.mean(steps), "batch": batch},
            )
    if "batch" in parts:
        number, length, new_tokens = 64, 1024, 128
        seconds = [
            elapsed(loads.equal(number, length, new_tokens))
            for _ in range(1 + -(-arguments.repeats // 2))
        ][1:]
        rates = [number * (length + new_tokens) / one for one in seconds]
        yield (
            f"{number} requests of {length} tokens, {new_tokens} more each",
            {"tokens_per_s": statistics.median(rates), "count": len(rates)},
        )
    if "mixed" in parts:
        run_load(engine, loads.mixed(max(1, arguments.requests // 10), arguments.rate), clock)
        progress = run_load(engine, loads.mixed(arguments.requests, arguments.rate), clock)
        name = f"{arguments.rate:g} requests a second"
        yield f"{name}: first token", spread_ms([one.first_token for one in progress])
        gaps = [gap for one in progress for gap in one.gaps]
        yield f"{name}: between two tokens", spread_ms(gaps)


def serve_all(arguments: argparse.Namespace) -> int:
    """Each engine in a process of its own, and the report's tables. Returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.json or Path(folder, "report.json")
        path.write_text(json.dumps(new_report(arguments), indent=1) + "\n")
        for name in arguments.engines:
            command = [sys.executable, "-m", "benchmarks.serving", *sys.argv[1:]]
            command += ["--serve", name, "--json", str(path)]
            environment = {**os.environ, **ENVIRONMENT, **ENGINES[name].environment()}
            reason = run_limited(command, environment, arguments.limit_s)
            if reason is not None:
                failed += 1
                note(path, name, partial(dict.update, failed=reason))
        show([json.loads(path.read_text())], None, None)
    return failed


def run_limited(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float | None
) -> str | None:
    """Run a program with all that it starts, and end it at the limit. Returns why it failed."""
    with child_sessions() as start:
        process = start(command, env=dict(environment))
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:g} s"
    return None if status == 0 else f"exit status {status}"


def new_report(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "model": {
            name: getattr(arguments, name) for name in ("model", "layers", "weights", *SIZES)
        },
        "gpus": arguments.gpus,
        "machine": None,
        "server": None,
        "engines": {},
    }


def note(path: Path, engine: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a report says of an engine; whoever reads it sees it before or after that."""
    report = json.loads(path.read_text())
    change(report["engines"].setdefault(engine, {"label": ENGINES[engine].label, "parts": {}}))
    write_report(path, report)


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    beside.replace(path)


def serve_one(
    arguments: argparse.Namespace,
    make_engine: Callable[[Path, argparse.Namespace], Engine] | None = None,
    clock: Clock | None = None,
) -> None:
    """In a process of its own: one engine, all parts. make_engine, clock: for tests."""
    path, name = arguments.json, arguments.serve
    with tempfile.TemporaryDirectory() as folder:
        write_config(
            Path(folder),
            layers=arguments.layers,
            quantization=quantization_of(
                arguments.weights, arguments.layers, in_sglang=arguments.server == "sglang"
            ),
            **{size: getattr(arguments, size) for size in SIZES},
        )
        engine = (make_engine or make_server)(Path(folder), arguments)
        serve_parts(engine, path, name, arguments, clock or WallClock())
        engine.close()


def make_server(folder: Path, arguments: argparse.Namespace) -> Engine:
    settings = EngineSettings(
        gpus=arguments.gpus,
        max_requests=max(256, *arguments.decode),
        step_tokens=arguments.step_tokens,
        memory=arguments.memory,
        commit=arguments.commit,
        weights=arguments.weights,
    )
    engine = SERVERS[arguments.server](folder, settings)
    # As vLLM's own server does: to look through all that was imported takes 0.4 s, in some step.
    gc.collect()
    gc.freeze()
    return engine


def serve_parts(
    engine: Engine, path: Path, name: str, arguments: argparse.Namespace, clock: Clock
) -> None:
    layers = [*engine.layers().values()]
    report = json.loads(path.read_text())
    report["machine"] = engine.machine()
    report["server"] = f"{engine.name} {version_of(arguments.server)}"
    own = report["engines"].setdefault(name, {})
    own |= {
        "label": ENGINES[name].label,
        "start_s": engine.start_seconds,
        "layers": {who: layers.count(who) for who in dict.fromkeys(layers)},
        "kernels_at_start": engine.kernel_counts(),
        "parts": {},
    }
    write_report(path, report)
    print(f"{name}: layers of experts run by {own['layers']}", flush=True)
    by_deep_moe = len(layers) if ENGINES[name].is_ours else 0
    if not layers or sum(who.startswith("deep_moe") for who in layers) != by_deep_moe:
        raise RuntimeError(
            f"{name}: deep_moe must run {by_deep_moe} of {len(layers)} layers of experts; "
            f"got {own['layers']}"
        )
    for part, result in timed_parts(engine, arguments, clock):
        note(path, name, partial(add_part, part, result, engine.kernel_counts()))
        print(f"{name}: {part}: {values_of(result)}", flush=True)


def add_part(
    part: str, result: dict[str, Any], counts: list[dict[str, int]], own: dict[str, Any]
) -> None:
    own["parts"][part] = result
    own["kernels_at_end"] = counts


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def values_of(result: Mapping[str, float]) -> str:
    """
    >>> values_of({"tokens_per_s": 311364.2, "count": 5})
    '311,364 tokens/s'
    >>> values_of({"median_ms": 1.5, "p99_ms": 2.0, "max_ms": 4.0, "mean_ms": 1.6})
    '1.50 ms, p99 2.00, mean 1.60'
    """
    if "tokens_per_s" in result:
        return f"{result['tokens_per_s']:,.0f} tokens/s"
    words = f"{result['median_ms']:.2f} ms, p99 {result['p99_ms']:.2f}"
    return words + (f", mean {result['mean_ms']:.2f}" if "mean_ms" in result else "")


def times_as_fast(ours: Mapping[str, float], other: Mapping[str, float]) -> float:
    """
    >>> times_as_fast({"median_ms": 2.0}, {"median_ms": 3.0})
    1.5
    >>> times_as_fast({"tokens_per_s": 300.0}, {"tokens_per_s": 200.0})
    1.5
    """
    if "tokens_per_s" in ours:
        return ours["tokens_per_s"] / other["tokens_per_s"]
    key = "mean_ms" if "mean_ms" in ours else "median_ms"
    return other[key] / ours[key]


Table = tuple[str, list[str], list[list[str]]]


def tables(reports: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Title, columns and rows of each report. The last column compares the first two engines."""
    return [table_of(report) for report in reports if report["machine"]]


def table_of(report: Mapping[str, Any]) -> Table:
    model, engines = report["model"], report["engines"]
    gpus = f"{report['gpus']} GPU{'s' if report['gpus'] > 1 else ''}"
    title = (
        f"{report['machine']['gpu']}, {gpus}, {report['server']}: {model['layers']} layers of "
        f"{model['experts']} {model['weights'].upper()} experts, {model['hidden']} x "
        f"{model['intermediate']}"
    )
    served = {name: own for name, own in engines.items() if own["parts"]}
    parts = list(dict.fromkeys(part for own in served.values() for part in own["parts"]))
    columns = ["", *(engine_label(own) for own in served.values())]
    if len(served) > 1:
        columns.append("times as fast")
    rows = []
    for part in parts:
        results = [own["parts"].get(part) for own in served.values()]
        cells = [values_of(result) if result else "" for result in results]
        if len(results) > 1:
            both = results[0] and results[1]
            cells.append(f"{times_as_fast(results[0], results[1]):.2f}" if both else "")
        rows.append([part, *cells])
    rows.append(["start", *(f"{own['start_s']:.0f} s" for own in served.values())])
    if len(served) > 1:
        rows[-1].append("")
    return title, columns, rows


def engine_label(own: Mapping[str, Any]) -> str:
    """With what ran the experts, where that is not deep_moe."""
    others = [who for who in own["layers"] if not who.startswith("deep_moe")]
    return own["label"] + (f" ({', '.join(others)})" if others else "")


def notes(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """What failed, and whether a step waited for a kernel."""
    said = []
    for report in reports:
        for name, own in report["engines"].items():
            where = f"{name}, {report['gpus']} GPU{'s' if report['gpus'] > 1 else ''}"
            if "failed" in own:
                said.append(f"{where}: {own['failed']}")
            if name in ENGINES and ENGINES[name].is_ours and "kernels_at_end" in own:
                same = own["kernels_at_end"] == own["kernels_at_start"]
                said.append(
                    f"{where}: no kernel was compiled, read or loaded after the start"
                    if same
                    else f"{where}: kernels at the start {own['kernels_at_start']}, at the end "
                    f"{own['kernels_at_end']}"
                )
    return said


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for title, columns, rows in tables(reports):
        lines += [f"**{title}**", "", f"| {' | '.join(columns)} |"]
        lines += ["|---" + "|---:" * (len(columns) - 1) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows] + [""]
    return "\n".join([*lines, *(f"- {one}" for one in notes(reports))]).rstrip() + "\n"


def picture(reports: Sequence[Mapping[str, Any]]) -> str:
    """Decoding by the number of requests, a panel for each report."""
    panels = []
    for report in reports:
        curves = []
        for name, own in report["engines"].items():
            points = {
                result["batch"]: result["mean_ms"]
                for result in own["parts"].values()
                if "batch" in result
            }
            if points:
                curves.append(Curve(engine_label(own), points, ENGINES[name].style))
        if curves:
            gpus = f"{report['gpus']} GPU{'s' if report['gpus'] > 1 else ''}"
            where = f"{report['machine']['gpu']}, {gpus}, {report['server'].split()[0]}"
            panels.append(Panel(where, curves))
    if not panels:
        raise SystemExit("no report has times of decoding, so there is nothing to draw")
    return chart(
        "Decoding in engines", panels, x_label="requests", y_label="milliseconds of a step"
    )


def show(
    reports: Sequence[Mapping[str, Any]], markdown_path: Path | None, svg_path: Path | None
) -> None:
    console = stdout()
    for title, columns, rows in tables(reports):
        table = new_table(title, *columns, right=tuple(columns[1:]))
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for one in notes(reports):
        console.print(one, markup=False)
    if markdown_path is not None:
        markdown_path.write_text(markdown(reports))
    if svg_path is not None:
        svg_path.write_text(picture(reports))


if __name__ == "__main__":
    main()
