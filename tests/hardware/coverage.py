"""Which of the emulator's instructions the cases execute, and why the others are left out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .case import Case

_SM100 = "SM100 only"
_LATER = "our kernels do not use it; not recorded yet"
_SEVERAL = "several GPUs"
NOT_RECORDED = {
    "brkpt": "ends the context",
    "trap": "ends the context",
    "alloca": _LATER,
    "clusterlaunchcontrol.query_cancel.get_first_ctaid": _SM100,
    "clusterlaunchcontrol.query_cancel.is_canceled": _SM100,
    "clusterlaunchcontrol.try_cancel": _SM100,
    "cp.async.mbarrier.arrive": _LATER,
    "mbarrier.pending_count": _LATER,
    "mma.sp": "the form without ordered metadata is deprecated",
    "multimem.ld_reduce": _SEVERAL,
    "multimem.red": _SEVERAL,
    "multimem.st": _SEVERAL,
    "prefetch.const.tensormap": "the tensor map would have to be in constant memory",
    "red.async": _LATER,
    "st.async": _LATER,
    "st.bulk": _SM100,
    "stackrestore": _LATER,
    "stacksave": _LATER,
}
_SIMD = ("vabsdiff", "vadd", "vavrg", "vmax", "vmin", "vset", "vsub")
NOT_RECORDED_FAMILIES = {
    "tcgen05": _SM100,
    "wmma": _LATER,
    **{f"{name}{lanes}": _LATER for name in _SIMD for lanes in (2, 4)},
}

_STATEMENT = re.compile(r"^(?:@!?%?\w+\s+)?([a-z][\w.:]*)")
_LABEL = re.compile(r"^\$?\w+\s*:(?!:)\s*")


def mnemonics(ptx: str) -> set[str]:
    """Of the statements in PTX, with all modifiers."""
    found = set()
    for statement in re.split(r"[;{}\n]", ptx):
        text = statement.strip()
        while label := _LABEL.match(text):
            text = text[label.end() :]
        if match := _STATEMENT.match(text):
            found.add(match[1])
    return found


def instruction_of(mnemonic: str, names: Iterable[str]) -> str | None:
    """The longest of `names` that is the mnemonic or a part of it up to a dot."""
    fitting = [name for name in names if mnemonic == name or mnemonic.startswith(name + ".")]
    return max(fitting, key=len, default=None)


def covered(cases: Iterable[Case], names: Iterable[str]) -> set[str]:
    names = list(names)
    used = set().union(*(mnemonics(case.ptx) for case in cases))
    return {name for mnemonic in used if (name := instruction_of(mnemonic, names))}


def reason_left_out(name: str) -> str | None:
    return NOT_RECORDED.get(name) or NOT_RECORDED_FAMILIES.get(name.split(".")[0])
