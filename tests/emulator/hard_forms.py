"""Forms of PTX that few kernels use, as hard_forms.txt lists them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Form:
    text: str
    target: str
    is_refused: bool

    @property
    def name(self) -> str:
        """With all modifiers."""
        return self.text.split()[0]

    @property
    def module(self) -> str:
        """PTX of a kernel that is the form alone."""
        return f"""
.version 9.0
.target {self.target}
.address_size 64
.visible .entry kernel() {{
.reg .b16 %h<16>; .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .b128 %q<4>;
.reg .f32 %f<16>; .reg .f64 %d<16>; .reg .pred %c<4>;
{self.text};
ret;
}}
"""


def hard_forms() -> dict[str, list[Form]]:
    """By chapter."""
    chapters: dict[str, list[Form]] = {}
    forms: list[Form] = []
    target = ""
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            chapter, target = line.removeprefix("== ").split(": ")
            forms = chapters.setdefault(chapter, [])
        elif line and not line.startswith("#"):
            text = line.removeprefix("refused: ")
            forms.append(Form(text, target, is_refused=text != line))
    return chapters
