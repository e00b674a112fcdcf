"""Draws what `python -m benchmarks.mega_moe --json` wrote.

python -m benchmarks.plot docs/images/h200x4.png benchmarks/results/h200x4-2026-11-20-*.json
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LABELS = {
    "fused": "deep_moe, FP4 weights",
    "peer": "sgl-deep-gemm 0.1.4, FP8 weights",
    "unfused": "five steps: NCCL, grouped FP8 products",
}

# Of one path: microseconds by tokens per rank.
Curve = dict[int, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    arguments = parser.parse_args()
    draw(arguments.picture, [json.loads(path.read_text()) for path in arguments.reports])


def curves(reports: Sequence[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """By model and path. Where two reports timed the same, the first one counts."""
    found: dict[str, dict[str, Curve]] = defaultdict(lambda: defaultdict(dict))
    for report in reports:
        for result in report["results"]:
            model, tokens = result["model"], result["tokens_per_rank"]
            times = {"fused": result["us"], "floor": result["floor_us"]}
            times |= {name: result[name]["us"] for name in ("unfused", "peer") if name in result}
            for name, us in times.items():
                found[model][name].setdefault(tokens, us)
    return found


def draw(picture: Path, reports: Sequence[dict[str, Any]]) -> None:
    """One panel per model, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_model = curves(reports)
    figure, axes = plt.subplots(1, len(by_model), figsize=(6 * len(by_model), 4), squeeze=False)
    for axis, (model, paths) in zip(axes[0], sorted(by_model.items()), strict=True):
        floor = sorted(paths["floor"].items())
        axis.fill_between(*zip(*floor, strict=True), color="0.9", label="below the floor")
        for i, (name, label) in enumerate(LABELS.items()):
            if name in paths:
                times = zip(*sorted(paths[name].items()), strict=True)
                axis.plot(*times, marker="o", color=f"C{i}", label=label)
        axis.set(
            xscale="log", yscale="log", title=model, xlabel="tokens per rank", ylabel="µs per call"
        )
        axis.grid(alpha=0.3)
    axes[0][-1].legend()
    machine = reports[0]["machine"]
    num_ranks = reports[0]["results"][0]["num_ranks"]
    figure.suptitle(
        f"{num_ranks} × {machine['gpu']}, CUDA {machine['cuda']}, torch {machine['torch']}, "
        f"{machine['date'][:10]}",
        fontsize=9,
    )
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
