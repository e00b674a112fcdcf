"""Draws and tabulates what `python -m benchmarks.mega_moe --json` wrote.

    python -m benchmarks.plot

takes every report in benchmarks/results and renews what is made of them: a picture per kind of
machine in docs/images, benchmarks/RESULTS.md, and the tables in docs/performance.md, of training
(results/training) in docs/training.md and of all-to-alls (results/all_to_all) in docs/split.md. Of
peers, only times of the newest version among the reports are taken. Only results for uniform
routing and equal tokens are shown, in pictures those for published models as they are, or with
other sizes where a machine has no others. Each curve is from one report, never pieced together: the
one that timed most sizes of it, of several the newest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import all_to_all, engines, training
from .chart import Curve, Panel, Style, chart
from .published import compared, figures, is_even, is_standard
from .tables import markdown_table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE_TOKENS = (8, 128, 512, 2048, 8192)
PAGE_MODEL = "deepseek-v4-pro, experts 192"
PAGE_MACHINE = ("NVIDIA H200", 2)
PAGE_PART = re.compile(r"(<!-- speed: .*?-->\n).*?(<!-- end of speed -->)", re.DOTALL)
LABELS = {
    "fused": "deep_moe, FP4 weights",
    "peer": "{peer}, FP8 weights",
    "unfused": "five steps, NCCL and grouped FP8 products",
}
STYLES = {
    "fused": Style("#0969da"),
    "peer": Style("#bc4c00"),
    "unfused": Style("#8250df"),
    "floor": Style("#eaeef2", is_area=True),
    "goal": Style("#1a7f37", dash=None, marker="bar"),
}
PUBLISHED_COLORS = ("#d4a72c", "#57606a", "#bf3989")

COLUMNS = (
    "tokens/rank",
    "µs",
    "p10 to p90",
    "TFLOPS",
    "weights TB/s",
    "of the floor",
    "five steps µs",
    "peer µs",
    "best peer µs",
    "against it",
    "asked",
    "goal µs",
    "off the goal",
)

# Parts of these pages are tables of a report in a folder of OTHER_TABLES; the words behind its name
# say which.
PAGES_WITH_TABLES = tuple(ROOT / "docs" / f"{name}.md" for name in ("split", "training", "vllm"))
PAGE_TABLE = re.compile(
    r"(<!-- table: (?P<folder>\w+)/(?P<name>[^\s,]+)(?P<words>[^,]*), made by .*?-->\n).*?"
    r"(?P<end><!-- end of table -->)",
    re.DOTALL,
)

Result = Mapping[str, Any]
Machine = tuple[str, int]  # name of the GPU, ranks


@dataclass(frozen=True)
class Timed:
    """What one report timed of one model on one path: results by tokens per rank."""

    results: Mapping[int, Result]
    machine: Mapping[str, Any]
    peer: str | None

    def label(self, path: str) -> str:
        """What a curve of it is called."""
        return LABELS[path].format(peer=self.peer)

    def us(self, path: str) -> dict[int, float]:
        """Microseconds by tokens per rank."""
        return {
            num_tokens: of_path(result, path)["us"] for num_tokens, result in self.results.items()
        }


def main() -> None:
    for path, text in documents([read(path) for path in sorted(RESULTS.glob("*.json"))]).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


def read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def documents(reports: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Everything that is made of the reports, by path."""
    reports = with_newest_peer(reports)
    machines = sorted(
        {
            (report["machine"]["gpu"], result["num_ranks"])
            for report in reports
            for result in report["results"]
        }
    )
    made = {
        picture_path(machine): picture(machine, reports)
        for machine in machines
        if pictured_models(reports, machine)
    }
    tables = [table(machine, reports) for machine in machines]
    others = [
        section(folder, read(path))
        for folder in OTHER_TABLES
        for path in sorted((RESULTS / folder).glob("*.json"))
    ]
    made[ROOT / "benchmarks" / "RESULTS.md"] = "\n".join([RESULTS_HEAD, *tables, *others])
    for page in PAGES_WITH_TABLES:
        made[page] = PAGE_TABLE.sub(with_table, page.read_text())
    page = ROOT / "docs" / "performance.md"
    text, count = PAGE_PART.subn(
        lambda match: match[1] + page_table(reports) + match[2], page.read_text()
    )
    if count != 1:
        raise ValueError(
            "docs/performance.md must have one part between <!-- speed --> and <!-- end -->"
        )
    made[page] = text
    return made


