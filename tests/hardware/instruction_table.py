"""The instructions that the emulator knows, as docs/instructions.md lists them.

python -m tests.hardware.instruction_table > docs/instructions.md
"""

from __future__ import annotations

from deep_moe.emulator import supported_instructions

from .coverage import covered, reason_left_out
from .suite import all_cases

HEADER = """# Instructions of the emulator

Made from the emulator's own table by `python -m tests.hardware.instruction_table`; a test compares.
An instruction or a form that is not listed is an error when PTX that has it is loaded. The last
column says whether `tests/hardware/` repeats it with the results of an H200, or why not.

| instruction | what of it | as an H200 |
|---|---|---|
"""


# Of PTX ISA 9, in the words of its chapters.
FOOTER = """
## What is refused

A module that has one of these does not load; the error names the line.

| instruction | what of it |
|---|---|
| `cp.async.bulk.tensor` | `.im2col` and its kinds |
| `mma` | a sparse A of 4-bit or 6-bit elements, or with scales |
| `mma` | m8n8k4 of halves, elements of one and four bits (`.b1`, `.u4`, `.s4`) |
| `multimem.*` | FP8 |
| `tcgen05.mma` | sparse A (`.sp`), K = 96 |
| `tcgen05.mma.ws` | sparse A (`.sp`), a mask of zero columns |
| `tex`, `tld4`, `txq`, `istypep`, `suld`, `sust`, `sured`, `suq` | textures and surfaces |
| `vadd`, `vsub`, `vabsdiff`, `vmin`, `vmax`, `vshl`, `vshr`, `vmad`, `vset` | of one value |
"""


def instruction_table() -> str:
    names = supported_instructions()
    executed = covered(all_cases().values(), names)

    def row(name: str) -> str:
        summary = names[name].replace("|", "\\|")
        return (
            f"| `{name}` | {summary} | {'yes' if name in executed else reason_left_out(name)} |\n"
        )

    return HEADER + "".join(map(row, sorted(names))) + FOOTER


if __name__ == "__main__":
    print(instruction_table(), end="")
