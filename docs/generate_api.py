"""Writes docs/api.md, the reference of the Python API, from signatures and docstrings.

    python -m docs.generate_api

A test compares the file with what this makes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

OUTPUT = Path(__file__).parent / "api.md"
# Every name in `__all__` of these is documented, and so are the modules that are among the names.
MODULES = ("deep_moe", "deep_moe.emulator")
HEAD = """\
# API reference

Made from the docstrings by `python -m docs.generate_api`. [serving.md](serving.md) shows how the
calls go together, [environment.md](environment.md) lists the environment variables, and
`deep-moe --help` the commands.

`Pair` stands for one linear layer's weights and their scales.
"""
# What users do not make or call themselves.
NOT_CONSTRUCTED = {
    "CompilingKernels",
    "Dispatched",
    "DispatchHandle",
    "DispatchMetaInfo",
    "DomainGroups",
    "Module",
    "AllToAllHandle",
    "Received",
    "SymmBuffer",
}
NOT_CALLED = {
    "AllToAll.memory_regions",
    "AllToAll.of_memory",
    "AllToAll.prepare_combine",
    "AllToAll.prepare_dispatch",
    "AllToAll.prepare_return_scalars",
    "AllToAll.run",
    "EmulatedAllToAll.run",
    "EmulatedThroughputAllToAll.run",
    "LowLatencyAllToAll.memory_regions",
    "LowLatencyAllToAll.of_memory",
    "LowLatencyAllToAll.prepare_combine",
    "LowLatencyAllToAll.prepare_dispatch",
    "LowLatencyAllToAll.prepare_receive",
    "LowLatencyAllToAll.run",
    "SymmBuffer.closed_error",
    "SymmBuffer.mark_failed",
    "SymmBuffer.of_handle",
    "SymmBuffer.raise_if_closed",
    "SymmBuffer.raise_if_unusable",
    "SymmBuffer.refuse_gradients",
    "SymmBuffer.refuse_second_user",
    "SymmBuffer.reset_among",
}
LINE_LENGTH = 88
LONGEST_DEFAULT = 40


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(_module(module) for module in modules())


def modules() -> Iterator[ModuleType]:
    """All that are documented."""
    pending = [importlib.import_module(name) for name in MODULES]
    while pending:
        module = pending.pop(0)
        yield module
        names = getattr(module, "__all__", ())
        inside = (getattr(module, name) for name in names)
        pending = [value for value in inside if inspect.ismodule(value)] + pending


def _module(module: ModuleType) -> str:
    values = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    objects = {name: value for name, value in values.items() if not inspect.ismodule(value)}
    errors = {name: value for name, value in objects.items() if _is_error(value)}
    text = f"\n## {module.__name__}\n\n{_prose(module, ())}"
    for name, value in objects.items():
        if name not in errors:
            text += f"\n### {name}\n\n{_class(value) if inspect.isclass(value) else entry(value)}"
    if errors:
        text += "\n### Errors\n\n| error | a kind of | when |\n|---|---|---|\n"
        for name, error in sorted(errors.items(), key=lambda item: len(item[1].__mro__)):
            bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
            text += f"| `{name}` | {bases} | {' '.join(_doc(error).split())} |\n"
    return text


def module_of(name: str) -> ModuleType:
    """The module whose public name this is."""
    return next(module for module in modules() if name in getattr(module, "__all__", ()))


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _class(cls: type) -> str:
    parameters = set(inspect.signature(cls).parameters)
    is_constructed = parameters and cls.__name__ not in NOT_CONSTRUCTED
    text = _signature(cls, cls.__name__) if is_constructed else ""
    # A class explains its parameters and attributes alike.
    text += _prose(cls, parameters | set(re.findall(r"(\w+): ", _doc(cls))))
    for name, member in _public_members(cls):
        if isinstance(member, property):
            text += f"\n**`{name}`**: {_prose(member, ())}"
        else:
            text += f"\n{entry(member, owner=cls)}"
    return text


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that have a docstring, in the order of the source, those of the base
    classes last."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("deep_moe.")]
    members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    in_order = dict.fromkeys(name for base in bases for name in vars(base))
    for name in in_order:
        member = members[name]
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        is_kind = inspect.isfunction(member) or isinstance(member, property)
        is_public = not name.startswith("_") and f"{cls.__name__}.{name}" not in NOT_CALLED
        if is_public and is_kind and member.__doc__:
            yield name, member


def entry(function: Callable[..., Any], owner: type | None = None) -> str:
    """A function's signature and docstring."""
    name = function.__name__ if owner is None else f"{owner.__name__}.{function.__name__}"
    parameters = set(inspect.signature(function).parameters)
    return _signature(function, name) + _prose(function, parameters)


def _signature(function: Callable[..., Any], name: str) -> str:
    """The signature as code, on one line if it fits."""
    signature = inspect.signature(function)
    written, kind = [], None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY is not kind and "*" not in "".join(written):
            written.append("*")
        kind = parameter.kind
        written.append(_parameter(parameter))
    result = signature.return_annotation
    arrow = "" if inspect.isclass(function) or result is signature.empty else f" -> {_type(result)}"
    line = f"{name}({', '.join(written)}){arrow}"
    if len(line) > LINE_LENGTH:
        inside = "".join(f"    {text},\n" for text in written)
        line = f"{name}(\n{inside}){arrow}"
    return f"```text\n{line}\n```\n\n"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = repr(parameter.default)
        text += " = " + (default if len(default) <= LONGEST_DEFAULT else "...")
    return text


def _type(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _doc(thing: object) -> str:
    """Its docstring; a class that has none of its own has none."""
    text = inspect.cleandoc(thing.__doc__ or "")
    if not text:
        raise ValueError(f"{thing!r} has no docstring")
    return text


def _prose(thing: object, names: Collection[str]) -> str:
    """A docstring as Markdown. Paragraphs that are indented or begin with >>> are code."""
    parts = []
    for paragraph in re.split(r"\n\n+", _doc(thing)):
        if paragraph.startswith(">>> "):
            parts.append(f"```pycon\n{paragraph}\n```")
        elif paragraph.startswith("    "):
            parts.append(f"```python fragment\n{inspect.cleandoc(paragraph)}\n```")
        else:
            parts.append(_paragraph(paragraph, names))
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str, names: Collection[str]) -> str:
    """Text, and from the first `name: ` at the start of a line on a list."""
    before: list[str] = []
    entries: list[str] = []
    # An entry begins with a line, or behind the sentence of another.
    for piece in re.split(r"\n(?=\w+(?:, \w+)*: )|(?<=[.;]) (?=\w+(?:, \w+)*: )", text):
        entry = re.match(r"(\w+(?:, \w+)*): (.*)", piece, re.DOTALL)
        if entry and set(entry[1].split(", ")) <= set(names):
            words = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            entries.append(f"- {words}: {_escape(' '.join(entry[2].split()))}")
        elif entries:
            entries[-1] += " " + _escape(" ".join(piece.split()))
        else:
            before.append(_escape(piece))
    return "\n\n".join("\n".join(part) for part in (before, entries) if part)


def _escape(text: str) -> str:
    """Stars outside of code would be emphasis."""
    return re.sub(r"(`[^`]*`)|\*", lambda match: match[1] or r"\*", text)


if __name__ == "__main__":
    OUTPUT.write_text(reference(), encoding="utf-8")
    print(f"wrote {OUTPUT}")