RESULTS_HEAD = """# Results

`python -m benchmarks.plot` makes this page from the reports in `benchmarks/results/`. A time is the
median of 20 calls or more, of the slowest rank.

| column | meaning |
|---|---|
| of the floor | what weights, products or links alone would take, as a share of the time |
| five steps | dispatch, Linear1, activation, Linear2 and combine as kernels of their own |
| peer | sgl-deep-gemm's fused kernel, in the same run |
| best peer | the fastest that was timed or published (`benchmarks/published.json`) |
| against it | best peer's time, divided by ours |
| asked | how many times as fast as the best peer the layer is to be |
| goal | the time that this comes to |

Behind the layer's tables stand those of engines' kernels, of training and of all-to-alls. In a
training table, brackets say how many times as fast as BF16 a path is.
`python -m benchmarks.engines --show REPORT` explains the columns of engines.
"""


def with_newest_peer(reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The reports, without times of other versions of the peer than the newest.

    >>> made = [{"peer": f"p {version}", "results": [{"peer": 1}]} for version in ("0.10.0", "0.9")]
    >>> [report["results"] for report in with_newest_peer(made)]
    [[{'peer': 1}], [{}]]
    """

    def version(report: Mapping[str, Any]) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", report.get("peer") or "")]

    newest = max(map(version, reports), default=[])
    return [
        report
        if version(report) == newest
        else {
            **report,
            "results": [
                {name: value for name, value in result.items() if name != "peer"}
                for result in report["results"]
            ],
        }
        for report in reports
    ]


def picture_path(machine: Machine) -> Path:
    """
    >>> picture_path(("NVIDIA H200", 4)).name
    'h200x4.svg'
    """
    gpu, num_ranks = machine
    name = gpu.removeprefix("NVIDIA ").replace(" ", "-").lower()
    return ROOT / "docs" / "images" / f"{name}x{num_ranks}.svg"


def of_path(result: Result, path: str) -> Result:
    """A result's part that is about one path; the fused kernel's is at its top."""
    return result if path == "fused" else result[path]


def timed(
    reports: Sequence[Mapping[str, Any]], machine: Machine, model: str, path: str
) -> Timed | None:
    """The report that counts for a curve."""
    found = []
    for report in reports:
        results = {
            result["tokens_per_rank"]: result
            for result in report["results"]
            if (report["machine"]["gpu"], result["num_ranks"]) == machine
            and result["model"] == model
            and is_even(result)
            and (path == "fused" or path in result)
        }
        if results:
            found.append(
                Timed(dict(sorted(results.items())), report["machine"], report.get("peer"))
            )
    return max(found, key=lambda t: (len(t.results), t.machine["date"]), default=None)


def models(
    reports: Sequence[Mapping[str, Any]], machine: Machine, *, as_published: bool = True
) -> list[str]:
    """Those that were timed on a machine, as they are published or with other sizes."""
    names = {
        result["model"]
        for report in reports
        for result in report["results"]
        if is_even(result) and is_standard(result) == as_published
    }
    return sorted(name for name in names if timed(reports, machine, name, "fused"))


def pictured_models(reports: Sequence[Mapping[str, Any]], machine: Machine) -> list[str]:
    """Those as published, or where none was timed, those with other sizes."""
    return models(reports, machine) or models(reports, machine, as_published=False)


def picture(machine: Machine, reports: Sequence[Mapping[str, Any]]) -> str:
    """A panel per model."""
    gpu, num_ranks = machine
    panels, facts = [], []
    for model in pictured_models(reports, machine):
        own = timed(reports, machine, model, "fused")
        assert own is not None
        facts.append(own.machine)
        floor = {n: result["floor_us"] for n, result in own.results.items()}
        curves = [
            Curve(
                "impossible: weights, products or links alone take longer", floor, STYLES["floor"]
            )
        ]
        for color, curve in zip(PUBLISHED_COLORS, figures(model, gpu, num_ranks), strict=False):
            style = Style(color, dash="5 4", marker="ring")
            curves.append(Curve(curve.name, curve.us, style))
        for path in ("unfused", "peer", "fused"):
            of = timed(reports, machine, model, path)
            if of is not None:
                curves.append(Curve(of.label(path), of.us(path), STYLES[path]))
        comparisons = {n: compared(result, gpu) or {} for n, result in own.results.items()}
        goals = {n: c["goal_us"] for n, c in comparisons.items() if "goal_us" in c}
        if goals:
            curves.append(Curve("our goal", goals, STYLES["goal"]))
        panels.append(Panel(model, curves))
    newest = max(facts, key=lambda machine: machine["date"])
    title = f"{num_ranks} × {gpu}, CUDA {newest['cuda']}, {newest['date'][:10]}"
    return chart(title, panels, x_label="tokens per rank", y_label="µs per call")


def table(machine: Machine, reports: Sequence[Mapping[str, Any]]) -> str:
    """All numbers of a machine, in Markdown."""
    gpu, num_ranks = machine
    lines = []
    names = [*models(reports, machine), *models(reports, machine, as_published=False)]
    for model in names:
        own = timed(reports, machine, model, "fused")
        assert own is not None
        paths = {path: timed(reports, machine, model, path) for path in ("unfused", "peer")}
        lines += [
            f"## {model}, {num_ranks} × {gpu}, commit {own.machine['commit']}, "
            f"{own.machine['date'][:10]}",
            "",
            f"| {' | '.join(COLUMNS)} |",
            "|---:" * len(COLUMNS) + "|",
        ]
        for num_tokens, result in own.results.items():
            others = [
                f"{of.us(path)[num_tokens]:.0f}" if of and num_tokens in of.results else ""
                for path, of in paths.items()
            ]
            elsewhere = {}
            peer = paths["peer"]
            if "peer" not in result and peer is not None and num_tokens in peer.results:
                name = f"sgl-deep-gemm, run of {peer.machine['date'][:16]}"
                elsewhere[name] = peer.us("peer")[num_tokens]
            spread = (
                f"{result['us_p10']:.1f} to {result['us_p90']:.1f}" if "us_p10" in result else ""
            )
            cells = [
                f"{num_tokens}",
                f"{result['us']:.1f}",
                spread,
                f"{result['tflops']:.0f}",
                f"{result['weight_tb_per_s']:.2f}",
                f"{result['floor_share']:.0%}",
                *others,
                *_comparison_cells(compared(result, gpu, elsewhere), result),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _comparison_cells(comparison: Mapping[str, Any] | None, result: Result) -> list[str]:
    if comparison is None:
        times = f"{result['peer']['times_slower']:.2f}×" if "peer" in result else ""
        return ["", times, "", "", ""]
    cells = [
        f"{comparison['best_peer_us']:.0f} ({comparison['best_peer']})",
        f"{comparison['times_slower']:.2f}×",
    ]
    if "goal_us" not in comparison:
        return [*cells, "", "", ""]
    off = result["us"] / comparison["goal_us"] - 1
    return [
        *cells,
        f"{comparison['asked_times']:g}×",
        f"{comparison['goal_us']:.0f}",
        "reached" if off <= 0 else f"{off:+.0%}",
    ]


def page_table(reports: Sequence[Mapping[str, Any]]) -> str:
    """A few sizes of one model, a row per path."""
    lines = [
        f"| {PAGE_MODEL}, tokens/rank | {' | '.join(map(str, PAGE_TOKENS))} |",
        "|---|" + "---:|" * len(PAGE_TOKENS),
    ]
    for path in LABELS:
        of = timed(reports, PAGE_MACHINE, PAGE_MODEL, path)
        us = of.us(path) if of is not None else {}
        if of is not None and any(n in us for n in PAGE_TOKENS):
            cells = [f"{us[n]:.0f}" if n in us else "" for n in PAGE_TOKENS]
            lines.append(f"| {of.label(path)}, µs | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def section(folder: str, report: Result) -> str:
    """A report's part of RESULTS.md."""
    own = report["machine"]
    where = f"{report.get('num_ranks', 1)} × {own['gpu']}"
    name = f"{where}, commit {own['commit']}, {own['date'][:10]}"
    return "\n".join(
        f"## {title}, {name}\n\n{text}" for title, text in OTHER_TABLES[folder](report).items()
    )


def engines_tables(report: Result) -> dict[str, str]:
    return {
        title.partition(f", {report['machine']['gpu']}")[0] + " beside engines' kernels, µs": (
            markdown_table(columns, rows)
        )
        for title, columns, rows in engines.tables([report])
    }


def training_tables(report: Result) -> dict[str, str]:
    return {
        f"training, ms of {title} ({report['rounds']} rounds)": training.table(
            report["results"], time
        )
        for time, title in training.TIMES.items()
    }


def all_to_all_tables(report: Result) -> dict[str, str]:
    options = report["arguments"]
    words = [f"{options['path']} all-to-all"]
    words += ["`--placement experts`"] * (options["placement"] == "experts")
    words += ["`--zero-copy`"] * (options["zero_copy"] == "True")
    words += [f"`--sms {options['sms']}`"] * (options["sms"] != "None")
    return {f"{', '.join(words)}, µs": all_to_all.table(report["results"])}


def with_table(part: re.Match[str]) -> str:
    """Of a page: the same part with the table that the report gives now."""
    report = read(RESULTS / part["folder"] / f"{part['name']}.json")
    if part["folder"] == "training":
        text = training.table(report["results"], part["words"].strip())
    elif part["folder"] == "engines":
        text = engines.page_table(report)
    else:
        text = all_to_all.table(report["results"])
    return part[1] + text + part["end"]


# By the folder of results/: tables of its reports, by what stands above each.
OTHER_TABLES: dict[str, Callable[[Result], dict[str, str]]] = {
    "engines": engines_tables,
    "training": training_tables,
    "all_to_all": all_to_all_tables,
}


if __name__ == "__main__":
    main()
