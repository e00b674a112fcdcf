"""Cases of lane-wise instructions: every element of the inputs is one thread's operands."""

from __future__ import annotations

import re

from .case import Bound, Family
from .values import NUM, bits_of, operands

THREADS = 256


def load_type(bits: int) -> str:
    return "u8" if bits == 8 else f"b{bits}"


def lane_case(
    family: Family,
    name: str,
    texts: list[str],
    out_bits: int,
    kinds: tuple[str, ...],
    *,
    bound: Bound | None = None,
    num: int = NUM,
    prologue: str = "",
    make_inputs=None,
) -> None:
    """Each of `texts` (one or several instructions) computes $d from $a, $b, $c, $e, the operands.

    A row of the output is one text's results. make_inputs: instead of operands of `kinds`.
    """
    names = "abce"[: len(kinds)]
    lines = [
        "mov.u32 %r60, %tid.x; mov.u32 %r61, %ctaid.x;",
        f"mad.lo.u32 %r62, %r61, {THREADS}, %r60;",
    ]
    for letter, kind in zip(names, kinds, strict=True):
        bits = bits_of(kind)
        lines.append(f".reg .b{max(16, bits)} %{letter};")
    lines.append(f".reg .b{max(16, out_bits)} %d;")
    for index, (letter, kind) in enumerate(zip(names, kinds, strict=True)):
        bits = bits_of(kind)
        lines.append(f"mad.wide.u32 %rd60, %r62, {bits // 8}, %p{index + 1};")
        lines.append(f"ld.global.{load_type(bits)} %{letter}, [%rd60];")
    lines.append(f"mad.wide.u32 %rd61, %r62, {out_bits // 8}, %p0;")
    lines.append(prologue)
    for row, text in enumerate(texts):
        body = re.sub(r"\$(\w)", r"%\1", text)
        # A scope of its own, so that texts may declare registers and labels.
        lines.append("{ " + body + " }")
        offset = row * num * out_bits // 8
        lines.append(f"st.global.{load_type(out_bits)} [%rd61+{offset}], %d;")

    def make_arrays():
        import numpy as np

        inputs = make_inputs() if make_inputs else operands(f"{family.name}/{name}", kinds, num)
        return [np.zeros((len(texts), num), f"<u{out_bits // 8}"), *inputs]

    family.add(
        name,
        "\n".join(lines),
        make_arrays,
        1 + len(kinds),
        grid=(num // THREADS, 1, 1),
        block=(THREADS, 1, 1),
        rows=tuple(texts),
        bound=bound,
    )
