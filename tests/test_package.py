"""What `import deep_moe` brings, and what it does not."""

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import deep_moe

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_import_loads_neither_torch_nor_cuda():
    code = "import sys, deep_moe; print(sorted({'torch', 'cuda', 'safetensors'} & {*sys.modules}))"
    assert run_python(code) == "[]"


@pytest.mark.parametrize("name", sorted({*deep_moe.__all__}))
def test_every_public_name_is_there(name):
    assert getattr(deep_moe, name) is not None


def test_submodules_are_there_after_the_import():
    code = "import deep_moe; print(deep_moe.checkpoint.load_experts.__name__)"
    assert run_python(code) == "load_experts"
    code = "import deep_moe; print(deep_moe.compat.deep_gemm.__name__)"
    assert run_python(code) == "deep_moe.compat.deep_gemm"


def test_dir_is_the_public_names():
    names = {name for name in dir(deep_moe) if not name.startswith("__")}
    assert names == {*deep_moe.__all__}


def test_a_checkouts_other_folders_are_not_found():
    code = "import deep_moe.{}"
    for name in ("emulator", "heuristics", "jit"):
        run_python(code.format(name))
    for name in ("benchmarks", "conftest", "docs", "examples", "include", "tests"):
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            run_python(code.format(name))


def test_help_lists_the_packages_own_parts():
    text = pydoc.plain(pydoc.render_doc(deep_moe))
    contents = text.split("PACKAGE CONTENTS\n")[1].split("\n\n")[0].split("\n")
    names = {line.split()[0] for line in contents if line.strip()}
    assert {"emulator", "heuristics", "jit", "checkpoint", "formats"} <= names
    assert not names & {"benchmarks", "conftest", "deep_moe", "docs", "setup", "tests"}
    assert text.index("quantize_mxfp4") > 0
