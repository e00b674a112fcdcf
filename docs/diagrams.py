"""Writes the diagrams of docs/images that are drawn, not measured.

    python -m docs.diagrams

A test compares the files with what this makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

INK, PALE, PAPER = "#24292f", "#8c959f", "#ffffff"
# One color for each step of the layer, in all diagrams.
DISPATCH, LINEAR1, ACTIVATION, LINEAR2, COMBINE = (
    "#9ecbff",
    "#ffd59a",
    "#ffb3c1",
    "#c3e6a5",
    "#d3c1f7",
)
MEMORY = "#eef1f4"
STEPS = (
    ("dispatch", DISPATCH),
    ("Linear1", LINEAR1),
    ("activation", ACTIVATION),
    ("Linear2", LINEAR2),
    ("combine", COMBINE),
)


@dataclass
class Drawing:
    """An SVG of this size in pixels. title: what it shows, for those who cannot see it."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, color: str, *lines: str) -> None:
        """A rectangle with lines of text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{color}" stroke="{INK}" stroke-width="0.8"/>'
        )
        first = y + height / 2 - 8 * (len(lines) - 1) + 4
        for i, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * i, line, anchor="middle", bold=i == 0)

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def arrow(self, *points: tuple[float, float], words: str = "") -> None:
        """A line through the points, with a head at the last and words above its middle."""
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{line}" fill="none" stroke="{INK}" marker-end="url(#head)"/>'
        )
        if words:
            (x0, y0), (x1, y1) = points[-2:]
            self.text((x0 + x1) / 2, (y0 + y1) / 2 - 5, words, anchor="middle")

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'font-family="sans-serif" font-size="12" '
            f'fill="{INK}"><title>{escape(self.title)}</title>\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker>'
            f'</defs>\n<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def five_steps() -> Drawing:
    """Five kernels in turn, above one kernel whose experts are at different steps."""
    drawing = Drawing(800, 330, "Five kernels in turn, and the same steps inside one kernel")
    left, width, height = 90, 132, 18

    def lanes(top: float) -> None:
        for expert in range(4):
            drawing.text(left - 10, top + 14 + 24 * expert, f"expert {expert}", anchor="end")

    drawing.text(left, 20, "Five kernels: each waits for the slowest expert of the last", bold=True)
    lanes(32)
    loads = (0.55, 0.9, 0.4, 0.7)  # how much of the longest time each expert takes
    for i, (name, color) in enumerate(STEPS):
        x = left + i * (width + 4)
        for expert, load in enumerate(loads):
            drawing.box(x, 32 + 24 * expert, load * width, height, color)
        drawing.text(x, 144, name)
    top = 196
    drawing.text(
        left, top - 12, "One kernel: an expert goes on when its own tokens are there", bold=True
    )
    lanes(top)
    for expert, load in enumerate(loads):
        x = left + 14.0 * expert
        for _, color in STEPS:
            drawing.box(x, top + 24 * expert, load * width * 0.62, height, color)
            x += load * width * 0.62
    drawing.arrow((left, 310), (left + 690, 310), words="time (a sketch, not measured)")
    return drawing


def kernel() -> Drawing:
    """The warp roles of one CTA, and the memory between them."""
    drawing = Drawing(860, 330, "Warp roles of the kernel, and the memory between them")
    drawing.box(20, 40, 130, 56, MEMORY, "peers' buffers", "tokens x, scales")
    drawing.box(200, 40, 130, 56, DISPATCH, "dispatch warps", "count, pull tokens")
    drawing.box(380, 40, 130, 56, MEMORY, "pool (HBM, L2)", "rows by expert")
    drawing.box(380, 136, 130, 56, MEMORY, "weights (HBM)", "blocks in order")
    drawing.box(560, 40, 120, 56, LINEAR1, "token loader", "one warp")
    drawing.box(560, 136, 120, 56, LINEAR1, "weight loader", "one warp")
    drawing.box(
        720, 40, 120, 152, MEMORY, "stages", "shared memory,", "mbarriers", "full and empty"
    )
    drawing.box(560, 234, 120, 62, LINEAR2, "products", "SM90: math warps", "SM100: MMA warp")
    drawing.box(380, 234, 130, 62, ACTIVATION, "Linear1 epilogue", "activation,", "quantize h")
    drawing.box(200, 234, 130, 62, LINEAR2, "Linear2 epilogue", "rows to the rank", "of the token")
    drawing.box(20, 234, 130, 62, COMBINE, "combine", "sum of slots, y")
    drawing.arrow((150, 68), (200, 68), words="NVLink")
    drawing.arrow((330, 68), (380, 68))
    drawing.arrow((510, 68), (560, 68))
    drawing.arrow((510, 164), (560, 164))
    drawing.arrow((680, 68), (720, 68))
    drawing.arrow((680, 164), (720, 164))
    drawing.arrow((780, 192), (780, 265), (680, 265))
    drawing.arrow((560, 265), (510, 265))
    drawing.arrow((445, 234), (445, 214), (355, 214), (355, 90), (380, 90))
    drawing.text(345, 150, "h, into the pool", anchor="end")
    drawing.arrow((600, 296), (600, 314), (265, 314), (265, 296))
    drawing.arrow((200, 265), (150, 265), words="NVLink")
    drawing.text(
        20,
        22,
        "Every role walks the same list of blocks; experts are at different steps",
        bold=True,
    )
    return drawing


def buffer() -> Drawing:
    """The parts of a rank's symmetric buffer and who writes them."""
    drawing = Drawing(800, 300, "The symmetric buffer of a rank, and who writes its parts")
    rows: Sequence[tuple[str, str, str, str]] = (
        ("control", "counters, barriers, bit masks", "all ranks", MEMORY),
        ("inputs", "x, x_sf, topk_idx, topk_weights", "the caller, prepare_inputs", DISPATCH),
        ("lists", "slots of each source rank by expert", "the source rank", DISPATCH),
        (
            "pool of Linear1",
            "tokens by expert, scales, sources",
            "dispatch warps of this rank",
            LINEAR1,
        ),
        ("pool of Linear2", "h by expert, scales", "epilogue of Linear1", ACTIVATION),
        ("combine", "one row for each token and slot", "epilogue of Linear2, any rank", COMBINE),
    )
    drawing.text(20, 22, "part", bold=True)
    drawing.text(220, 22, "holds", bold=True)
    drawing.text(520, 22, "written by", bold=True)
    for i, (name, holds, writer, color) in enumerate(rows):
        y = 34 + 42 * i
        drawing.box(20, y, 170, 36, color, name)
        drawing.text(220, y + 22, holds)
        drawing.text(520, y + 22, writer)
    return drawing


