"""What MkDocs adds to the pages of docs/: the README as the first page, pages of other folders,
examples, and the API, a page for each public module. So none of these files is committed twice.

Links in documents lead to files of the repository. Here they are turned to the site's pages.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Every name in `__all__` of these has its entry, and so have the modules that are among the names.
MODULES = ("deep_moe", "deep_moe.emulator", "deep_moe.emulator.cuda")
# Pages from outside of docs/, by their paths in the repository.
BESIDE = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/RESULTS.md",
    "benchmarks/COMBINATIONS.md",
    "benchmarks/LOG.md",
)
# Objects of these classes come from calls. Their constructors are not for users.
NOT_CONSTRUCTED = {
    "AllToAllHandle",
    "CompilingKernels",
    "DispatchHandle",
    "DispatchMetaInfo",
    "Dispatched",
    "LowLatencyHandle",
    "MegaMoEWeights",
    "Module",
    "Received",
    "SymmBuffer",
}
# Methods that other parts of the package call, and users do not.
NOT_CALLED = {
    "closed_error",
    "mark_failed",
    "memory_regions",
    "newest_phases",
    "of_dispatch",
    "of_handle",
    "of_memory",
    "prepare_combine",
    "prepare_dispatch",
    "prepare_receive",
    "prepare_return_scalars",
    "raise_if_closed",
    "raise_if_unusable",
    "refuse_gradients",
    "refuse_second_user",
}
# `run` executes a kernel for a layer; `Machine.run` is for users.
RUNS_KERNELS = {"AllToAll", "EmulatedAllToAll", "EmulatedThroughputAllToAll", "LowLatencyAllToAll"}
# A folder for each build of this process.
SOURCES = tempfile.TemporaryDirectory(prefix="deep_moe_site_")
LINK = re.compile(r"!?\[([^]]*)\]\(([^)\s]+)\)")


@event_priority(100)  # before mkdocstrings reads its own part
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """`API: api/` of the navigation becomes the list of the API's pages, which are made from a copy
    of the package."""
    folder = Path(SOURCES.name, str(len(os.listdir(SOURCES.name))))
    copy_package(folder / "deep_moe")
    plugin: Any = config.plugins["mkdocstrings"]
    plugin.config.handlers["python"]["paths"] = [str(folder)]
    pages = [{module.__name__: api_uri(module)} for module in modules()]
    for section in config.nav or ():
        for items in section.values():
            for item in items:
                if isinstance(item, dict) and item.get("API") == "api/":
                    item["API"] = pages
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for uri, text in generated().items():
        files.append(File.generated(config, uri, content=text))
    return files


def copy_package(package: Path) -> None:
    """The package as it is installed, in which mkdocstrings looks: the top-level folders emulator,
    heuristics and jit are packages inside of it. A copy for each build, so that nothing that other
    processes write beside the sources, another build for one, comes and goes while it looks."""

    def without_others(_folder: str, names: list[str]) -> set[str]:
        return {name for name in names if "." in name and not name.endswith(".py")} | {
            "__pycache__",
            "__main__.py",
            "src",
        }

    shutil.copytree(ROOT / "deep_moe", package, ignore=without_others)
    for name in ("emulator", "heuristics", "jit"):
        shutil.copytree(ROOT / name, package / name, ignore=without_others)


def generated() -> dict[str, str]:
    """The text of every page that is not in docs/, by where the site has it."""
    pages = {"index.md": (ROOT / "README.md").read_text(encoding="utf-8")}
    pages |= {path: (ROOT / path).read_text(encoding="utf-8") for path in BESIDE}
    for path in sorted((ROOT / "examples").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        pages[f"examples/{path.stem}.md"] = f"# examples/{path.name}\n\n```python\n{code}```\n"
    return pages | {api_uri(module): api_page(module) for module in modules()}


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    if uri.startswith(("api/", "examples/")):
        return markdown
    return for_site(markdown, uri)


def for_site(markdown: str, uri: str) -> str:
    """A page's text as the site has it at `uri`.

    >>> for_site("[a](docs/weights.md#b), [c](https://d.e)", "index.md")
    '[a](weights.md#b), [c](https://d.e)'
    >>> for_site("[a](../benchmarks/LOG.md), [b](../jit/render.py)", "weights.md")
    '[a](benchmarks/LOG.md), b (`jit/render.py`)'
    """
    path = path_of(uri)

    def turned(match: re.Match[str]) -> str:
        words, link = match[1], match[2]
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        target, _, anchor = link.partition("#")
        to = os.path.normpath((path.parent / target).as_posix())
        if not (ROOT / to).exists():
            raise PluginError(f"{path.as_posix()} links to {link}, which is not there")
        there = uri_of(to)
        if there is None:
            return f"{words} (`{to}`)"
        relative = os.path.relpath(there, os.path.dirname(uri) or ".")
        image = "!" if match[0].startswith("!") else ""
        return f"{image}[{words}]({relative}{'#' + anchor if anchor else ''})"

    # Words behind the language say how tests run a block.
    markdown = re.sub(r"^```(\w+) \w+$", r"```\1", markdown, flags=re.MULTILINE)
    return LINK.sub(turned, markdown)


def path_of(uri: str) -> Path:
    """The path in the repository of the page that the site has at `uri`."""
    if uri == "index.md":
        return Path("README.md")
    return Path(uri) if uri in BESIDE else Path("docs", uri)


def uri_of(path: str) -> str | None:
    """Where the site has a file of the repository; None where it has it not."""
    if path == "README.md":
        return "index.md"
    if path in BESIDE:
        return path
    if path.startswith("examples/"):
        return str(Path(path).with_suffix(".md"))
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def modules() -> Iterator[ModuleType]:
    """All public modules."""
    pending = [importlib.import_module(name) for name in MODULES]
    while pending:
        module = pending.pop(0)
        yield module
        inside = (getattr(module, name) for name in getattr(module, "__all__", ()))
        pending = [value for value in inside if inspect.ismodule(value)] + pending


def api_uri(module: ModuleType) -> str:
    return f"api/{module.__name__}.md"


def api_page(module: ModuleType) -> str:
    """Calls and classes first, then errors."""
    values: dict[str, Any] = {
        name: getattr(module, name) for name in getattr(module, "__all__", ())
    }
    # What a public module inside this one has too stands on that module's page.
    inside = [value for value in values.values() if inspect.ismodule(value)]
    elsewhere = {name for own in inside for name in getattr(own, "__all__", ())}
    names = [
        name for name in values if name not in elsewhere and not inspect.ismodule(values[name])
    ]
    names.sort(
        key=lambda name: inspect.isclass(values[name]) and issubclass(values[name], Exception)
    )
    entries = "".join(_entry(name, values[name], module) for name in names)
    return f"# {module.__name__}\n\n{inspect.cleandoc(module.__doc__ or '')}\n{entries}"


def _entry(name: str, value: object, module: ModuleType) -> str:
    """A block that mkdocstrings replaces."""
    home = getattr(value, "__module__", module.__name__)
    entry = f"\n::: {home}.{name}\n"
    if not inspect.isclass(value):
        return entry
    hidden = "|".join(sorted(hidden_members(value)))
    options = {
        "filters": ["!^_", f"!^({hidden})$"],
        "merge_init_into_class": value.__name__ not in NOT_CONSTRUCTED,
    }
    lines = "".join(f"      {key}: {json.dumps(option)}\n" for key, option in options.items())
    return f"{entry}    options:\n{lines}"


def hidden_members(cls: type) -> set[str]:
    """Methods of a class that are not for users."""
    return NOT_CALLED | ({"run"} if cls.__name__ in RUNS_KERNELS else set())


def undocumented_parameters() -> dict[str, set[str]]:
    """Of each public callable the parameters that its docstring does not describe."""
    found = {}
    for name, function, text in public_callables():
        parameters = {p for p in inspect.signature(function).parameters if not p.startswith("_")}
        described = {
            item.name
            for section in griffe.Docstring(text).parse("google", warnings=False)
            if section.kind.value in ("parameters", "attributes")
            for item in section.value
        }
        missing = parameters - described - {"self", "cls"}
        if missing:
            found[name] = missing
    return found


def documented_errors(function: Callable[..., Any]) -> set[str]:
    """The names of the errors that the docstring of a function or class lists under "Raises:"."""
    return {
        item.annotation
        for section in griffe.Docstring(inspect.getdoc(function) or "").parse(
            "google", warnings=False
        )
        if section.kind.value == "raises"
        for item in section.value
    }


def public_callables() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Name, function or class, and docstring of all that users call."""
    for module in modules():
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value, inspect.getdoc(value) or ""
            elif inspect.isclass(value) and not issubclass(value, BaseException):
                if value.__name__ not in NOT_CONSTRUCTED:
                    yield f"{module.__name__}.{name}", value, inspect.getdoc(value) or ""
                for member, function in inspect.getmembers(value, inspect.isroutine):
                    is_own = str(getattr(function, "__module__", "")).startswith("deep_moe")
                    is_public = not member.startswith("_") and member not in hidden_members(value)
                    if is_own and is_public:
                        yield f"{name}.{member}", function, inspect.getdoc(function) or ""
