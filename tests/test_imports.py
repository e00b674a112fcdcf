"""What may import what: each room only itself and rooms below it, and no module itself, by whatever
way. docs/architecture.md has the picture.

Imports inside of functions count. What only type checkers import does not: nothing of it runs.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "deep_moe": "deep_moe",
    "heuristics": "deep_moe.heuristics",
    "jit": "deep_moe.jit",
    "emulator": "deep_moe.emulator",
}
# From below. A module belongs to the longest name that it begins with.
ROOMS = (
    # A distribution of its own.
    ("emulator",),
    # Nothing else of ours, or each other. The package finds its own names when they are asked for.
    (
        "errors",
        "lazy",
        "source_checkout",
        "described",
        "tensor_memory",
        "tensor_map",
        "axes",
        "devices",
    ),
    # Numbers; what formats and activations are called, and the values of the axes below targets.
    ("formats", "tokens", "activations", "weights"),
    ("heuristics",),
    # Weights in their folders know shapes, and what targets do with them.
    ("weights.", "biases", "targets"),
    ("jit", "traces"),
    ("checkpoint", "fused"),
    ("split", "balancing"),
    ("training",),
    ("compat",),
    ("integrations",),
    ("trial",),
    ("cli", "__main__"),
)
RANKS = {name: rank for rank, room in enumerate(ROOMS) for name in room}


def modules() -> dict[str, Path]:
    """Those that are ours, by name."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()


def package_of(name: str, path: Path) -> str:
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def module_of(node: ast.ImportFrom, package: str) -> str:
    """The full name of what stands behind "from" in a module of `package`."""
    above = package.split(".")[: -(node.level - 1) or None] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def imported(name: str) -> set[str]:
    """Our modules that one imports when it runs."""
    path = MODULES[name]
    package = package_of(name, path)

    def targets(node: ast.stmt) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = module_of(node, package)
            for alias in node.names:
                own = f"{module}.{alias.name}"
                yield own if own in MODULES else module
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            for child in ast.iter_child_nodes(node):
                yield from targets(child)

    return {own for own in targets(ast.parse(path.read_text())) if own in MODULES} - {name}


GRAPH = {name: imported(name) for name in MODULES}


def rank(name: str) -> int:
    if name == "deep_moe":
        return 0
    inside = name.removeprefix("deep_moe.")
    room = inside.split(".")[0]
    return RANKS[f"{room}." if f"{room}." in RANKS and "." in inside else room]


def test_every_room_has_its_place() -> None:
    rooms = {name.split(".")[1] for name in MODULES if "." in name}
    assert rooms == {name.rstrip(".") for name in RANKS}


@pytest.mark.parametrize("room", sorted({name.split(".")[1] for name in MODULES if "." in name}))
def test_imports_point_down(room: str) -> None:
    up = {
        f"{name} -> {other}"
        for name, others in GRAPH.items()
        if name.split(".")[1:2] == [room]
        for other in others
        if rank(other) > rank(name)
    }
    assert up == set()


