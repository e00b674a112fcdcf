"""The worked examples of docs/architecture.md, as they stand there: what they add is laid out in a
temporary folder, and their commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deep_moe.axes import VALUES_VARIABLE
from deep_moe.emulator import library

ROOT = Path(__file__).parents[1]
_, _, TEXT = (ROOT / "docs/architecture.md").read_text().partition("\n### Worked examples\n")
TEXT, _, _ = TEXT.partition("\n## ")
EXAMPLES = dict(re.findall(r"(?ms)^#### ([^\n]+)\n(.*?)(?=^####|\Z)", TEXT))

# What the example of an option does not say: the function and the operator, and what is refused.
FURTHER = {
    "An option that is a tensor": """
import inspect

import pytest
import torch

import deep_moe
from deep_moe.fused import mega_moe

buffer = deep_moe.get_symm_buffer_for_mega_moe(None, 4, 8, 2, 128, 128, weights="bf16")
layer = torch.randn(4, 256, 128).bfloat16(), torch.randn(4, 128, 128).bfloat16()
weights = deep_moe.transform_weights_for_mega_moe(*layer, "sm_90a", weights="bf16")
y = torch.empty(2, 128, dtype=torch.bfloat16)
buffer.x[:2] = 1
buffer.topk_idx[:2] = torch.tensor([[2, 1], [2, -1]])


def call(largest, stats=None):
    options = {"arch": "sm_90a", "num_sms": 2}
    deep_moe.mega_moe(y, weights, buffer, stats, largest_expert_counts=largest, **options)


for is_direct in (True, False):
    stats, largest = torch.ones(2, 4, dtype=torch.int32)
    mega_moe.is_seen_by_nobody = lambda *_: is_direct
    call(None, stats)
    call(largest, stats)
    call(None)
    assert (largest.tolist(), stats.tolist()) == ([1, 1, 2, 1], [1, 3, 5, 1])
    for wrong, error in (
        (largest.float(), "largest_expert_counts must be torch.int32; got torch.float32"),
        (largest[:3], "largest_expert_counts must have shape .4,. for this buffer; got .3,."),
        (buffer.x.view(torch.int32)[0, :4], "largest_expert_counts must not share memory with"),
        (y.view(torch.int32)[0, :4], "largest_expert_counts must not share memory with y"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            call(wrong)
    with pytest.raises(ValueError, match="largest_expert_counts must not share memory with cumul"):
        call(stats, stats)
for wrong in ([1, 2], "a"):
    with pytest.raises(TypeError, match="largest_expert_counts must be a tensor or None; got "):
        mega_moe.is_seen_by_nobody = lambda *_: False
        call(wrong)
with pytest.raises(TypeError, match="unexpected keyword argument 'largest_expert_counts'"):
    deep_moe.compile_ahead(buffer, largest_expert_counts=largest)
assert "largest_expert_counts" in inspect.signature(deep_moe.mega_moe).parameters
assert "largest_expert_counts: int32 [local experts]" in deep_moe.mega_moe.__doc__
assert "largest_expert_counts" not in inspect.signature(deep_moe.compile_ahead).parameters
assert "largest_expert_counts" not in deep_moe.compile_ahead.__doc__
"""
}


def copy_package(folder: Path) -> None:
    """As it is installed, with the library of the emulator."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "deep_moe", folder / "deep_moe", ignore=ignored)
    for name in ("heuristics", "jit", "emulator", "include"):
        shutil.copytree(ROOT / name, folder / "deep_moe" / name, ignore=ignored)
    shutil.copy(library.library_path(), folder / "deep_moe" / "emulator" / library.LIBRARY_NAME)


def change(folder: Path, diff: str) -> None:
    # In the repository headers lie beside the package, in an installed one inside.
    diff = diff.replace("/include/deep_moe/", "/deep_moe/include/deep_moe/")
    command = ["git", "apply", "--recount", "-"]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command, cwd=folder, input=diff, text=True, check=True, env=environment)


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_worked_example_runs_as_it_stands_in_the_document(tmp_path: Path, title: str) -> None:
    package, values = tmp_path / "package", tmp_path / "values"
    (values / "deep_moe").mkdir(parents=True)
    commands: list[list[str]] = []
    for fence, text in re.findall(r"(?ms)^```(\w[^\n]*)\n(.*?)^```$", EXAMPLES[title]):
        language, *named = shlex.split(fence)
        if language == "diff":
            if not package.exists():
                copy_package(package)
            change(package, text)
        elif language == "console":
            commands += [shlex.split(line.removeprefix("$ ")) for line in text.splitlines()]
        else:
            path = named[0].removeprefix("title=")
            file = (values if "/" in path else tmp_path) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    environment = {**os.environ, VALUES_VARIABLE: str(values), "PYTHONPATH": str(package)}
    programs = {"python": [sys.executable], "deep-moe": [sys.executable, "-m", "deep_moe"]}
    assert commands
    if title in FURTHER:
        (tmp_path / "further.py").write_text(FURTHER[title])
        commands.append(["python", "further.py"])
    for program, *arguments in commands:
        done = subprocess.run(
            [*programs[program], *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_one_for_each_kind() -> None:
    assert list(EXAMPLES) == [
        "An activation",
        "An option that is a tensor",
        "A target for a kernel that is there",
    ]
