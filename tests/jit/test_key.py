"""The key of a compiled kernel: whatever its result follows from gives it another one."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from deep_moe import jit
from deep_moe.emulator import nvrtc
from deep_moe.heuristics import MoEShape
from deep_moe.jit import headers, render
from deep_moe.jit.cache import KernelCache
from deep_moe.jit.headers import find_library
from deep_moe.jit.nvrtc import compiler_version
from deep_moe.targets import choose_config

SHAPE = MoEShape(1, 4, 2, 256, 128, 16)
ROOT = Path(__file__).parents[2]


class Keys:
    """The keys that kernels are looked up by; nothing is compiled."""

    def __init__(self, folder: Path) -> None:
        self.cache = KernelCache(folder)

    def of_source(self, source: str = "source", *, for_emulator: bool = False, **changes: str):
        seen: list[str] = []
        cache = SimpleNamespace(
            load=lambda key: None, load_or_compile=lambda key, _: seen.append(key)
        )
        arguments = {"arch": "sm_90a", "kernel": "kernel", **changes}
        jit.compile_cached(source, cache=cache, for_emulator=for_emulator, **arguments)  # type: ignore[arg-type]
        return seen[0]

    def of_config(self) -> str:
        seen: list[str] = []
        cache = SimpleNamespace(load_or_compile=lambda key, _: seen.append(key))
        jit.build(choose_config(SHAPE, 8, arch="sm_90a"), cache=cache)  # type: ignore[arg-type]
        return seen[0]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_equal_kernels_have_equal_keys(keys: Keys) -> None:
    assert keys.of_source() == keys.of_source()
    assert keys.of_config() == keys.of_config()


def test_source_entry_architecture_and_results_are_in_the_key(keys: Keys) -> None:
    found = [
        keys.of_source(),
        keys.of_source("other source"),
        keys.of_source(kernel="other_kernel"),
        keys.of_source(arch="sm_100a"),
        keys.of_source(for_emulator=True),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("option", nvrtc.COMPILE_OPTIONS)
@pytest.mark.parametrize("for_emulator", [False, True])
def test_every_option_is_in_the_key(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, option: str, for_emulator: bool
) -> None:
    before = keys.of_source(for_emulator=for_emulator)
    others = tuple(other for other in nvrtc.COMPILE_OPTIONS if other != option)
    monkeypatch.setattr(nvrtc, "COMPILE_OPTIONS", others)
    without = keys.of_source(for_emulator=for_emulator)
    monkeypatch.setattr(nvrtc, "COMPILE_OPTIONS", (*others, f"{option}0"))
    changed = keys.of_source(for_emulator=for_emulator)
    assert len({before, without, changed}) == 3


def test_what_is_compiled_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="deep_moe")
    source = 'extern "C" __global__ void kernel() {}'
    for _ in range(2):
        kernel = jit.compile_cached(
            source, arch="sm_90a", kernel="kernel", cache=KernelCache(tmp_path), for_emulator=True
        )
    seconds = kernel.manifest["compile_seconds"]
    assert caplog.record_tuples == [
        ("deep_moe.jit", logging.INFO, f"{kernel.key}: compiling kernel for sm_90a to PTX"),
        ("deep_moe.jit", logging.INFO, f"{kernel.key}: compiled in {seconds:.1f} s"),
        ("deep_moe.jit.cache", logging.DEBUG, f"{kernel.key}: loaded from {tmp_path}"),
    ]


def test_the_compiler_is_given_the_options_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the architecture, and folders of headers, which are in the key by themselves."""
    given: list[list[str]] = []
    compile_it = nvrtc._precompiled_headers.compile

    def note(source, options, run):
        given.append(list(options))
        return compile_it(source, options, run)

    monkeypatch.setattr(nvrtc._precompiled_headers, "compile", note)
    source = 'extern "C" __global__ void kernel() {}'
    kernel = jit.compile_cached(source, arch="sm_90a", kernel="kernel", cache=KernelCache(tmp_path))
    (options,) = given
    assert options[0] == "--gpu-architecture=sm_90a"
    folders = [f"-I{path}" for path in headers.find_headers().include_paths]
    assert options[1:] == [*kernel.manifest["options"], *folders]


def test_the_compiler_s_version_is_in_the_key(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys.of_source()
    monkeypatch.setattr("importlib.metadata.version", lambda package: "13.99.1")
    assert "13.99.1" in compiler_version()
    assert keys.of_source() != before


def test_the_template_s_text_is_in_the_key(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys.of_config()
    rendered = render.render_kernel(choose_config(SHAPE, 8, arch="sm_90a"))
    monkeypatch.setattr(jit, "render_kernel", lambda config: rendered + "// a line more\n")
    assert keys.of_config() != before


# Every folder that holds headers, the deepest too.
FOLDERS = sorted({path.parent.relative_to(ROOT) for path in (ROOT / "include").rglob("*.cuh")})


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_header_of_any_folder_is_in_the_key(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    before = keys.of_source()
    header = min((ROOT / folder).glob("*.cuh"))
    read = headers._content
    monkeypatch.setattr(
        headers,
        "_content",
        lambda path: read(path) + (b"// changed" if path == str(header) else b""),
    )
    assert keys.of_source() != before


def test_names_and_bounds_of_headers_are_in_the_digest(tmp_path: Path) -> None:
    """The same bytes, otherwise distributed."""
    trees = [
        {"a.cuh": b"12", "b.cuh": b"3"},
        {"a.cuh": b"1", "b.cuh": b"23"},
        {"a.cuh": b"12", "below/b.cuh": b"3"},
        {"a.cuh": b"12", "below/below/b.cuh": b"3"},
        {"a.cuh": b"12", "c.cuh": b"3"},
        {"a.cuh": b"12", "b.cuh": b"3", "c.cuh": b""},
    ]
    digests = set()
    for number, tree in enumerate(trees):
        for name, content in tree.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        digests.add(headers.tree_digest(tmp_path / str(number)))
    assert len(digests) == len(trees)


@pytest.mark.parametrize("which", ["library", "cutlass", "cuda", "cccl"])
def test_other_headers_give_another_key(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    before = keys.of_source()
    found = headers.find_headers()
    folder = headers.HeaderFolder(getattr(found, which).path, "another version")
    changed = headers.Headers(
        **{n: getattr(found, n) for n in ("library", "cutlass", "cuda", "cccl") if n != which},
        **{which: folder},
    )
    monkeypatch.setattr(jit, "find_headers", lambda: changed)
    assert keys.of_source() != before
    assert find_library() == found.library


def test_a_changed_file_of_a_cutlass_checkout_is_another_cutlass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version may be the same."""
    for name in ("cute/tensor.hpp", "cute/atom/deep/copy.hpp", "cutlass/version.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("// text\n")
    monkeypatch.setenv("DEEP_MOE_CUTLASS_INCLUDE", str(tmp_path))
    before = headers.find_cutlass().identity
    assert headers.find_cutlass().identity == before
    (tmp_path / "cute/atom/deep/copy.hpp").write_text("// another text\n")
    assert headers.find_cutlass().identity != before