def test_the_emulator_needs_its_own_packages_and_nothing_of_ours() -> None:
    """Not even for types. It is installed without deep_moe, too: emulator/pyproject.toml."""
    optional = {"cuda", "pytest"}
    allowed = sys.stdlib_module_names | {"numpy", "typer"} | optional
    folder = ROOT / "emulator"
    others = set()
    for path in folder.rglob("*.py"):
        if path == folder / "setup.py":
            continue
        depth = len(path.relative_to(folder).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                others |= {alias.name.partition(".")[0] for alias in node.names} - allowed
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                others |= {str(node.module).partition(".")[0]} - allowed
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= depth, f"{path} imports from above the emulator"
    assert others == set()


def test_no_module_imports_itself_by_any_way() -> None:
    """Modules whose imports are all gone can be taken away, one after the other, until none is
    left."""
    left = dict(GRAPH)
    while True:
        leaves = {name for name, others in left.items() if not others & left.keys()}
        if not leaves:
            break
        left = {name: others for name, others in left.items() if name not in leaves}
    assert left == {}


def test_only_the_command_line_imports_what_tries_the_layer() -> None:
    importing = {
        name
        for name, others in GRAPH.items()
        if any(other.startswith("deep_moe.trial") for other in others)
    }
    assert {name.split(".")[1] for name in importing} == {"trial", "cli"}


@functools.cache
def names_of(path: Path) -> set[str]:
    """What a module binds; all that it quotes, too, if it finds names when they are asked for."""

    def bound(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from bound(child)

    tree = ast.parse(path.read_text())
    names = set(bound(tree))
    if "__getattr__" in names:
        names |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return names


def nowhere(name: str, path: Path) -> set[str]:
    """What the module `name` imports from modules of ours that they do not have."""
    missing = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        source = module_of(node, package_of(name, path))
        if source.partition(".")[0] not in {"deep_moe", "tests", "benchmarks"}:
            continue
        if source not in IMPORTABLE:
            missing.add(source)
            continue
        module = IMPORTABLE[source]
        names = {alias.name for alias in node.names} - (names_of(module) if module else set())
        missing |= {f"{source}.{one}" for one in names} - IMPORTABLE.keys()
    return missing


def importable() -> dict[str, Path | None]:
    """Modules by name, and folders without an __init__.py: None."""
    paths: dict[str, Path | None] = dict(MODULES)
    for folder in CALLERS:
        for path in (ROOT / folder).rglob("*.py"):
            parts = (folder, *path.relative_to(ROOT / folder).with_suffix("").parts)
            paths[".".join(part for part in parts if part != "__init__")] = path
            for depth in range(1, len(parts)):
                paths.setdefault(".".join(parts[:depth]), None)
    return paths


CALLERS = ("tests", "benchmarks", "examples", "docs")
IMPORTABLE = importable()


@pytest.mark.parametrize("folder", [*FOLDERS, *CALLERS])
def test_what_is_imported_is_there(folder: str) -> None:
    """In files, too, that run only where an engine, a trainer or a GPU is."""
    missing = {
        f"{path.relative_to(ROOT)}: {one}"
        for name, path in IMPORTABLE.items()
        if path is not None and path.is_relative_to(ROOT / folder)
        for one in nowhere(name, path)
    }
    assert missing == set()


def test_a_name_that_is_gone_is_seen(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from deep_moe.cli.layer_options import LayerOptions, no_such_option\n"
        "from deep_moe.cli.no_such_module import option\n"
        "from deep_moe import mega_moe, cli\n"
        "from .fused import options, no_such_room\n"
        "def late():\n    from tests.test_imports import ROOT, late\n"
    )
    assert nowhere("deep_moe.planted", planted) == {
        "deep_moe.fused.no_such_room",
        "deep_moe.cli.layer_options.no_such_option",
        "deep_moe.cli.no_such_module",
        "tests.test_imports.late",
    }


def test_an_arrow_up_and_a_circle_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the tests above can fail."""
    planted = tmp_path / "planted.py"
    planted.write_text(
        "from typing import TYPE_CHECKING\n"
        "from ..targets import target_of as of\n"
        "if TYPE_CHECKING:\n    from deep_moe.cli import app\n"
        "def choose():\n    from .shape import MoEShape\n    import deep_moe.trial.paths\n"
    )
    monkeypatch.setitem(MODULES, "deep_moe.heuristics.planted", planted)
    assert imported("deep_moe.heuristics.planted") == {
        "deep_moe.targets",
        "deep_moe.heuristics.shape",
        "deep_moe.trial.paths",
    }
    assert rank("deep_moe.targets") > rank("deep_moe.heuristics.planted") > rank("deep_moe.weights")
    assert rank("deep_moe.weights.layers") == rank("deep_moe.targets.sm90.weights")
