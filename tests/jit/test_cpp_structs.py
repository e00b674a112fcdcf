"""Structs that are read from headers: as the compiler lays them out, and nothing misread."""

import ctypes
import functools
from pathlib import Path

import pytest

from deep_moe.jit import cpp_structs, kernel_args
from deep_moe.jit.cpp_structs import CppStruct, constant, member_names, struct
from deep_moe.jit.headers import find_headers
from deep_moe.jit.kernel_args import ARGS_OF_STEP
from deep_moe.jit.nvrtc import compile_to_ptx

STRUCTS = {
    own.cpp_name: own
    for own in (
        *(own for own in vars(kernel_args).values() if isinstance(own, type)),
        *ARGS_OF_STEP.values(),
        *map(kernel_args.kernel_args, ("sm90", "sm100")),
    )
    if issubclass(own, CppStruct) and own is not CppStruct
}
HEADERS = (
    "deep_moe/experts/sm90/kernel_args.cuh",
    "deep_moe/experts/sm100/kernel_args.cuh",
    "deep_moe/kernels/prepare_inputs.cuh",
    "deep_moe/products/args.cuh",
    "deep_moe/split/low_latency_args.cuh",
    "deep_moe/split/phase_span.cuh",
    "deep_moe/split/throughput_args.cuh",
    "deep_moe/training/args.cuh",
    "deep_moe/trace/tracer.cuh",
)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, with caches of its own: a struct that is read again would be another class."""
    monkeypatch.setattr(cpp_structs, "library_path", lambda: tmp_path)
    for name in ("_struct", "_with_includes", "_code"):
        function = getattr(cpp_structs, name).__wrapped__
        monkeypatch.setattr(cpp_structs, name, functools.cache(function))
    return tmp_path


def test_all_structs_are_as_the_compiler_has_them() -> None:
    assert len(STRUCTS) > 15
    lines = [f"#include <{header}>" for header in HEADERS]
    for check in cpp_structs.layout_checks(*STRUCTS.values()):
        own = f"deep_moe::{check.struct}"
        size = f"sizeof({own})"
        if check.member is not None:
            size = f"__INTADDR__(&static_cast<{own}*>(nullptr)->{check.member})"
        lines.append(f"static_assert({size} == {check.value});")
    paths = find_headers().include_paths
    compile_to_ptx("\n".join(lines), arch="sm_90a", include_paths=paths)


def test_tensor_maps_are_aligned() -> None:
    for kernel in ("sm90", "sm100"):
        args = kernel_args.kernel_args(kernel)
        maps = [n for n in member_names(args) if getattr(args, n).size == 128 and n[0] == "l"]
        assert maps
        assert all(getattr(args, name).offset % 64 == 0 for name in maps)
        assert ctypes.sizeof(args) % 64 == 0


def test_members_of_all_forms_are_read(library: Path) -> None:
    (library / "other.cuh").write_text("inline constexpr uint32_t many = 3u << 1;  // of them\n")
    (library / "deep_moe").mkdir()
    (library / "other.cuh").rename(library / "deep_moe/other.cuh")
    (library / "own.cuh").write_text(
        '#include "deep_moe/other.cuh"\n'
        "enum class Step : uint16_t { none = 0 };\n"
        "struct Inner {\n    uint8_t bytes[5];  // of it\n};\n"
        "struct alignas(32) Outer {\n"
        "    Inner inner;\n    // A comment; of two parts.\n    Step step;\n"
        "    const void* data;\n    float factors[many];\n    uint32_t pair[2];\n};\n"
    )
    outer = struct("own.cuh", "Outer")
    assert [(name, getattr(outer, name).offset) for name in member_names(outer)] == [
        ("inner", 0),
        ("step", 6),
        ("data", 8),
        ("factors", 16),
        ("pair", 40),
    ]
    assert ctypes.sizeof(outer) == 64
    assert constant("own.cuh", "many") == 6


def test_what_is_not_understood_is_an_error(library: Path) -> None:
    (library / "own.cuh").write_text("struct Own {\n    uint32_t bits : 3;\n};\n")
    with pytest.raises(ValueError, match=r"own.cuh: Own must have .* known forms; got 'uint32_t b"):
        struct("own.cuh", "Own")
    with pytest.raises(ValueError, match=r"own.cuh must declare Other; it does not"):
        struct("own.cuh", "Other")
    with pytest.raises(ValueError, match=r"own.cuh must declare num_tracks; it does not"):
        constant("own.cuh", "num_tracks")
