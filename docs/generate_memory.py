"""Writes the table of docs/memory.md: what models take, by number of ranks.

    python -m docs.generate_memory

A test compares the table with what this makes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from deep_moe.heuristics import PRESETS, preset_shape
from deep_moe.heuristics.shape import DEFAULT_POOL_TOKENS
from deep_moe.heuristics.symm_buffer_layout import symm_buffer_layout
from deep_moe.targets import target_of

OUTPUT = Path(__file__).parent / "memory.md"
BEGIN, END = "<!-- made by python -m docs.generate_memory -->\n", "<!-- end of table -->\n"
NUM_RANKS = (4, 8, 16, 32, 64)
MAX_TOKENS = (128, 1024, 8192)
GIB = 2**30


def table() -> str:
    """A line for each model and number of ranks."""
    names = ["model", "ranks", "local experts", "weights", *(f"T = {t}" for t in MAX_TOKENS)]
    names += [f"T = {MAX_TOKENS[-1]}, a row for each token"]
    lines = [f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]
    for model in PRESETS:
        num_experts, *_ = PRESETS[model]
        for num_ranks in (n for n in NUM_RANKS if num_experts % n == 0):
            shapes = [
                preset_shape(model, num_ranks=num_ranks, num_max_tokens_per_rank=max_tokens)
                for max_tokens in MAX_TOKENS
            ]
            largest = shapes[-1]
            shapes = [replace(shape, num_pool_tokens=DEFAULT_POOL_TOKENS) for shape in shapes]
            shapes.append(largest)
            tensors = target_of("sm_100a").weights_of().tensors(shapes[0]).values()
            weights = sum(math.prod(sizes) * dtype.itemsize for dtype, sizes in tensors)
            sizes = [weights, *(symm_buffer_layout(shape).num_bytes for shape in shapes)]
            cells = [model, str(num_ranks), str(shapes[0].num_experts_per_rank)]
            cells += [f"{num_bytes / GIB:.2f}" for num_bytes in sizes]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """memory.md with the table as it has to be."""
    text = OUTPUT.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
