"""Structs of the header library as ctypes has them, read from the headers: each is declared once.

A struct's members are numbers, pointers, enums, other such structs, and arrays of these whose size
is a constant of the headers. It may derive from another one. Kernels assert all sizes and offsets
(`layout_checks`), so that what is misread does not compile.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from .headers import library_path

_NUMBERS: dict[str, Any] = {
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_MEMBER = re.compile(
    r"(?:const )?(?P<type>[\w:]+)(?P<pointer>\*)? (?P<name>\w+)(?:\[(?P<size>\w+)\])?"
)


class CppStruct(ctypes.Structure):
    """A struct of the header library. cpp_name: in the namespace deep_moe. cpp_alignment: bytes, of
    which the size is a multiple. has_tensors: of a kernel's arguments that are kept for further
    calls, whether members are set that not every call sets."""

    cpp_name: str
    cpp_alignment: int
    has_tensors = False


def constant(header: str, name: str) -> int:
    """A constexpr integer of a header, or of one that it includes."""
    _, found = _declaration(header, name, rf"\bconstexpr \w+ {name} = (\w+?)u?(?: << (\d+))?;")
    return int(found[1], 0) << int(found[2] or 0)


def struct(header: str, name: str) -> type[CppStruct]:
    """The struct that a header, or one that it includes, declares.

    name: in the namespace deep_moe, as `WaitStatus` or `sm90::KernelArgs`; the latter is in the
    header itself.
    """
    last = name.split("::")[-1]
    declared = rf"\bstruct (?:alignas\((\d+)\) )?{last}(?: : deep_moe::(\w+))? \{{(.*?)\}};"
    declaring, found = _declaration(header, name, declared)
    return _struct(declaring, name, *found.groups())


@cache
def _struct(
    header: str, name: str, alignment: str | None, base_name: str | None, body: str
) -> type[CppStruct]:
    base: type[CppStruct] = CppStruct
    if base_name is not None:
        base = struct("deep_moe/layout/kernel_args.cuh", base_name)
    end = 0 if base_name is None else ctypes.sizeof(base)
    most = max(int(alignment or 1), getattr(base, "cpp_alignment", 1))
    fields: list[tuple[str, Any]] = []

    def pad(alignment: int) -> None:
        if end % alignment:
            fields.append((f"_padding_at_{end}", ctypes.c_ubyte * (-end % alignment)))

    for line in filter(None, (line.strip() for line in body.split(";"))):
        member = _MEMBER.fullmatch(" ".join(line.split()))
        if member is None:
            raise ValueError(f"{header}: {name} must have members of known forms; got {line!r}")
        kind = ctypes.c_uint64 if member["pointer"] else _type(header, member["type"])
        own_alignment = getattr(kind, "cpp_alignment", ctypes.alignment(kind))
        if member["size"]:
            size = member["size"]
            kind = kind * (int(size) if size.isdigit() else constant(header, size))
        pad(own_alignment)
        end += -end % own_alignment + ctypes.sizeof(kind)
        fields.append((member["name"], kind))
        most = max(most, own_alignment)
    pad(most)
    members = {"_fields_": fields, "cpp_name": name, "cpp_alignment": most}
    return type(name.split("::")[-1], (base,), members)


@dataclass(frozen=True)
class LayoutCheck:
    """A fact that host and device must agree on. `member` is None for the size of the struct."""

    struct: str
    member: str | None
    value: int


def layout_checks(*structs: type[CppStruct]) -> Iterator[LayoutCheck]:
    """Size and every member's offset."""
    for own in structs:
        yield LayoutCheck(own.cpp_name, None, ctypes.sizeof(own))
        for name in member_names(own):
            yield LayoutCheck(own.cpp_name, name, getattr(own, name).offset)


def member_names(own: type[CppStruct]) -> list[str]:
    """Of a struct and what it derives from, in their order."""
    inherited = [kind for kind in reversed(own.__mro__) if "_fields_" in vars(kind)]
    names = (name for kind in inherited for name, *_ in vars(kind)["_fields_"])
    return [name for name in names if not name.startswith("_")]


def _type(header: str, name: str) -> Any:
    if name in _NUMBERS:
        return _NUMBERS[name]
    _, found = _declaration(
        header, name, rf"\b(?:enum class|struct)[\w() ]* {name} (?:: (\w+) )?\{{"
    )
    return _NUMBERS[found[1]] if found[1] in _NUMBERS else struct(header, name)


def _declaration(header: str, name: str, pattern: str) -> tuple[str, re.Match[str]]:
    """The header that declares something, among one and those that it includes, and how."""
    for own in _with_includes(header):
        found = re.search(pattern, _code(own), re.DOTALL)
        if found is not None:
            return own, found
    raise ValueError(f"{header} must declare {name}; it does not")


@cache
def _with_includes(header: str) -> tuple[str, ...]:
    names = re.findall(r'#include "(deep_moe/[^"]+)"', _code(header))
    return tuple(dict.fromkeys([header, *(own for name in names for own in _with_includes(name))]))


@cache
def _code(header: str) -> str:
    """A header without comments."""
    return re.sub(r"//.*", "", (library_path() / header).read_text())
