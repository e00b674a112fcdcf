"""What the checks found, as data: what it is about, and who executed which instructions."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .errors import BY_KIND, KIND_NAMES, EmulatorError


@dataclass(frozen=True)
class Involved:
    """One of the instructions that a finding is about, and who executed it.

    Args:
        access: "read", "write", "asynchronous write" and the like, "" where it is not about memory.
        rank: whose kernel it is.
        cta: index in the grid.
        warp: index in the CTA.
        lane: None if it was no single one.
        role: as `launch(roles=...)` names the warp, else "".
        file: of the source, "" without line information.
        line: of the source, 0 without line information.
        ptx_line: in the module's text, which `instruction` quotes.
        kernel: its C++ name, or the PTX's.
        instruction: the line of PTX.
    """

    access: str
    rank: int
    cta: int
    warp: int
    lane: int | None
    role: str
    file: str
    line: int
    ptx_line: int
    kernel: str
    instruction: str


@dataclass(frozen=True)
class Finding:
    """One mistake in a kernel. `str` of it is its text.

    Args:
        kind: "race", "uninitialized", "barrier_misuse", "out_of_bounds" and so on, one for each
            class of error.
        text: all of it in words.
        space: of the memory that it is about, "global", "shared", "tensor", "register" or another
            state space, "" if it is about none.
        address: there; in shared memory an offset, in tensor memory lane << 16 | column, None where
            there is none.
        involved: the instructions in the order in which they came; of a race the two accesses. What
            caught it is the last one, and `file`, `line` and `role` are its own.
        same_value: it is a race of two writes, and the second one changed nothing.
    """

    kind: str
    text: str
    space: str
    address: int | None
    involved: tuple[Involved, ...]
    same_value: bool = False

    @property
    def file(self) -> str:
        return self.involved[-1].file if self.involved else ""

    @property
    def line(self) -> int:
        return self.involved[-1].line if self.involved else 0

    @property
    def role(self) -> str:
        return self.involved[-1].role if self.involved else ""

    @property
    def error(self) -> type[EmulatorError]:
        """What a machine that stops at findings raises."""
        return next(BY_KIND[number] for number, name in KIND_NAMES.items() if name == self.kind)

    def as_dict(self) -> dict[str, Any]:
        """All of it, with `file`, `line` and `role`, as `json` takes it."""
        place = {"file": self.file, "line": self.line, "role": self.role}
        return {**asdict(self), **place}

    def to_json(self) -> str:
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        return self.text


def decode_finding(text: str) -> Finding:
    """The finding that the library describes by this JSON."""
    fields = json.loads(text)
    involved = []
    for one in fields["involved"]:
        lane = one["lane"] if one["lane"] >= 0 else None
        involved.append(Involved(**{**one, "lane": lane}))
    has_address = fields["space"] not in ("", "register")
    return Finding(
        KIND_NAMES[fields["kind"]],
        fields["text"],
        fields["space"],
        fields["address"] if has_address else None,
        tuple(involved),
        fields["same_value"],
    )
