"""The instructions that the emulator knows, as docs/instructions.md lists them.

python -m tests.hardware.instruction_table > docs/instructions.md
"""

from __future__ import annotations

from deep_moe.emulator import supported_instructions

from ..emulator.hard_forms import hard_forms
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
| `cp.async.bulk.tensor` | `.im2col::w`, `.im2col::w::128` |
| `cvt` | `.scaled::n2::ue8m0` to anything but `.bf16x2`; `.s2f6x2` |
| `tex`, `tld4`, `txq`, `istypep`, `suld`, `sust`, `sured`, `suq` | textures and surfaces |
| `tcgen05.mma` | `.ashift` |
| `mma` | `.f16` results of elements of 4 and 6 bits |
| `wmma` | elements of 1 and 4 bits |
| `vadd`, `vsub`, `vabsdiff`, `vmin`, `vmax`, `vshl`, `vshr`, `vmad`, `vset` | of one value |

What a descriptor asks for at run time ends the kernel: K = 96 and absolute leading offsets
(sm_103), sparsity selectors above 1, `tcgen05.mma.sp` with 64 rows in each CTA of a pair,
`tcgen05.mma.ws` of 32 or 64 rows with a sparse A or with A in tensor memory.

`tests/emulator/hard_forms.txt` lists {num_forms} forms that few kernels use, from all chapters.
`ptxas` 13.0 assembles each of them. {num_loaded} load here, and {num_refused} are refused as above;
a test compares.
"""


def instruction_table() -> str:
    names = supported_instructions()
    executed = covered(all_cases().values(), names)

    def row(name: str) -> str:
        summary = names[name].replace("|", "\\|")
        return (
            f"| `{name}` | {summary} | {'yes' if name in executed else reason_left_out(name)} |\n"
        )

    forms = [form for chapter in hard_forms().values() for form in chapter]
    num_refused = sum(form.is_refused for form in forms)
    footer = FOOTER.format(
        num_forms=len(forms), num_loaded=len(forms) - num_refused, num_refused=num_refused
    )
    return HEADER + "".join(map(row, sorted(names))) + footer


if __name__ == "__main__":
    print(instruction_table(), end="")