def protocol() -> Drawing:
    """What two ranks tell each other in a call."""
    drawing = Drawing(800, 372, "What two ranks tell each other in one call")
    left, right = 210, 590
    drawing.box(left - 70, 10, 140, 28, MEMORY, "rank 0")
    drawing.box(right - 70, 10, 140, 28, MEMORY, "rank 1")
    for x in (left, right):
        drawing.parts.append(
            f'<line x1="{x}" y1="38" x2="{x}" y2="360" stroke="{PALE}" stroke-dasharray="4 4"/>'
        )
    steps: Sequence[tuple[str, str, str, bool]] = (
        ("count tokens", "lists of slots, counts by expert", DISPATCH, True),
        ("pull tokens", "rows of x, one read for each token", DISPATCH, False),
        ("Linear1, activation", "", LINEAR1, True),
        ("Linear2", "rows into combine[slot][token]", LINEAR2, True),
        ("rank barrier", "all rows have come", MEMORY, True),
        ("combine", "", COMBINE, True),
        ("rank barrier", "the next call may begin", MEMORY, True),
    )
    for i, (name, words, color, is_sent) in enumerate(steps):
        y = 54 + 44 * i
        for x in (left, right):
            drawing.box(x - 75, y, 150, 26, color, name)
        if words:
            ends = ((left + 75, y + 17), (right - 75, y + 17))
            drawing.arrow(*(ends if is_sent else ends[::-1]), words=words)
    drawing.text(20, 366, "Both ranks do the same; one direction is shown.")
    return drawing


def paths() -> Drawing:
    """Which path to take."""
    drawing = Drawing(800, 300, "Which path to take")
    drawing.box(20, 20, 210, 46, MEMORY, "all ranks in one", "NVLink domain?")
    drawing.box(20, 126, 210, 46, MEMORY, "own experts' kernels, or", "work while tokens travel?")
    drawing.box(20, 232, 210, 46, MEMORY, "more than 1,024 tokens", "for each rank?")
    drawing.box(330, 20, 210, 46, COMBINE, "two-level", "TwoLevelMoE")
    drawing.box(330, 126, 210, 46, LINEAR1, "fused", "mega_moe")
    drawing.box(330, 232, 210, 46, DISPATCH, "throughput", "AllToAll, ThroughputMoE")
    drawing.box(580, 176, 200, 46, LINEAR2, "low latency", "LowLatencyAllToAll")
    drawing.arrow((230, 43), (330, 43), words="no")
    drawing.arrow((125, 66), (125, 126))
    drawing.text(132, 98, "yes")
    drawing.arrow((230, 149), (330, 149), words="no")
    drawing.arrow((125, 172), (125, 232))
    drawing.text(132, 204, "yes")
    drawing.arrow((230, 255), (330, 255), words="yes")
    drawing.arrow((125, 278), (125, 292), (680, 292), (680, 222))
    drawing.text(560, 286, "no")
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "five-steps.svg": five_steps,
    "kernel.svg": kernel,
    "buffer.svg": buffer,
    "protocol.svg": protocol,
    "paths.svg": paths,
}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (IMAGES / name).write_text(draw().svg(), encoding="utf-8")
        print(f"wrote {IMAGES / name}")


if __name__ == "__main__":
    main()
